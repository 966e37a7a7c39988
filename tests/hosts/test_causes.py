"""The table of causes is complete: every metric and every alert has one, and what they name exists."""

from __future__ import annotations

import re

from kvcluster.runtime.metrics import METRICS
from tests.deploy.alert_rules import RULES, rules
from tests.hosts.causes import CAUSES
from tests.hosts.scraping import printed_files, printed_metrics_settings, quick_rules


def test_every_metric_of_the_table_has_a_cause() -> None:
    assert set().union(*(cause.metrics for cause in CAUSES)) == set(METRICS)


def test_every_alert_has_a_cause() -> None:
    alerts = {rule["alert"] for rule in rules()}
    assert set().union(*(cause.fires for cause in CAUSES)) == alerts
    assert set().union(*(cause.also for cause in CAUSES)) <= alerts


def test_a_cause_names_labels_that_its_metric_has() -> None:
    for movement, _ in (move for cause in CAUSES for move in cause.moves):
        assert movement.labels.keys() <= set(METRICS[movement.metric].labels), movement


def test_the_document_prints_what_prometheus_and_the_processes_are_given() -> None:
    assert set(printed_files()) == {"/etc/prometheus/prometheus.yml", "/etc/prometheus/kvcluster-shards.yaml"}
    assert "port = 9400" in printed_metrics_settings()


def test_quick_rules_have_seconds_for_minutes_and_minutes_for_hours() -> None:
    times = re.compile(r"for: (\w+)|\[(\w+)\]")
    plain, quick = (times.findall(text) for text in (RULES.read_text(encoding="utf-8"), quick_rules()))
    shorter = {"m": "s", "h": "m"}
    assert [[time[:-1] + shorter[time[-1]] for time in pair if time] for pair in plain] == [
        [time for time in pair if time] for pair in quick
    ]
