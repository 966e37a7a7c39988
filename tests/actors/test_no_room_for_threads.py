"""A shard's process without room for another thread still saves its pages and ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcluster.actors import shard
from kvcluster.actors.ray_view import ends_with_ray
from kvcluster.actors.stopping import on_sigterm
from kvcluster.core.messages import Leave
from kvcluster.errors import KVClusterError
from tests.no_threads import no_room_for_threads


@pytest.fixture
def full() -> Iterator[None]:
    with no_room_for_threads():
        yield


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_stops_it_in_the_main_thread_and_once(full: None, sigterm: None) -> None:
    stopped: list[threading.Thread] = []
    on_sigterm(lambda: stopped.append(threading.current_thread()))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped == [threading.main_thread()]


def test_what_leaves_for_good_ends(full: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Leave] = []
    monkeypatch.setattr(shard, "end_process", ended.append)
    leave = Leave("it is drained", for_good=True)
    unbound = cast(Any, shard.ShardActor)._leave
    unbound(SimpleNamespace(_leave_for_good=lambda leave: None), leave)
    assert ended == [leave]


def test_a_watch_of_ray_says_that_it_cannot_begin(full: None) -> None:
    with pytest.raises(KVClusterError, match="no room for another thread"), ends_with_ray(lambda: True, int, "gone"):
        raise AssertionError("not watched")
