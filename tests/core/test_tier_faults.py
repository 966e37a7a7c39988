"""Past bugs between tiers: numbers used twice, moves without end, twins that were overlooked."""

from __future__ import annotations

import pytest

from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator import record_sweeper
from kvcluster.core.ids import CLUSTER
from kvcluster.core.messages import Move, Suspect, Tick, Tier
from kvcluster.core.miss import Loss
from tests.core import test_tiering as coordinating
from tests.core.lone_shard import A, B, moves, pinned
from tests.core.moving import BELOW, doubled, holding, lies, lowered
from tests.core.samples import SECOND, attempt, key, ours
from tests.core.test_tiering import RAW


def test_another_shard_that_pulls_a_promoted_page_gets_it_encoded() -> None:
    shard = doubled(A)
    [slot] = pinned(shard.pin(attempt(9), A, tenant=CLUSTER, accept=Loss.Q8))
    assert slot.codec is Codec.Q8


def test_an_order_after_a_new_inventory_is_carried_out_beside_the_one_under_way() -> None:
    shard = holding(A, B)
    shard.order(moves(Move(shard.space, A, Tier.HOST, Codec.Q8)))
    shard.hear(inventory=True)
    shard.settle()
    shard.order(moves(Move(shard.space, B, Tier.HOST, Codec.Q8)))
    shard.move_all()
    assert lies(shard, A) == lies(shard, B) == [BELOW]


def test_no_number_of_an_order_is_used_again_while_it_may_be_under_way() -> None:
    _, voice = coordinating.serving(*coordinating.above(A, B))
    first = voice.report(pressure=RAW)
    voice.inventory(*coordinating.above(A, B))
    second = voice.report(pressure=2 * RAW)
    assert first.move is not None and second.move is not None
    assert second.move.number > first.move.number


def test_a_promotion_that_comes_to_nothing_is_not_tried_for_ever() -> None:
    shard = lowered(A)
    shard.promote(A)
    shard.move(unfit=[0])
    assert shard.moving is None and lies(shard, A) == [BELOW]


def test_what_cannot_even_go_down_raw_stays() -> None:
    shard = holding(A)
    shard.demote(A)
    for _ in range(2):  # encoded, and as it is
        shard.move(unfit=[0])
    assert shard.moving is None
    assert [tier for tier, *_ in lies(shard, A)] == [Tier.RAM]


def test_what_is_hot_on_a_shard_that_is_lost_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sweeper, "SWEEP_BLOCKS", 1)
    coordinator, voice = coordinating.serving(*coordinating.above(A, B), promote_loads=1)
    coordinator.voice("b", below=coordinating.below()).join(*coordinating.encoded(A, B))
    for _ in range(2):
        coordinator.now += 3 * SECOND
        voice.report()
    coordinator.step(Tick())  # b is lost, and one record is swept
    coordinating.heat(coordinator, A, B, loads=1)
    assert voice.report().move is None
    assert coordinator.core.next_deadline() == 0, "others still name it"


def test_what_a_reader_suspects_is_read_again_in_every_tier() -> None:
    shard = lowered(A)
    pinned(shard.pin(attempt(3), A, accept=Loss.Q8))
    shard.promote(A)
    shard.move()
    shard.call(ours(Suspect(shard.epoch, (key(A),)), shard.space))
    assert shard.reading is not None
    assert sorted(slot.tier for slot in shard.reading.slots) == [Tier.RAM, Tier.HOST]
