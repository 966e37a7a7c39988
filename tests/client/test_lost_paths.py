"""A path to a shard breaks in the middle of a load or a store, and the call goes on over the next."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import (
    Abort,
    Decision,
    Need,
    Reserve,
    Run,
    ShardAddress,
    Source,
    StoreGrant,
    StoreRun,
    TicketBody,
    Tier,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.replay.core_stepper import build_request
from kvcluster.testing.conformance import World, open_world
from kvcluster.testing.conformance.content import Content, store
from kvcluster.testing.conformance.encoded import numbers
from kvcluster.testing.conformance.world import ONE, soon
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Buffers
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transfers.store_plan import PAUSES_NS
from kvcluster.transfers.transfer import Loaded, Stored
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transport.base import Unavailable
from tests.transport.frail import HERE, Ways, broken
from tests.transport.peers import InProcess


class Coordinator:
    """Has every new block stored at the one shard, and knows of no other replica."""

    def __init__(self, world: World, content: Content, shard: ShardAddress) -> None:
        self._content = content
        self._shard = shard
        self.tickets_ended = 0

    def attach(self, spec: Any, deadline: Any, owner: Any = None) -> Any:
        return SimpleNamespace(namespace=self._content.namespace, run_blocks=64, wants_tokens=False)

    def namespace(self, spec: Any, deadline: Any) -> Any:
        return self._content.namespace

    def check_may_store(self) -> None:
        """It may."""

    def ask(self, kind: type[Any], spec: Any, question: Any, deadline: Any) -> Any:
        if kind is StoreGrant:
            return StoreGrant((StoreRun(len(question.hashes), Decision.WRITE, self._shard, None),))
        raise Unavailable(Miss(MissReason.SHARD_LOST, "no other replica"))

    def request(self, kind: type[Any], question: Any, deadline: Any) -> Any:
        self.tickets_ended += 1


class Desk:
    """A client's transfers over paths that break, of one content whose every page is a block."""

    def __init__(self, world: World, content: Content) -> None:
        self.world = world
        self.content = content
        self.ways = Ways(world)
        self.shard = ShardAddress(ShardId("shard-0"), world.epoch, "an address", HERE)
        self.coordinator: Any = Coordinator(world, content, self.shard)
        policy, lock = ShardHealth(breaker_failures=9, breaker_ms=1), threading.RLock()
        self.part = content.keys[0].part
        shards = ShardConnections(lambda shard: self.ways.choice, policy, lock)
        self.movers = TransferQueue(
            self.coordinator, shards, policy, lock, (self.part,), next_attempt=world.attempt, config=ClientConfig()
        )
        page_bytes = content.spec.page_bytes(0, self.part)
        self.pages = [bytearray(page_bytes) for _ in content.keys]

    def load(self, accept: Loss = Loss.EXACT) -> Loaded:
        source = Source(0, self.part, self.shard, Tier.RAM, accept)
        hashes = tuple(key.hash for key in self.content.keys)
        body = TicketBody(
            self.content.namespace,
            self.world.attempt(),
            hashes,
            Need((self.part,), accept),
            (Run(len(hashes), ((source,),)),),
        )
        into = bind(
            Buffers(list(map(memoryview, self.pages))), self.content.spec, (self.part,), len(hashes), writable=True
        )
        return self.movers.load(body, 0, into, self.content.spec, soon()).result()

    def store(self) -> Stored:
        content, spec = self.content, self.content.spec
        hashes = [key.hash for key in content.keys]
        data = [memoryview(b"".join(content.layers[key])) for key in content.keys]
        source = bind(Buffers(data), spec, (self.part,), len(hashes), writable=False)
        return self.movers.store(hashes, 0, Loss.EXACT, source, (), spec, soon()).result()

    def right(self, without: tuple[int, ...] = ()) -> bool:
        """Does every page hold what was stored?"""
        return all(
            bytes(page) == b"".join(self.content.layers[key])
            for at, (page, key) in enumerate(zip(self.pages, self.content.keys, strict=True))
            if at not in without
        )


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(InProcess) as world:
        yield world


