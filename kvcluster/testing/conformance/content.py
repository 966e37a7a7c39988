"""What the claims move: pages with different bytes, a source that allows no more than its contract, and a sink that
verifies everything; and the few calls that the claims consist of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Group, Plane
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, Epoch
from kvcluster.core.messages import NewPage, PageKey, PageWant, ReadRequest, RefusedKind, WriteRequest, Written
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum, codec
from kvcluster.testing.cluster import RecordSource
from kvcluster.testing.conformance.world import ONE, Pause, World, soon
from kvcluster.transport.base import (
    DataPath,
    Deadline,
    Payload,
    RefusedByShard,
    Transport,
    Unavailable,
    read_whole,
    run_to_completion,
)
from kvcluster.transport.worker_exchange import RecordSink

Pieces = Generator[None, None, list[Miss | None]]

Came = dict[tuple[int, int], tuple[int, int, bytes]]
"""What arrived, by item and layer, counted from its page's first: codec, checksum and bytes."""


class Asker(Protocol):
    """Provides the attempts and the shard's epoch for requests: a World, or a stand-in for one."""

    @property
    def epoch(self) -> Epoch: ...

    def attempt(self) -> Attempt:
        """Returns an attempt that was never used."""


def opaque_spec(layers: int, layer_bytes: int) -> KVSpec:
    """Returns a spec of one group, whose layers have any number of bytes."""
    group = Group(tuple(range(layers)), (Plane.opaque("bytes", layer_bytes),))
    return KVSpec("conformance", "sha256:0", block_tokens=1, groups=(group,))


