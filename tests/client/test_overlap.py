"""Concurrency: shards and streams of one transfer, stores that wait for one another, and as few questions as
possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.core.groups import Group, Plane
from kvcluster.core.messages import (
    CoordinatorQuestion,
    EndTicket,
    PrepareLoad,
    PrepareStore,
    ReadRequest,
    Refused,
    RefusedKind,
    ShardAddress,
    WriteRequest,
)
from kvcluster.core.messages import Written as Outcome
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.shard_health import Permit, ShardHealth
from kvcluster.transfers.transfer import Loaded, Stored
from kvcluster.transport.base import (
    Deadline,
    PageSink,
    PageSource,
    Payload,
    RefusedByShard,
    Streams,
    Transport,
    Unavailable,
)
from kvcluster.transport.worker_exchange import RecordSink
from tests.client.build import (
    BLOCK,
    BOUND_S,
    DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Hold,
    Port,
    Steps,
    Watched,
    ended,
    kv,
    noise,
    prompt,
    room,
    same,
    unwritten,
    watched_client,
)
from tests.client.conftest import Start
from tests.records import pass_on

BLOCKS = 6
TOKENS = prompt(BLOCKS)
LOST = Miss(MissReason.SHARD_LOST, "gone")


@pytest.fixture(autouse=True)
def pages_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough for a stream each."""
    monkeypatch.setattr(limits, "STREAM_BYTES", PAGE_BYTES)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", PAGE_BYTES)


@pytest.fixture
def alone(start: Start) -> MemoryCluster:
    """One shard, which has TOKENS."""
    return filled(start(shards=1, ram_bytes="1MiB"))


@pytest.fixture
def spread(start: Start) -> MemoryCluster:
    """Two shards, over which the blocks of TOKENS are spread singly."""
    cluster = filled(start(shards=2, ram_bytes="1MiB", config={"coordinator": {"run_blocks": 1}}))
    assert all(len(host.core.pool) for host in cluster.shards.values())
    return cluster


def filled(cluster: MemoryCluster) -> MemoryCluster:
    client = cluster.client(SPEC)
    assert client.store(TOKENS, kv(BLOCKS)).blocks == BLOCKS
    assert client.flush()
    return cluster


class Noting(Watched):
    """Notes what is asked of a shard. Its bench may refuse a request, and hold back all but the first layers."""

    def __init__(self, inner: Transport, bench: Bench) -> None:
        super().__init__(inner, bench.steps)
        self._bench = bench

    def read(self, request: ReadRequest, sink: PageSink, deadline: Deadline):  # type: ignore[no-untyped-def]
        self._bench.reads.append(request)
        self._bench.bend(request)
        return super().read(request, _Gated(sink, self._bench), deadline)

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Outcome]:
        self._bench.writes.append(request)
        self._bench.bend(request)
        return super().write(request, source, deadline)


class _Gated(RecordSink):
    def __init__(self, inner: PageSink, bench: Bench) -> None:
        self._inner = inner
        self._bench = bench

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        if layer:
            self._bench.behind_the_first_layer()
        pass_on(self._inner, item, layer, codec, sums, data)


class Bench:
    """A client whose exchanges are recorded, with open connections to all shards."""

    def __init__(self, cluster: MemoryCluster, *, streams: int = 1, spec: KVSpec = SPEC, warm: bool = True) -> None:
        self.steps = Steps(streams=streams)
        self.port = Port(cluster)
        self.reads: list[ReadRequest] = []
        self.writes: list[WriteRequest] = []
        self.bend: Callable[[ReadRequest | WriteRequest], None] = lambda request: None
        self.behind_the_first_layer: Callable[[], None] = lambda: None
        open_transport = cluster.opener()

        def opener(shard: ShardAddress) -> Transport:
            return Noting(open_transport(shard), self)

        self.client = Client(self.port, opener, spec, config=cluster.config.client)
        if warm:
            assert self.client.load(TOKENS, room(BLOCKS)) == BLOCKS * BLOCK
            cluster.wait_until(cluster.idle)
            self.reads.clear()
            self.port.asked.clear()

    def asked(self, *kinds: type) -> list[CoordinatorQuestion]:
        return [message for message in self.port.asked if isinstance(message, kinds)]


