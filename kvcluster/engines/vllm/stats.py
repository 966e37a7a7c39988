"""The connector's counts, in vLLM's log and Prometheus endpoint as `kvcluster:<name>_total`; and the prefill rate.

Loads count bytes that were verified and written into the engine, unlike the engine's own counters of external hits,
which count what a lookup promised.

`PrefillRate` measures how fast this engine computes prompts, from its own steps, to decide whether a load is faster. A
step takes some time whatever it computes (weights are read, kernels are launched). No load saves that time, since the
tokens that are not loaded are computed in a step, too. So the time of the shortest of the last small steps is
subtracted, and the rest is attributed to the tokens of large steps. A step counts if no load delayed it. The weight of
each large step falls by a fifth with every later one. This module reads no clock: `now` is an argument.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

import kvcluster.engines.vllm.kv_hints as kv_hints
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
    "opened_breakers": "Times that a rank stopped asking a shard whose calls had failed, or tried it again in vain.",
    "refused_pin_hints": "Actions of KV hints of type pin that were refused: it is not carried out yet.",
    "refused_unpin_hints": "Actions of KV hints of type unpin that were refused: it is not carried out yet.",
    "refused_prefetch_hints": "Actions of KV hints of type prefetch that were refused: it is not carried out yet.",
    "refused_drop_hints": "Actions of KV hints of type drop that were refused: it is not carried out yet.",
    "refused_unknown_hints": "Actions of KV hints that were refused: of a type or version that is not known.",
    "refused_malformed_hints": "Actions of KV hints that were refused: malformed, or too many in one request.",
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

    def reported(self, report: StepReport) -> None:
        """Adds what the workers report of their stores and of their circuit breakers."""
        self._counts["stored_pages"] += report.stored
        self._counts["store_bytes"] += report.store_bytes
        self._counts["dropped_stores"] += report.dropped
        self._counts["failed_stores"] += sum(report.store_misses.values())
        self._counts["opened_breakers"] += report.opened_breakers

    def answered(self, hints: kv_hints.HintAnswers) -> None:
        """Adds the answers to a request's hints."""
        for kind, count in hints.counts().items():
            self._counts[f"refused_{kind}_hints"] += count

    def take(self) -> dict[str, float]:
        """Returns the counts so far without zeros, and resets them."""
        taken, self._counts = dict(self._counts), Counter()
        return {name: count for name, count in taken.items() if count}


class TransferStats(KVConnectorStats):
    """The counts of one interval, passed from the scheduler to vLLM's logger and metrics endpoint."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        counts = {name: self.data[name] for name in DESCRIBED if name in self.data}
        return {name: round(count, 3) if isinstance(count, float) else count for name, count in counts.items()}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """One counter for each count, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"kvcluster:{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in DESCRIBED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


LEAST_TOKENS = 64
"""A step of so many tokens is a large one."""

_KEPT = 0.8
_SMALL = 64
"""Small steps that are remembered."""

_LEAST_SHARE = 0.25
"""At least this part of a large step's time is that of its tokens."""


class PrefillRate:
    """Tokens per second. `given` is a configured rate, which is used unchanged; 0 to learn the rate."""

    def __init__(self, given: int = 0) -> None:
        self._given = given
        self._tokens = 0.0
        self._ns = 0.0
        self._steps = 0.0
        self._small: deque[int] = deque(maxlen=_SMALL)  # nanoseconds of each
        self._begun: dict[int, tuple[int, int]] = {}  # by step: its tokens and start time; a few run at once

    def began(self, step: int, tokens: int, now: int) -> None:
        if tokens and len(self._begun) < 8:
            self._begun[step] = tokens, now

    def ended(self, step: int, now: int) -> None:
        tokens, began = self._begun.pop(step, (0, now))
        if now > began and tokens >= LEAST_TOKENS:
            self._tokens = _KEPT * self._tokens + tokens
            self._ns = _KEPT * self._ns + now - began
            self._steps = _KEPT * self._steps + 1
        elif now > began:
            self._small.append(now - began)
        for older in [number for number in self._begun if number < step]:
            del self._begun[older]

    def known(self) -> int | None:
        """Returns the rate; None before the first large step."""
        if self._given or not self._ns:
            return self._given or None
        of_tokens_ns = max(self._ns - min(self._small, default=0) * self._steps, _LEAST_SHARE * self._ns)
        return max(1, round(self._tokens * 1e9 / of_tokens_ns))