class Content:
    """Pages of a spec in a given order; no two layers have the same bytes."""

    def __init__(self, asker: Asker, spec: KVSpec, keys: Sequence[PageKey], *, seed: int = 0) -> None:
        self._asker = asker
        self.spec = spec
        self.keys = tuple(keys)
        self.namespace = spec.namespace(ONE)
        draw = random.Random(seed)
        self.layers = {
            key: [draw.randbytes(spec.layer_bytes(key.group, key.part)) for _ in range(key.part.layers)] for key in keys
        }

    @classmethod
    def of(cls, asker: Asker, pages: int, layers: int, layer_bytes: int, *, first: int = 0) -> Content:
        """Returns `pages` pages of one group, of the blocks numbered from `first` on."""
        spec = opaque_spec(layers, layer_bytes)
        return cls(asker, spec, [PageKey(block(first + at), 0, spec.whole(0)) for at in range(pages)], seed=first)

    @classmethod
    def big(cls, asker: Asker, *, first: int = 0) -> Content:
        """Returns more than any transport keeps under way: 16 pages of a frame each."""
        return cls.of(asker, 16, 2, limits.FRAME_BYTES // 2, first=first)

    def write_request(self, *, wait_ns: int = 0, keys: Sequence[PageKey] | None = None) -> WriteRequest:
        pages = tuple(NewPage(key, block(0), 1) for key in (self.keys if keys is None else keys))
        return WriteRequest(self.namespace, self._asker.attempt(), self._asker.epoch, pages, wait_ns)

    def wants(self) -> list[PageWant]:
        """Returns wants for every layer of every page."""
        return [PageWant(key, 0, key.part.layers) for key in self.keys]

    def read_request(self, wants: Sequence[PageWant] | None = None) -> ReadRequest:
        wanted = tuple(self.wants() if wants is None else wants)
        return ReadRequest(self.namespace, self._asker.attempt(), self._asker.epoch, wanted)


def block(number: int) -> BlockHash:
    """Returns a block hash that a shard accepts."""
    return BlockHash(number.to_bytes(HASH_BYTES, "big"))


class ContentSource(RecordSource):
    """Sends a request's pages from one buffer, which every further call overwrites: the receiver must not keep views.

    `before_copy` is called before every piece. The checksums of the items in `lies_about` are wrong.
    """

    def __init__(
        self,
        content: Content,
        request: WriteRequest,
        before_copy: Callable[[], object] = lambda: None,
        *,
        lies_about: Sequence[int] = (),
    ) -> None:
        self._content = content
        self._keys = [page.key for page in request.pages]
        self._before_copy = before_copy
        self._lies_about = lies_about
        self.copied: list[int] = []  # the item of each piece
        self.drained_calls = 0

    def layer_bytes(self, item: int) -> int:
        key = self._keys[item]
        return self._content.spec.layer_bytes(key.group, key.part)

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        self._before_copy()
        self.copied.append(item)
        key = self._keys[item]
        into[:] = b"".join(self._content.layers[key][layer : layer + layers])
        sums = checksum.layer_sums(checksum.identity(self._content.namespace, key, codec.RAW), layer, layers, into)
        return [layer_sum ^ (item in self._lies_about) for layer_sum in sums]

    def drained(self) -> None:
        self.drained_calls += 1


class ContentSink(RecordSink):
    """Keeps and verifies what arrives for a request. `after_receive` is called after every piece."""

    def __init__(self, content: Content, request: ReadRequest, after_receive: Callable[[], object] = lambda: None):
        self._content = content
        self._wants = request.wants
        self._after_receive = after_receive
        self.came: Came = {}
        self.corrupt: list[tuple[int, int]] = []

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        key = self._wants[item].key
        identity = checksum.identity(self._content.namespace, key, codec_id)
        nbytes = data.nbytes // len(sums)
        raw = self._content.spec.layer_bytes(key.group, key.part)
        assert data.nbytes == len(sums) * (raw if codec_id == codec.RAW else nbytes), "whole layers"
        for at, expected in enumerate(sums, layer):
            copy = bytearray(nbytes)
            read_whole(data, memoryview(copy))
            assert (item, at) not in self.came or (item, at) in self.corrupt, "every layer comes once"
            self.came[item, at] = codec_id, expected, bytes(copy)
            if checksum.layer_sum(identity, at, bytes(copy)) != expected:
                self.corrupt.append((item, at))
        self._after_receive()

    @property
    def got(self) -> dict[tuple[int, int], bytes]:
        """What has arrived and is not corrupt."""
        return {place: data for place, (_, _, data) in self.came.items() if place not in self.corrupt}

    def check(self, without: Sequence[int] = ()) -> None:
        """Raises AssertionError unless exactly what was wanted has arrived, except for these items."""
        wanted = {
            (item, layer): self._content.layers[want.key][layer]
            for item, want in enumerate(self._wants)
            if item not in without
            for layer in range(want.layer_start, want.layer_stop)
        }
        assert self.got.keys() == wanted.keys(), "exactly the layers that were asked for"
        assert self.got == wanted, "the bytes that were stored"


@dataclass(slots=True)
class ActiveRead:
    """A load under way. Iterating over `pieces` drives it."""

    request: ReadRequest
    pieces: Pieces
    sink: ContentSink

    def finish(self) -> list[Miss | None]:
        """Reads to the end and returns the outcome."""
        return run_to_completion(self.pieces)


def read(
    transport: Transport,
    content: Content,
    wants: Sequence[PageWant] | None = None,
    *,
    accept: Loss = Loss.EXACT,
    after_receive: Callable[[], object] = lambda: None,
    deadline: Deadline | None = None,
) -> ActiveRead:
    """Returns a load that has not begun."""
    request = replace(content.read_request(wants), accept=accept)
    sink = ContentSink(content, request, after_receive)
    return ActiveRead(request, transport.read(request, sink, deadline or soon()), sink)


def read_begun(transport: Transport, content: Content) -> ActiveRead:
    """Returns a load whose first piece has arrived."""
    reading = read(transport, content)
    next(reading.pieces)
    return reading


def load(transport: Transport, content: Content, wants: Sequence[PageWant] | None = None) -> list[MissReason | None]:
    """Loads these wants, all by default, and checks that what did not miss is correct and complete. Returns for each
    why it missed, or None."""
    reading = read(transport, content, wants)
    outcome = reading.finish()
    reading.sink.check(without=[item for item, miss in enumerate(outcome) if miss is not None])
    return [None if miss is None else miss.reason for miss in outcome]


def write(
    transport: Transport,
    content: Content,
    before_copy: Callable[[], object] = lambda: None,
    *,
    lies_about: Sequence[int] = (),
    wait_ns: int = 0,
    deadline: Deadline | None = None,
) -> list[Written]:
    """Attaches and stores all pages; returns the outcome."""
    transport.attach(content.spec, soon())
    request = content.write_request(wait_ns=wait_ns)
    source = ContentSource(content, request, before_copy, lies_about=lies_about)
    return transport.write(request, source, deadline or soon())


def write_begun(
    world: World, transport: Transport, content: Content, *, at: int = 1
) -> tuple[Future[list[Written]], Pause]:
    """Returns a store of all pages on another thread, which stands still before its piece number `at` until the pause
    is released."""
    pause = Pause(at)
    under_way = world.meanwhile(lambda: write(transport, content, pause))
    pause.wait_reached()
    return under_way, pause


def store(transport: Transport, content: Content) -> None:
    """Stores all pages; raises AssertionError unless all are committed."""
    assert write(transport, content) == [Written.COMMITTED] * len(content.keys)


def stored(world: World, content: Content | None = None) -> tuple[Transport, Content]:
    """Stores these pages, by default those of Content.big; returns the transport, and what is stored."""
    transport, content = world.open(), content or Content.big(world)
    store(transport, content)
    return transport, content


@contextmanager
def unavailable(reason: MissReason) -> Iterator[pytest.ExceptionInfo[Unavailable]]:
    """Raises AssertionError unless the block raises Unavailable for this reason."""
    with pytest.raises(Unavailable) as trouble:
        yield trouble
    assert trouble.value.miss.reason is reason


@contextmanager
def refused(kind: RefusedKind) -> Iterator[None]:
    """Raises AssertionError unless the block raises RefusedByShard of this kind."""
    with pytest.raises(RefusedByShard) as refusal:
        yield
    assert refusal.value.refused.kind is kind


class Stop(Exception):
    """What a caller's own code raises."""


def stop_at(number: int) -> Callable[[], None]:
    """Returns a function that raises Stop at its call of that number."""
    calls = itertools.count(1)

    def call() -> None:
        if next(calls) == number:
            raise Stop

    return call


def page_calls(path: DataPath, content: Content, deadline: Callable[[], Deadline] = soon) -> list[Callable[[], object]]:
    """Returns a load and a store that send nothing, to be made in turn."""
    reading, writing = content.read_request(), content.write_request()
    return [
        lambda: list(path.read(reading, ContentSink(content, reading, stop_at(1)), deadline())),
        lambda: path.write(writing, ContentSource(content, writing, stop_at(1)), deadline()),
    ]


def every_call(
    transport: Transport, content: Content, deadline: Callable[[], Deadline] = soon
) -> list[Callable[[], object]]:
    """Returns an attach, the calls of `page_calls`, a flush and a report of suspects, to be made in turn."""
    request = content.read_request()
    return [
        lambda: transport.attach(content.spec, deadline()),
        *page_calls(transport, content, deadline),
        lambda: transport.flush(deadline()),
        lambda: transport.suspect(request.namespace, request.epoch, content.keys, deadline()),
    ]