@pytest.fixture
def desk(world: World) -> Iterator[Desk]:
    """Three pages of four layers, each a record, that lie in the shard."""
    content = Content.of(world, 3, 4, 100)
    store(world.open(), content)
    desk = Desk(world, content)
    yield desk
    desk.movers.close(desk.ways.choice.close)


@pytest.fixture
def new(world: World) -> Iterator[Desk]:
    """Three pages of two frames each that the shard has never seen."""
    desk = Desk(world, Content.of(world, 3, 2, limits.FRAME_BYTES, first=10))
    yield desk
    desk.movers.close(desk.ways.choice.close)


# -------------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize("breaks_in_wait", [True, False])
@pytest.mark.parametrize("at", [0, 1, 99, 100, 101, 399, 400, 401, 650, 800, 1_199, 1_200])
def test_a_load_goes_on_where_its_path_broke_off(desk: Desk, at: int, breaks_in_wait: bool) -> None:
    desk.ways.shm.read_bytes, desk.ways.shm.breaks_in_wait = at, breaks_in_wait
    assert desk.load() == Loaded(3, 1_200)
    assert desk.right()
    assert desk.ways.choice.refused() == {"shm": "the wire is cut"}
    assert len(desk.ways.tcp.reads) == (at < 1_200), "all had come but the end"


@pytest.mark.parametrize("at", [0, 50, 450, 1_000])
@pytest.mark.parametrize("then", [0, 10, 333, 700])
def test_a_load_survives_the_second_path_as_well(desk: Desk, at: int, then: int) -> None:
    desk.ways.shm.read_bytes, desk.ways.tcp.read_bytes = at, then
    assert desk.load() == Loaded(3, 1_200) and desk.right()
    attempts = [request.attempt for path in desk.ways.all for request in path.reads]
    assert len(set(attempts)) == len(attempts), "each try is an attempt of its own"


def test_only_what_has_not_come_is_asked_again(desk: Desk) -> None:
    desk.ways.shm.read_bytes = 450  # in the second page
    assert desk.load().miss is None
    (again,) = desk.ways.tcp.reads
    keys = desk.content.keys
    assert [(want.key, want.layer_start, want.layer_stop) for want in again.wants] == [(keys[1], 0, 4), (keys[2], 0, 4)]


def test_a_page_that_went_while_its_record_was_broken_is_a_miss_and_the_others_come(desk: Desk, world: World) -> None:
    def evict() -> None:
        page = world.page(desk.content.namespace, desk.content.keys[1])
        assert page is not None
        world.host.inspect(lambda: world.host.core.pool.condemn(page))

    desk.ways.shm.read_bytes, desk.ways.shm.on_break = 450, evict
    loaded = desk.load()
    assert (loaded.blocks, list(loaded.failed), loaded.miss and loaded.miss.reason) == (1, [1], MissReason.EVICTED)
    assert desk.right(without=(1,))


def test_when_all_paths_have_broken_the_last_ones_trouble_is_told(desk: Desk) -> None:
    for path in desk.ways.all:
        path.read_bytes, path.error = 300, broken(f"{path.name} is cut")
    loaded = desk.load()
    assert (loaded.blocks, loaded.nbytes, loaded.miss and loaded.miss.detail) == (0, 0, "grpc is cut")


@pytest.mark.parametrize("codec", [Codec.Q8, Codec.Q4])
def test_what_goes_down_before_the_next_path_comes_over_that_encoded(world: World, codec: Codec) -> None:
    content = numbers(world, 3)
    store(world.open(), content)
    desk = Desk(world, content)
    page_bytes = content.spec.page_bytes(0, content.keys[0].part)
    desk.ways.shm.read_bytes = page_bytes + 100
    desk.ways.shm.on_break = lambda: world.demote(content.namespace, content.keys, codec)
    assert desk.load(accept=Loss.Q4).miss is None
    assert desk.right(without=(1, 2)) and not desk.right()
    desk.movers.close(desk.ways.choice.close)


def test_what_goes_down_meanwhile_is_not_brought_to_who_accepts_no_loss(world: World) -> None:
    content = numbers(world, 3)
    store(world.open(), content)
    desk = Desk(world, content)
    desk.ways.shm.read_bytes = content.spec.page_bytes(0, content.keys[0].part) + 100
    desk.ways.shm.on_break = lambda: world.demote(content.namespace, content.keys, Codec.Q8)
    loaded = desk.load()
    assert (loaded.blocks, loaded.miss) == (1, Miss(MissReason.LOSSY, "only with q8"))
    desk.movers.close(desk.ways.choice.close)


