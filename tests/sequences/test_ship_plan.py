"""The plan of a step: every position is attended to in exactly one place, by whole nodes of the one tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, Epoch, SequenceId, ShardId
from kvcluster.core.messages import ShardAddress
from kvcluster.core.position_tree import CUT_TOKENS, ROOT, Subtree, subtrees, subtrees_beside, subtrees_of
from kvcluster.sequences.attend_planner import SpanChoice, SpanFacts
from kvcluster.sequences.blocks import SequenceBlock, StoreState
from kvcluster.sequences.ship_plan import (
    CutBlocks,
    SeenBlocks,
    ShipPlan,
    shard_spans,
    ship_plan,
    shippable_cuts,
)
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.window_policy import WindowPolicy

PAGE_BYTES = 1024
SHARDS = [ShardAddress(ShardId(f"shard-{number}"), Epoch(1), f"host:{number}", "here") for number in range(4)]


def state_of(
    tokens: int, *, block_tokens: int = 16, sealed: int | None = None, like: SequenceState | None = None
) -> SequenceState:
    """A sequence of so many tokens, whose first `sealed` blocks (by default all full ones) are stored and absent. It
    begins with the blocks of `like`."""
    state = SequenceState(
        SequenceId(bytes(16)), BlockHash(bytes(32)), WindowPolicy(), block_tokens=block_tokens, max_tokens=1 << 20
    )
    state.length = tokens
    full = tokens // block_tokens if sealed is None else sealed
    for depth in range(state.blocks_for(tokens)):
        if like is not None and depth < len(like.blocks):
            state.add(like.blocks[depth])
            continue
        block = SequenceBlock(state.tip, None, state.family)
        if depth < full:
            block.name, block.stored = BlockHash(depth.to_bytes(32, "big")), StoreState.YES
        else:
            block.page = depth
        state.add(block)
    state.sealed = full
    return state


def seen(state: SequenceState, *, first: int = 0, queries: int = 1) -> SeenBlocks:
    return SeenBlocks(state, (range(first, len(state.blocks)),), state.length, queries)


def ship_absent(span: SpanFacts) -> SpanChoice:
    return SpanChoice.LOCAL if span.resident else SpanChoice.SHIP


def planned(
    rows: list[SeenBlocks],
    place: Callable[[CutBlocks], ShardAddress | None] = lambda cut: SHARDS[cut.cut % 4],
    choose: Callable[[SpanFacts], SpanChoice] = ship_absent,
) -> ShipPlan:
    spans = shard_spans([list(shippable_cuts(row)) for row in rows], place)
    queries = [row.queries for row in rows]
    return ship_plan(rows, spans, [choose(span.facts(queries, PAGE_BYTES)) for span in spans])


def cuts_of(row: SeenBlocks) -> list[int]:
    return [cut.cut for cut in shippable_cuts(row)]


def test_whole_cuts_of_stored_blocks_may_be_shipped() -> None:
    assert cuts_of(seen(state_of(4 * CUT_TOKENS + 5))) == [0, 1, 2, 3]
    assert cuts_of(seen(state_of(4 * CUT_TOKENS - 1))) == [0, 1, 2]
    assert cuts_of(seen(state_of(4 * CUT_TOKENS, sealed=33))) == [0]
    assert cuts_of(seen(state_of(4 * CUT_TOKENS), queries=0)) == []


def test_a_cut_before_the_edge_of_a_window_stays() -> None:
    assert cuts_of(seen(state_of(4 * CUT_TOKENS), first=1)) == [1, 2, 3]
    assert cuts_of(seen(state_of(4 * CUT_TOKENS), first=32)) == [1, 2, 3]


def test_a_cut_that_is_partly_dropped_stays() -> None:
    state = state_of(6 * CUT_TOKENS)
    row = SeenBlocks(state, (range(40), range(100, len(state.blocks))), state.length, 1)
    assert cuts_of(row) == [0, 4, 5]


def test_a_block_that_is_encoded_here_stays() -> None:
    state = state_of(3 * CUT_TOKENS)
    state.table[40] = -2  # a slot
    state.encoded = 48
    assert cuts_of(seen(state)) == [0, 2]
    assert Codec.RAW is WindowPolicy().coding


def test_a_cut_of_private_and_public_blocks_stays() -> None:
    state = state_of(2 * CUT_TOKENS)
    for depth in range(20, len(state.blocks)):
        state.blocks[depth].private = True
    assert cuts_of(seen(state)) == [1]


def test_blocks_that_do_not_divide_a_cut_are_named_by_both() -> None:
    row = seen(state_of(3 * CUT_TOKENS, block_tokens=48))
    found = list(shippable_cuts(row))
    assert [cut.cut for cut in found] == [0, 1, 2][: len(found)]
    assert found[0].last is found[1].blocks[0]


def test_neighbours_on_one_shard_are_one_result() -> None:
    plan = planned([seen(state_of(8 * CUT_TOKENS + 3))], lambda cut: SHARDS[cut.cut // 4])
    (first,), (second,) = plan.asks[SHARDS[0]], plan.asks[SHARDS[1]]
    assert first.subtrees == (Subtree(2, 0),) and second.subtrees == (Subtree(2, 1),)
    (local,) = plan.local
    assert local.depths == (range(256, 257),)
    assert all(each.start >= 8 * CUT_TOKENS for each in local.subtrees) and len(local.subtrees) == 1


def test_rows_that_share_a_span_are_asked_about_once_and_named_together() -> None:
    first = state_of(2 * CUT_TOKENS)
    fork = state_of(4 * CUT_TOKENS, like=first)
    facts: list[SpanFacts] = []

    def choose(span: SpanFacts) -> SpanChoice:
        facts.append(span)
        return SpanChoice.SHIP

    plan = planned([seen(first, queries=2), seen(fork)], lambda cut: SHARDS[0], choose)
    assert [(span.start, span.stop, span.rows, span.queries) for span in sorted(facts)] == [
        (0, 2 * CUT_TOKENS, (0, 1), 3),
        (2 * CUT_TOKENS, 4 * CUT_TOKENS, (1,), 1),
    ]
    assert [row.row for row in plan.asks[SHARDS[0]]] == [0, 1]
    assert plan.asks[SHARDS[0]][1].subtrees == (Subtree(2, 0),)


def test_what_no_shard_has_whole_stays_and_is_not_asked_about() -> None:
    plan = planned([seen(state_of(4 * CUT_TOKENS))], lambda cut: SHARDS[0] if cut.cut == 2 else None)
    assert [cut.cut for cut in plan.asks[SHARDS[0]][0].cuts] == [2]
    assert plan.local[0].depths == (range(64), range(96, 128))


def test_what_is_to_be_loaded_is_named_and_attended_to_here() -> None:
    row = seen(state_of(2 * CUT_TOKENS))
    plan = planned([row], lambda cut: SHARDS[0], lambda span: SpanChoice.FETCH)
    assert not plan.asks and list(plan.fetched) == row.state.blocks
    assert plan.local[0].subtrees == (ROOT,)


def test_all_may_be_shipped() -> None:
    plan = planned([seen(state_of(4 * CUT_TOKENS))], lambda cut: SHARDS[0])
    assert plan.local[0].depths == () and plan.local[0].subtrees == ()


CUTS = st.lists(st.integers(0, 40), unique=True).map(sorted)


@given(CUTS)
def test_the_largest_subtrees_hold_exactly_their_cuts(cuts: list[int]) -> None:
    found = subtrees_of(cuts)
    held = [cut for each in found for cut in range(each.start // CUT_TOKENS, each.stop // CUT_TOKENS)]
    assert held == cuts
    siblings = [(one, other) for one, other in itertools.pairwise(found) if one.parent == other.parent]
    assert not siblings, "two halves are one"
    if cuts and cuts == list(range(cuts[0], cuts[-1] + 1)):
        assert found == subtrees(cuts[0] * CUT_TOKENS, (cuts[-1] + 1) * CUT_TOKENS)


@given(CUTS, st.integers(0, 41 * CUT_TOKENS), st.integers(0, 41 * CUT_TOKENS))
def test_the_rest_of_the_tree_is_what_was_not_taken(cuts: list[int], one: int, other: int) -> None:
    start, stop = sorted((one, other))
    beside = subtrees_beside(subtrees_of(cuts), start, stop)
    held = {cut for each in beside for cut in range(each.start // CUT_TOKENS, min(60, each.stop // CUT_TOKENS))}
    assert not held & set(cuts)
    assert {cut for cut in range(41) if start < (cut + 1) * CUT_TOKENS and cut * CUT_TOKENS < stop} <= held | set(cuts)
    assert all(left.stop <= right.start for left, right in itertools.pairwise(beside))


@settings(max_examples=60)
@given(st.data())
def test_each_position_is_attended_to_in_one_place(data: st.DataObject) -> None:
    block_tokens = data.draw(st.sampled_from([16, 48, 512, 1000]))
    tokens = data.draw(st.integers(1, 9 * CUT_TOKENS))
    sealed = data.draw(st.integers(0, tokens // block_tokens))
    first = state_of(tokens, block_tokens=block_tokens, sealed=sealed)
    fork = state_of(tokens + 700, block_tokens=block_tokens, like=first)
    places = data.draw(st.lists(st.sampled_from([None, *SHARDS]), min_size=12, max_size=12))
    choices = data.draw(st.lists(st.sampled_from(list(SpanChoice)), min_size=12, max_size=12))
    rows = [seen(first), seen(fork, first=data.draw(st.integers(0, len(fork.blocks) - 1)))]
    plan = planned(rows, lambda cut: places[cut.cut], lambda span: choices[span.start // CUT_TOKENS])
    for number, row in enumerate(rows):
        remote = [each for asks in plan.asks.values() for ask in asks if ask.row == number for each in ask.subtrees]
        local = plan.local[number]
        together = sorted([*remote, *local.subtrees], key=lambda each: each.start)
        assert all(left.stop <= right.start for left, right in itertools.pairwise(together))
        attended = range(row.depths[0].start * block_tokens, row.visible)
        for position in {*attended[:: max(1, len(attended) // 50)], attended[-1]}:
            (place,) = [each for each in together if each.start <= position < each.stop]
            if place in local.subtrees:
                assert any(position // block_tokens in depths for depths in local.depths)
            else:
                (ask,) = [
                    ask for asks in plan.asks.values() for ask in asks if ask.row == number and place in ask.subtrees
                ]
                blocks = [block for cut in ask.cuts for block in cut.blocks]
                assert row.state.blocks[position // block_tokens] in blocks
