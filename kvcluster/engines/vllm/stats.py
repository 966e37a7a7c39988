"""What the connector counts, in plain values that vLLM's logger and Prometheus endpoint can carry.

Loads count what was verified and written into the engine, never what was promised: the engine's own counters of
external hits are of promises.
"""

from __future__ import annotations

from collections import Counter

from kvcluster.engines.vllm.step_metadata import LoadReport, StepReport

DESCRIBED = {
    "loads": "Loads that ended.",
    "loaded_bytes": "Bytes of KV that were verified and written into the engine.",
    "load_seconds": "Time that loads took, of the slowest rank.",
    "failed_loads": "Loads of which not everything came; the engine computes the rest.",
    "stored_pages": "Pages that became READY by this engine.",
    "store_bytes": "Bytes that were moved for stores.",
    "dropped_stores": "Stores that were broken off because the engine needed their blocks.",
    "failed_stores": "Stores that the cluster did not take.",
}
"""Every count, and what it says."""


class Stats:
    """Counts since they were last taken."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def loaded(self, load: LoadReport) -> None:
        self._counts["loads"] += 1
        self._counts["loaded_bytes"] += load.nbytes
        self._counts["load_seconds"] += load.took_ns / 1e9  # type: ignore[assignment]
        self._counts["failed_loads"] += load.miss is not None

    def stored(self, report: StepReport) -> None:
        self._counts["stored_pages"] += report.stored
        self._counts["store_bytes"] += report.store_bytes
        self._counts["dropped_stores"] += report.dropped
        self._counts["failed_stores"] += sum(report.store_misses.values())

    def take(self) -> dict[str, float]:
        """The counts so far, which begin anew."""
        taken, self._counts = dict(self._counts), Counter()
        return {name: count for name, count in taken.items() if count}
