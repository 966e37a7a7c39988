"""The kinds of KV that models keep, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVTrait:
    """What one kind of KV is, in a sentence, and `proved_by`: the check of tests/vllm/e2e in which a real engine proves
    that it is served exactly, "" if none does."""

    about: str
    proved_by: str = ""


FULL = "full attention"
WINDOWS = "sliding windows"
SEVERAL_WINDOWS = "windows of several sizes"
LATENTS = "latents (MLA)"
FP8 = "fp8"
SINKS = "attention sinks"
STATIC_SINKS = "static sinks"
SHARED = "layers that share KV"
UNLIKE = "K and V of unlike sizes"
SEVERAL_SHAPES = "layers of several shapes"
INDEXER = "an indexer's cache"
LATENT_WINDOWS = "latents within windows"
COMPRESSED = "compressed latents"
CHUNKED = "chunked attention"
MAMBA = "Mamba"
MAMBA_2 = "Mamba 2"
DELTA_NET = "gated delta net"
LINEAR = "linear attention"
SHORT_CONVOLUTION = "short convolutions"
CROSS = "cross attention"
BIDIRECTIONAL = "attention to what follows"
OTHER = "something else"
NONE = "no KV"

TRAITS: dict[str, KVTrait] = {
    FULL: KVTrait("a layer keeps K and V of every token", "llama"),
    WINDOWS: KVTrait("a layer keeps K and V of the last tokens (Gemma 3)", "gemma"),
    SEVERAL_WINDOWS: KVTrait("layers have windows of two or more sizes"),
    LATENTS: KVTrait("a layer keeps one latent of a token for all heads (DeepSeek V3)", "mla"),
    FP8: KVTrait("the engine rounds K and V to fp8 (--kv-cache-dtype)", "e4m3"),
    SINKS: KVTrait("each head has a weight that takes part in the softmax (gpt-oss); it is no KV", "sinks"),
    STATIC_SINKS: KVTrait("every sequence attends to tokens that belong to the model's weights (openPangu)"),
    SHARED: KVTrait("some layers read the KV of others and keep none (Gemma 3n)"),
    UNLIKE: KVTrait("a head's V has another size than its K"),
    SEVERAL_SHAPES: KVTrait("layers have other numbers of heads, or heads of other sizes, than one another"),
    INDEXER: KVTrait("sparse attention, whose indexer keeps keys of its own (DeepSeek V3.2)"),
    LATENT_WINDOWS: KVTrait("a layer keeps the latents of the last tokens"),
    COMPRESSED: KVTrait("one latent stands for several tokens (DeepSeek V4)"),
    CHUNKED: KVTrait("a layer attends within chunks of fixed places (Llama 4)", "chunks"),
    MAMBA: KVTrait("a layer keeps a state instead of KV"),
    MAMBA_2: KVTrait("a layer keeps a state instead of KV (Nemotron-H, Granite 4)"),
    DELTA_NET: KVTrait("a layer keeps a state instead of KV: GDN (Qwen3-Next), KDA (Kimi Linear)", "gdn"),
    LINEAR: KVTrait("a layer keeps a state instead of KV (MiniMax Text, Bailing 2.5)"),
    SHORT_CONVOLUTION: KVTrait("a layer keeps the last few inputs of a convolution (LFM2)", "conv"),
    CROSS: KVTrait("a decoder's layer keeps K and V of an encoder's output (Whisper)"),
    BIDIRECTIONAL: KVTrait("tokens attend to those that follow them"),
    OTHER: KVTrait("a kind of KV that this table has no name for"),
    NONE: KVTrait("nothing is kept"),
}
"""Every kind, in the order in which a model's kinds are named."""
