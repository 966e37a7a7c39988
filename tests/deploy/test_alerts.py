"""The alert rules of deploy/prometheus: they name metrics that exist, and Prometheus' own tools pass them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcluster.core.messages import Tier
from kvcluster.runtime.metric_samples import Refusal
from kvcluster.runtime.metrics import METRICS, MetricKind
from tests.deploy.programs import programs

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")

WANTED = {"KVClusterShardLost", "KVClusterRebuilding", "KVClusterNotStoring", "KVClusterVersionRefused"}
WANTED |= {"KVClusterCredentialRefused", "KVClusterEvictsYoung", "KVClusterBreakerOpen", "KVClusterCorruptPages"}
WANTED |= {"KVClusterMemoryFull", "KVClusterDrainLate"}


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def series(expression: str) -> list[tuple[str, dict[str, str]]]:
    """The names of metrics in an expression, each with the labels that it is to have."""
    found = re.findall(r"\b(kvcluster_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, dict(re.findall(r'(\w+)="([^"]*)"', labels))) for name, labels in found]


def test_every_metric_that_a_rule_names_exists_with_its_labels() -> None:
    named = [one for rule in rules() for one in series(rule["expr"])]
    assert len(named) > len(WANTED)
    for name, labels in named:
        if name not in METRICS:
            name = name.removesuffix("_bucket")
            assert METRICS[name].kind is MetricKind.HISTOGRAM, name
        assert set(labels) <= set(METRICS[name].labels), name


def test_the_labels_of_the_rules_have_values_that_exist() -> None:
    values = {(name, *label) for rule in rules() for name, labels in series(rule["expr"]) for label in labels.items()}
    reasons = {value for _, label, value in values if label == "reason"}
    assert reasons <= {refusal.value for refusal in Refusal}
    assert {value for _, label, value in values if label == "tier"} <= {tier.name.lower() for tier in Tier}
    assert ("kvcluster_drains_total", "result", "deadline") in values
    assert ("kvcluster_shard_pages_total", "event", "corrupt") in values


def test_every_alert_says_what_it_means_and_has_a_case() -> None:
    cases = CASES.read_text(encoding="utf-8")
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert f'alertname="{rule["alert"]}"' in cases, rule["alert"]
    assert {rule["alert"] for rule in rules()} >= WANTED


def test_every_alert_names_a_section_of_the_documentation_that_exists() -> None:
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, rule[
            "alert"
        ]


@pytest.mark.parametrize("promtool", programs("promtool"))
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(promtool: str) -> None:
    for arguments in (("check", "rules", str(RULES)), ("test", "rules", str(CASES))):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
