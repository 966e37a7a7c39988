"""Workers that are stopped, killed and forked while they write into a shard's arena or read out of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import Written
from kvcluster.core.miss import MissReason
from kvcluster.core.shard.page import PageState
from kvcluster.memory.region import Mapping
from kvcluster.testing.conformance import World, open_world
from kvcluster.testing.conformance.content import Content, ContentSink, ContentSource, load, store, write
from kvcluster.testing.conformance.wire import unserved
from kvcluster.testing.conformance.world import BOUND_S, ONE, soon
from kvcluster.transport.base import Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.shm_pages import ShmPages
from tests.transport.peers import token
from tests.transport.shm_served import Served

FRAME = limits.FRAME_BYTES
EVICTED, WRITING = MissReason.EVICTED, PageState.WRITING
MINE = 3
"""Pages of the worker that is hurt, each of two chunks."""


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Served) as world:
        yield world


class Worker:
    """A process that runs a function of this module, and says where it has come to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def send(self, what: signal.Signals) -> None:
        self._process.send_signal(what)

    def wait_stopped(self) -> None:
        """Until the system has stopped it."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def end(self) -> None:
        """Lets it go on to its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(BOUND_S) == 0


@contextmanager
def worker(world: World, function: str) -> Iterator[Worker]:
    """Runs `function(address, epoch)`; ended with the context."""
    script = f"from {__name__} import {function}; {function}({world.served.address!r}, {world.epoch})"  # type: ignore[attr-defined]
    root = Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, cwd=root, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield Worker(process)
        finally:
            process.kill()