@contextmanager
def bench_of(cluster: MemoryCluster, **options: Any) -> Iterator[Bench]:
    bench = Bench(cluster, **options)
    with bench.client:
        yield bench


def meeting(parties: int) -> Callable[[], None]:
    """A barrier: this many threads must arrive, or none goes on."""
    barrier = threading.Barrier(parties)
    return lambda: barrier.wait(BOUND_S) and None


# --------------------------------------------------------------------------------------------------- loads


def test_a_load_reads_one_shard_by_as_many_exchanges_at_once_as_its_transport_likes(alone: MemoryCluster) -> None:
    into = room(BLOCKS)
    with bench_of(alone, streams=3) as bench:
        bench.steps.read = meeting(3)
        assert bench.client.load(TOKENS, into) == BLOCKS * BLOCK
        shares = [[want.key.hash for want in request.wants] for request in bench.reads]
        hashes = bench.client.hashes(TOKENS)
    assert sorted(shares, key=lambda share: hashes.index(share[0])) == [hashes[:2], hashes[2:4], hashes[4:]]
    assert len({request.attempt for request in bench.reads}) == 3, "a lease each"
    assert same(into, kv(BLOCKS))


def test_a_small_load_is_not_divided(alone: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_BYTES", BLOCKS * PAGE_BYTES)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", BLOCKS * PAGE_BYTES)
    with bench_of(alone, streams=3) as bench:
        assert bench.client.load(TOKENS, room(BLOCKS)) == BLOCKS * BLOCK
    assert [len(request.wants) for request in bench.reads] == [BLOCKS]


def test_the_first_load_from_a_shard_of_which_nothing_is_known_is_not_divided(alone: MemoryCluster) -> None:
    with bench_of(alone, streams=3, warm=False) as bench:
        for _ in range(2):
            assert bench.client.load(TOKENS, room(BLOCKS)) == BLOCKS * BLOCK
    assert len(bench.reads) == 1 + 3


@pytest.mark.parametrize("streams", [1, 2])
def test_with_any_streams_the_first_layer_is_there_while_the_others_come(
    alone: MemoryCluster, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    for bound in ("FRAME_BYTES", "RECORD_BYTES"):
        monkeypatch.setattr(limits, bound, 1)
    hold, into = Hold(), room(BLOCKS)
    with bench_of(alone, streams=streams) as bench, bench.client.prepare_load(bench.client.hashes(TOKENS)) as ticket:
        bench.behind_the_first_layer = hold
        transfer = bench.client.begin_load(ticket, into)
        assert transfer.wait_layer(0)
        assert same(into[:, :1], kv(BLOCKS)[:, :1]) and unwritten(into[:, 1:])
        assert not transfer.done() and not any(transfer.layer_done(layer) for layer in range(1, LAYERS))
        hold.let_go()
        assert transfer.result() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES)
    assert len(bench.reads) == streams
    assert same(into, kv(BLOCKS))


def test_of_a_stream_that_fails_only_its_own_blocks_are_missing(alone: MemoryCluster) -> None:
    into = room(BLOCKS)
    with bench_of(alone, streams=2) as bench, bench.client.prepare_load(bench.client.hashes(TOKENS)) as ticket:
        last = ticket.hashes[-1]

        def fail(request: ReadRequest | WriteRequest) -> None:
            if isinstance(request, ReadRequest) and any(want.key.hash == last for want in request.wants):
                raise Unavailable(LOST)

        bench.bend = fail
        loaded = bench.client.begin_load(ticket, into).result()
    half = BLOCKS // 2
    assert loaded == Loaded(half, half * PAGE_BYTES, LOST, dict.fromkeys(range(half, BLOCKS), LOST))
    assert same(into[:half], kv(BLOCKS)[:half]) and unwritten(into[half:])


