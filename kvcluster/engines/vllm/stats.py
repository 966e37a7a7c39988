"""The connector's counts, as plain values for vLLM's logger and Prometheus endpoint.

Loads count bytes that were verified and written into the engine, unlike the engine's own counters of external hits,
which count what a lookup promised.
"""

from __future__ import annotations

from collections import Counter

from kvcluster.engines.vllm.step_metadata import LoadReport, StepReport

DESCRIBED = {
    "loads": "Loads that ended.",
    "loaded_bytes": "Bytes of KV that were verified and written into the engine.",
    "load_seconds": "Seconds that loads took on their slowest rank.",
    "failed_loads": "Loads of which a part did not arrive; the engine computes the rest.",
    "stored_pages": "Pages that this engine stored and that became READY.",
    "store_bytes": "Bytes that were transferred for stores.",
    "dropped_stores": "Stores that were cancelled because the engine needed their blocks.",
    "failed_stores": "Stores that the cluster did not accept.",
}
"""Every count and its description."""


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
        """Returns the counts so far without zeros, and resets them."""
        taken, self._counts = dict(self._counts), Counter()
        return {name: count for name, count in taken.items() if count}
