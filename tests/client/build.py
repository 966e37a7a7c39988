"""Builders for tests of the client: small specs, prompts, KV of random bits, and ways to hold a thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kvcluster.client.client import Client
from kvcluster.core.groups import Part
from kvcluster.core.ids import Caller, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    CoordinatorQuestion,
    PageKey,
    ReadRequest,
    Reply,
    ShardAddress,
    WriteRequest,
)
from kvcluster.core.messages import Written as Outcome
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster
from kvcluster.testing.cluster import RecordSource
from kvcluster.transfers.transfer import Loaded, Pinned
from kvcluster.transport.base import Deadline, PageSink, PageSource, Payload, Streams, Transport
from kvcluster.transport.worker_exchange import RecordSink
from tests.records import copied, pass_on

BOUND_S = 20.0
"""How long anything may take before a test fails; nothing is expected to take a tenth of it."""

LAYERS, HEADS, DIM, BLOCK = 3, 4, 8, 4
UNWRITTEN = 0x5A
"""What destinations are filled with, so that a byte written by mistake shows."""


def spec_of(**settings: Any) -> KVSpec:
    """A spec small enough that a page is a few KiB."""
    return KVSpec.uniform(
        **{
            "model": "tiny",
            "weights": "sha256:1",
            "num_layers": LAYERS,
            "num_kv_heads": HEADS,
            "head_dim": DIM,
            "dtype": "float32",
            "block_tokens": BLOCK,
            **settings,
        }
    )


SPEC = spec_of()
PAGE_BYTES = SPEC.page_bytes(0, SPEC.whole(0))


def prompt(blocks: int, seed: int = 0, *, rest: int = 0, block_tokens: int = BLOCK) -> list[int]:
    """Tokens of that many blocks, and `rest` that fill none."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(blocks * block_tokens + rest)]


