"""The dashboard of deploy/grafana: panels that do not overlap, and expressions of metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from kvcluster.runtime.metrics import METRICS, MetricKind

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "kvcluster.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
OF_A_SCRAPE = {"job", "instance"}

# Figures for whoever looks for a fault, on the page /metrics alone.
ABSENT = {"kvcluster_reported_pages_total", "kvcluster_purged_blocks_total", "kvcluster_ordered_pulls_total"}
ABSENT |= {"kvcluster_blocks", "kvcluster_private_blocks", "kvcluster_claimed_blocks", "kvcluster_sequences"}
ABSENT |= {"kvcluster_namespaces", "kvcluster_pinned_blocks", "kvcluster_orders", "kvcluster_replica_requests"}
ABSENT |= {"kvcluster_tickets", "kvcluster_coordinator_epoch_seconds", "kvcluster_shard_epoch_seconds"}
ABSENT |= {"kvcluster_tier_pages", "kvcluster_leases", "kvcluster_waiting", "kvcluster_calls_under_way"}
ABSENT |= {
    "kvcluster_start_retries_total",
    "kvcluster_token_file_stale",
    "kvcluster_uptime_seconds",
    "kvcluster_worker_paths",
}
ABSENT |= {"kvcluster_worker_attended_spans_total", "kvcluster_worker_shipped_bytes_total"}
ABSENT |= {"kvcluster_worker_failed_attends_total"}


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def table_name(series: str) -> str:
    if series in METRICS:
        return series
    name = re.sub(r"_(bucket|count|sum)$", "", series)
    assert METRICS[name].kind is MetricKind.HISTOGRAM, series
    return name


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    for series, labels in re.findall(r"\b(kvcluster_\w+)(?:\{([^}]*)\})?", expression):
        yield table_name(series), set(re.findall(r"(\w+)\s*[=!]~?", labels))


def test_every_selector_and_grouping_names_metrics_and_labels_that_exist() -> None:
    for expression in expressions():
        known = set(OF_A_SCRAPE)
        for name, labels in selectors(expression):
            assert labels <= OF_A_SCRAPE | set(METRICS[name].labels), expression
            known |= set(METRICS[name].labels)
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= known | {"le"}, expression


def test_a_legend_names_labels_that_its_expression_keeps() -> None:
    for target in (target for panel in PANELS for target in panel.get("targets", [])):
        kept = {label for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
        aggregated = re.search(r"\b(sum|min|max)\b", target["expr"])
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= (kept if aggregated else OF_A_SCRAPE)


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    shown = {name for expression in expressions() for name, _ in selectors(expression)}
    assert not shown & ABSENT
    assert shown | ABSENT == set(METRICS)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) > 20
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_the_source_of_data_and_the_processes_are_variables() -> None:
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query", "instance": "query"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS if panel["type"] != "row")
