"""The progress of a store: the outcomes of its blocks so far."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcluster.core.messages import Decision, ShardAddress, StoreGrant, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.results import Stored

_MISSES = {
    Written.CORRUPT: Miss(MissReason.CORRUPT, "what arrived did not match its checksum"),
    Written.FULL: Miss(MissReason.FULL),
    Written.LOST: Miss(MissReason.SHARD_LOST, "the shard could not commit"),
}


class StoreProgress:
    """The counts of one store. Thread-safe; they are correct at every moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = self._deduplicated = self._pending = self._nbytes = 0
        self._miss: Miss | None = None

    def missed(self, miss: Miss, nbytes: int) -> None:
        """Records that an exchange which moved `nbytes` ended without an answer. The first reason is reported."""
        with self._lock:
            self._nbytes += nbytes
            self._miss = self._miss or miss

    def count(self, of_block: Sequence[int], outcome: Sequence[Written], nbytes: int) -> None:
        """Records the outcome of an exchange that moved `nbytes`. A block counts by the worst outcome of its pages."""
        fates: dict[int, set[Written]] = {}
        for block, written in zip(of_block, outcome, strict=True):
            fates.setdefault(block, set()).add(written)
        with self._lock:
            self._nbytes += nbytes
            for fate in fates.values():
                failed = next((written for written in _MISSES if written in fate), None)
                if failed is not None:
                    self._miss = self._miss or _MISSES[failed]
                elif Written.PENDING in fate:
                    self._pending += 1
                elif Written.COMMITTED in fate:
                    self._blocks += 1
                else:
                    self._deduplicated += 1

    def sort(self, grant: StoreGrant) -> dict[ShardAddress, list[int]]:
        """Returns the blocks to write to each shard, and counts the others."""
        by_shard: dict[ShardAddress, list[int]] = {}
        at = 0
        with self._lock:
            for run in grant.runs:
                if run.decision is Decision.WRITE:
                    assert run.shard is not None
                    by_shard.setdefault(run.shard, []).extend(range(at, at + run.count))
                elif run.decision is Decision.COMMITTED:
                    self._deduplicated += run.count
                elif run.decision is Decision.PENDING:
                    self._pending += run.count
                elif run.miss is not None:
                    self._miss = self._miss or run.miss
                at += run.count
        return by_shard

    def stored(self, why: Miss | None = None) -> Stored:
        """Returns the outcome. `why`: the miss of a store that ends early, unless an earlier one was recorded."""
        with self._lock:
            return Stored(self._blocks, self._deduplicated, self._pending, self._nbytes, self._miss or why)
