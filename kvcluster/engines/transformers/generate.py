"""Wraps `model.generate`: loads the cached prefix, generates, and stores the new KV."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvcluster.client.client import Client
from kvcluster.engines.transformers.cache import DEADLINE_MS, PrefixCache
from kvcluster.engines.transformers.compat import Generation
from kvcluster.errors import CallerError


def generate(
    client: Client,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    salt: bytes = b"",
    deadline_ms: float = DEADLINE_MS,
    **generate_kwargs: Any,
) -> Any:
    """Returns what `model.generate` returns, computed from the cached prefix of each row, and stores the computed KV.

    Takes the arguments of `model.generate` for a text model, padded on the left. Raises CallerError, naming the
    argument and before anything moves, for those that would fill the cache in another way (assisted decoding,
    contrastive search, static or quantised caches) or make KV depend on more than token ids (images, `inputs_embeds`,
    `position_ids`). Hidden states and attentions, if requested, are those of the computed tokens only. `deadline_ms`
    bounds loading and storing separately; a failure of the cluster costs time, never the answer.
    """
    if "past_key_values" in generate_kwargs:
        raise CallerError("generate() brings its own past_key_values; use PrefixCache to hold the cache yourself")
    generation = Generation(model, generate_kwargs)
    if attention_mask is None and getattr(input_ids, "ndim", 0) == 2:
        attention_mask = generation.attention_mask(input_ids)
    cache = PrefixCache.from_inputs(client, model, input_ids, attention_mask, salt=salt, deadline_ms=deadline_ms)
    if generation.repeats > 1:
        cache.batch_repeat_interleave(generation.repeats)
    run: Any = model.generate
    out = run(input_ids, attention_mask=attention_mask, past_key_values=cache, **generate_kwargs)
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    cache.save(sequences, eos_token_id=generation.eos_token_ids, deadline_ms=deadline_ms)
    return out
