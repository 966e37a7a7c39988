"""Configurations for architectures whose class is in neither transformers nor vLLM, or is there under another name, and
fields of checkpoints that a class of transformers has renamed or has no default for."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

_DENSE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": _ROPE,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = _DENSE | {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "embedding_dropout": 0.0,
    "score_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "scoring_func": "sigmoid",
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 256,
    "num_key_value_heads": 8,
}
_LANGUAGE = (
    _EXPERTS
    | _LATENT
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "moe_layer_freq": 1,
        "q_lora_rank": None,
    }
)
REMOVED = object()
"""Stands for a field that checkpoints do not have."""

_VL2 = {"language_config": _LANGUAGE, "text_config": REMOVED}
_INTERN: dict[str, Any] = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "select_layer": -1,
    "force_image_size": 448,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "vision_config": {
        "model_type": "intern_vit_6b",
        "hidden_size": 128,
        "image_size": 448,
        "patch_size": 14,
        "num_channels": 3,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "qkv_bias": True,
        "qk_normalization": False,
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "initializer_factor": 0.1,
        "hidden_act": "gelu",
    },
    "llm_config": _DENSE | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "layer_types": None},
}
_INDEXER = {"index_topk": 2048, "index_n_heads": 8, "index_head_dim": 128}
_CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"] * 2
_NEMOTRON_H = ["mamba", "mlp", "mamba", "attention", "mamba", "mlp", "mamba", "attention"]
_SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2

_PANGU = {
    "qk_nope_dim": 48,
    "qk_rope_dim": 16,
    "v_channels": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
}
_MIMO_V2: dict[str, Any] = _EXPERTS | {
    "model_type": "mimo_v2_flash_published",
    "head_dim": 192,
    "v_head_dim": 128,
    "layernorm_epsilon": 1e-5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "partial_rotary_factor": 0.334,
    "swa_rope_theta": 10_000.0,
    "topk_method": "noaux_tc",
}
"""As published of MiMo-V2-Flash, but for the number of layers and heads."""

CLASSES: dict[str, str] = {
    "BailingMoeV3VLForConditionalGeneration": "bailing_moe_v3_vl",
    "BagelForConditionalGeneration": "bagel",
    "ChatGLMModel": "chatglm",
    "ChatGLMForConditionalGeneration": "chatglm",
    "DeepseekOCR2ForCausalLM": "deepseek_vl_v2",
    "DeepseekOCRForCausalLM": "deepseek_vl_v2",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekVLV2ForCausalLM": "deepseek_vl_v2",
    "Dots3NoteForCausalLM": "dots3_note",
    "DotsOCRForCausalLM": "DotsOCRConfig",
    "ExaoneMoEForCausalLM": "exaone_moe",
    "FunAudioChatForConditionalGeneration": "funaudiochat",
    "HfMoondream": "moondream3",
    "InternLM3ForCausalLM": "llama",
    "IQuestCoderForCausalLM": "llama",
    "IsaacForConditionalGeneration": "isaac",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "Llama4ForCausalLM": "llama4_text",
    "LLaMAForCausalLM": "llama",
    "MiDashengLMModel": "midashenglm",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3TextConfig",
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "Moondream3ForCausalLM": "moondream3",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe_diarize",
    "MuseGlimmerForCausalLM": "muse_glimmer",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "NemotronHPuzzleForCausalLM": "nemotron_h",
    "OpenVLAForActionPrediction": "openvla",
    "Ovis": "ovis",
    "PhiMoEForCausalLM": "phimoe",
    "Qwen2_5OmniModel": "qwen2_5_omni",
    "Qwen3ASRRealtimeGeneration": "qwen3_asr",
    "Step3TextForCausalLM": "step3_text",
    "Step3VLForConditionalGeneration": "step3_vl",
    "Step3p5ForCausalLM": "step3p5",
    "TeleChat3ForCausalLM": "llama",
    "UltravoxModel": "ultravox",
    "UnlimitedOCRForCausalLM": "unlimited_ocr",
    "VoxtralRealtimeGeneration": "voxtral_realtime",
}
"""The model type, or the name of vLLM's class, of architectures that transformers does not name."""

