"""Keeping a thread off the processor on which another thread is busy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvcluster.testing.conformance import open_world
from kvcluster.testing.conformance.content import Content, store
from kvcluster.testing.conformance.world import soon
from kvcluster.transport.cpu_affinity import AffinityGuard, here
from kvcluster.transport.page_writer import PageWriter
from kvcluster.wire.shm_frames import NO_PROCESSOR
from tests.transport.shm_served import Served
from tests.waiting import eventually

ALL = os.sched_getaffinity(0)


def without(processor: int) -> set[int]:
    """Where there is but one, a thread stays there."""
    return ALL - {processor} or ALL


@pytest.fixture(autouse=True)
def everywhere() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, ALL)


def test_a_thread_knows_where_it_runs() -> None:
    (processor, *_) = ALL
    os.sched_setaffinity(0, {processor})
    assert here() == processor


def test_it_keeps_off_one_at_a_time_and_returns_at_the_end() -> None:
    with AffinityGuard() as thread:
        assert os.sched_getaffinity(0) == ALL
        for processor in sorted(ALL):
            thread.keep_off(processor)
            assert os.sched_getaffinity(0) == without(processor)
            assert here() in without(processor)
    assert os.sched_getaffinity(0) == ALL


@pytest.mark.parametrize("processor", [NO_PROCESSOR, 10**6])
def test_processors_that_it_does_not_run_on_change_nothing(processor: int) -> None:
    with AffinityGuard() as thread:
        thread.keep_off(processor)
        assert os.sched_getaffinity(0) == ALL


def test_where_there_is_but_one_it_stays_there() -> None:
    only = {min(ALL)}
    os.sched_setaffinity(0, only)
    with AffinityGuard() as thread:
        thread.keep_off(min(ALL))
        assert os.sched_getaffinity(0) == only
    assert os.sched_getaffinity(0) == only


def test_it_moves_its_own_thread_and_no_other() -> None:
    seen: list[set[int]] = []

    def run() -> None:
        with AffinityGuard() as thread:
            thread.keep_off(min(ALL))
            seen.extend([os.sched_getaffinity(0), os.sched_getaffinity(threading.main_thread().native_id or 0)])

    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert seen == [without(min(ALL)), ALL]


def test_a_shard_verifies_where_the_writer_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, set[int]]] = []
    written = PageWriter.written

    def look(arrivals: PageWriter, *page: Any) -> None:
        seen.append((threading.get_native_id(), os.sched_getaffinity(0)))
        written(arrivals, *page)

    monkeypatch.setattr(PageWriter, "written", look)
    with open_world(Served) as world:
        content, transport = Content.of(world, 1, 2, 1_000), world.open()
        transport.attach(content.spec, soon())
        os.sched_setaffinity(0, {min(ALL)})  # the writer; the shard's threads have all of them
        store(transport, content)
        ((thread, processors),) = seen
        assert processors == without(min(ALL))
        eventually(lambda: os.sched_getaffinity(thread) == ALL)
