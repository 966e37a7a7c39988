"""A shard to try a transport on, and everything that is needed to try it hard.

A World is one real shard in a running cluster of this process, behind the transport that is tried, and watched
from inside: tests wait until the shard has come to some state instead of sleeping, end leases at will, spoil bytes,
and cut the shard off. When a test is over, nothing may be left: no lease, no half-written page, no room that
nobody accounts for. Content is pages with bytes of their own; its source hands them out as stingily as the
contract of PageSource allows, and its sink believes nothing.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, CallId, Epoch, Holder, Tenant
from kvcluster.core.invariants import check_shard
from kvcluster.core.messages import (
    NewPage,
    PageKey,
    PageSlot,
    PageWant,
    ReadRequest,
    Renew,
    Reply,
    ShardMessage,
    WriteRequest,
)
from kvcluster.core.pool import Page, PageState
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import Group, KVSpec, Plane
from kvcluster.pages import checksum, codec
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing.cluster import MemoryCluster
from kvcluster.transport.seam import Deadline, PageHost, Transport, Trouble

T = TypeVar("T")

ONE, TWO = Tenant("one"), Tenant("two")
"""The tenants of a world."""

ARENA_BYTES = 32 * 2**20
BOUND_S = 20.0
"""How long anything may take before a test fails; nothing is expected to take a tenth of it."""


def soon() -> Deadline:
    """A deadline that only a test that hangs can miss."""
    return Deadline.after_ms(BOUND_S * 1e3)


class Served(Protocol):
    """The serving side of a transport, before one shard."""

    def open(self, tenant: Tenant) -> Transport:
        """A way to the shard with that tenant's credential."""

    def close(self) -> None:
        """Ends it at once, and with it what is under way, as the end of the shard's process would. May be repeated."""