ADDED: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "Cosmos3EdgeForConditionalGeneration": {"text_config": {"rope_parameters": _ROPE}},
    "DeepseekOCR2ForCausalLM": _VL2,
    "DeepseekOCRForCausalLM": _VL2,
    "DeepseekV41ForCausalLM": {"index_topk": 512, "hidden_size": 4096, "num_attention_heads": 64},
    "DeepseekV4ForCausalLM": {"index_topk": 512},
    "DeepseekVLV2ForCausalLM": _VL2,
    "UnlimitedOCRForCausalLM": _VL2,
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "pixel_hidden_size": 1280,
        "vision_config": {"embed_dim": 1280, "mlp_ratio": 4},
    },
    "KimiK25ForConditionalGeneration": {"text_config": {"n_routed_experts": 8}},
    "LightOnOCRForConditionalGeneration": {
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
    },
    "Step3VLForConditionalGeneration": {
        "text_config": {"architectures": ["Step3TextForCausalLM"], "moe_layers_enum": "4,5,6,7"}
    },
    "CohereCompassForConditionalGeneration": {"tie_word_embeddings": True},
    "DeepseekV32ForCausalLM": _INDEXER,
    "Glm4MoeForCausalLM": {"head_dim": 128, "first_k_dense_replace": 1},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {"head_dim": 128, "first_k_dense_replace": 1, "use_qk_norm": True}
    },
    "GlmMoeDsaForCausalLM": _INDEXER,
    "HYV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 256,
        "route_norm": True,
        "router_scaling_factor": 1.0,
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2},
    "Gemma4ForConditionalGeneration": {"vision_config": {"model_type": "gemma4_vision"}},
    "Gemma4UnifiedForConditionalGeneration": {"vision_config": {"model_type": "gemma4_vision"}},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2},
    "InklingForCausalLM": {"padded_vocab_size": 1024},
    "Lfm2ForCausalLM": {"block_dim": 2560, "conv_dim": 2560, "layer_types": _CONVOLUTIONS},
    "Lfm2MoeForCausalLM": {"layer_types": _CONVOLUTIONS},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {"block_dim": 2560, "conv_dim": 2560, "layer_types": _CONVOLUTIONS}
    },
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "NemotronHForCausalLM": {"layers_block_type": _NEMOTRON_H},
    "NemotronHPuzzleForCausalLM": {"layers_block_type": _NEMOTRON_H},
    "Step3p5ForCausalLM": {"max_position_embeddings": 4096, "layer_types": _SLIDING, "sliding_window": 512},
    "Step3TextForCausalLM": {"moe_layers_enum": "4,5,6,7"},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
}
"""Fields that published checkpoints have beside those that the class writes, or in place of a default of it."""

