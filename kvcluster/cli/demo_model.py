"""The demo's model and document, which a benchmark uses as well. Neither needs Ray or a download.

The model is a Llama of random weights whose tokens are the bytes of UTF-8. The document is English text that every
machine has: the help texts of Python. The model shows how KV moves; its output is meaningless.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(max_tokens: int) -> LlamaForCausalLM:
    """Returns a model with the same float32 weights each time. A few thousand tokens take it seconds on two cores.

    The weights vary enough that greedy output does not repeat one token.
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
    """Returns the text as tokens of the model."""
    return list(characters.encode())


def document() -> str:
    """Returns a few hundred thousand characters, the longest topics first; callers cut it to the length they need."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))
