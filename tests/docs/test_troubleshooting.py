"""docs/troubleshooting.md: what it quotes, the code prints; what it names, there is; and no reason and no alert is
missing."""

from __future__ import annotations

import re

import pytest
import yaml

from kvcluster import errors
from kvcluster.core.miss import MissReason
from kvcluster.runtime.metrics import METRICS
from tests.docs.code_strings import code_spans, is_printed, quotations
from tests.docs.names import cluster_settings, engine_settings
from tests.docs.snippets import ROOT, text_of

TEXT = re.sub(r"^```.*?^```", "", text_of("docs/troubleshooting.md"), flags=re.MULTILINE | re.DOTALL)
QUOTED = quotations(TEXT)
SPANS = code_spans(TEXT)
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("quotation", QUOTED, ids=QUOTED)
def test_what_is_quoted_is_printed(quotation: str) -> None:
    assert is_printed(quotation)


def test_a_sentence_that_is_not_printed_is_noticed() -> None:
    assert not is_printed("nothing listens there any more")
    assert not is_printed("turns it on again ... nothing is loaded"), "in that order"
    assert len(QUOTED) > 50


def test_every_reason_of_a_miss_is_explained() -> None:
    assert {reason.value for reason in MissReason} - set(SPANS) == set()


def test_alerts_are_those_that_there_are() -> None:
    rules = {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert {span for span in SPANS if re.match(r"KVCluster[A-Z]", span)} == rules


def test_metrics_are_those_that_there_are() -> None:
    named = {span for span in SPANS if re.fullmatch(r"kvcluster_\w+", span)}
    assert named and named <= METRICS.keys()


def test_counters_of_the_vllm_connector_are_those_that_there_are() -> None:
    stats = (ROOT / "kvcluster/engines/vllm/stats.py").read_text(encoding="utf-8")
    named = {name for span in SPANS for name in re.findall(r"kvcluster:(\w+)_total", span)}
    assert named and all(f'"{name}"' in stats for name in named)


def test_settings_are_those_that_there_are() -> None:
    for span in (span.partition(" = ")[0] for span in SPANS):
        section, _, key = span.partition(".")
        if key and section in cluster_settings():
            assert span in cluster_settings()
        elif re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span) and not span.startswith("kvcluster_"):
            sections = {name.rpartition(".")[2] for name in cluster_settings()}
            known = sections | engine_settings() | {reason.value for reason in MissReason} | {"block_tokens"}
            assert span in known | {"kv_transfer_params"}


def test_errors_are_those_that_there_are() -> None:
    named = [span for span in SPANS if re.fullmatch(r"(Lost|Resident|\w+Error)\w*", span)]
    assert named and all(hasattr(errors, name) for name in named)
