"""Recurrent state of toy engines: what vLLM's model runner does with the blocks of a group that keeps it.

A request has one state, in the block of the column that its last token belongs to. Before a step the runner copies it
to the column that the step ends in, if that is another one; the step computes it there in place, from the state before
its first token to that behind its last. What a state is follows from all tokens before it, as KV does in toy.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.mamba_utils import cleanup_mamba_state_idx


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the state of a request is before a step, -1 for nowhere, and where the step leaves it."""

    before: int
    after: int


class StateColumns:
    """The columns of a rank's requests, as vLLM's preprocess_mamba keeps them."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._last: dict[str, int] = {}

    def step(self, output: SchedulerOutput, spans: dict[str, tuple[int, int, int]]) -> dict[str, Columns]:
        """Returns the columns of the requests of this step."""
        cleanup_mamba_state_idx(output, self._last)
        columns: dict[str, Columns] = {}
        for request, (start, stop, _) in spans.items():
            before = self._last.get(request, (start - 1) // self._block)
            self._last[request] = -(-stop // self._block) - 1
            columns[request] = Columns(before, self._last[request])
        return columns


def state_of(cache: torch.Tensor, block: int, nbytes: int) -> torch.Tensor:
    """A layer's state in a block, as numbers of 32 bits."""
    return cache[block].flatten()[:nbytes].view(torch.int32)
