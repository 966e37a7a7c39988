"""An engine whose cluster is lost is warned when it is and when it is back, with since when."""

from __future__ import annotations

import logging
import time

import pytest

from kvcluster.core.miss import Miss, MissReason
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.coordinator_client import FAILURES, Outage
from tests.client.build import SPEC, kv, prompt

LOST = Miss(MissReason.COORDINATOR_LOST, "connection refused")


def at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def test_the_loss_is_reported_once_with_its_beginning_and_so_is_the_return() -> None:
    outage = Outage()
    assert outage.answered(900.0) == ""
    said = [outage.failed(LOST, 1_000.0 + second) for second in range(5)]
    assert [bool(each) for each in said] == [number == FAILURES - 1 for number in range(5)]
    assert said[FAILURES - 1].startswith(
        f"the cluster has not answered since {at(1_000.0)} (coordinator_lost (connection refused)): "
    )
    assert outage.answered(1_060.0) == f"the cluster answers again; it did not from {at(1_000.0)} on, for 60 s"
    assert outage.answered(1_061.0) == ""


def test_one_failure_among_answers_is_no_outage() -> None:
    outage = Outage()
    for _ in range(5):
        assert outage.answered(1.0) == outage.failed(LOST, 2.0) == outage.answered(3.0) == ""


def test_a_coordinator_that_has_never_answered_has_not_been_lost() -> None:
    outage = Outage()
    assert [outage.failed(LOST, 1.0) for _ in range(5)] == [""] * 5
    assert outage.answered(2.0) == ""


def test_a_second_outage_has_its_own_beginning() -> None:
    outage = Outage()
    outage.answered(0.0)
    for begun in (1_000.0, 2_000.0):
        assert at(begun) in [outage.failed(LOST, begun + second) for second in range(FAILURES)][-1]
        assert at(begun) in outage.answered(begun + 10)


def test_a_client_warns_when_its_cluster_is_lost_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryCluster(shards=1, ram_bytes="4MiB") as cluster, caplog.at_level(logging.WARNING, "kvcluster"):
        client = cluster.client(SPEC)
        assert client.store(prompt(2, 0), kv(2, 0)).blocks == 2
        assert caplog.messages == []
        cluster.stop_coordinator()
        for seed in range(3):
            assert client.store(prompt(2, seed), kv(2, seed)).blocks == 0
        (lost,) = caplog.messages
        assert lost.startswith("kvcluster: the cluster has not answered since ")
        cluster.start_coordinator()
        client.lookup(prompt(2, 0))
        assert [message[:35] for message in caplog.messages[1:]] == ["kvcluster: the cluster answers agai"]
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
