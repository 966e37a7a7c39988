"""What a worker tells shards of its spans, and what it remembers of where blocks lie."""

from __future__ import annotations

from typing import Any

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, BlockHash, Holder, NamespaceId, SpanId
from kvcluster.core.messages import BlockFate, Explain, Explained, RegisterSpans, Source, Tier
from kvcluster.core.miss import Loss
from kvcluster.errors import Unreachable
from kvcluster.sequences import remote_spans
from kvcluster.sequences.block_places import BlockPlaces
from kvcluster.sequences.blocks import SequenceBlock, StoreState
from kvcluster.sequences.remote_spans import RemoteSpans
from kvcluster.sequences.ship_plan import CutBlocks, shippable_cuts
from kvcluster.transport.base import Deadline
from kvcluster.wire.methods import SHARD
from tests.client.build import SPEC
from tests.sequences.test_ship_plan import SHARDS, seen, state_of

HOLDER = Holder(b"h" * 16)
PART = SPEC.whole(0)
HERE, THERE = SHARDS[:2]
NOW = Deadline.after_ms(10**7)


def cuts(count: int = 4) -> list[CutBlocks]:
    return list(shippable_cuts(seen(state_of(count * 512))))


def spans_of(accept: Loss = Loss.EXACT) -> RemoteSpans:
    return RemoteSpans(HOLDER, PART, accept)


def tell(spans: RemoteSpans, shard: Any = HERE) -> list[RegisterSpans]:
    """Has the shard told of everything, and returns the messages."""
    messages = [message for _, message in spans.messages(shard)]
    for message in messages:
        spans.registered(shard, message)
    return messages


def test_a_span_is_told_once_to_each_shard() -> None:
    spans, (one, other, *_) = spans_of(), cuts()
    first, second = spans.named(HERE, one), spans.named(HERE, other)
    assert spans.named(HERE, one) == first != second
    (message,) = tell(spans)
    assert [blocks.span for blocks in message.spans] == [first, second]
    assert message.holder == HOLDER and message.epoch == HERE.epoch
    assert message.spans[1].depth == 32 and len(message.spans[1].hashes) == 32
    assert not tell(spans)
    spans.named(THERE, one)
    assert len(tell(spans, THERE)) == 1


def test_what_was_not_answered_is_told_again() -> None:
    spans, (one, *_) = spans_of(), cuts()
    spans.named(HERE, one)
    assert spans.messages(HERE) == spans.messages(HERE) != []


def test_private_and_public_spans_go_in_messages_of_their_own() -> None:
    spans, (one, other, *_) = spans_of(), cuts()
    for block in other.blocks:
        block.private = True
    spans.named(HERE, one), spans.named(HERE, other)
    assert [private for private, _ in spans.messages(HERE)] == [False, True]


def test_blocks_that_are_here_too_may_have_lost_no_more_there() -> None:
    spans, row = spans_of(Loss.Q4), seen(state_of(512))

    def cut() -> CutBlocks:
        (one,) = shippable_cuts(row)
        return one

    absent, block = spans.named(HERE, cut()), row.state.blocks[3]
    block.page, block.stored = 7, StoreState.YES
    here = spans.named(HERE, cut())
    assert here != absent
    (message,) = tell(spans)
    assert [blocks.accept for blocks in message.spans] == [Loss.Q4, Loss.EXACT]
    block.loss = Loss.Q8
    spans.named(HERE, cut())
    assert tell(spans)[0].spans[0].accept is Loss.Q8


def test_spans_without_sequences_end_with_the_next_message() -> None:
    spans, (one, other, *_), (fresh, *_) = spans_of(), cuts(), cuts()
    for cut in (one, other):
        cut.last.references = 1
    ended, kept = spans.named(HERE, one), spans.named(HERE, other)
    tell(spans)
    one.last.references = 0
    spans.sweep()
    assert not tell(spans), "nothing is to be told but an end"
    spans.named(HERE, fresh)
    (message,) = tell(spans)
    assert message.ended == (ended,)
    spans.named(HERE, cuts()[2])
    assert tell(spans)[0].ended == ()
    assert spans.named(HERE, other) == kept


def test_a_block_that_is_written_again_is_of_another_span() -> None:
    spans, (one, other, *_) = spans_of(), cuts()
    one.last.references = 1
    before = spans.named(HERE, one)
    tell(spans)
    again = SequenceBlock(one.last.before, one.last.page, one.last.family)
    again.name, again.references, one.last.references = BlockHash(b"n" * 32), 1, 0
    assert spans.named(HERE, one._replace(blocks=(*one.blocks[:-1], again))) != before
    (message,) = tell(spans)
    assert message.spans[0].hashes[-1] == again.name
    spans.sweep()
    spans.named(HERE, other)
    assert tell(spans)[0].ended == (before,)


def test_a_span_that_was_never_told_need_not_end() -> None:
    spans, (one, other, *_) = spans_of(), cuts()
    one.last.references, other.last.references = 0, 1
    spans.named(HERE, one), spans.named(HERE, other)
    spans.sweep()
    (message,) = tell(spans)
    assert len(message.spans) == 1 and message.ended == ()


def test_a_shard_that_has_forgotten_is_told_anew_under_other_numbers() -> None:
    spans, (one, *_) = spans_of(), cuts()
    before = spans.named(HERE, one)
    tell(spans)
    spans.forget(HERE)
    assert spans.named(HERE, one) > before
    assert len(tell(spans)) == 1


