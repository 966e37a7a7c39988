"""Both ends of the stream of orders, with answers and reports that are lost, repeated, late and overtaken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    EvictOrder,
    MoveOrder,
    Order,
    OrderProgress,
    PullOrder,
    ShardAddress,
    Tier,
    TierUse,
)
from kvcluster.core.streams import OrderCursor, OrderStream
from tests.core.lone_coordinator import BLOCKS, LoneCoordinator
from tests.core.pulling import others, pull, want, wanted
from tests.core.samples import CODED, OURS, PAGE, SPEC, pages

EVICT: Callable[[int], Order] = partial(EvictOrder, blocks=())
MOVE: Callable[[int], Order] = partial(MoveOrder, moves=())
PULL: Callable[[int], Order] = partial(
    PullOrder, source=ShardAddress(ShardId("b"), Epoch(1), "b:1"), tenant=OURS, spec=SPEC, pages=()
)


def stream(*makes: Callable[[int], Order]) -> OrderStream:
    orders = OrderStream(count(1))
    for make in makes:
        orders.give(make)
    return orders


def cursor() -> OrderCursor:
    return OrderCursor(lambda: None)


# ---------------------------------------------------------------------------------- what is given


def test_orders_to_all_members_are_numbered_by_one_counter() -> None:
    numbers = count(1)
    one, two = OrderStream(numbers), OrderStream(numbers)
    one.give(EVICT)
    two.give(EVICT)
    one.give(MOVE)
    assert [order.number for order in (*one.unaccepted(), *two.unaccepted())] == [1, 3, 2]


def test_an_order_is_sent_until_it_is_accepted_and_open_until_it_has_ended() -> None:
    orders = stream(MOVE, EVICT)
    assert orders.unaccepted() == (MOVE(1), EVICT(2))
    assert orders.heard(OrderProgress(1, (1,))) == []
    assert orders.unaccepted() == (EVICT(2),)
    assert orders.heard(OrderProgress(2, (1,))) == [EVICT(2)]
    assert (orders.of(MoveOrder), orders.of(EvictOrder)) == (MOVE(1), None)
    assert orders.heard(OrderProgress(2)) == [MOVE(1)]
    assert len(orders) == 0


def test_a_late_report_changes_nothing() -> None:
    orders = stream(MOVE, EVICT)
    assert orders.heard(OrderProgress(2, (1,))) == [EVICT(2)]
    assert orders.heard(OrderProgress(1, (1,))) == []
    assert orders.heard(OrderProgress()) == []
    assert (orders.unaccepted(), len(orders)) == ((), 1)


def test_a_second_order_of_a_kind_is_a_mistake_while_the_first_is_open() -> None:
    orders = stream(EVICT)
    with pytest.raises(AssertionError, match="one order of a kind"):
        orders.give(EVICT)
    orders.heard(OrderProgress(1))
    orders.give(EVICT)


def test_more_orders_than_may_be_in_flight_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ORDERS_IN_FLIGHT", 2)
    with pytest.raises(AssertionError, match="in flight"):
        stream(EVICT, MOVE, PULL)


def test_an_order_that_is_withdrawn_is_sent_no_more_and_its_end_is_not_awaited() -> None:
    orders = stream(PULL, EVICT)
    orders.withdraw(PULL(1))
    assert orders.unaccepted() == (EVICT(2),)
    orders.give(PULL)
    assert orders.heard(OrderProgress(2, (1,))) == [EVICT(2)]
    assert orders.unaccepted() == (PULL(3),)


def test_a_stream_that_is_closed_gives_back_what_had_not_ended() -> None:
    orders = stream(PULL, EVICT)
    orders.heard(OrderProgress(2, (1,)))
    assert orders.close() == [PULL(1)]
    assert (orders.close(), len(orders)) == ([], 0)


# ----------------------------------------------------------------------------------- what is heard


def test_an_order_is_accepted_once_however_often_and_late_it_comes() -> None:
    heard = cursor()
    assert list(heard.accept([MOVE(3), EVICT(5)])) == [MOVE(3), EVICT(5)]
    assert list(heard.accept([MOVE(3), EVICT(5), PULL(9)])) == [PULL(9)]
    assert list(heard.accept([PULL(4)])) == [], "a number below is of an order that was withdrawn"
    assert heard.progress == OrderProgress(9, (3, 5, 9))


def test_what_is_accepted_and_has_not_ended_runs() -> None:
    heard = cursor()
    for order in heard.accept([MOVE(1), EVICT(2)]):
        if isinstance(order, EvictOrder):
            heard.ended(order)
    assert heard.progress == OrderProgress(2, (1,))
    assert [heard.progress.ended(number) for number in (1, 2, 3)] == [False, True, False]


def test_an_order_is_accepted_as_it_is_handed_out_and_not_before() -> None:
    heard = cursor()
    accepting = heard.accept([MOVE(1), EVICT(2)])
    assert heard.progress == OrderProgress()
    next(accepting)
    assert heard.progress == OrderProgress(1, (1,))


def test_another_coordinator_counts_from_one_and_an_order_of_the_last_one_ends_under_no_number() -> None:
    heard = cursor()
    [old] = heard.accept([MOVE(1)])
    heard.reset()
    assert heard.progress == OrderProgress()
    [new] = heard.accept([MOVE(1)])
    heard.ended(old)
    assert heard.progress == OrderProgress(1, (1,)), "they are equal, and not the same"
    heard.ended(new)
    assert heard.progress == OrderProgress(1)


def test_the_end_of_an_order_is_said_soon() -> None:
    said: list[None] = []
    heard = OrderCursor(lambda: said.append(None))
    [order] = heard.accept([MOVE(1)])
    assert not said
    heard.ended(order)
    assert len(said) == 1


# ------------------------------------------------------------------------------------ both of them


@given(st.lists(st.sampled_from(["give", "answer", "lost", "end", "report", "late report", "inventory"]), max_size=60))
def test_every_order_is_carried_out_once_and_in_its_turn(happens: list[str]) -> None:
    numbers = count(1)
    orders, heard = OrderStream(numbers), cursor()
    ordered, done, settled, closed = list[int](), list[int](), list[int](), list[int]()
    running: list[Order] = []
    reports = [OrderProgress()]

    def act(what: str) -> None:
        nonlocal orders
        if what == "give" and orders.of(MoveOrder) is None:
            orders.give(MOVE)
            ordered.extend(order.number for order in orders.unaccepted()[-1:])
        elif what == "answer":
            for order in heard.accept(orders.unaccepted()):
                done.append(order.number)
                running.append(order)
        elif what == "end" and running:
            heard.ended(running.pop(0))
        elif what == "report":
            reports.append(heard.progress)
            settled.extend(order.number for order in orders.heard(reports[-1]))
        elif what == "late report":
            settled.extend(order.number for order in orders.heard(reports[len(reports) // 2]))
        elif what == "inventory":  # the member's slot dies, and the next has a stream of its own
            closed.extend(order.number for order in orders.close())
            orders = OrderStream(numbers)

    for what in happens:
        act(what)
        assert done == sorted(set(done)), "each once, in order"
        assert all(number in done for number in settled), "settled and never carried out"
        assert not [order for order in running if order.number in settled], "settled while it runs"
    for what in ("answer", *["end"] * 60, "report"):
        act(what)
    assert len(orders) == 0 and not heard.progress.running
    assert [number for number in ordered if number not in closed] == sorted(settled)


# --------------------------------------------------------------------------------- the coordinator


def test_an_eviction_is_ordered_while_a_pull_runs_and_the_pull_is_not_sent_again() -> None:
    coordinator, one = LoneCoordinator.serving(*pages(BLOCKS[:2]), hold_ms=0)
    [two] = others(coordinator, "b")
    want(coordinator, 2, *BLOCKS[:2])
    ack = two.report(*pages(BLOCKS[4:6]))
    assert wanted(ack) == list(BLOCKS[:2]) and ack.pull is not None
    two.orders = OrderProgress(ack.pull.number, (ack.pull.number,))
    assert two.report().orders == ()
    urgent = two.report(pressure=PAGE)
    assert urgent.pull is None and urgent.evict is not None
    two.ends(urgent.evict, ack.pull)
    assert two.report().orders == ()
    assert len(one.report().orders) == 0
    assert pull(two, ack).pull is None


def test_an_answer_that_asks_for_an_inventory_orders_nothing() -> None:
    below = (TierUse(Tier.HOST, 10 * CODED.page_bytes(0, CODED.whole(0)), 0, 0),)
    _, voice = LoneCoordinator.serving(*pages(BLOCKS[:2]), hold_ms=0, below=below)
    assert voice.report(pressure=PAGE).orders
    ack = voice.report(first=voice.told + 2)
    assert ack.inventory and ack.orders == ()
