"""Counts what attention of one client's sequences has chosen, sent and received."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvcluster.sequences.attend_planner import SpanChoice


@dataclass
class ShippedCounts:
    """What one client's remote attention has done since it began: messages, spans that rows named in them, bytes of
    queries and of results, and messages that brought none. `chosen`: how many spans of how many steps were attended to
    in each way (SpanChoice), by its name. `loaded_bytes`: KV that this client has loaded, by whatever call."""

    messages: int = 0
    spans: int = 0
    query_bytes: int = 0
    result_bytes: int = 0
    failed: int = 0
    chosen: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0


class ShippedCounter:
    """Thread-safe. It may outlive its client, so that what is summed over clients never falls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = ShippedCounts()

    def chose(self, choices: Iterable[SpanChoice]) -> None:
        """Counts what was chosen for the spans of a step."""
        with self._lock:
            for choice, count in Counter(choices).items():
                self._counts.chosen[choice.value] = self._counts.chosen.get(choice.value, 0) + count

    def sent(self, spans: int, query_bytes: int) -> None:
        """Counts one message."""
        with self._lock:
            self._counts.messages += 1
            self._counts.spans += spans
            self._counts.query_bytes += query_bytes

    def received(self, result_bytes: int) -> None:
        """Counts results."""
        with self._lock:
            self._counts.result_bytes += result_bytes

    def failed(self) -> None:
        """Counts what was asked of a shard and brought no results."""
        with self._lock:
            self._counts.failed += 1

    def counts(self) -> ShippedCounts:
        """Returns what was counted so far."""
        with self._lock:
            return replace(self._counts, chosen=dict(self._counts.chosen))