def test_a_shard_that_has_failed_is_tried_by_one_exchange(alone: MemoryCluster) -> None:
    now = [0]
    open_transport = alone.opener()
    policy = ShardHealth(breaker_failures=1, breaker_ms=1)
    shards = ShardConnections(
        lambda shard: Watched(open_transport(shard), Steps(streams=3)), policy, threading.RLock(), clock=lambda: now[0]
    )
    ((name, host),) = alone.shards.items()
    address = ShardAddress(name, host.core.epoch, name)
    assert shards.streams(address) == Streams(1, 1, 1), "nothing is known of it"
    client = alone.client(SPEC)
    namespace = client._control.namespace(SPEC, Deadline.after_ms(1e3))
    shards.suspect(address, SPEC, namespace, [], Deadline.after_ms(1e3))
    assert shards.streams(address) == Streams(3, 3, 3)
    permit = policy.permit(address, now[0])
    assert isinstance(permit, Permit)
    policy.failed(permit, LOST, now[0])
    now[0] += 10**9
    assert shards.streams(address) == Streams(1, 1, 1)
    shards.suspect(address, SPEC, namespace, [], Deadline.after_ms(1e3))
    assert shards.streams(address) == Streams(3, 3, 3), "it has answered"
    shards.close()


# -------------------------------------------------------------------------------------------------- stores


def test_a_store_writes_all_its_shards_at_once(spread: MemoryCluster) -> None:
    tokens, values, into = prompt(16, seed=1), kv(16, 1), room(16)
    with bench_of(spread) as bench:
        bench.steps.write = meeting(2)
        assert bench.client.store(tokens, values) == Stored(16, 0, 0, 16 * PAGE_BYTES)
        assert bench.client.flush()
        assert bench.client.load(tokens, into) == 16 * BLOCK
    assert same(into, values)


def test_a_store_writes_one_shard_by_as_many_exchanges_as_its_transport_likes(alone: MemoryCluster) -> None:
    tokens, into = prompt(BLOCKS, seed=1), room(BLOCKS)
    with bench_of(alone, streams=3) as bench:
        bench.steps.write = meeting(3)
        assert bench.client.store(tokens, kv(BLOCKS, 1)) == Stored(BLOCKS, 0, 0, BLOCKS * PAGE_BYTES)
        assert bench.client.flush()
        assert bench.client.load(tokens, into) == BLOCKS * BLOCK
        hashes = bench.client.hashes(tokens)
    shares = [[page.key.hash for page in request.pages] for request in bench.writes]
    assert sorted(shares, key=lambda share: hashes.index(share[0])) == [hashes[:2], hashes[2:4], hashes[4:]]
    assert len({request.attempt for request in bench.writes}) == 3
    assert same(into, kv(BLOCKS, 1))


def test_streams_gather_from_a_strided_source_at_once(alone: MemoryCluster) -> None:
    """Each into a buffer of its own: none sends what another has gathered."""
    tokens, into = prompt(BLOCKS, seed=1), room(BLOCKS)
    caches = [noise((2, BLOCKS, BLOCK, HEADS, DIM), seed=layer) for layer in range(LAYERS)]
    with bench_of(alone, streams=3) as bench:
        bench.steps.send = meeting(3)
        assert bench.client.store(tokens, Paged.nhd(caches, range(BLOCKS))).blocks == BLOCKS
        bench.steps.send = lambda: None
        assert bench.client.flush()
        assert bench.client.load(tokens, into) == BLOCKS * BLOCK
    assert same(into, torch.stack([cache.permute(1, 0, 2, 3, 4) for cache in caches], 1))


