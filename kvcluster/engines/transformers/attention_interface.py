"""Attention of a transformers model, computed by its cache where the KV lies.

A plain `Cache` has to return all KV to the model. Here a function is registered with transformers' AttentionInterface
under NAME, and one with its AttentionMaskInterface: of a mask it returns the rule that the mask would follow
(MaskRule), so no mask is ever made. While `attending` is open, the model's layers call the first function; it asks the
cache of this thread, which has just got the keys of the layer.

Whatever a layer asks for that is not computed here is refused by name. `check_attention` (sequence_cache.py) has each
layer of a model ask before anything starts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvcluster.engines.transformers.compat import text_config
from kvcluster.errors import CallerError

NAME = "kvcluster"
"""The attention implementation, as transformers' configs name it."""

_PASSED_ON = (
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",
    "token_type_ids",
    "use_cache",
)
"""Arguments that models hand on to attention and that change nothing here; the mask contains the window. All others
that are None or False change nothing either."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """The rule of a mask: each token sees the last `window` tokens up to itself, or all if it is None, but none of the
    padding. `mask` is bool `[rows, columns]`, False for padding; None if there is no padding."""

    window: int | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerScores:
    """How a layer computes scores: `scale`, by default head_dim ** -0.5; `softcap`; learned `sinks`, `[heads]`."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class AttendingCache(Protocol):
    """A cache that computes attention."""

    def attend(self, query: Tensor, key: Tensor, rule: MaskRule, scores: LayerScores) -> Tensor:
        """Returns `[rows, columns, heads, head_dim]` for a query `[rows, heads, columns, head_dim]` of the layer whose
        last update returned `key`."""

    def end_step(self, input_ids: Tensor | None) -> None:
        """The model has computed these tokens, `[rows, columns]`, in all layers. Called again, it does nothing."""


_attending: ContextVar[AttendingCache | None] = ContextVar("kvcluster_attending", default=None)
_lock = threading.Lock()
_replaced: dict[int, tuple[str | None, int]] = {}
"""By the id of a config whose implementation is replaced: what it was, and how many have it replaced."""


@contextmanager
def attending(model: PreTrainedModel, cache: AttendingCache) -> Iterator[None]:
    """Within the context this cache computes the attention of the model in this thread, and is notified of each forward
    pass. Other threads may use the model at the same time only with caches of their own, in the same way."""
    config = text_config(model)

    def ended(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _attending.get() is cache and kwargs.get("past_key_values") is cache:
            cache.end_step(kwargs.get("input_ids", args[0] if args else None))

    hook = model.register_forward_hook(ended, with_kwargs=True)
    _replace(config)
    token = _attending.set(cache)
    try:
        yield
    finally:
        _attending.reset(token)
        _restore(config)
        hook.remove()


def _replace(config: Any) -> None:
    with _lock:
        was, count = _replaced.get(id(config), (config._attn_implementation, 0))
        _replaced[id(config)] = was, count + 1
        config._attn_implementation = NAME


def _restore(config: Any) -> None:
    with _lock:
        was, count = _replaced.pop(id(config))
        if count > 1:
            _replaced[id(config)] = was, count - 1
        else:
            config._attn_implementation = was


def mask_rule(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **others: Any,
) -> MaskRule:
    """Returns the rule of a mask, with the arguments that transformers gives to mask functions. Raises CallerError for
    a mask that is not causal, a window and padding alone."""
    if use_vmap or not allow_is_causal_skip:
        raise CallerError(
            "the model masks more than the future, a window and the padding; generate with offload=True computes "
            "causal attention of text alone"
        )
    return MaskRule(local_size, attention_mask)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Has the cache of this thread compute a layer, with the arguments and the result of an attention function of
    transformers. Raises CallerError for whatever else the layer asks for."""
    cache, layer = _attending.get(), type(module).__name__
    if cache is None:
        raise CallerError(
            f"this model generates with offload=True in another thread, so {layer} cannot compute without a cache of "
            "kvcluster now: use another copy of the model, or wait"
        )
    if not isinstance(attention_mask, MaskRule):
        raise CallerError(f"{layer} makes masks of its own, which may say more than causality, a window and padding")
    asked = [name for name, given in others.items() if name not in _PASSED_ON and not (given is None or given is False)]
    if asked or dropout or others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        what = ", ".join(asked) or ("dropout" if dropout else "attention to later tokens")
        raise CallerError(f"{layer} asks attention for {what}, which is not computed over sequences")
    return cache.attend(query, key, attention_mask, LayerScores(scaling, softcap, s_aux)), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask_rule)