# -------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("pieces", range(6))
def test_a_store_is_sent_anew_over_the_next_path(new: Desk, pieces: int) -> None:
    new.ways.shm.pieces = pieces
    stored = new.store()
    assert (stored.blocks, stored.deduplicated, stored.pending, stored.miss) == (3, 0, 0, None)
    assert (new.ways.choice.name, new.ways.choice.refused()) == ("tcp", {"shm": "the wire is cut"})
    assert new.load().miss is None and new.right()
    assert new.coordinator.tickets_ended == 1


def test_pages_that_a_second_try_committed_whose_answer_was_lost_are_ours(new: Desk) -> None:
    new.ways.shm.pieces, new.ways.tcp.commit_lost = 1, True
    assert (new.store().blocks, new.store().deduplicated) == (3, 3)


def test_a_source_that_was_told_that_it_is_free_is_not_asked_again(new: Desk) -> None:
    new.ways.shm.commit_lost = True
    stored = new.store()
    assert stored.blocks == 0 and stored.miss is not None
    assert not new.ways.tcp.writes and not new.ways.grpc.writes


def hold(desk: Desk, pages: slice = slice(None)) -> Callable[[], object]:
    """Another client begins to write these pages; returns what releases them."""
    attempt = desk.world.attempt()
    request = desk.content.write_request(keys=desk.content.keys[pages])
    reserve = Reserve(attempt, desk.world.epoch, request.pages)
    desk.world.host.ask(build_request(reserve, ONE, desk.content.namespace), 20.0)
    return lambda: desk.world.host.ask(build_request(Abort(attempt), ONE), 20.0)


def dies(desk: Desk, let_go: list[Callable[[], object]], pages: slice = slice(None)) -> Callable[..., Any]:
    """A path that breaks before its shard has noticed."""

    def write(request: Any, source: Any, deadline: Any) -> Any:
        let_go.append(hold(desk, pages))
        raise broken()

    return write


def test_a_page_that_a_dying_try_holds_is_asked_for_again_until_it_is_free(new: Desk) -> None:
    let_go: list[Callable[[], object]] = []
    new.ways.shm.write = dies(new, let_go)  # type: ignore[method-assign]
    inner, calls = new.ways.tcp.write, itertools.count()

    def third(*request: Any) -> Any:
        if next(calls) == 2:
            let_go[0]()
        return inner(*request)

    new.ways.tcp.write = third  # type: ignore[method-assign]
    assert new.store().blocks == 3
    assert next(calls) == 3


def test_a_page_that_stays_pending_is_told_so_after_a_few_tries(new: Desk) -> None:
    let_go: list[Callable[[], object]] = []
    new.ways.shm.write = dies(new, let_go)  # type: ignore[method-assign]
    assert new.store().pending == 3
    attempts = [request.attempt for request in new.ways.tcp.writes]
    assert len(set(attempts)) == len(attempts) == len(PAUSES_NS) + 1
    let_go[0]()


def test_pages_that_another_client_writes_are_pending_at_once(new: Desk) -> None:
    new.ways.choice.attach(new.content.spec, soon())
    let_go = hold(new, slice(1, 2))
    stored = new.store()
    assert (stored.blocks, stored.pending) == (2, 1)
    assert not new.ways.tcp.writes
    let_go()


def test_what_is_known_of_a_store_is_told_even_if_the_rest_cannot_be_asked_again(new: Desk) -> None:
    let_go: list[Callable[[], object]] = []
    new.ways.shm.write = dies(new, let_go, slice(0, 1))  # type: ignore[method-assign]
    inner, calls = new.ways.tcp.write, itertools.count()

    def once(*request: Any) -> Any:
        if next(calls):
            new.ways.grpc.pieces, new.ways.grpc.commit_lost = 0, True
            raise broken()
        return inner(*request)

    new.ways.tcp.write = once  # type: ignore[method-assign]
    stored = new.store()
    assert (stored.blocks, stored.pending) == (2, 1)
    let_go[0]()
