"""Small random models of several families, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvcluster.client import Client
from kvcluster.engines.transformers import spec_of
from kvcluster.testing import MemoryCluster

BLOCK = 4
PAD = 0

Settings = dict[str, Any]

_COMMON: Settings = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, Settings] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 4, "tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6, "tie_word_embeddings": False},
    "gpt_oss": {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "rope_parameters": _PLAIN_ROPE},
    "cohere2": {"sliding_window": 16, "num_hidden_layers": 4},
    "phi3": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"num_key_value_heads": None},
    "opt": {"num_key_value_heads": None, "word_embed_proj_dim": 64, "ffn_dim": 96},
}
"""Grouped heads; windows in all layers or some; softcaps (gemma2); sinks (gpt_oss); learned positions; experts."""

_EAGER = ("gemma2", "gpt_oss")  # torch's fused kernel has no softcap and no sinks


def model_of(kind: str = "llama", seed: int = 0, **settings: Any) -> Any:
    """Returns a model of that family whose greedy output does not settle on one token."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**_COMMON, **FAMILIES.get(kind, {}), **settings})
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager" if kind in _EAGER else None).eval()


def prompt(tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 300, (tokens,), generator=generator).tolist()


def batch(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows padded on the left, and their mask."""
    columns = max(map(len, rows))
    ids = torch.tensor([[PAD] * (columns - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def connect(cluster: MemoryCluster, model: Any, block_tokens: int = BLOCK) -> Client:
    return cluster.client(spec_of(model, block_tokens=block_tokens))


def logits(out: Any) -> torch.Tensor:
    """Returns the logits of a generation, `[steps, rows, vocabulary]`."""
    return torch.stack(out.logits)
