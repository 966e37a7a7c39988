"""The models of the end-to-end tests: tiny, of random weights, in float32, made where they are needed.

`initializer_range` is wide, so that greedy output does not repeat itself: an output of one token shows nothing. Run as
`python -m tests.vllm.e2e.models FOLDER` in the engine's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

TOKENS = 256
"""Token ids below it are bytes; those above end a text."""

_SHAPE: dict[str, Any] = {
    "vocab_size": TOKENS + 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": TOKENS + 1,
    "eos_token_id": TOKENS + 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LAYERS = {"llama": 4, "gemma": 6, "mla": 4, "e4m3": 4, "e5m2": 4, "chunks": 4, "sinks": 4, "conv": 6, "gdn": 4}
LAYERS |= {"deep": 40, "middling": 12}
"""An engine spends its time computing the last two, as do those that people run. "deep" is "llama" with more layers,
and as exact. "middling" has usual proportions, and products so long that on some processors the order in which they are
summed up depends on how many tokens are computed at once: an answer's last bits show what was cached of its prompt."""
_MIDDLING = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
WINDOW = 64
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": LAYERS["mla"],
}
"""A latent of 576 values, the only one that vLLM's attention for MLA on a CPU knows; all layers dense."""

_CONV: dict[str, Any] = {
    "conv_L_cache": 3,
    "conv_dim": 256,
    "conv_bias": False,
    "block_dim": 256,
    "block_ff_dim": 512,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "conv", "full_attention"] * 2,
}
_GDN: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "torch_dtype": "bfloat16",
}
"""Heads of the only size that vLLM's kernel for GDN on a CPU knows, and as few as make short blocks."""


_CHUNKS: dict[str, Any] = {
    "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 3 * WINDOW // 2,
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
    "num_local_experts": 1,
    "intermediate_size_mlp": 512,
}
"""Chunks of three blocks; all layers dense."""

_SINKS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "intermediate_size": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}


def make_all(folder: Path) -> None:
    """Every model and adapter, each in a folder of its own; what is there stays."""
    for name in LAYERS:
        if not (folder / name / "tokenizer.json").exists():
            make(name, folder / name, seed=1)
    changed = folder / "changed" / "llama"  # another checkpoint under the same name
    if not (changed / "tokenizer.json").exists():
        make("llama", changed, seed=2)
    for number in (1, 2):
        adapter(folder / "adapters" / str(number) / "tuned", seed=number)


def make(name: str, folder: Path, seed: int) -> None:
    """One model: all have full attention, "gemma" (Gemma 3) also layers that slide, "mla" (DeepSeek V3) of latents,
    "chunks" (Llama 4) layers that attend in chunks, "sinks" (gpt-oss) layers that slide, all with sinks, "conv" (LFM2)
    also short convolutions, and "gdn" (Qwen3-Next) also layers of gated delta rules. Engines of "e4m3" and "e5m2" keep
    KV in fp8, the first with scales of its checkpoint."""
    torch.manual_seed(seed)
    if name == "mla":
        shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"} | _LATENT
        DeepseekV3ForCausalLM(DeepseekV3Config(**shape, num_hidden_layers=LAYERS[name])).save_pretrained(folder)
    elif name == "chunks":
        Llama4ForCausalLM(Llama4TextConfig(**_SHAPE | _CHUNKS, num_hidden_layers=LAYERS[name])).save_pretrained(folder)
    elif name == "sinks":
        made = GptOssForCausalLM(GptOssConfig(**_SHAPE | _SINKS, num_hidden_layers=LAYERS[name]))
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        made.save_pretrained(folder)
    elif name == "conv":
        Lfm2ForCausalLM(Lfm2Config(**_SHAPE, **_CONV, num_hidden_layers=LAYERS[name])).save_pretrained(folder)
    elif name == "gdn":
        config = Qwen3NextConfig(**(_SHAPE | _GDN), num_hidden_layers=LAYERS[name])
        Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    elif name != "gemma":
        shape = _SHAPE | (_MIDDLING if name == "middling" else {})
        LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=LAYERS[name])).save_pretrained(folder)
    else:
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(
            **_SHAPE,
            num_hidden_layers=LAYERS[name],
            layer_types=kinds,
            sliding_window=WINDOW,
            query_pre_attn_scalar=_SHAPE["head_dim"],
        )
        Gemma3ForCausalLM(config).save_pretrained(folder)
    if name == "e4m3":
        _scale(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def _scale(folder: Path) -> None:
    """Adds scales of K and of V to the checkpoint, other ones for each layer, as a calibration leaves them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(LAYERS["e4m3"]):
        for number, name in enumerate(("k_scale", "v_scale")):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([0.8 + 0.1 * (2 * layer + number)])
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def adapter(folder: Path, seed: int) -> None:
    """A LoRA for "llama": its name is its folder's, whatever its content."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = _SHAPE["hidden_size"], _SHAPE["num_key_value_heads"] * _SHAPE["head_dim"]
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS["llama"]):
        for module, out in (("k_proj", heads), ("v_proj", heads), ("q_proj", hidden)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.2
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "llama"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def nudged(model: Path, into: Path) -> None:
    """A copy of a model that differs in one weight of its first layer."""
    shutil.copytree(model, into, dirs_exist_ok=True)
    tensors = load_file(into / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] += 0.5
    save_file(tensors, into / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
