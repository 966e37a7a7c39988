"""Wraps `model.generate`: loads the cached prefix, generates, and stores the new KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcluster.client.client import Client
from kvcluster.engines.transformers.cache import DEADLINE_MS, PrefixCache
from kvcluster.engines.transformers.compat import Generation
from kvcluster.engines.transformers.sequence_cache import SequenceCache
from kvcluster.errors import CallerError
from kvcluster.sequences import AttendPlanner, FetchWhatFits, ShipAbsent, WindowPolicy
from kvcluster.sequences.attend_planner import FEW_TOKENS

_FEW, MANY = ShipAbsent(), FetchWhatFits()
"""The planners of `generate`, for at most FEW_TOKENS new tokens and for more."""


def generate(
    client: Client,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    salt: bytes = b"",
    offload: bool | WindowPolicy = False,
    planner: AttendPlanner | None = MANY,
    deadline_ms: float = DEADLINE_MS,
    **generate_kwargs: Any,
) -> Any:
    """Returns what `model.generate` returns, computed from the cached prefix of each row, and stores the computed KV.

    Takes the arguments of `model.generate` for a text model, padded on the left. Raises CallerError, naming the
    argument and before anything moves, for those that would fill the cache in another way (assisted decoding,
    contrastive search, static or quantised caches) or make KV depend on more than token ids (images, `inputs_embeds`,
    `position_ids`). Hidden states and attentions, if requested, are those of the computed tokens only. `deadline_ms`
    bounds loading and storing separately; a failure of the cluster costs time, never the answer.

    With `offload` the KV lies in sequences of the cluster, and this process keeps `ClientConfig.resident_bytes` of it,
    so the context may be many times larger; True is the default WindowPolicy. `planner` decides which of the rest is
    loaded and which attended to at its shards: by default nothing is loaded for at most 8 new tokens (ShipAbsent), and
    what fits for more (FetchWhatFits); None sends no queries. What is returned has no `past_key_values`, and
    `output_attentions` is refused, as are models whose attention is not computed over sequences (docs/transformers.md).
    A failure of the cluster may then cost the answer: raises LostTokens if it has lost KV that is needed (call again:
    what it still has is not computed again), ResidentSetFull if `resident_bytes` is too small, and Unreachable if it
    was never reached.
    """
    if "past_key_values" in generate_kwargs:
        raise CallerError("generate() brings its own past_key_values; use PrefixCache to hold the cache yourself")
    generation = Generation(model, generate_kwargs)
    if attention_mask is None and getattr(input_ids, "ndim", 0) == 2:
        attention_mask = generation.attention_mask(input_ids)
    given = client, model, input_ids, attention_mask
    if offload is not False:
        policy = offload if isinstance(offload, WindowPolicy) else None
        how: dict[str, Any] = {"salt": salt, "policy": policy, "planner": _planned(generation, input_ids, planner)}
        with SequenceCache.from_inputs(*given, **how, deadline_ms=deadline_ms) as over:
            return _generate_over(over, model, input_ids, attention_mask, generation, generate_kwargs, deadline_ms)
    cache = PrefixCache.from_inputs(*given, salt=salt, deadline_ms=deadline_ms)
    if generation.repeats > 1:
        cache.batch_repeat_interleave(generation.repeats)
    run: Any = model.generate
    out = run(input_ids, attention_mask=attention_mask, past_key_values=cache, **generate_kwargs)
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    cache.save(sequences, eos_token_id=generation.eos_token_ids, deadline_ms=deadline_ms)
    return out


def _planned(generation: Generation, input_ids: torch.Tensor, planner: AttendPlanner | None) -> AttendPlanner | None:
    """Returns the planner of a generation with `offload`. Raises CallerError for arguments that `offload` does not
    support."""
    if generation.option("output_attentions"):
        raise CallerError("generate() cannot take output_attentions with offload: attention weights are not kept")
    few = generation.most_tokens(input_ids.shape[-1]) <= FEW_TOKENS
    return _FEW if planner is MANY and few else planner


def _generate_over(
    cache: SequenceCache,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation: Generation,
    generate_kwargs: dict[str, Any],
    deadline_ms: float,
) -> Any:
    """Computes the prompts once each, in chunks, and generates from there; then stores what is not stored yet."""
    cache.prefill(model, input_ids, attention_mask, chunk=generation.option("prefill_chunk_size"))
    if generation.repeats > 1:
        cache.batch_repeat_interleave(generation.repeats)
    run: Any = model.generate
    with cache.attending(model):
        out = run(input_ids, attention_mask=attention_mask, past_key_values=cache, **generate_kwargs)
    if not isinstance(out, torch.Tensor):
        out.past_key_values = None
    if (generation.option("num_beams") or 1) == 1:  # rows of beams are not those that are returned
        ids = out if isinstance(out, torch.Tensor) else out.sequences
        cache.keep([_end(row, input_ids.shape[1], generation.eos_token_ids) for row in ids.tolist()])
    cache.flush(deadline_ms=deadline_ms)
    return out


def _end(row: Sequence[int], prompt: int, eos_token_ids: Sequence[int]) -> int:
    """Returns the column behind the first end token after the prompt: what follows is filler."""
    return next((at + 1 for at in range(prompt, len(row)) if row[at] in eos_token_ids), len(row))
