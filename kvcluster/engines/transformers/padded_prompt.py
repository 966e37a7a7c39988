"""A prompt as one row of a batch: its tokens behind columns of padding, which hold none.

`generate` takes prompts of different lengths as the rows of one tensor, with padding on the left. Only left padding has
a meaning here: KV behind any other masked token would not be that of its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvcluster.core.ids import BlockHash
from kvcluster.engines.transformers.compat import Generation
from kvcluster.errors import CallerError


@dataclass(frozen=True, slots=True)
class PaddedPrompt:
    """One row of `input_ids`: its columns, of which the first `padding` hold no token, and the hashes of its full
    blocks."""

    columns: list[int]
    padding: int
    hashes: list[BlockHash]


def find_paddings(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Returns the number of padding columns before each row. Raises CallerError for inputs that `generate` does not
    take, or with padding elsewhere."""
    if getattr(input_ids, "ndim", 0) != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise CallerError("input_ids must be integers [batch, columns], at least one of each")
    if attention_mask is None:
        attention_mask = Generation(model, {}).attention_mask(input_ids)
    if attention_mask.shape != input_ids.shape:
        given, expected = list(attention_mask.shape), list(input_ids.shape)
        raise CallerError(f"attention_mask has shape {given}; expected that of input_ids, {expected}")
    mask = attention_mask.cpu().long()
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any(1).all()):
        raise CallerError("attention_mask must be 0 and 1, with at least one 1 in every row")
    if not bool(mask[:, -1].all()):
        raise CallerError("padding on the right is not supported: give the tokenizer padding_side='left'")
    if bool((mask.diff(dim=1) < 0).any()):
        raise CallerError(
            "attention_mask has holes: KV behind a masked token is not that of its prefix; mask only the left padding"
        )
    return (mask == 0).sum(1).tolist()
