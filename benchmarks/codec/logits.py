"""Measures how each codec changes the logits of the demo's model, whose weights are random.

It shows how errors of KV propagate through a transformer. It says nothing about a real model, or the quality of text.

The model computes a prefix of the demo's document in float32. That KV is encoded and decoded in pages, as the
transformers engine stores them. Then the model computes the document's next tokens, whatever it would have generated
(teacher forcing), so that all codecs are compared at the same positions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.codec.coded import round_trip
from kvcluster.cli.demo.engine import document, encode, llama
from kvcluster.core.codecs import Codec
from kvcluster.engines.transformers.compat import layers, planes, text_config
from kvcluster.engines.transformers.spec import groups

BLOCK_TOKENS = 16

CODINGS = ((Codec.RAW, 0), (Codec.Q8, 0), (Codec.Q4, 0), (Codec.Q4, 1))
"""Codecs, and how many blocks at the start of the sequence stay raw. With raw nothing differs: the control."""


def measure(*, prefix_tokens: int, tokens: int = 256) -> list[dict[str, Any]]:
    """Returns for each of CODINGS how the logits of the `tokens` tokens after the prefix differ from those of exact KV.

    `error` is the norm of the difference divided by the norm of the exact logits; `kl_nats` the divergence of the lossy
    from the exact distribution, averaged over all positions; `same_token` the share of positions with the same most
    likely token.
    """
    assert prefix_tokens % BLOCK_TOKENS == 0, "the engine stores whole blocks"
    model = llama(prefix_tokens + tokens)
    (group,) = groups(model)
    ids = torch.tensor([encode(document())[: prefix_tokens + tokens]])
    prefix, rest = ids[:, :prefix_tokens], ids[:, prefix_tokens:]
    rows = []
    with torch.inference_mode():
        pages = prefilled(model, prefix)
        exact = _logits(model, pages, rest)
        for codec, raw_blocks in CODINGS:
            lossy = torch.cat([pages[:raw_blocks], round_trip(codec, group, pages[raw_blocks:])])
            row = {"codec": codec.name.lower(), "raw_blocks": raw_blocks, "prefix_tokens": prefix_tokens}
            rows.append(row | {"tokens": tokens} | difference(_logits(model, lossy, rest), exact))
    return rows


def prefilled(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Returns the KV of `ids` `[1, tokens]` as pages `[blocks, layers, planes, block_tokens, heads, dim]` of the
    model's dtype."""
    cache = DynamicCache(config=text_config(model))
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    kv = torch.stack([torch.cat(planes(layer)) for layer in layers(cache)])
    blocks = kv.view(*kv.shape[:3], -1, BLOCK_TOKENS, kv.shape[-1])  # [layers, planes, heads, blocks, ...]
    return blocks.permute(3, 0, 1, 4, 2, 5).contiguous()


def difference(came: torch.Tensor, meant: torch.Tensor) -> dict[str, float]:
    """Returns the measures of `measure` for logits, float64 `[positions, vocabulary]`."""
    likely, lossy = meant.log_softmax(-1), came.log_softmax(-1)
    return {
        "error": float((came - meant).norm() / meant.norm()),
        "kl_nats": float((likely.exp() * (likely - lossy)).sum(-1).mean()),
        "same_token": float((came.argmax(-1) == meant.argmax(-1)).double().mean()),
    }


def _logits(model: PreTrainedModel, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits, float64 `[tokens, vocabulary]`, of `ids` `[1, tokens]`, which follow the tokens of
    `pages`."""
    cache = DynamicCache(config=text_config(model))
    kv = pages.permute(1, 2, 4, 0, 3, 5).flatten(3, 4)
    for number, (k, v) in enumerate(kv):
        cache.update(k[None], v[None], number)
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0].double()
