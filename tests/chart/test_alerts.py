"""Two releases of the chart in one Prometheus: the rules of each fire for its own release, and no alert twice.

The cases are those of tests/deploy/alerts_test.yaml with two releases, of one name in two namespaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import render, values_of
from tests.deploy.alert_rules import ILL, RELEASE, WELL, cases, promtool, selectors
from tests.deploy.programs import programs

PROMTOOL = programs("promtool")


def expectations(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from case.get("promql_expr_test", ())


TWO = [
    case
    for case in cases()
    if "promql_expr_test" in case
    and {one.equal.get(RELEASE) for each in case["input_series"] for one in selectors(each["series"])} == {ILL, WELL}
]
QUIET = [{**case, "promql_expr_test": [{**each, "exp_samples": []} for each in expectations(case)]} for case in TWO]
"""The same, where no alert fires."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The rules that the chart writes for each of the two releases."""
    folder, found = tmp_path_factory.mktemp("rules"), {}
    for name in (ILL, WELL):
        namespace, _, release = name.partition("/")
        objects = render(values_of("monitoring"), release=release, namespace=namespace)
        (rule,) = [each for each in objects if each["kind"] == "PrometheusRule"]
        found[name] = folder / f"{namespace}.yaml"
        found[name].write_text(yaml.safe_dump(rule["spec"]), encoding="utf-8")
    return found


def test_there_is_a_case_for_each_alert(files: dict[str, Path]) -> None:
    (group,) = yaml.safe_load(files[ILL].read_text(encoding="utf-8"))["groups"]
    expected = [each["expr"] for case in TWO for each in expectations(case) if each["exp_samples"]]
    for rule in group["rules"]:
        assert any(rule["alert"] in text for text in expected), rule["alert"]


@pytest.mark.parametrize("program", PROMTOOL)
def test_each_alert_of_a_release_fires_by_its_own_rules(program: str, files: dict[str, Path], tmp_path: Path) -> None:
    assert promtool(program, [files[ILL]], TWO, tmp_path) == ""


@pytest.mark.parametrize("program", PROMTOOL)
def test_no_alert_of_a_release_fires_by_the_rules_of_the_other(
    program: str, files: dict[str, Path], tmp_path: Path
) -> None:
    assert promtool(program, [files[WELL]], QUIET, tmp_path) == ""


@pytest.mark.parametrize("program", PROMTOOL)
def test_an_engine_whose_scrape_names_no_release_is_not_left_out(
    program: str, files: dict[str, Path], tmp_path: Path
) -> None:
    series = 'kvcluster:opened_breakers_total{job="vllm", instance="w:8000", engine="0", model_name="m"}'
    alert = 'ALERTS{alertname="KVClusterBreakerOpen", alertstate="firing"'
    case = {
        "interval": "1m",
        "input_series": [{"series": series, "values": "0+2x20"}],
        "promql_expr_test": [
            {
                "expr": alert + "}",
                "eval_time": "20m",
                "exp_samples": [{"labels": alert + ', severity="warning", job="vllm", instance="w:8000"}', "value": 1}],
            }
        ],
    }
    assert promtool(program, [files[ILL]], [case], tmp_path) == ""


@pytest.mark.parametrize("program", PROMTOOL)
def test_a_release_of_which_no_process_is_scraped_has_no_coordinator(
    program: str, files: dict[str, Path], tmp_path: Path
) -> None:
    alert = 'ALERTS{alertname="KVClusterNoCoordinator", alertstate="firing"'
    labels = f'{alert}, severity="warning", {RELEASE}="{ILL}"}}'
    of_other = f'{RELEASE}="{WELL}", instance="10.0.2.1:9400"'
    case = {
        "interval": "1m",
        "input_series": [
            {"series": f'up{{job="kvcluster", {of_other}}}', "values": "1x20"},
            {"series": f"kvcluster_coordinator_epoch_seconds{{{of_other}}}", "values": "1x20"},
        ],
        "promql_expr_test": [
            {"expr": alert + "}", "eval_time": "20m", "exp_samples": [{"labels": labels, "value": 1}]}
        ],
    }
    assert promtool(program, files.values(), [case], tmp_path) == ""
