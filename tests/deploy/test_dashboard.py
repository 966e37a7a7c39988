"""The dashboard of deploy/grafana: panels that do not overlap, and expressions of metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvcluster.runtime.metrics import METRICS, WORKER_METRICS, MetricKind
from tests.deploy.alert_rules import ILL, RELEASE, WELL, connector_counters, promtool, selectors
from tests.deploy.programs import programs

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "kvcluster.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
OF_A_SCRAPE = {"job", "instance", RELEASE}
OF_A_POD = {"namespace", "pod", "container"}
FROM_THE_INSTANCE = {"host"}
OF_THE_CONNECTOR = {"engine", "model_name"}
"""The labels of its counters in vLLM."""

# Figures for whoever looks for a fault, on the page /metrics alone.
ABSENT = {"kvcluster_reported_pages_total", "kvcluster_purged_blocks_total", "kvcluster_ordered_pulls_total"}
ABSENT |= {"kvcluster_blocks", "kvcluster_private_blocks", "kvcluster_claimed_blocks", "kvcluster_sequences"}
ABSENT |= {"kvcluster_namespaces", "kvcluster_pinned_blocks", "kvcluster_orders", "kvcluster_replica_requests"}
ABSENT |= {"kvcluster_tickets", "kvcluster_coordinator_epoch_seconds", "kvcluster_shard_epoch_seconds"}
ABSENT |= {"kvcluster_tier_pages", "kvcluster_leases", "kvcluster_waiting", "kvcluster_calls_under_way"}
ABSENT |= {
    "kvcluster_start_retries_total",
    "kvcluster_file_stale",
    "kvcluster_tenant_bytes",
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


def named(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of the table that an expression names, with the labels that its selectors name."""
    for series, labels in selectors(expression):
        if series not in connector_counters():
            yield table_name(series), set(labels)


def filled_in(expression: str) -> str:
    """An expression as Grafana asks it where everything is chosen."""
    return re.sub(r"\$(job|instance|release)\b", ".*", expression).replace("$__rate_interval", "5m")


def grouped_by(expression: str) -> list[set[str]]:
    return [set(group.split(", ")) for group in re.findall(r"\bby \(([^)]*)\)", expression)]


def test_every_selector_and_grouping_names_metrics_and_labels_that_exist() -> None:
    for expression in expressions():
        known = OF_A_SCRAPE | OF_A_POD
        for name, labels in named(expression):
            assert labels <= OF_A_SCRAPE | set(METRICS[name].labels), expression
            known |= set(METRICS[name].labels)
        for group in grouped_by(expression):
            assert group <= known | {"le"} | (FROM_THE_INSTANCE if "label_replace" in expression else set()), expression
    counters = {name for expression in expressions() for name, _ in selectors(expression) if ":" in name}
    assert counters <= connector_counters()


def test_every_selector_takes_the_chosen_releases_and_every_sum_keeps_them_apart() -> None:
    for expression in expressions():
        for name, labels in selectors(expression):
            of_engine = name in connector_counters() | set(WORKER_METRICS)  # whose scrape may set no such label
            assert labels[RELEASE] == ("=~", "$release|" if of_engine else "$release"), expression
        groups = grouped_by(expression)
        assert len(groups) == len(re.findall(r"\b(?:sum|min|max|count|avg)\b", expression)) > 0, expression
        assert all(RELEASE in group for group in groups), expression


def test_a_legend_names_labels_that_its_expression_keeps() -> None:
    for target in (target for panel in PANELS for target in panel.get("targets", [])):
        kept = set.union(*grouped_by(target["expr"]))
        assert {RELEASE} <= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    shown = {name for expression in expressions() for name, _ in named(expression)}
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
    assert variables == {"datasource": "datasource", "job": "query", "release": "query", "instance": "query"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS if panel["type"] != "row")


@pytest.mark.parametrize("program", programs("promtool"))
def test_prometheus_takes_every_expression(program: str, tmp_path: Path) -> None:
    tests = [{"expr": filled_in(expression), "eval_time": "1m", "exp_samples": []} for expression in expressions()]
    assert promtool(program, [], [{"interval": "1m", "input_series": [], "promql_expr_test": tests}], tmp_path) == ""


@pytest.mark.parametrize("program", programs("promtool"))
def test_the_hit_rate_and_the_memory_are_those_of_each_release(program: str, tmp_path: Path) -> None:
    """Of two releases, with two shards in a pod each."""
    tokens = {ILL: (60, 180), WELL: (18_000, 6_000)}  # hits and misses in a minute
    series = {
        f'kvcluster_lookup_tokens_total{{{RELEASE}="{release}", instance="h:9400", result="{result}"}}': f"0+{rate}x20"
        for release, rates in tokens.items()
        for result, rate in zip(("hit", "miss"), rates, strict=True)
    }
    for release, used in {ILL: (48, 47), WELL: (30, 20)}.items():
        for port, nbytes in enumerate(used, 9401):
            labels = f'{{{RELEASE}="{release}", pod="cache-0", instance="10.0.0.2:{port}"}}'
            series |= {
                f"kvcluster_memory_bytes{labels}": f"{nbytes}x20",
                f"kvcluster_memory_limit_bytes{labels}": "100x20",
            }
    hit_rate, memory = (
        next(panel["targets"][0]["expr"] for panel in PANELS if panel["title"] == title)
        for title in ("Hit rate, in tokens", "Memory of its limit")
    )
    expected = {
        hit_rate: {f'{{{RELEASE}="{ILL}"}}': 0.25, f'{{{RELEASE}="{WELL}"}}': 0.75},
        memory: {
            f'{{{RELEASE}="{ILL}", pod="cache-0", host="10.0.0.2"}}': 0.95,
            f'{{{RELEASE}="{WELL}", pod="cache-0", host="10.0.0.2"}}': 0.5,
        },
    }
    tests = [
        {
            "expr": filled_in(expression),
            "eval_time": "20m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expression, samples in expected.items()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    assert (
        promtool(program, [], [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}], tmp_path) == ""
    )