class WatchedHost:
    """A shard host that tells whenever it was asked something or has revoked a lease. Implements PageHost."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._changed = threading.Condition()
        self._changes = 0
        self._late: list[type] = []

    def ask(self, build: Callable[[CallId], ShardMessage], wait_s: float) -> Reply:
        asked: list[type] = []

        def watched(call: CallId) -> ShardMessage:
            message = build(call)
            asked.append(type(message))
            return message

        try:
            reply = self._host.ask(watched, wait_s)
        finally:
            self._note()
        if asked[0] in self._late:
            self._late.remove(asked[0])
            raise Trouble(Miss(MissReason.DEADLINE))
        return reply

    def view(self, slot: PageSlot) -> memoryview:
        return self._host.view(slot)

    def on_revoke(self, attempt: Attempt, stop: Callable[[], object]) -> AbstractContextManager[None]:
        def stop_and_note() -> None:
            stop()
            self._note()

        return self._host.on_revoke(attempt, stop_and_note)

    def answer_late(self, kind: type[ShardMessage]) -> None:
        """The next answer to a question of that kind comes too late for whoever asked."""
        self._late.append(kind)

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        """Waits until `holds()` in the core, looking after every change. Raises AssertionError after BOUND_S."""
        deadline = soon()
        changes = self._changes
        while not self._host.inspect(holds):  # without the lock: the core notes changes under its own
            with self._changed:
                while self._changes == changes:
                    assert self._changed.wait(deadline.remaining_s()), f"not within {BOUND_S:.0f} s: {what}"
                changes = self._changes

    def _note(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()


class World:
    """One shard and two tenants. Made by `open_world`."""

    def __init__(
        self, cluster: MemoryCluster, host: ShardHost, watched: WatchedHost, served: Served, pool: ThreadPoolExecutor
    ) -> None:
        self.cluster = cluster
        self.host = host
        self.watched = watched
        self.served = served
        self._pool = pool
        self._transports: list[Transport] = []
        self._holder = Holder(random.randbytes(HOLDER_BYTES))
        self._attempts = itertools.count(1)
        self._is_cut = False

    def open(self, tenant: Tenant = ONE) -> Transport:
        """A way to the shard, closed with the world."""
        transport = self.served.open(tenant)
        self._transports.append(transport)
        return transport

    def second_tenant(self) -> Transport:
        """A way to the shard for somebody else."""
        return self.open(TWO)

    def attempt(self) -> Attempt:
        """One that nobody had."""
        return Attempt(self._holder, next(self._attempts))

    @property
    def epoch(self) -> Epoch:
        return self.host.core.epoch

    def cut(self) -> None:
        """The shard is gone, as if its process had ended."""
        self._is_cut = True
        self.served.close()
        for shard, host in self.cluster.shards.items():
            if host is self.host:
                self.cluster.stop_shard(shard)

    def meanwhile(self, work: Callable[[], T]) -> Future[T]:
        """Does it on a thread of its own."""
        return self._pool.submit(work)

    def page(self, content: Content, key: PageKey) -> Page | None:
        """What the shard has for a key."""
        return self.host.core.pool.get(content.namespace, key)

    def spoil(self, content: Content, key: PageKey, at: int) -> None:
        """Flips a bit of a page in the arena."""
        page = self.page(content, key)
        assert page is not None
        self.host.view(page.slot())[at] ^= 1

    def expire_leases(self) -> None:
        """All leases run out at this moment."""

        def expire() -> None:
            for lease in self.host.core.leases.all():
                lease.expires_at = 0

        self.host.inspect(expire)
        self.host.ask(lambda call: Renew(call, self.attempt()), BOUND_S)  # the driver sees a deadline after a step
        self.watched.wait_until(lambda: self.host.core.leases.next_expiry is None, "leases that have run out end")

    def wait_until_unleased(self) -> None:
        """Waits until nothing is read or written."""
        self.watched.wait_until(lambda: not len(self.host.core.leases), "every lease is given back")

    def check(self) -> None:
        """Raises AssertionError where anything is left of what the test did, but for READY pages."""
        if self._is_cut:
            return
        self.wait_until_unleased()
        core = self.host.core

        def check() -> None:
            check_shard(core)
            core.pool.allocator.check()
            assert all(page.state is PageState.READY for page in core.pool.everything()), "a page is left half-way"

        self.host.inspect(check)

    def close(self) -> None:
        """Ends the transports and what serves them. May be called again."""
        for transport in self._transports:
            transport.close()
        self.served.close()


@contextmanager
def open_world(serve: Callable[[PageHost], Served]) -> Iterator[World]:
    """A world whose shard is reached by what `serve` puts before it; checked at the end of a test that passes."""
    unasked = {"coordinator": {"low_free": 0.0, "high_free": 0.0}}  # room is made when a test asks for it, not before
    with MemoryCluster(device_bytes=ARENA_BYTES, config=unasked) as cluster, ThreadPoolExecutor(4) as pool:
        (host,) = cluster.shards.values()
        watched = WatchedHost(host)
        world = World(cluster, host, watched, serve(watched), pool)
        try:
            yield world
            world.check()
        finally:
            world.close()


class Pause:
    """Where one thread stops, at call number `at`, until another lets it go on."""

    def __init__(self, at: int = 1) -> None:
        self._calls = itertools.count(1)
        self._at = at
        self._reached = threading.Event()
        self._released = threading.Event()

    def __call__(self) -> None:
        if next(self._calls) == self._at:
            self._reached.set()
            assert self._released.wait(BOUND_S), "nobody let it go on"

    def wait_reached(self) -> None:
        assert self._reached.wait(BOUND_S), "it never came there"

    def release(self) -> None:
        self._released.set()


def opaque_spec(*groups: tuple[int, int]) -> KVSpec:
    """A spec with a group of (layers, bytes of a layer) for each pair."""
    first = itertools.accumulate((layers for layers, _ in groups), initial=0)
    return KVSpec(
        "conformance",
        "sha256:0",
        block_tokens=1,
        groups=tuple(
            Group(tuple(range(at, at + layers)), (Plane.opaque("bytes", nbytes),))
            for at, (layers, nbytes) in zip(first, groups, strict=False)
        ),
    )


class Content:
    """Pages of a spec, in an order of their own, with bytes that no two layers share."""

    def __init__(self, world: World, spec: KVSpec, keys: Sequence[PageKey], *, seed: int = 0) -> None:
        self._world = world
        self.spec = spec
        self.keys = tuple(keys)
        self.namespace = spec.namespace(ONE)
        draw = random.Random(seed)
        self.layers = {
            key: [draw.randbytes(spec.layer_bytes(key.group, key.part)) for _ in range(key.part.layers)] for key in keys
        }

    @classmethod
    def of(cls, world: World, pages: int, layers: int, layer_bytes: int, *, first: int = 0) -> Content:
        """`pages` pages of one group, of blocks numbered from `first` on."""
        spec = opaque_spec((layers, layer_bytes))
        return cls(world, spec, [PageKey(block(first + at), 0, spec.whole(0)) for at in range(pages)], seed=first)

    def write_request(self, *, wait_ns: int = 0, keys: Sequence[PageKey] | None = None) -> WriteRequest:
        pages = tuple(NewPage(key, block(0), 1) for key in (self.keys if keys is None else keys))
        return WriteRequest(self.namespace, self._world.attempt(), self._world.epoch, pages, wait_ns)

    def wants(self) -> list[PageWant]:
        """Every layer of every page."""
        return [PageWant(key, 0, key.part.layers) for key in self.keys]

    def read_request(self, wants: Sequence[PageWant] | None = None) -> ReadRequest:
        wanted = tuple(self.wants() if wants is None else wants)
        return ReadRequest(self.namespace, self._world.attempt(), self._world.epoch, wanted)


def block(number: int) -> BlockHash:
    """The hash of a block, as far as a shard can tell."""
    return BlockHash(number.to_bytes(HASH_BYTES, "big"))


class ContentSource:
    """Hands a request's pages out from one buffer, which every further call overwrites: nothing may be kept.

    `before_send` is called before every piece. The checksums of the items in `lies_about` are wrong.
    """

    def __init__(
        self,
        content: Content,
        request: WriteRequest,
        before_send: Callable[[], object] = lambda: None,
        *,
        lies_about: Sequence[int] = (),
    ) -> None:
        self._content = content
        self._keys = [page.key for page in request.pages]
        self._before_send = before_send
        self._buffer = bytearray(max([content.spec.page_bytes(key.group, key.part) for key in self._keys], default=0))
        self._lies_about = lies_about
        self.sent: list[int] = []  # the item of each piece
        self.drained_calls = 0

    def layer_bytes(self, item: int) -> int:
        key = self._keys[item]
        return self._content.spec.layer_bytes(key.group, key.part)

    def send(self, item: int, layer: int, layers: int) -> tuple[Sequence[int], memoryview]:
        self._before_send()
        self.sent.append(item)
        key = self._keys[item]
        data = b"".join(self._content.layers[key][layer : layer + layers])
        self._buffer[: len(data)] = data
        view = memoryview(self._buffer)[: len(data)]
        sums = checksum.layer_sums(checksum.identity(self._content.namespace, key, codec.RAW), layer, layers, view)
        return [layer_sum ^ (item in self._lies_about) for layer_sum in sums], view

    def drained(self) -> None:
        self.drained_calls += 1
        self._buffer[:] = bytes(len(self._buffer))


class ContentSink:
    """Verifies and keeps what comes for a request. `after_receive` is called after every piece."""

    def __init__(self, content: Content, request: ReadRequest, after_receive: Callable[[], object] = lambda: None):
        self._content = content
        self._wants = request.wants
        self._after_receive = after_receive
        self.got: dict[tuple[int, int], bytes] = {}
        self.corrupt: list[tuple[int, int]] = []

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: memoryview) -> None:
        key = self._wants[item].key
        identity = checksum.identity(self._content.namespace, key, codec_id)
        nbytes = self._content.spec.layer_bytes(key.group, key.part)
        assert data.nbytes == nbytes * len(sums), "whole layers"
        for at, expected in enumerate(sums, layer):
            copy = bytes(data[(at - layer) * nbytes : (at - layer + 1) * nbytes])
            assert (item, at) not in self.got, "every layer comes once"
            if checksum.layer_sum(identity, at, copy) == expected:
                self.got[item, at] = copy
            else:
                self.corrupt.append((item, at))
        self._after_receive()

    def check(self, without: Sequence[int] = ()) -> None:
        """Raises AssertionError unless exactly what was wanted has come, but for these items."""
        wanted = {
            (item, layer): self._content.layers[want.key][layer]
            for item, want in enumerate(self._wants)
            if item not in without
            for layer in range(want.layer_start, want.layer_stop)
        }
        assert self.got.keys() == wanted.keys(), "exactly the layers that were asked for"
        assert self.got == wanted, "the bytes that were stored"
