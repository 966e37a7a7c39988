"""What a process says of its decisions: once each, with who asked and why it was so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Drain,
    EvictOrder,
    LeaveReason,
    Move,
    MoveOrder,
    PullOrder,
    Purge,
    ReportAck,
    SetPolicy,
    SetWeights,
    ShardAddress,
    Tier,
    Tombstone,
)
from kvcluster.errors import CredentialError
from kvcluster.runtime.json_log import AckReader, shown
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline
from tests.client.build import BOUND_S, SPEC, kv, prompt, room
from tests.core.samples import OURS, chain
from tests.core.samples import SPEC as CORE_SPEC
from tests.runtime import hosts

SPACE = CORE_SPEC.namespace(OURS)


class Decisions(logging.Handler):
    """The decisions that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append((record.__dict__["event"], record.__dict__["fields"]))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in list(self.all) if name == event]


@pytest.fixture
def decisions() -> Iterator[Decisions]:
    logger, handler = logging.getLogger("kvcluster.decisions"), Decisions()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def test_a_prompt_is_followed_from_its_store_to_its_load(decisions: Decisions) -> None:
    with MemoryCluster(ram_bytes="4MiB", config={"shard": {"scrub_bytes": 0}}) as cluster:
        client = cluster.client(SPEC)
        assert client.store(prompt(8), kv(8)).blocks == 8 and client.flush()
        client.load(prompt(9), room(9))
        cluster.wait_until_idle()
    [prepared] = decisions.of("store_prepared")
    assert (prepared["tenant"], prepared["write"]) == ("default", 8)
    assert decisions.of("lookup")[-1] | {"attempt": ""} == {
        "tenant": "default", "attempt": "", "hold": True, "blocks": 9, "found": 8, "missed": "never_seen"
    }  # fmt: skip
    ended = {fields["operation"]: fields for fields in decisions.of("exchange_ended")}
    assert list(ended) == ["store", "load"]
    nbytes = 8 * SPEC.page_bytes(0, SPEC.whole(0))
    for fields in ended.values():
        assert (fields["tenant"], fields["path"], fields["result"]) == ("default", "memory", "done")
        assert (fields["pages"], fields["bytes"]) == (8, nbytes)


def test_what_operators_do_is_logged_with_who_did_it(decisions: Decisions) -> None:
    with MemoryCluster(ram_bytes="4MiB") as cluster:
        client = cluster.client(SPEC)
        assert client.store(prompt(4), kv(4)).blocks == 4 and client.flush()
        client.pin(prompt(4), 60.0)
        client.unpin(prompt(4))
        for question in (
            SetPolicy((("cache", "off"),)),
            SetPolicy((("none", "x"),)),
            SetWeights("m", "w"),
            Purge(model="no"),
        ):
            cluster.port().ask(question, Deadline.after_ms(BOUND_S * 1e3))
        cluster.port().ask(Drain(ShardId("shard-0")), Deadline.after_ms(BOUND_S * 1e3))
        cluster.wait_until(lambda: bool(cluster.drained))
    who = {"tenant": "default"}
    assert decisions.of("pin") == [who | {"blocks": 4, "of": 4, "replicas": 1}]
    assert decisions.of("unpin") == [who | {"blocks": 4}]
    assert decisions.of("policy_set") == [who | {"cache": "off"}]
    [refused] = decisions.of("question_refused")
    assert (refused["question"], refused["kind"]) == ("SetPolicy", "bad")
    assert decisions.of("weights_set") == [who | {"model": "m", "weights": "w"}]
    assert decisions.of("purge")[0] == who | {"model": "no", "weights": None, "adapter": None, "blocks": 0}
    assert decisions.of("drain_ordered") == [who | {"shard": "shard-0", "known": True}]
    assert decisions.of("leave_ordered") == [{"why": "drained"}]
    assert decisions.of("leaving") == [{"why": "this shard is drained"}]


def test_a_lost_shard_is_logged_once(decisions: Decisions) -> None:
    with MemoryCluster(shards=2, ram_bytes="4MiB", config={"membership_ttl_ms": 200}) as cluster:
        cluster.stop_shard(ShardId("shard-1"))
        cluster.wait_until(lambda: bool(decisions.of("shard_lost")))
    [lost] = decisions.of("shard_lost")
    assert lost["why"].startswith("shard-1 has not reported for ")


def test_a_shard_reads_each_order_and_tombstone_once() -> None:
    reader, blocks = AckReader(), chain(2)
    named = tuple((SPACE, block) for block in blocks)
    source = ShardAddress(ShardId("b"), Epoch(1), "b:1")
    orders = (
        EvictOrder(4, named, Tier.HOST),
        MoveOrder(5, (Move(SPACE, blocks[0], Tier.HOST),)),
        PullOrder(6, source, OURS, CORE_SPEC, ()),
    )
    ack = ReportAck(Epoch(9), 0, orders=orders, tombstones=(Tombstone(1, OURS, model="m"),), drain=True)
    events = reader.news(ack)
    assert [event for event, _ in events] == ["drain_begun", "purge_received", "order", "order", "order"]
    assert [fields["kind"] for event, fields in events if event == "order"] == ["evict", "move", "pull"]
    assert reader.news(ack) == [], "they are repeated until the shard is known to have them"
    leave = replace(ack, epoch=Epoch(10), leave=LeaveReason.DRAINED)
    assert [event for event, _ in reader.news(leave)] == ["order"] * 3 + ["leave_ordered"], "of another coordinator"


def test_a_refused_connection_says_why(decisions: Decisions) -> None:
    with hosts.shard(hosts.Coordinator()) as host:
        host.connection_refused("tcp", CredentialError("the token is not known"))
    assert decisions.of("connection_refused") == [
        {"path": "tcp", "reason": "credential", "why": "the token is not known"}
    ]


def test_nothing_is_noted_where_decisions_are_not_shown() -> None:
    assert not shown()
