"""The demo's model and the document that it reads, for a benchmark too: neither needs Ray, nor a download.

A Llama of random weights, whose tokens are the bytes of UTF-8, and English that is on every machine, the help texts of
the Python language. It shows how KV moves; what it says means nothing.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(max_tokens: int) -> LlamaForCausalLM:
    """The same weights each time, float32. It takes seconds to read a few thousand tokens on two cores.

    They are spread widely enough that greedy output does not settle on one token.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.1,
        max_position_embeddings=max_tokens,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def encode(characters: str) -> list[int]:
    """As tokens of the model."""
    return list(characters.encode())


def document() -> str:
    """Some hundred thousand characters, the longest topics first; whoever needs less cuts it."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))