def mine(epoch: int) -> Content:
    """What the worker moves."""
    return unserved(MINE, 4, FRAME // 4, epoch=Epoch(epoch))


def states(world: World) -> list[PageState]:
    core = world.host.core
    found: list[PageState] = []
    world.host.inspect(lambda: found.extend(page.state for page in core.pool.everything()))
    return found


def stop_myself_before_chunk(number: int) -> None:
    """This process is stopped with that chunk in hand: it is written after it was let go on."""
    view, chunks = Mapping.view, iter(range(1, 1_000))

    def view_and_stop(mapping: Mapping, offset: int, nbytes: int) -> memoryview:
        into = view(mapping, offset, nbytes)
        if not into.readonly and next(chunks) == number:
            signal.raise_signal(signal.SIGSTOP)  # of this thread, which does not run on
        return into

    Mapping.view = view_and_stop  # type: ignore[method-assign]


def store_and_stop(address: str, epoch: int) -> None:
    """Stopped within the second page, the first of which is told as written."""
    stop_myself_before_chunk(4)
    content = mine(epoch)
    request = content.write_request()
    try:
        print(
            ShmPages(address, Credentials(token(ONE))).write(request, ContentSource(content, request), soon()),
            flush=True,
        )
    except Unavailable as trouble:
        print(trouble.miss.reason.value, flush=True)


def test_a_page_of_a_writer_that_was_stopped_past_its_lease_is_not_reused(world: World) -> None:
    transport = world.open()
    transport.attach(mine(world.epoch).spec, soon())
    room = world.host.core.pool.allocator.room(FRAME)
    others = [Content.of(world, room, 4, FRAME // 4, first=first) for first in (100, 200)]
    with worker(world, "store_and_stop") as stopped:
        stopped.wait_stopped()
        for _ in range(2):
            world.expire_leases()
            assert states(world).count(WRITING) == MINE, "by time alone it loses nothing"
        assert write(transport, others[0]) == [Written.COMMITTED] * (room - MINE) + [Written.FULL] * MINE
        pool = world.host.core.pool
        world.host.inspect(lambda: list(map(pool.condemn, list(pool.ready()))))
        assert write(transport, others[1]) == [Written.COMMITTED] * (room - MINE) + [Written.FULL] * MINE
        stopped.send(signal.SIGCONT)
        assert stopped.says() == "deadline", "its store is not called done"
        world.wait_until_unleased()
        assert load(transport, others[1]) == [None] * (room - MINE) + [EVICTED] * MINE, "no byte of it is anywhere"
        assert load(transport, mine(world.epoch)) == [EVICTED] * MINE
        stopped.end()
    assert WRITING not in states(world)


def test_the_pages_of_a_writer_that_is_killed_are_free_at_once(world: World) -> None:
    transport = world.open()
    transport.attach(mine(world.epoch).spec, soon())
    with worker(world, "store_and_stop") as stopped:
        stopped.wait_stopped()
        assert states(world) == [WRITING] * MINE
        stopped.send(signal.SIGKILL)
        world.wait_until_unleased()
    assert world.host.core.pool.allocator.used_bytes == 0
    store(transport, mine(world.epoch))


def store_and_fork(address: str, epoch: int) -> None:
    """In the middle of a store it has a child, which inherits its connection and outlives it."""
    content = mine(epoch)
    request = content.write_request()

    def fork() -> None:
        if len(source.copied) == 5:
            child = os.fork()
            if not child:
                sys.stdin.read()
                os._exit(0)
            print(child, flush=True)
            os.waitpid(child, 0)

    source = ContentSource(content, request, fork)
    ShmPages(address, Credentials(token(ONE))).write(request, source, soon())


def test_a_child_that_inherits_the_connection_of_a_killed_writer_keeps_no_page(world: World) -> None:
    transport = world.open()
    transport.attach(mine(world.epoch).spec, soon())
    with worker(world, "store_and_fork") as forked:
        child = int(forked.says())
        assert states(world) == [WRITING] * MINE
        forked.send(signal.SIGKILL)
        world.wait_until_unleased()
        os.kill(child, 0)  # it is there still
    assert world.host.core.pool.allocator.used_bytes == 0


def fork_within_exchanges(address: str, epoch: int) -> None:
    """A child tries to use what its parent has open, ends what its parent has begun, and closes all of it."""
    content = mine(epoch)
    way = ShmPages(address, Credentials(token(ONE)))

    def loaded() -> str:
        request = content.read_request()
        sink = ContentSink(content, request)
        try:
            list(way.read(request, sink, soon()))
        except Unavailable as trouble:
            return str(trouble)
        sink.check()
        return "loaded"

    def fork() -> None:
        if len(source.copied) == 5 and not os.fork():
            raise ZeroDivisionError

    writing = content.write_request()
    source = ContentSource(content, writing, fork)
    try:
        outcome = way.write(writing, source, soon())
    except ZeroDivisionError:
        print(loaded(), flush=True)
        way.close()
        os._exit(0)
    os.wait()
    print(outcome == [Written.COMMITTED] * MINE, flush=True)
    request = content.read_request()
    under_way = way.read(request, ContentSink(content, request), soon())
    next(under_way)
    (control,) = way._connections._busy
    if not os.fork():
        under_way.close()
        way.close()
        os._exit(0)
    os.wait()
    list(under_way)
    print(loaded(), control in way._connections._idle, flush=True)


def test_what_is_open_is_of_no_use_to_a_forked_child_and_none_the_worse_for_it(world: World) -> None:
    world.open().attach(mine(world.epoch).spec, soon())
    with worker(world, "fork_within_exchanges") as forked:
        assert "forked from" in forked.says()
        assert forked.says() == "True", "the child's failure has aborted nothing"
        assert forked.says() == "loaded True", "nor ended a load"
        forked.end()


def load_and_stop(address: str, epoch: int) -> None:
    """Stopped with the first piece in hand, which it has not looked at yet."""
    content = mine(epoch)
    request = content.read_request()
    sink = ContentSink(content, request)
    receive, pieces = sink.receive, iter(range(1, 1_000))

    def receive_later(*piece: object) -> None:
        if next(pieces) == 2:
            signal.raise_signal(signal.SIGSTOP)  # of this thread, which does not run on
        receive(*piece)  # type: ignore[arg-type]

    sink.receive = receive_later  # type: ignore[method-assign, assignment]
    try:
        list(ShmPages(address, Credentials(token(ONE))).read(request, sink, soon()))
        print("loaded", flush=True)
    except Unavailable as trouble:
        print(trouble.miss.reason.value, flush=True)
    right = all(data == content.layers[content.keys[item]][layer] for (item, layer), data in sink.got.items())
    print(right, len(sink.got), len(sink.corrupt), flush=True)


def test_a_reader_that_was_stopped_past_its_lease_misses_and_has_no_wrong_byte(world: World) -> None:
    transport = world.open()
    store(transport, mine(world.epoch))
    with worker(world, "load_and_stop") as stopped:
        stopped.wait_stopped()
        world.expire_leases()
        world.wait_until_unleased()
        pool = world.host.core.pool
        world.host.inspect(lambda: list(map(pool.condemn, list(pool.ready()))))
        others = Content.of(world, pool.allocator.room(FRAME), 4, FRAME // 4, first=100)
        store(transport, others)  # every page is another's now
        stopped.send(signal.SIGCONT)
        assert stopped.says() == "deadline"
        right, came, corrupt = stopped.says().split()
        assert (right, came) == ("True", "2"), "the first piece, before it was stopped"
        assert int(corrupt) > 0, "the pages that it read afterwards did not verify"
        stopped.end()


def test_a_reader_that_is_killed_leaves_no_pin(world: World) -> None:
    store(world.open(), mine(world.epoch))
    with worker(world, "load_and_stop") as stopped:
        stopped.wait_stopped()
        assert len(world.host.core.leases) == 1
        stopped.send(signal.SIGKILL)
        world.wait_until_unleased()
