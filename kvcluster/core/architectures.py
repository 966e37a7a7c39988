"""Which KV the generative architectures of vLLM 0.32.0 keep: found over its own objects.

Written by `make models` (tests/vllm/models_table); docs/models.md shows it. The fields are those of
model_outcome.ExaminedArchitectures.
"""

RELEASE = "0.32.0"
SERVED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Mamba",),
        """
    FalconMambaForCausalLM MambaForCausalLM
        """,
    ),
    (
        ("full attention",),
        """
    ApertusForCausalLM ArceeForCausalLM AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration
    BagelForConditionalGeneration BailingMoeForCausalLM BailingMoeV2ForCausalLM Blip2ForConditionalGeneration
    BloomForCausalLM CohereCompassForConditionalGeneration CohereForCausalLM
    Cosmos3EdgeForConditionalGeneration DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM
    Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM ExaoneForCausalLM FalconForCausalLM FlexOlmoForCausalLM
    GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM GemmaForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
    GlmAsrForConditionalGeneration GlmForCausalLM GlmOcrForConditionalGeneration GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteSpeechForConditionalGeneration
    GraniteSpeechPlusForConditionalGeneration HYV3ForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM IQuestCoderForCausalLM Idefics3ForConditionalGeneration
    InternLM2ForCausalLM InternLM3ForCausalLM InternVLForConditionalGeneration Jais2ForCausalLM
    K2HorizonForCausalLM LLaMAForCausalLM LagunaForCausalLM LightOnOCRForConditionalGeneration
    LlamaForCausalLM LlavaForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration MellumForCausalLM
    MiMoForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM
    Mistral3ForConditionalGeneration MixtralForCausalLM MossTranscribeDiarizeForConditionalGeneration
    NemotronForCausalLM OPTForCausalLM Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM
    OpenVLAForActionPrediction OrionForCausalLM PaddleOCRVLForConditionalGeneration
    PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM Param2MoEForCausalLM Phi3ForCausalLM
    PhiForCausalLM PhiMoEForCausalLM QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration
    Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration
    Qwen2_5OmniModel Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration
    Qwen3ASRRealtimeGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration SarvamMoEForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    SmolVLMForConditionalGeneration SolarForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    Step3TextForCausalLM Step3VLForConditionalGeneration TeleChat2ForCausalLM TeleChat3ForCausalLM
    TeleFLMForCausalLM
        """,
    ),
    (
        ("full attention", "Mamba"),
        """
    JambaForCausalLM
        """,
    ),
    (
        ("full attention", "chunked attention"),
        """
    Llama4ForCausalLM Llama4ForConditionalGeneration
        """,
    ),
    (
        ("full attention", "gated delta net"),
        """
    MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration OlmoHybridForCausalLM
    Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration
        """,
    ),
    (
        ("full attention", "short convolutions"),
        """
    Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration
        """,
    ),
    (
        ("full attention", "sliding windows"),
        """
    AfmoeForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration
    CwmForCausalLM Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration ExaoneMoEForCausalLM
    ExaoneMoeForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
    IQuestLoopCoderForCausalLM MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration Olmo3ForCausalLM
    Plamo3ForCausalLM Step3p5ForCausalLM VaultGemmaForCausalLM
        """,
    ),
    (
        ("full attention", "sliding windows", "attention sinks"),
        """
    GptOssForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM
        """,
    ),
    (
        ("full attention", "sliding windows", "layers that share KV"),
        """
    Gemma3nForCausalLM
        """,
    ),
    (
        ("latents (MLA)",),
        """
    AXK1ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM
    KimiK25ForConditionalGeneration KimiVLForConditionalGeneration MistralLarge3ForCausalLM
    PanguUltraMoEForCausalLM SarvamMLAForCausalLM
        """,
    ),
    (
        ("sliding windows",),
        """
    MistralForCausalLM
        """,
    ),
)
REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Mamba 2",),
        "a group (MAMBA2) writes the state of a boundary in the middle of a chunk, which has not been reviewed",
        """
    Mamba2ForCausalLM
        """,
    ),
    (
        ("an indexer's cache",),
        "its attention is sparse, and the indexer that chooses its tokens has a cache beside the KV",
        """
    DeepseekV32ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM Glm5NextForConditionalGeneration
    GlmMoeDsaForCausalLM
        """,
    ),
    (
        ("attention to what follows",),
        "a group attends to what follows, so that KV depends on more than its prefix",
        """
    HrmTextForCausalLM
        """,
    ),
    (
        ("full attention", "Mamba 2"),
        "a group (MAMBA2) writes the state of a boundary in the middle of a chunk, which has not been reviewed",
        """
    FalconH1ForCausalLM GraniteMoeHybridForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM
    Zamba2ForCausalLM
        """,
    ),
    (
        ("full attention", "cross attention"),
        "a group keeps CrossAttentionSpec; served are FullAttentionSpec, SlidingWindowSpec, "
        "ChunkedLocalAttentionSpec, MLAAttentionSpec",
        """
    WhisperForConditionalGeneration
        """,
    ),
    (
        ("full attention", "sliding windows", "attention sinks", "K and V of unlike sizes", "layers of several shapes"),
        "its groups of layers have blocks of 128, 256 tokens; all must have as many; a group has 8 "
        "heads a rank, where the model has 4 for 1 ranks",
        """
    MiMoV2FlashForCausalLM MiMoV2ForCausalLM
        """,
    ),
    (
        ("full attention", "sliding windows", "layers of several shapes"),
        "its groups of layers have blocks of 128, 256 tokens; all must have as many",
        """
    Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
        """,
    ),
    (
        ("latents (MLA)",),
        "a group has several caches in one layer of the model, such as model.layers.0.self_attn.0.attn",
        """
    LongcatFlashForCausalLM
        """,
    ),
    (
        ("latents (MLA)", "an indexer's cache"),
        "its attention is sparse, and the indexer that chooses its tokens has a cache beside the KV",
        """
    HYV4ForCausalLM
        """,
    ),
    (
        ("static sinks",),
        "a group keeps SinkFullAttentionSpec; served are FullAttentionSpec, SlidingWindowSpec, "
        "ChunkedLocalAttentionSpec, MLAAttentionSpec",
        """
    PanguProMoEV2ForCausalLM
        """,
    ),
)
UNREAD = """
    IQuestLoopCoderForCausalLM Step3TextForCausalLM Step3VLForConditionalGeneration Step3p5ForCausalLM
"""
NOT_EXAMINED = """
    AliceAIForCausalLM Alpamayo2Super BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM
    BailingMoeV3VLForConditionalGeneration BeamForCausalLM BeeForConditionalGeneration
    ChatGLMForConditionalGeneration ChatGLMModel CohereAsrForConditionalGeneration
    Cosmos3ForConditionalGeneration DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM
    DeepseekV4ForConditionalGeneration DeepseekVLV2ForCausalLM DiffusionGemmaForBlockDiffusion
    DomynEdgeForCausalLM DoryForCausalLM Dots3NoteForCausalLM DotsOCRForCausalLM
    Eagle2_5_VLForConditionalGeneration Emu3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration
    FireRedASR2ForConditionalGeneration FlintForCausalLM FunASRForConditionalGeneration
    FunAudioChatForConditionalGeneration GLM4VForCausalLM Gemma3nForConditionalGeneration Glm5NextForCausalLM
    Granite4VisionForConditionalGeneration H2OVLChatModel HCXVisionV2ForCausalLM HfMoondream
    HunYuanVLForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration
    InternS1ForConditionalGeneration InternS1ProForConditionalGeneration
    InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration InternVLChatModel
    IsaacForConditionalGeneration KananaVForConditionalGeneration KeyeForConditionalGeneration
    KeyeVL1_5ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM Kolibri1ForCausalLM
    Llama_Nemotron_Nano_VL LlavaOnevision2ForConditionalGeneration LongcatFlashNgramForCausalLM
    MiDashengLMModel MiMoV2OmniForCausalLM MiniCPMO MiniCPMOcrForConditionalGeneration MiniCPMV
    MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration Molmo2ForConditionalGeneration
    MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
    MuseSparkForConditionalGeneration NVLM_D NanbeigeForCausalLM NemotronH_Nano_Omni_Reasoning_V3
    NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3
    NemotronParseForConditionalGeneration OpenCUAForConditionalGeneration OpenPanguVLForConditionalGeneration
    Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM Phi3VForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM
    PixtralForConditionalGeneration Qwen3OmniMoeForConditionalGeneration Qwen4ExpForCausalLM
    Qwen4ExpForConditionalGeneration RForConditionalGeneration RadioMBartPrefixForCausalLM Rnj1ForCausalLM
    SkyworkR1VChatModel Step1ForCausalLM Step3p7ForConditionalGeneration Step5ForCausalLM
    Step5ForConditionalGeneration StepVLForConditionalGeneration UltravoxModel UnlimitedOCRForCausalLM
    VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration VoxtralRealtimeGeneration
"""
