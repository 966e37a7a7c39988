"""Probes of the cluster: one run at a time, ordered with each answer to a shard until it has reported what it found."""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.doctor_probes import RUN_NS, SINCE_VERSION, ProbeRuns, ProbeTaker
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import Findings, PeersTried, ProbeOrder, ProcessFacts, ShardAddress, TryPeers

EPOCH = Epoch(100)
A, B, C = (ShardAddress(ShardId(name), Epoch(1), f"{name}:1") for name in "abc")
ALL = [(A, SINCE_VERSION), (B, SINCE_VERSION)]


def begun(members: list[tuple[ShardAddress, int]] | None = None) -> tuple[ProbeRuns, int]:
    runs = ProbeRuns()
    probed = runs.ask(0, EPOCH, ALL if members is None else members, 0)
    assert probed is not None
    return runs, probed.number


def test_a_run_orders_every_member_to_try_the_others_until_it_has_reported() -> None:
    runs, number = begun()
    order = ProbeOrder(number, (B,))
    assert runs.order_for(A.shard, A.epoch, 1) == order
    assert runs.order_for(A.shard, A.epoch, 2) == order  # the first answer may have been lost
    runs.take(A.shard, Findings(number))
    assert runs.order_for(A.shard, A.epoch, 3) is None
    probed = runs.ask(number, EPOCH, ALL, 4)
    assert probed is not None
    assert (probed.running, probed.silent) == (True, (B.shard,))
    runs.take(B.shard, Findings(number))
    probed = runs.ask(number, EPOCH, ALL, 5)
    assert probed is not None
    assert (probed.running, [found.shard for found in probed.shards]) == (False, [A.shard, B.shard])


def test_a_second_question_joins_the_run_that_is_under_way() -> None:
    runs, number = begun()
    joined = runs.ask(0, EPOCH, [*ALL, (C, SINCE_VERSION)], RUN_NS - 1)
    assert joined is not None
    assert joined.number == number
    assert C.shard not in joined.silent
    after = runs.ask(0, EPOCH, ALL, RUN_NS)
    assert after is not None
    assert after.number == number + 1


def test_a_run_ends_with_its_time_and_with_those_who_are_gone() -> None:
    runs, number = begun()
    ended = runs.ask(number, EPOCH, ALL, RUN_NS)
    assert ended is not None
    assert (ended.running, ended.silent) == (False, (A.shard, B.shard))
    assert runs.order_for(A.shard, A.epoch, RUN_NS) is None
    runs, number = begun()
    runs.take(A.shard, Findings(number))
    gone = runs.ask(number, EPOCH, ALL[:1], 1)
    assert gone is not None
    assert not gone.running


def test_what_belongs_to_another_run_or_incarnation_is_not_taken() -> None:
    runs, number = begun()
    runs.take(A.shard, Findings(number - 1))
    runs.take(C.shard, Findings(number))
    runs.take(A.shard, None)
    probed = runs.ask(number, EPOCH, ALL, 1)
    assert probed is not None
    assert probed.shards == ()
    assert runs.order_for(A.shard, Epoch(2), 1) is None  # it is not at the address that the others were told
    assert runs.ask(number + 1, EPOCH, ALL, 1) is None


def test_a_shard_of_an_older_version_is_not_asked_and_many_are_bounded() -> None:
    runs, _ = begun([(A, SINCE_VERSION), (B, SINCE_VERSION - 1)])
    assert runs.order_for(B.shard, B.epoch, 1) is None
    many = [(ShardAddress(ShardId(f"s{n}"), Epoch(1), "x:1"), SINCE_VERSION) for n in range(limits.PROBED_SHARDS + 9)]
    runs, _ = begun(many)
    order = runs.order_for(ShardId("s0"), Epoch(1), 1)
    assert order is not None
    assert len(order.peers) == limits.PROBED_SHARDS - 1


def test_numbers_are_above_those_of_an_earlier_coordinator() -> None:
    _, before = begun()
    later = ProbeRuns().ask(0, Epoch(before + 10), ALL, 0)
    assert later is not None
    assert later.number > before


def test_a_shard_carries_out_an_order_once_and_reports_until_it_is_ordered_no_more() -> None:
    taker, order = ProbeTaker(), ProbeOrder(5, (B,))
    assert taker.heed(order) == [TryPeers(order)]
    assert taker.heed(order) == []
    assert taker.heed(ProbeOrder(6, (B,))) == []  # one at a time
    found = Findings(5, ProcessFacts(1))
    taker.tried(PeersTried(found))
    assert taker.heed(order) == []
    assert taker.findings == found
    assert taker.heed(None) == []
    assert taker.findings is None
    following = ProbeOrder(6, (B,))
    assert taker.heed(following) == [TryPeers(following)]