def noise(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits: what moves them must not care whether they are numbers."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = prod(shape) * dtype.itemsize
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(*shape)


def blank(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A destination in which nothing has been written yet."""
    return torch.full((prod(shape) * dtype.itemsize,), UNWRITTEN, dtype=torch.uint8).view(dtype).view(*shape)


def shape_of(blocks: int, spec: KVSpec = SPEC, part: Part | None = None) -> list[int]:
    """Returns the shape of a dense tensor of that part of the only group, by default the whole group."""
    part, plane = part or spec.whole(0), spec.groups[0].planes[0]
    return [blocks, part.layers, len(spec.groups[0].planes), spec.block_tokens, part.heads, plane.dim]


def kv(blocks: int, seed: int = 0, spec: KVSpec = SPEC, part: Part | None = None) -> torch.Tensor:
    """The KV of a prompt, dense."""
    return noise(shape_of(blocks, spec, part), getattr(torch, spec.groups[0].planes[0].dtype), seed)


def room(blocks: int, spec: KVSpec = SPEC, part: Part | None = None) -> torch.Tensor:
    """Returns a dense tensor into which the KV of a prompt can be loaded."""
    return blank(shape_of(blocks, spec, part), getattr(torch, spec.groups[0].planes[0].dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, whatever the bits mean."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def unwritten(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == UNWRITTEN).all())


def ended(client: Client) -> bool:
    """Waits until every store so far has ended. A flush is False where one of them has missed, and the next is not."""
    return client.flush(deadline_ms=BOUND_S * 1e3) or client.flush(deadline_ms=BOUND_S * 1e3)


def missed(miss: Miss, blocks: range, nbytes: int = 0) -> Loaded:
    """A load whose blocks before `blocks` have come, and none of these."""
    return Loaded(blocks.start, nbytes, miss, dict.fromkeys(blocks, miss))


def pinned(blocks: int) -> Pinned:
    """Returns the answer for that many blocks that are pinned, or are no longer."""
    return Pinned(blocks * BLOCK, blocks)


def counters(client: Client) -> dict[str, Any]:
    """Returns all counters of the cluster's questions and moves."""
    status = client.status()
    return {"coordinator": status["counters"], **{s["shard"]: s["counters"] for s in status["shards"]}}


class Hold:
    """Blocks threads, from call number `at` on, until the test lets them go on."""

    def __init__(self, at: int = 1) -> None:
        self.calls = 0
        self._at = at
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            self.calls += 1
            stop = self.calls >= self._at
        if stop:
            self._reached.set()
            assert self._open.wait(BOUND_S), "no test let it go on"

    def wait_reached(self) -> None:
        assert self._reached.wait(BOUND_S), "it never came there"

    def let_go(self) -> None:
        self._open.set()


def _nothing() -> None:
    """Does nothing, the default of a step."""


@dataclass
class Steps:
    """What a test does at each step of a transport: before the spec is named, a load, a layer's arrival, a store, a
    layer's departure, a flush and a report, and after the shard has answered a store. `streams` is what it says of
    itself."""

    attach: Callable[[], None] = _nothing
    read: Callable[[], None] = _nothing
    receive: Callable[[], None] = _nothing
    write: Callable[[], None] = _nothing
    send: Callable[[], None] = _nothing
    written: Callable[[], None] = _nothing
    flush: Callable[[], None] = _nothing
    suspect: Callable[[], None] = _nothing
    streams: int = 1


class Watched:
    """A transport whose steps are watched. Once closed it serves no call, like a closed connection."""

    def __init__(self, inner: Transport, steps: Steps) -> None:
        self.name = inner.name
        self.streams = Streams(steps.streams, steps.streams, steps.streams)
        self._inner = inner
        self._steps = steps
        self._closed = False

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        assert not self._closed
        self._steps.attach()
        return self._inner.attach(spec, deadline, owner)

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        assert not self._closed
        self._steps.read()
        with closing(self._inner.read(request, _Sink(sink, self._steps), deadline)) as progress:
            return (yield from progress)

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Outcome]:
        assert not self._closed
        self._steps.write()
        outcome = self._inner.write(request, _Source(source, self._steps), deadline)
        self._steps.written()
        return outcome

    def flush(self, deadline: Deadline) -> bool:
        assert not self._closed
        self._steps.flush()
        return self._inner.flush(deadline)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        assert not self._closed
        self._steps.suspect()
        self._inner.suspect(namespace, epoch, keys, deadline)

    def close(self) -> None:
        self._closed = True
        self._inner.close()


class _Sink(RecordSink):
    def __init__(self, inner: PageSink, steps: Steps) -> None:
        self._inner = inner
        self._steps = steps

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        self._steps.receive()
        pass_on(self._inner, item, layer, codec, sums, data)


class _Source(RecordSource):
    def __init__(self, inner: PageSource, steps: Steps) -> None:
        self._inner = inner
        self._steps = steps

    def layer_bytes(self, item: int) -> int:
        return self._inner.layer_bytes(item)

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        self._steps.send()
        return copied(self._inner, item, layer, layers, into)

    def drained(self) -> None:
        self._inner.drained()


class Port:
    """A way to the coordinator that a test can bend: `before` a question goes out, and `after` it was stepped."""

    def __init__(self, cluster: MemoryCluster, tenant: str = "default") -> None:
        self._inner = cluster.port(tenant)
        self.asked: list[CoordinatorQuestion] = []
        self.deadlines: list[Deadline] = []
        self.before: Callable[[CoordinatorQuestion], None] = lambda question: None
        self.after: Callable[[CoordinatorQuestion], None] = lambda question: None

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        self.asked.append(question)
        self.deadlines.append(deadline)
        self.before(question)
        reply = self._inner.ask(question, deadline, namespace)
        self.after(question)
        return reply

    def cut_off(self) -> None:
        self._inner.cut_off()

    def close(self) -> None:
        self._inner.close()


DEFAULT = Caller(Tenant("default"), operator=True)


def watched_client(
    cluster: MemoryCluster,
    steps: Steps | None = None,
    spec: KVSpec = SPEC,
    *,
    caller: Caller = DEFAULT,
    **options: Any,
) -> Client:
    """A client whose port and transports a test may replace. Its caller closes it."""
    port = options.pop("port", None) or cluster.port_of(lambda: caller)
    open_transport = cluster.opener_of(caller)

    def opener(shard: ShardAddress) -> Transport:
        return Watched(open_transport(shard), steps or Steps())

    return Client(port, opener, spec, config=options.pop("config", cluster.config.client), **options)
