"""Loads that at least one rank has not ended: which requests they are for, and which blocks they fill.

A load may outlive its request. The blocks of a load within a forward pass are *in doubt*: what is computed over them is
wrong if they do not arrive. So this module also keeps the block tables of requests that ended over such blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.ids import BlockHash
from kvcluster.engines.vllm.step_metadata import LoadOrder, LoadReport


@dataclass(slots=True)
class _Loading:
    """A load that is in progress on at least one rank. `hashes` are those of its blocks; `reported` merges the reports
    of the ranks that have ended it."""

    order: LoadOrder
    hashes: tuple[BlockHash, ...]
    reported: LoadReport | None = None


class LoadsInFlight:
    """The loads of one engine of `ranks` ranks, by request."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._loads: dict[str, _Loading] = {}
        self.steps: set[int] = set()
        """Outstanding steps with a load in their forward pass."""
        self.ended_tables: list[list[int]] = []
        """The block tables of requests that ended while they held blocks in doubt."""

    def add(self, order: LoadOrder, hashes: tuple[BlockHash, ...]) -> None:
        self._loads[order.request] = _Loading(order, hashes)

    def report(self, request: str, load: LoadReport) -> tuple[LoadOrder, tuple[BlockHash, ...], LoadReport] | None:
        """Merges a report on a request's load. Once all ranks have ended it, removes and returns it, with the merged
        report; otherwise returns None."""
        loading = self._loads.get(request)
        if loading is None:
            return None
        loading.reported = merged = load if loading.reported is None else loading.reported.with_others(load)
        if merged.ranks < self._ranks:
            return None
        del self._loads[request]
        return loading.order, loading.hashes, merged

    def end_steps(self, step: int) -> None:
        """Records that all steps up to this one have ended."""
        self.steps = {number for number in self.steps if number > step}

    def hashes_within(self) -> set[BlockHash]:
        """Returns the hashes of the blocks that loads within forward passes fill."""
        return {block for load in self._loads.values() if load.order.layerwise for block in load.hashes}

    def in_doubt(self) -> set[int]:
        """Returns the engine's own numbers of the same blocks."""
        within = (load.order for load in self._loads.values() if load.order.layerwise)
        return {block for order in within for block in order.into[0]}