WRITTEN: dict[str, dict[str, Any]] = {
    "BailingMoeForCausalLM": _EXPERTS | {"model_type": "bailing_moe", "use_qkv_bias": False, "use_bias": False},
    "BailingMoeV2ForCausalLM": _EXPERTS | {"model_type": "bailing_moe_v2", "use_qkv_bias": False, "use_bias": False},
    "BailingMoeV2_5ForCausalLM": _EXPERTS
    | _LATENT
    | {"model_type": "bailing_hybrid", "layer_group_size": 4, "use_bias": False, "use_qkv_bias": False},
    "BailingMoeV3ForCausalLM": _EXPERTS
    | _LATENT
    | {
        "model_type": "bailing_moe_v3",
        "layer_group_size": 4,
        "short_conv_kernel_size": 4,
        "use_bias": False,
        "no_kda_lora": True,
    },
    "DbrxForCausalLM": {
        "model_type": "dbrx",
        "d_model": 512,
        "n_heads": 8,
        "n_layers": 8,
        "max_seq_len": 4096,
        "vocab_size": 1024,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500_000.0},
        "ffn_config": {"ffn_hidden_size": 1024, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeciLMForCausalLM": _DENSE
    | {
        "model_type": "nemotron-nas",
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 4, "no_op": layer % 4 == 3, "replace_with_linear": False},
                "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
            }
            for layer in range(8)
        ],
    },
    "DeepseekForCausalLM": _EXPERTS | {"model_type": "deepseek", "num_key_value_heads": 8, "moe_layer_freq": 1},
    "ExaoneForCausalLM": _DENSE | {"model_type": "exaone", "activation_function": "silu", "layer_norm_epsilon": 1e-5},
    "InternVLChatModel": _INTERN,
    "H2OVLChatModel": _INTERN | {"model_type": "h2ovl_chat"},
    "SkyworkR1VChatModel": _INTERN | {"model_type": "skywork_chat"},
    "InternLM2ForCausalLM": _DENSE | {"model_type": "internlm2", "bias": False},
    "IQuestLoopCoderForCausalLM": _DENSE | {"model_type": "iquestloopcoder", "loop_num": 2, "loop_window_size": 64},
    "K2HorizonForCausalLM": _EXPERTS
    | {
        "model_type": "k2_horizon",
        "rope_head_dim": 32,
        "mova_num_experts": 0,
        "mova_num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_gate_bias": False,
        "router_score_func": "sigmoid",
        "router_scaling_factor": 1.0,
        "query_key_norm": True,
        "attention_gate_func": "sigmoid",
        "layernorm_num_groups": 1,
    },
    "LongcatFlashNgramForCausalLM": _EXPERTS | _LATENT | {"model_type": "longcat_flash_ngram", "num_layers": 8},
    "MiMoForCausalLM": _DENSE | {"model_type": "mimo", "num_nextn_predict_layers": 0},
    "MiMoV2FlashForCausalLM": _MIMO_V2,
    "MiMoV2ForCausalLM": _MIMO_V2,
    "MiniCPMForCausalLM": _DENSE
    | {"model_type": "minicpm", "dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12, "num_experts": 0},
    "OrionForCausalLM": _DENSE | {"model_type": "orion"},
    "PanguEmbeddedForCausalLM": _DENSE | {"model_type": "PanguEmbedded", "bias": True},
    "PanguProMoEV2ForCausalLM": _EXPERTS
    | {"model_type": "PanguProMoE", "qkv_bias": True, "param_sink_number": 128, "param_sink_with_value": True}
    | _PANGU,
    "PanguUltraMoEForCausalLM": _EXPERTS | _LATENT | {"model_type": "pangu_ultra_moe"},
    "Param2MoEForCausalLM": _EXPERTS | {"model_type": "param2moe", "use_qkv_bias": False, "use_bias": False},
    "Plamo3ForCausalLM": _DENSE
    | {
        "model_type": "plamo3",
        "layer_types": _SLIDING,
        "interleaved_sliding_window": [2048, 2048, 2048, None] * 2,
        "rope_local_theta": 10_000,
        "sliding_window": 2048,
    },
    "Rnj1ForCausalLM": _DENSE
    | {
        "model_type": "gemma3_text",
        "layer_types": ["full_attention"] * 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "SarvamMLAForCausalLM": _EXPERTS | _LATENT | {"model_type": "sarvam_mla", "score_function": "sigmoid"},
    "SarvamMoEForCausalLM": _EXPERTS | {"model_type": "sarvam_moe", "use_qkv_bias": False, "use_bias": False},
    "SolarForCausalLM": _DENSE
    | {"model_type": "solar", "bskcn_1": [2], "bskcn_2": [3], "bskcn_3": [4], "bskcn_4": [5], "bskcn_tv": [0.9, 0.8]},
    "Step1ForCausalLM": _DENSE | {"model_type": "step1", "num_attention_groups": 2},
    "TeleChat2ForCausalLM": _DENSE
    | {
        "model_type": "telechat",
        "n_head": 8,
        "n_layer": 8,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "ffn_hidden_size": 1024,
    },
    "TeleFLMForCausalLM": _DENSE | {"model_type": "teleflm", "use_mup": False},
}
"""The content of a config.json by architecture, with the fields that vLLM's model reads."""
