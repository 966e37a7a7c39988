"""What is moved: pages with bytes of their own, a source that allows no more than its contract, and a sink that
verifies everything; and the few calls that the claims are made of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcluster.core import limits
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, Epoch
from kvcluster.core.messages import NewPage, PageKey, PageWant, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import Group, KVSpec, Plane
from kvcluster.pages import checksum, codec
from kvcluster.testing.conformance.world import ONE, soon
from kvcluster.transport.base import DataPath, Deadline, Payload, Transport, read_whole

Pieces = Generator[None, None, list[Miss | None]]


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


class ContentSource:
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


class ContentSink:
    """Verifies and keeps what arrives for a request. `after_receive` is called after every piece."""

    def __init__(self, content: Content, request: ReadRequest, after_receive: Callable[[], object] = lambda: None):
        self._content = content
        self._wants = request.wants
        self._after_receive = after_receive
        self.got: dict[tuple[int, int], bytes] = {}
        self.corrupt: list[tuple[int, int]] = []

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        key = self._wants[item].key
        identity = checksum.identity(self._content.namespace, key, codec_id)
        nbytes = self._content.spec.layer_bytes(key.group, key.part)
        assert data.nbytes == nbytes * len(sums), "whole layers"
        for at, expected in enumerate(sums, layer):
            copy = bytearray(nbytes)
            read_whole(data, memoryview(copy))
            assert (item, at) not in self.got, "every layer comes once"
            if checksum.layer_sum(identity, at, bytes(copy)) == expected:
                self.got[item, at] = bytes(copy)
            else:
                self.corrupt.append((item, at))
        self._after_receive()

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
        while True:
            try:
                next(self.pieces)
            except StopIteration as end:
                outcome: list[Miss | None] = end.value
                return outcome


def read(
    transport: Transport,
    content: Content,
    wants: Sequence[PageWant] | None = None,
    *,
    after_receive: Callable[[], object] = lambda: None,
    deadline: Deadline | None = None,
) -> ActiveRead:
    """Returns a load that has not begun."""
    request = content.read_request(wants)
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
    wait_ns: int = 0,
    deadline: Deadline | None = None,
) -> list[Written]:
    """Attaches and stores all pages; returns the outcome."""
    transport.attach(content.spec, soon())
    request = content.write_request(wait_ns=wait_ns)
    return transport.write(request, ContentSource(content, request, before_copy), deadline or soon())


def store(transport: Transport, content: Content) -> None:
    """Stores all pages; raises AssertionError unless all are committed."""
    assert write(transport, content) == [Written.COMMITTED] * len(content.keys)


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
