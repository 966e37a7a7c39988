from __future__ import annotations

import pytest

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Publish, Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream, KVEvent
from tests.sim.event_picture import EventPicture

SPACE = NamespaceId(bytes(32))
A, B = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
BOTH = BlocksStored(Tier.RAM, None, (A, B), (1, 2, 3, 4))


def publish(*events: KVEvent) -> Publish:
    return Publish(EventStream(SPACE, "m", "", block_tokens=2), events)


def test_a_picture_knows_each_block_by_tier_with_its_parent_and_its_tokens() -> None:
    picture = EventPicture()
    picture.hear(publish(BOTH, BlocksStored(Tier.HOST, A, (B,)), BlocksRemoved(Tier.RAM, (B,))))
    assert picture.blocks == {(SPACE, Tier.RAM): {A}, (SPACE, Tier.HOST): {B}}
    assert picture.parents == {A: None, B: A}
    assert picture.tokens == {A: (1, 2), B: (3, 4)}
    picture.hear(publish(AllBlocksCleared()))
    assert picture.blocks == {}


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ((BOTH, BOTH), "stored twice"),
        ((BlocksRemoved(Tier.RAM, (A,)),), "was not there"),
        ((BOTH, BlocksRemoved(Tier.HOST, (A,))), "was not there"),
    ],
)
def test_what_is_told_twice_or_removed_unknown_is_wrong_unless_some_events_were_missed(
    events: tuple[KVEvent, ...], wrong: str
) -> None:
    with pytest.raises(AssertionError, match=wrong):
        EventPicture().hear(publish(*events))
    EventPicture(strict=False).hear(publish(*events))


@pytest.mark.parametrize("events", [(), (BlocksStored(Tier.RAM, None, (A, A)),), (BlocksRemoved(Tier.HOST, ()),)])
def test_an_event_of_nothing_or_of_one_block_twice_is_wrong(events: tuple[KVEvent, ...]) -> None:
    with pytest.raises(AssertionError):
        EventPicture(strict=False).hear(publish(*events))


def test_token_ids_are_told_for_each_block_or_for_none() -> None:
    with pytest.raises(AssertionError, match="token ids"):
        EventPicture().hear(publish(BlocksStored(Tier.RAM, None, (A, B), (1, 2))))
