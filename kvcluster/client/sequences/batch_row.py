"""What one call of attention computes: a row for each sequence of a batch, and how scores are computed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """How scores are computed: see Sequence.attend."""

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    latent_values: int | None = None


class BatchRow(NamedTuple):
    """A sequence of `visible` tokens, whose last `queries` attend to the blocks of these ranges of depths."""

    depths: tuple[range, ...]
    visible: int
    queries: int
