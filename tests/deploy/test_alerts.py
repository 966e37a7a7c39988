"""The alert rules of deploy/prometheus: they name metrics that exist, and Prometheus' own tools pass them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvcluster.core.messages import Tier
from kvcluster.runtime.metric_samples import Refusal
from kvcluster.runtime.metrics import METRICS, WORKER_METRICS, MetricKind
from tests.deploy.alert_rules import (
    CASES,
    ILL,
    RELEASE,
    ROOT,
    RULES,
    WELL,
    Selector,
    cases,
    connector_counters,
    rules,
    selectors,
)
from tests.deploy.programs import programs

WANTED = {"KVClusterShardLost", "KVClusterRebuilding", "KVClusterNotStoring", "KVClusterVersionRefused"}
WANTED |= {"KVClusterCredentialRefused", "KVClusterEvictsYoung", "KVClusterBreakerOpen", "KVClusterCorruptPages"}
WANTED |= {"KVClusterMemoryFull", "KVClusterDrainLate"}

BY_PROCESS = {"KVClusterProcessDown", "KVClusterVersionRefused", "KVClusterCredentialRefused", "KVClusterCorruptPages"}
BY_PROCESS |= {"KVClusterDrainStuck", "KVClusterDegraded"}
BY_PROCESS_OR_SUM = BY_PROCESS | {"KVClusterMemoryFull", "KVClusterFileStale", "KVClusterNoCoordinator"}
BY_PROCESS_OR_SUM |= {"KVClusterCertificateEnds"}
"""Alerts of single processes, and those that add them up: in their cases a pod has two shards."""

RULE = {rule["alert"]: rule for rule in rules()}


def fired(case: dict[str, Any], alert: str) -> Iterator[list[dict[str, str]]]:
    """For each time at which a case looks at this alert alone: the labels of those that are to fire then."""
    for test in case.get("promql_expr_test", ()):
        if test["expr"] == f'ALERTS{{alertname="{alert}", alertstate="firing"}}':
            texts = [sample["labels"] for sample in test["exp_samples"]]
            yield [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in texts]


def case_of(alert: str) -> dict[str, Any]:
    """The case of two releases of which one falls ill: it looks three times at the alert."""
    found = [case for case in cases() if len(list(fired(case, alert))) == 3]
    assert len(found) == 1, alert
    return found[0]


def test_every_metric_that_a_rule_names_exists_with_its_labels() -> None:
    named = [one for rule in rules() for one in selectors(rule["expr"])]
    assert len(named) > len(WANTED)
    for name, labels in named:
        if name == "up":
            assert set(labels) == {"job", RELEASE}
            continue
        if name in connector_counters():
            assert set(labels) == {RELEASE}
            continue
        if name not in METRICS:
            name = name.removesuffix("_bucket")
            assert METRICS[name].kind is MetricKind.HISTOGRAM, name
        assert set(labels) <= {RELEASE, *METRICS[name].labels}, name


def test_every_selector_leaves_room_for_a_release() -> None:
    """Which the chart fills with its own. Series of engines have the label only if the scrape of the engines sets it,
    so where the chart names a release, those without one are selected, too."""
    for name, labels in (one for rule in rules() for one in selectors(rule["expr"])):
        of_engine = name in connector_counters() | set(WORKER_METRICS)
        assert labels[RELEASE] == ("=~", "|.*" if of_engine else ".*"), name


def test_the_labels_of_the_rules_have_values_that_exist() -> None:
    named = [one for rule in rules() for one in selectors(rule["expr"])]
    values = {(one.name, *label) for one in named for label in one.equal.items()}
    reasons = {value for _, label, value in values if label == "reason"}
    assert reasons <= {refusal.value for refusal in Refusal}
    assert {value for _, label, value in values if label == "tier"} <= {tier.name.lower() for tier in Tier}
    assert ("kvcluster_drains_total", "result", "deadline") in values
    assert ("kvcluster_shard_pages_total", "event", "corrupt") in values


def test_every_alert_says_what_it_means() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["description"]
        assert rule["annotations"]["summary"].startswith(f"{{{{ with $labels.{RELEASE} }}}}{{{{ . }}}}: {{{{ end }}}}")
    assert set(RULE) >= WANTED
    assert len(RULE) == len(rules())


@pytest.mark.parametrize("alert", RULE)
def test_an_alert_fires_for_the_one_of_two_releases_that_is_ill_and_is_quiet_before_and_after(alert: str) -> None:
    case = case_of(alert)
    before, ill, after = fired(case, alert)
    assert before == after == []
    assert ill and {labels[RELEASE] for labels in ill} == {ILL}
    assert len(ill) == 1 or alert in BY_PROCESS or len({labels["job"] for labels in ill}) == len(ill), "once"
    expected = {one.name for one in selectors(RULE[alert]["expr"])}
    shown = [one for series in case["input_series"] for one in selectors(series["series"])]
    for release in (ILL, WELL):
        assert {one.name for one in shown if one.equal[RELEASE] == release} == expected, "of both releases"


@pytest.mark.parametrize("alert", sorted(BY_PROCESS_OR_SUM))
def test_where_processes_matter_a_pod_of_a_case_has_two(alert: str) -> None:
    def instances(one: Selector) -> tuple[str, str]:
        host, _, port = one.equal["instance"].partition(":")
        return host, port

    shown = {instances(one) for each in case_of(alert)["input_series"] for one in selectors(each["series"])}
    assert 2 in Counter(host for host, _ in shown).values()


@pytest.mark.parametrize("alert", RULE)
def test_the_words_of_an_alert_name_labels_that_it_has(alert: str) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(RULE[alert]["annotations"].values())))
    (labels, *_) = next(each for each in fired(case_of(alert), alert) if each)
    assert named <= set(labels)


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