def test_a_block_of_several_pages_is_counted_once_whatever_its_streams(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB")
    planes = (Plane("k", HEADS, DIM, "float32"), Plane("v", HEADS, DIM, "float32"))
    spec = KVSpec(
        model="two", weights="sha256:1", block_tokens=BLOCK, groups=(Group((0, 2), planes), Group((1,), planes))
    )
    tokens = prompt(BLOCKS)
    memory = [noise((BLOCKS, layers, 2, BLOCK, HEADS, DIM)) for layers in (2, 1)]
    with bench_of(cluster, streams=4, spec=spec, warm=False) as bench:
        assert bench.client.store(prompt(1, seed=9), [m[:1] for m in memory]).blocks == 1
        bench.writes.clear()
        assert bench.client.store(tokens, memory) == Stored(BLOCKS, 0, 0, BLOCKS * PAGE_BYTES)
        assert len(bench.writes) == 4
        assert all(len(request.pages) % 2 == 0 for request in bench.writes), "no block in two of them"
        assert bench.client.store(tokens, memory) == Stored(0, BLOCKS, 0, 0)


def test_a_shard_that_fails_costs_a_store_its_own_blocks(spread: MemoryCluster) -> None:
    tokens, failed = prompt(16, seed=1), list[int]()
    with bench_of(spread) as bench:

        def fail(request: ReadRequest | WriteRequest) -> None:
            if isinstance(request, WriteRequest) and not failed:
                failed.append(len(request.pages))
                raise Unavailable(LOST)

        bench.bend = fail
        transfer = bench.client.begin_store(bench.client.hashes(tokens), kv(16))
        stored = transfer.result()
        assert stored == Stored(16 - failed[0], 0, 0, (16 - failed[0]) * PAGE_BYTES, LOST)
        assert transfer.source_free()
        again = bench.client.store(tokens, kv(16))
        assert (again.blocks, again.deduplicated, again.pending) == (failed[0], 16 - failed[0], 0)


def test_what_a_shard_finds_wrong_with_a_store_is_told_when_no_other_reads_the_source(spread: MemoryCluster) -> None:
    refused, ended = list[int](), list[int]()
    with bench_of(spread) as bench:

        def refuse(request: ReadRequest | WriteRequest) -> None:
            if not refused:
                refused.append(1)
                raise RefusedByShard(Refused(RefusedKind.BAD, "for this reason"))

        bench.bend = refuse
        bench.steps.written = lambda: ended.append(1)
        with pytest.raises(CallerError, match="for this reason"):
            bench.client.store(prompt(16, seed=1), kv(16))
        assert ended == [1]


def test_the_source_is_free_when_the_last_shard_has_taken_its_bytes_and_none_has_answered(
    spread: MemoryCluster,
) -> None:
    tokens, hold = prompt(16, seed=1), Hold()
    with bench_of(spread) as bench:
        bench.steps.written = hold
        source = kv(16, 1)
        transfer = bench.client.begin_store(bench.client.hashes(tokens), source)
        spread.wait_until(lambda: hold.calls == 2)
        assert transfer.source_free() and not transfer.done()
        source.zero_()
        hold.let_go()
        assert transfer.result() == Stored(16, 0, 0, 16 * PAGE_BYTES)


# ---------------------------------------------------------------------------------------------- in line


def test_beyond_so_many_stores_one_more_ends_at_once_and_says_so(
    alone: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORES_QUEUED", 2)
    hold = Hold()
    with watched_client(alone, Steps(send=hold)) as client:
        hashes = [client.hashes(prompt(2, seed)) for seed in range(1, 5)]
        waiting = [client.begin_store(hashes[n], kv(2)) for n in range(2)]
        hold.wait_reached()
        refused = client.begin_store(hashes[2], kv(2))
        assert refused.done() and refused.source_free()
        full = Miss(MissReason.FULL, "2 stores of this client wait already; store less often")
        assert refused.result() == Stored(0, 0, 0, 0, full)
        assert not any(transfer.done() for transfer in waiting)
        hold.let_go()
        assert [transfer.result().blocks for transfer in waiting] == [2, 2]
        assert ended(client)
        assert client.store(prompt(2, seed=4), kv(2)).blocks == 2, "there is room again"


def test_beyond_so_many_bytes_in_line_one_more_store_ends_at_once_and_says_so(
    alone: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORES_QUEUED_BYTES", 3 * PAGE_BYTES)
    hold = Hold()
    with watched_client(alone, Steps(send=hold)) as client:
        first = client.begin_store(client.hashes(prompt(4, seed=1)), kv(4))
        hold.wait_reached()
        stored = client.store(prompt(1, seed=2), kv(1))
        assert (stored.blocks, stored.miss and stored.miss.reason) == (0, MissReason.FULL)
        assert stored.miss is not None and "of this client wait already; store less" in stored.miss.detail
        hold.let_go()
        assert first.result().blocks == 4, "one alone may be larger than that"
        assert ended(client)
        two = [client.begin_store(client.hashes(prompt(1, seed)), kv(1)) for seed in (3, 4)]
        assert [transfer.result().blocks for transfer in two] == [1, 1]


def test_stores_begin_in_the_order_in_which_they_came(alone: MemoryCluster) -> None:
    hold = Hold()
    with bench_of(alone) as bench:
        bench.steps.send = hold
        hashes = [bench.client.hashes(prompt(2, seed)) for seed in range(1, 6)]
        transfers = [bench.client.begin_store(of_one, kv(2)) for of_one in hashes]
        hold.wait_reached()
        hold.let_go()
        assert [transfer.result().blocks for transfer in transfers] == [2] * 5
        assert [m.hashes for m in bench.asked(PrepareStore)] == [tuple(of_one) for of_one in hashes]  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- one round trip


def test_a_load_asks_the_coordinator_once_and_each_shard_once(spread: MemoryCluster) -> None:
    attached = Hold(at=10**9)
    with bench_of(spread) as bench:
        bench.steps.attach = attached
        hold = Hold()
        bench.port.before = lambda message: hold() if isinstance(message, EndTicket) else None
        assert bench.client.load(TOKENS, room(BLOCKS)) == BLOCKS * BLOCK
        assert [type(message) for message in bench.port.asked if not isinstance(message, EndTicket)] == [PrepareLoad]
        assert len(bench.reads) == len(spread.shards)
        assert attached.calls == 0
        hold.let_go()
        spread.wait_until(lambda: bool(bench.asked(EndTicket)))


def test_a_store_asks_the_coordinator_once_and_each_shard_once_before_its_outcome(spread: MemoryCluster) -> None:
    hold = Hold()
    with bench_of(spread) as bench:
        bench.port.before = lambda message: hold() if isinstance(message, EndTicket) else None
        tokens = prompt(16, seed=1)
        assert bench.client.store(tokens, kv(16)) == Stored(16, 0, 0, 16 * PAGE_BYTES), "while its ticket lives"
        hold.wait_reached()
        assert [type(message) for message in bench.port.asked] == [PrepareStore, EndTicket]
        assert len(bench.writes) == len(spread.shards)
        hold.let_go()
        assert bench.client.store(tokens, kv(16)) == Stored(0, 16, 0, 0), "and nothing of it is pending"


def test_what_was_not_written_others_may_write_from_the_moment_that_the_outcome_is_told(alone: MemoryCluster) -> None:
    tokens = prompt(2, seed=1)
    with bench_of(alone) as bench:

        def fail(request: ReadRequest | WriteRequest) -> None:
            raise Unavailable(LOST)

        bench.bend = fail
        assert bench.client.store(tokens, kv(2)).miss == LOST
        assert len(bench.asked(EndTicket)) == 1
    assert alone.client(SPEC).store(tokens, kv(2)).blocks == 2


def test_a_store_of_what_is_there_already_has_no_ticket_to_end(alone: MemoryCluster) -> None:
    with bench_of(alone) as bench:
        assert bench.client.store(TOKENS, kv(BLOCKS)) == Stored(0, BLOCKS, 0, 0)
        assert bench.client.flush()
        assert [type(message) for message in bench.port.asked] == [PrepareStore]
