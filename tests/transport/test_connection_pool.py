"""Connections are kept for the next exchange while they are usable, and every one is closed in the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcluster.core.miss import MissReason
from kvcluster.testing.conformance.world import soon
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.connection_pool import ConnectionPool


class Fake:
    """A connection that tells what was done to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.quiet = True
        self.done: list[str] = []

    def is_quiet(self) -> bool:
        return self.quiet

    def shutdown(self) -> None:
        self.done.append("shut")

    def close(self) -> None:
        self.done.append("closed")


class Opened:
    """Connections that count who is opened."""

    def __init__(self) -> None:
        self.all: list[Fake] = []
        self.before: Callable[[], object] = lambda: None
        self.connections: ConnectionPool[Fake] = ConnectionPool("shard", self._connect)

    def _connect(self, deadline: Deadline) -> Fake:
        self.before()
        self.all.append(Fake(len(self.all)))
        return self.all[-1]

    def take(self) -> Fake:
        return self.connections.take(soon())


def test_a_kept_connection_is_taken_again_and_a_taken_one_has_no_other_user() -> None:
    opened = Opened()
    first, second = opened.take(), opened.take()
    opened.connections.keep(first)
    assert opened.take() is first
    assert second is not first and len(opened.all) == 2
    assert not first.done


def test_what_is_discarded_is_shut_before_it_is_closed_and_never_taken_again() -> None:
    opened = Opened()
    first = opened.take()
    opened.connections.discard(first)
    assert first.done == ["shut", "closed"]
    assert opened.take() is not first


def test_what_the_other_side_has_ended_is_passed_over() -> None:
    opened = Opened()
    kept = [opened.take() for _ in range(3)]
    for one in kept:
        opened.connections.keep(one)
    kept[2].quiet = kept[1].quiet = False
    assert opened.take() is kept[0]
    assert [one.done for one in kept] == [[], ["shut", "closed"], ["shut", "closed"]]


def test_tidying_closes_what_has_ended_and_nothing_else() -> None:
    opened = Opened()
    idle, ended, busy = (opened.take() for _ in range(3))
    for one in (idle, ended):
        opened.connections.keep(one)
    ended.quiet = busy.quiet = False
    opened.connections.tidy()
    assert [one.done for one in (idle, ended, busy)] == [[], ["shut", "closed"], []]


def test_the_end_of_one_has_the_others_looked_at() -> None:
    opened = Opened()
    idle, busy = opened.take(), opened.take()
    opened.connections.keep(idle)
    idle.quiet = False
    opened.connections.discard(busy)
    assert idle.done == ["shut", "closed"]


def test_of_a_burst_only_so_many_are_kept() -> None:
    opened = Opened()
    burst = [opened.take() for _ in range(10)]
    for one in burst:
        opened.connections.keep(one)
    assert [len(one.done) for one in burst] == [0] * 8 + [2] * 2


def test_closing_ends_what_lies_idle_and_wakes_what_is_under_way() -> None:
    opened = Opened()
    idle, busy = opened.take(), opened.take()
    opened.connections.keep(idle)
    opened.connections.close()
    opened.connections.close()
    assert idle.done == ["shut", "closed"]
    assert busy.done == ["shut"] * 2, "its user closes it"
    opened.connections.keep(busy)
    assert busy.done[-1] == "closed"
    with pytest.raises(Unavailable, match="was closed") as trouble:
        opened.take()
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_what_is_opened_while_all_is_closed_is_closed_too() -> None:
    opened = Opened()
    opened.before = opened.connections.close
    with pytest.raises(Unavailable, match="was closed"):
        opened.take()
    assert [one.done for one in opened.all] == [["shut", "closed"]]


def test_a_deadline_that_has_passed_opens_nothing() -> None:
    opened = Opened()
    with pytest.raises(Unavailable) as trouble:
        opened.connections.take(Deadline.after_ms(0))
    assert trouble.value.miss.reason is MissReason.DEADLINE
    assert not opened.all
