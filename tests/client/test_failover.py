"""Which shards a load reads, and what it does when they fail: pure plans, without clock, bytes or cluster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import BlockFate, Need, PageKey, PageWant, Run, ShardAddress, Source, TicketBody, Tier
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.transfers.failover import ROUNDS, Replicas
from kvcluster.transfers.pieces import Piece, cover, plan_pieces
from tests.client.build import HEADS, LAYERS, SPEC

WHOLE = Part(0, LAYERS, 0, HEADS)
A, B, C, D, E = (ShardAddress(ShardId(name), Epoch(1), name) for name in "abcde")
HASHES = [BlockHash(bytes([number]) * HASH_BYTES) for number in range(4)]
NEVER = Miss(MissReason.NEVER_SEEN)


def source(shard: ShardAddress, part: Part = WHOLE, group: int = 0) -> Source:
    return Source(group, part, shard, Tier.RAM, Loss.EXACT)


def piece(block: int, group: int = 0, part: Part = WHOLE, layers: tuple[int, int] | None = None) -> Piece:
    start, stop = layers or (0, part.layers)
    return Piece(
        block, group, PageWant(PageKey(HASHES[block], group, part), start, stop), part.head_start, part.head_stop
    )


def fate(*shards: ShardAddress, count: int = 1) -> BlockFate:
    """Served by the first of these that it names, or by none."""
    return BlockFate(count, (tuple(source(shard) for shard in shards),), None) if shards else BlockFate(1, None, NEVER)


def plan(parts: Sequence[Part | None] = (WHOLE,), accept: Loss = Loss.EXACT) -> Replicas:
    return Replicas(HASHES, tuple(parts), accept)


# --------------------------------------------------------------------------------------------- geometry


def cells(part: Part) -> set[tuple[int, int]]:
    return {(x, y) for x in range(part.layer_start, part.layer_stop) for y in range(part.head_start, part.head_stop)}


rects = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 5), st.integers(1, 4)).map(
    lambda t: Part(t[0], t[0] + t[1], t[2], t[2] + t[3])
)


@given(rects, st.lists(rects, max_size=6))
def test_pieces_cover_a_rectangle_exactly_when_their_sources_do(rect: Part, parts: list[Part]) -> None:
    placed = cover(HASHES[0], 0, 0, rect, [source(A, part) for part in parts])
    everything = set[tuple[int, int]]().union(*map(cells, parts))
    assert (placed is not None) == (cells(rect) <= everything)
    if placed is not None:
        filled = [cell for _, one in placed for cell in cells(one.fills)]
        assert sorted(filled) == sorted(cells(rect)), "each place by one piece"
        assert all(cells(one.fills) <= cells(one.rect) for _, one in placed)
        for _, one in placed:
            assert one.want.key.part in parts
            assert 0 <= one.want.layer_start < one.want.layer_stop <= one.want.key.part.layers
            assert rect.layer_start <= one.rect.layer_start and one.rect.layer_stop <= rect.layer_stop


def test_the_first_source_that_has_it_all_is_the_only_one_read() -> None:
    placed = cover(HASHES[0], 0, 0, WHOLE, [source(A), source(B)])
    assert placed == [(A, piece(0))]


def ticket(*runs: Run, need: Need | None = None, hashes: int = 2) -> TicketBody:
    attempt = Attempt(Holder(bytes(16)), 1)
    return TicketBody(NamespaceId(bytes(32)), attempt, tuple(HASHES[:hashes]), need or Need((WHOLE,)), runs)


def test_a_ticket_whose_sources_overlap_and_leave_a_hole_is_no_plan() -> None:
    top, bottom = Part(0, 2, 0, HEADS), Part(1, 3, 0, HEADS - 1)
    with pytest.raises(ProtocolError, match="does not say where block 0 lies"):
        plan_pieces(ticket(Run(2, ((source(A, top), source(B, top), source(C, bottom)),))), SPEC, (WHOLE,))


def test_a_ticket_of_a_spec_with_other_groups_is_the_callers_mistake() -> None:
    with pytest.raises(CallerError, match="prepared for 2 groups of layers; this client's spec has 1"):
        plan_pieces(ticket(need=Need((WHOLE, WHOLE)), hashes=0), SPEC, (WHOLE,))


# ------------------------------------------------------------------------------------------------- retry


def test_what_one_shard_failed_is_one_question_that_names_it() -> None:
    retry = plan(accept=Loss.Q8)
    missing = [piece(0), piece(2), piece(3, layers=(1, 3))]
    retry.failed(A.shard, missing)
    (question,) = retry.questions(missing)
    assert question.blocks == (0, 2, 3)
    assert question.hashes == (HASHES[0], HASHES[2], HASHES[3])
    assert question.need == Need((WHOLE,), Loss.Q8, (A.shard,))


def test_blocks_that_fare_differently_are_asked_for_apart() -> None:
    half = Part(0, LAYERS, 0, 2)
    retry = plan([WHOLE, half, None])
    missing = [piece(0), piece(0, group=1, part=half), piece(1), piece(2)]
    retry.failed(A.shard, missing)
    retry.failed(B.shard, [piece(2)])
    asked = {question.blocks: question.need for question in retry.questions(missing)}
    assert asked == {
        (0,): Need((WHOLE, half, None), avoid=(A.shard,)),
        (1,): Need((WHOLE, None, None), avoid=(A.shard,)),
        (2,): Need((WHOLE, None, None), avoid=(A.shard, B.shard)),
    }


def test_only_what_is_missing_of_a_page_is_read_from_elsewhere() -> None:
    retry, rest = plan(), piece(1, layers=(2, 3))
    retry.failed(A.shard, [rest])
    (question,) = retry.questions([rest])
    found = retry.found(question, [fate(B)])
    assert retry.alternatives(rest, found) == [(B, rest)]


def test_pages_without_another_replica_stay_missing() -> None:
    retry, missing = plan(), [piece(0), piece(1)]
    retry.failed(A.shard, missing)
    (question,) = retry.questions(missing)
    found = retry.found(question, [fate(), fate(B)])
    assert [retry.alternatives(one, found) for one in missing] == [None, [(B, piece(1))]]


@pytest.mark.parametrize("fates", [[], [fate(B)], [BlockFate(2, (), None)], [fate(A, count=2)], [fate(B, count=9)]])
def test_an_answer_that_does_not_fit_moves_nothing_that_it_does_not_name(fates: list[BlockFate]) -> None:
    retry, missing = plan(), [piece(0), piece(1)]
    retry.failed(A.shard, missing)
    (question,) = retry.questions(missing)
    found = retry.found(question, fates)
    for one in missing:
        placed = retry.alternatives(one, found)
        assert placed is None or placed == [(B, one)]


def test_no_shard_is_read_twice_for_one_block_and_the_search_ends() -> None:
    retry, one, read = plan(), piece(0), [A]
    retry.failed(A.shard, [one])
    for shard in (B, C, D, E):
        questions = retry.questions([one])
        if not questions:
            break
        assert questions[0].need.avoid == tuple(sorted(tried.shard for tried in read))
        placed = retry.alternatives(one, retry.found(questions[0], [fate(A, shard)]))
        assert placed == [(shard, one)], "though the coordinator names the first again"
        read.append(shard)
        retry.failed(shard.shard, [one])
    assert len(read) == 1 + ROUNDS


def test_two_shards_that_have_half_each_stand_for_one_that_has_it_all() -> None:
    upper, lower = Part(0, 1, 0, HEADS), Part(1, LAYERS, 0, HEADS)
    retry, one = plan(), piece(3)
    retry.failed(A.shard, [one])
    (question,) = retry.questions([one])
    found = retry.found(question, [BlockFate(1, ((source(B, upper), source(C, lower)),), None)])
    assert retry.alternatives(one, found) == [(B, piece(3, part=upper)), (C, piece(3, part=lower))]
    part_of_it = retry.found(question, [BlockFate(1, ((source(B, upper),),), None)])
    assert retry.alternatives(one, part_of_it) is None
