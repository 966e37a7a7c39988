"""Read ranges: what an exchange may write until it is stopped, and what is missing then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import Part
from kvcluster.core.messages import PageKey, PageWant
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.transfers.pieces import Piece
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transport.base import Cancelled
from tests.client.stepping import DEADLINE, GIVEN_UP, HASHES, LATE
from tests.client.watched_gate import waits_for_gate

PART = Part(2, 10, 0, 4)


def piece(block: int, start: int = 0, stop: int = PART.layers) -> Piece:
    return Piece(block, 0, PageWant(PageKey(HASHES[block], 0, PART), start, stop), 0, 4)


def ranges(*pieces: Piece) -> ReadRanges:
    return ReadRanges(pieces or (piece(0), piece(1)), now=5, deadline_ns=DEADLINE)


def test_nothing_has_come_of_an_exchange_that_begins() -> None:
    some = ranges(piece(0), piece(1, 2, 4))
    assert (some.left(0), some.left(1)) == ([piece(0)], [piece(1, 2, 4)])
    assert some.last_arrival_ns == 5 and some.why(0) is None


def test_layers_come_in_order_and_what_is_left_shrinks() -> None:
    some = ranges()
    assert some.may_write(0, 0, 6)
    some.arrived(0, 3)
    assert some.left(0) == [piece(0, 3)] and some.left(1) == [piece(1)]
    assert some.may_write(0, 3, 7)
    some.arrived(0, PART.layers)
    assert some.left(0) == []


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_layer_that_is_not_the_next_is_not_what_was_asked_for(layer: int) -> None:
    some = ranges()
    some.arrived(0, 3)
    with pytest.raises(ProtocolError, match=f"layer {layer} of a page arrived, expected layer 3"):
        some.may_write(0, layer, 6)


def test_a_piece_of_some_layers_begins_with_its_own_first() -> None:
    some = ranges(piece(0, 2, 4))
    with pytest.raises(ProtocolError):
        some.may_write(0, 0, 6)
    assert some.may_write(0, 2, 6)


def test_whatever_comes_is_heard() -> None:
    some = ranges()
    some.stop([0])
    assert not some.may_write(0, 0, 8)
    assert some.last_arrival_ns == 8
    assert some.may_write(1, 0, 9)
    assert some.last_arrival_ns == 9


def test_after_the_deadline_nothing_is_written_or_heard() -> None:
    some = ranges()
    assert some.may_write(0, 0, DEADLINE - 1)
    with pytest.raises(Cancelled) as raised:
        some.may_write(0, 0, DEADLINE)
    assert raised.value.miss == LATE and some.last_arrival_ns == DEADLINE - 1


def test_an_item_that_was_taken_away_is_not_written_and_the_others_are() -> None:
    some = ranges()
    some.arrived(0, 2)
    some.stop([0])
    assert not some.may_write(0, 2, 6)
    assert not some.may_write(0, 7, 6), "whatever is sent of it is skipped"
    assert some.may_write(1, 0, 6)
    assert some.left(0) == [piece(0, 2)]


def test_an_exchange_that_is_stopped_writes_nothing() -> None:
    some = ranges()
    some.stop()
    for item in (0, 1):
        with pytest.raises(Cancelled) as raised:
            some.may_write(item, 0, 6)
        assert raised.value.miss == GIVEN_UP


@pytest.mark.parametrize("items", [None, [0], []], ids=str)
def test_a_stop_waits_for_the_chunk_in_progress(items: list[int] | None) -> None:
    some = ranges()
    assert waits_for_gate(lambda gate: setattr(some, "gate", gate), lambda: some.stop(items))


def test_an_exchange_of_which_items_were_taken_can_still_be_stopped_as_a_whole() -> None:
    some = ranges()
    some.stop([0])
    some.stop([])
    assert some.may_write(1, 0, 6), "to take nothing is not to stop it"
    some.stop()
    with pytest.raises(Cancelled):
        some.may_write(0, 0, 6)


def test_corrupt_layers_are_left_and_so_is_what_has_not_come() -> None:
    some = ranges()
    some.arrived(0, 1)
    some.did_not_match(0, 1, 3)
    some.arrived(0, 4)
    some.did_not_match(0, 4, 5)
    assert some.left(0) == [piece(0, 1, 3), piece(0, 4, 5), piece(0, 5)]
    assert some.may_write(0, 5, 6), "the next layers come behind them"
    assert some.why(0) == Miss(MissReason.CORRUPT) and some.why(1) is None


def test_why_a_page_cannot_be_read_is_told_rather_than_that_it_did_not_match() -> None:
    some, why = ranges(), Miss(MissReason.CORRUPT, "codec 9 is not known here")
    some.did_not_match(0, 0, 1)
    some.unreadable[0] = why
    assert some.why(0) == why


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=8), st.integers(0, 3), st.integers(4, 8))
def test_what_came_and_what_is_left_are_the_whole_piece(chunks: list[tuple[bool, int]], start: int, stop: int) -> None:
    some, right, at = ranges(piece(0, start, stop)), set[int](), start
    for matches, layers in chunks:
        end = min(stop, at + layers)
        if at == end:
            break
        assert some.may_write(0, at, 6)
        if matches:
            some.arrived(0, end)
            right |= set(range(at, end))
        else:
            some.did_not_match(0, at, end)
        at = end
    left = [layer for rest in some.left(0) for layer in range(rest.want.layer_start, rest.want.layer_stop)]
    assert sorted([*right, *left]) == list(range(start, stop)), "each layer once"