def test_an_answer_that_comes_after_all_was_forgotten_changes_nothing() -> None:
    spans, (one, *_) = spans_of(), cuts()
    spans.named(HERE, one)
    ((_, message),) = spans.messages(HERE)
    spans.forget(HERE)
    spans.registered(HERE, message)
    spans.named(HERE, one)
    assert len(tell(spans)) == 1


def test_the_span_named_longest_ago_ends_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_spans, "_MOST", 2)
    spans, (one, two, three, four) = spans_of(), cuts()
    names = [spans.named(HERE, cut) for cut in (one, two)]
    tell(spans)
    spans.named(HERE, one), spans.named(HERE, three)
    assert tell(spans)[0].ended == (names[1],)
    spans.named(HERE, four)
    assert spans.named(HERE, two) == SpanId(5), "its number is never used again"


def test_messages_are_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SPAN_BLOCKS_PER_CALL", 70)
    spans = spans_of()
    for cut in cuts(5):
        spans.named(HERE, cut)
    assert [len(message.spans) for message in tell(spans)] == [2, 2, 1]
    monkeypatch.setattr(limits, "SPANS_PER_CALL", 1)
    spans.forget(HERE)
    for cut in cuts(3):
        spans.named(HERE, cut)
    assert [len(message.spans) for message in tell(spans)] == [1, 1, 1]


def test_the_spans_of_a_million_tokens_go_in_several_messages_that_a_shard_takes() -> None:
    spans, every = spans_of(), cuts(2_048)
    for cut in every:
        spans.named(HERE, cut)
    messages = tell(spans)
    assert len(messages) > 1 and sum(len(message.spans) for message in messages) == 2_048
    method, space = SHARD["RegisterSpans"], NamespaceId(bytes(HASH_BYTES))
    assert all(len(method.encode_request(message, space)) <= method.most_bytes for message in messages)


# ---------------------------------------------------------------------------------------------- places


class Coordinator:
    """Answers Explain: block i of what is asked lies at `places[i]`."""

    def __init__(self) -> None:
        self.asked: list[Explain] = []
        self.up = True
        self.part: Part = PART
        self.shards: dict[BlockHash, list[Any]] = {}

    def ask(self, kind: object, spec: object, question: Explain, deadline: Deadline) -> Explained:
        if not self.up:
            raise Unreachable("down")
        self.asked.append(question)
        fates = []
        for block in question.hashes:
            there = [shard for shard in self.shards.get(block, [HERE]) if shard.shard not in question.need.avoid]
            plan = ((Source(0, self.part, there[0], Tier.RAM, Loss.EXACT),),) if there else None
            fates.append(BlockFate(1, plan, None))
        return Explained(tuple(fates))


class Places:
    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.now = 0
        self.of = BlockPlaces(SPEC, PART, Loss.EXACT, self.coordinator, clock=lambda: self.now)  # type: ignore[arg-type]

    def locate(self, *where: CutBlocks) -> list[Any]:
        self.of.locate(where, NOW)
        return [self.of.place_of(cut) for cut in where]


def test_the_coordinator_is_asked_once_for_all_new_blocks() -> None:
    places, (one, other, *_) = Places(), cuts()
    assert places.locate(one, other) == [HERE, HERE]
    assert places.locate(one) == [HERE]
    assert [len(question.hashes) for question in places.coordinator.asked] == [64]


def test_a_cut_whose_blocks_lie_on_two_shards_has_no_place() -> None:
    places, (one, other, *_) = Places(), cuts()
    name = one.blocks[5].name
    assert name is not None
    places.coordinator.shards[name] = [THERE]
    assert places.locate(one, other) == [None, HERE]


def test_a_page_of_another_part_is_no_place() -> None:
    places, (one, *_) = Places(), cuts()
    places.coordinator.part = Part(0, 1, 0, 1)
    assert places.locate(one) == [None]


def test_what_was_not_found_is_looked_for_again_after_a_while() -> None:
    places, (one, *_) = Places(), cuts()
    places.coordinator.up = False
    assert places.locate(one) == [None]
    places.coordinator.up = True
    assert places.locate(one) == [None] and not places.coordinator.asked
    places.now += 2 * 10**9
    assert places.locate(one) == [HERE]


def test_blocks_of_a_shard_that_failed_are_placed_on_another() -> None:
    places, (one, *_) = Places(), cuts()
    for block in one.blocks:
        assert block.name is not None
        places.coordinator.shards[block.name] = [HERE, THERE]
    assert places.locate(one) == [HERE]
    before = places.of.version
    places.of.avoid(HERE)
    assert places.of.version > before
    assert places.of.place_of(one) is None
    assert places.locate(one) == [THERE]


def test_a_cut_that_a_shard_lacks_is_not_asked_of_it_for_a_while() -> None:
    places, (one, other, *_) = Places(), cuts()
    places.locate(one, other)
    places.of.lacking(one)
    assert places.locate(one, other) == [None, HERE]
    places.now += 2 * 10**9
    assert places.locate(one, other) == [HERE, HERE]


def test_blocks_without_sequences_are_forgotten() -> None:
    places, (one, other, *_) = Places(), cuts()
    places.locate(one, other)
    for block in one.blocks:
        block.references = 0
    places.of.sweep()
    places.locate(one, other)
    assert [len(question.hashes) for question in places.coordinator.asked] == [64, 32]
