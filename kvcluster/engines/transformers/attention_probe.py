"""Has each layer of a model ask for attention once, before anything starts, so that a model whose attention cannot be
computed over sequences is refused by name, and not in the middle of a generation."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcluster.engines.transformers.attention_interface import LayerScores, MaskRule, attending
from kvcluster.engines.transformers.stepped_cache import SteppedCache
from kvcluster.errors import CallerError


class _Probe(SteppedCache):
    """A cache without KV, whose attention is 0."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise CallerError(f"layer {layer} has keys {list(key.shape)} and values {list(value.shape)}")

    def compute(self, layer: int, query: Tensor, rule: MaskRule, scores: LayerScores) -> Tensor:
        return torch.zeros_like(query).transpose(1, 2)

    def count(self, columns: int, input_ids: Tensor | None) -> None:
        """Nothing is kept."""


def check_attention(model: PreTrainedModel) -> None:
    """Runs the model on one token. Raises CallerError if a layer of it does not attend through transformers'
    AttentionInterface, or asks for what is not computed over sequences."""
    probe = _Probe(model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad(), attending(model, probe):
            model(input_ids=ids, past_key_values=probe, use_cache=True)
    except CallerError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise CallerError(
            f"{type(model).__name__} cannot generate over sequences: its layers do not attend through transformers' "
            f"AttentionInterface alone ({error})"
        ) from error
    if probe.columns != 1:
        raise CallerError(f"{type(model).__name__} cannot generate over sequences: it does not use the cache")
