"""What the series of metrics say, and that all of the table exist from the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcluster.runtime.coordinator_host import figures_of
from kvcluster.runtime.metric_samples import (
    CallMetrics,
    Histogram,
    Refusal,
    Sample,
    ShardMetrics,
    coordinator_samples,
    shard_samples,
)
from kvcluster.runtime.metrics import BUCKETS, COORDINATOR_METRICS, METRICS, PROCESS_METRICS, SHARD_METRICS, MetricKind
from kvcluster.runtime.metrics_server import ProcessSamples
from kvcluster.transport.certificates import Certificates
from kvcluster.wire.methods import COORDINATOR
from tests.authority import Authority
from tests.core.lone_coordinator import BLOCKS, LoneCoordinator
from tests.core.lone_shard import LoneShard
from tests.core.samples import SPEC, attempt, gone, pages

OF_TENANTS = (
    *("kvcluster_tenant_lookup_tokens_total", "kvcluster_tenant_written_blocks_total"),
    "kvcluster_tenant_bytes",
)
"""Shown only to who asks for them, metrics.tenants."""

OF_CERTIFICATES = {"kvcluster_certificate_expires_seconds"}
"""Shown by processes that speak TLS."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def of_coordinator(coordinator: LoneCoordinator) -> dict[tuple[str, ...], float]:
    core = coordinator.core
    samples = coordinator_samples(figures_of(core, coordinator.now))
    assert len({(sample.name, sample.labels) for sample in samples}) == len(samples), "one value a series"
    return {
        (sample.name, *sample.labels): sample.value if isinstance(sample, Sample) else float(sample.counts[-1])
        for sample in samples
    }


def test_every_series_exists_from_the_start(tmp_path: Path) -> None:
    found = {name for name, *_ in of_coordinator(LoneCoordinator(expected=1))}
    assert found == {name for name in COORDINATOR_METRICS if name not in OF_TENANTS}
    core = LoneShard().core
    of_shard = [*shard_samples(core.info(), core.waiting, 0), *ShardMetrics().samples()]
    assert {sample.name for sample in of_shard} == set(SHARD_METRICS)
    assert not [sample for sample in of_shard if isinstance(sample, Sample) and "memory" in sample.labels]
    calls = CallMetrics(COORDINATOR).samples()
    process = ProcessSamples(Certificates(Authority(tmp_path).issue("me", "shard").files))()
    assert {sample.name for sample in [*calls, *process]} == set(PROCESS_METRICS)
    without_tls = {sample.name for sample in ProcessSamples()()}
    assert {sample.name for sample in process} - without_tls == OF_CERTIFICATES
    assert {sample.labels[0] for sample in calls if isinstance(sample, Histogram)} == set(COORDINATOR)


def test_a_lookup_counts_tokens_found_and_missed_by_reason() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    before = of_coordinator(coordinator)
    coordinator.load(attempt(1), BLOCKS[:6])
    voice.report(*map(gone, BLOCKS[3:4]))
    coordinator.load(attempt(2), BLOCKS[:6])
    after = of_coordinator(coordinator)
    moved = {series: value - before[series] for series, value in after.items() if value != before[series]}
    tokens = SPEC.block_tokens
    assert moved["kvcluster_lookups_total",] == 2
    assert moved["kvcluster_lookup_tokens_total", "hit"] == (4 + 3) * tokens
    assert moved["kvcluster_lookup_tokens_total", "miss"] == (2 + 3) * tokens
    assert moved["kvcluster_missed_tokens_total", "never_seen"] == 2 * tokens
    assert moved["kvcluster_missed_tokens_total", "evicted"] == 3 * tokens
    assert moved["kvcluster_reported_pages_total", "gone"] == 1
    assert moved["kvcluster_tickets",] == 2
    assert moved["kvcluster_blocks",] == -1


def test_a_store_counts_blocks_by_decision() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    before = of_coordinator(coordinator)
    coordinator.store(attempt(1), BLOCKS[:6])
    after = of_coordinator(coordinator)
    for decision, blocks in (("committed", 4), ("write", 2), ("pending", 0), ("refused", 0)):
        series = ("kvcluster_store_blocks_total", decision)
        assert after[series] - before[series] == blocks, decision


def test_shards_are_counted_by_state() -> None:
    coordinator, _ = LoneCoordinator.serving()
    states = {
        labels[0]: value
        for (name, *labels), value in of_coordinator(coordinator).items()
        if labels and name == "kvcluster_shards"
    }
    assert states == {"up": 1, "joining": 0, "draining": 0, "stopping": 0, "lost": 0}
    assert of_coordinator(LoneCoordinator(expected=1))["kvcluster_rebuilding",] == 1


def test_a_call_is_in_the_first_bucket_that_holds_it_and_in_all_behind() -> None:
    calls = CallMetrics(["Ping"])
    for seconds in (0.0, BUCKETS[0], 0.002, 1_000.0):
        calls.took("Ping", seconds)
    calls.refused(Refusal.CREDENTIAL)
    [histogram] = [sample for sample in calls.samples() if isinstance(sample, Histogram)]
    refused = [sample for sample in calls.samples() if sample.name == "kvcluster_refused_calls_total"]
    assert histogram.counts == (2, 2, *[3] * (len(BUCKETS) - 2), 4)
    assert histogram.seconds == pytest.approx(1_000.0025)
    assert {sample.labels[0]: sample.value for sample in refused if not isinstance(sample, Histogram)} == {
        "credential": 1, "busy": 0, "protocol": 0, "version": 0, "method": 0, "rate": 0
    }  # fmt: skip


def test_names_follow_the_rule_and_labels_are_bounded() -> None:
    for name, row in METRICS.items():
        assert re.fullmatch(r"kvcluster(_[a-z]+)+", name)
        assert name.endswith("_total") == (row.kind is MetricKind.COUNTER), name
        assert row.about.endswith("."), name
        assert not {"namespace", "block", "hash"} & set(row.labels), name
        assert ("tenant" in row.labels) == (name in OF_TENANTS), name


def test_the_document_has_each_metric_as_the_table_has_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    table = [(name, row.kind.value, ", ".join(row.labels), row.about) for name, row in METRICS.items()]
    assert rows == table
