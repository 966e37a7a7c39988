"""An Attend over each path that carries one: the bits of the worker's own attention, or an answer that says why not."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial as partial_of
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcluster import KVSpec, Stored
from kvcluster.attention import (
    PageAddresses,
    PageLayout,
    PageSpan,
    QueryRow,
    Subtree,
    merge,
    partial,
    span_results,
    uses_fused,
)
from kvcluster.attention.span_results import attend_spans, result_bytes, unpack_results
from kvcluster.config import load
from kvcluster.core import limits
from kvcluster.core.attend_work import attend_work
from kvcluster.core.ids import Attempt, BlockHash, Caller, Epoch, NamespaceId, ShardId, SpanId, Tenant
from kvcluster.core.messages import (
    AttendDeclined,
    Attended,
    AttendRequest,
    AttendRow,
    DeclineReason,
    Done,
    Offer,
    Offers,
    RefusedKind,
    RegisterSpans,
    Request,
    ShardAddress,
    SpanBlocks,
    SpanMiss,
    SpansLacking,
    Unpin,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.errors import KVClusterError
from kvcluster.runtime import shard_host
from kvcluster.runtime.compute_pool import ComputePool
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing import MemoryCluster
from kvcluster.transport.attend_session import Attends, SpanResults, ask_to_attend
from kvcluster.transport.auto import own_attempts
from kvcluster.transport.base import ComputeTurn, Deadline, RefusedByShard, Unavailable
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire import shard as wire
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import FrameKind
from tests.resident import resident_bytes

LAYERS, HEADS, DIM, BLOCK, GROUP = 2, 2, 16, 16, 2
SPEC = KVSpec.uniform(
    model="m",
    weights="sha256:1",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype="bfloat16",
    block_tokens=BLOCK,
)
WHOLE = SPEC.whole(0)
CUTS = 3
TOKENS = [(7 * at) % 1000 for at in range(CUTS * CUT_TOKENS)]
CUT_BLOCKS = CUT_TOKENS // BLOCK
TENANT = Tenant("default")
LAYOUT = PageLayout(SPEC.groups[0], BLOCK, LAYERS, HEADS)


MIB = 2**20
SERVERS: dict[str, Any] = {}
"""The servers that this module has opened, by their address."""


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


@dataclass
class Bench:
    """A shard that has TOKENS, whose KV is `pool`, and a path to it. A span of each cut is registered, by its index."""

    host: ShardHost
    path: Attends
    control: MemoryTransport
    pool: Tensor
    hashes: list[BlockHash]
    space: NamespaceId
    attempts: Callable[[], Attempt]
    restore: Callable[[], Stored]
    """Stores what was lost again."""

    def register(self, *spans: SpanBlocks, ended: tuple[int, ...] = (), holder: Any = None) -> None:
        message = RegisterSpans(
            holder or self.attempts().holder, self.host.core.epoch, spans, tuple(map(SpanId, ended))
        )
        self.control.register_spans(self.space, message, soon())

    def cut(self, number: int, span: int | None = None) -> SpanBlocks:
        at = number * CUT_BLOCKS
        return SpanBlocks(
            SpanId(number if span is None else span), 0, WHOLE, at, tuple(self.hashes[at : at + CUT_BLOCKS])
        )

    def request(self, *rows: AttendRow, **settings: Any) -> AttendRequest:
        given = {"layer": 1, "heads": HEADS * GROUP, "dim": DIM, "dtype": "float32", "scale": 0.25} | settings
        return AttendRequest(self.attempts(), self.host.core.epoch, rows=rows, fused=uses_fused(), **given)

    def attend(self, request: AttendRequest, query: Tensor) -> SpanResults:
        data = memoryview(bytearray(query.contiguous().view(torch.uint8).flatten().tolist()))
        return self.path.attend(request, data, soon())

    def expected(self, query: Tensor, position: int, within: Subtree, layer: int = 1) -> tuple[Tensor, Tensor]:
        pages = PageAddresses.from_pool(LAYOUT, self.pool, torch.arange(len(self.hashes), dtype=torch.int32))
        row = QueryRow(range(position, position + len(query)), [PageSpan(pages, 0, len(TOKENS))])
        made = partial(query, [row], LAYOUT, layer, scale=0.25, within=within)
        return made.out, made.lse


def opened(kind: str, host: ShardHost, stack: ExitStack) -> Attends:
    if kind == "memory":
        return MemoryTransport(host, Caller(TENANT))
    server: TcpServer | ShmServer
    path: TcpPages | ShmPages
    if kind == "tcp":
        server = TcpServer(host, lambda token: Caller(TENANT), "127.0.0.1")
        path = TcpPages(server.address, ANONYMOUS)
    else:
        server = ShmServer(host, lambda token: Caller(TENANT))
        path = ShmPages(server.address, ANONYMOUS)
    SERVERS[server.address] = server
    stack.callback(server.close)
    server.start()
    stack.callback(path.close)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(ram_bytes="8MiB") as cluster:
        yield cluster
        cluster.wait_until_idle()
        cluster.check()


@pytest.fixture(scope="module")
def pool(cluster: MemoryCluster) -> Tensor:
    blocks = len(TOKENS) // BLOCK
    values = torch.randn(blocks, LAYERS, 2, BLOCK, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    pool = values.bfloat16()
    client = cluster.client(SPEC)
    assert client.store(TOKENS, pool).blocks == blocks
    assert client.flush()
    return pool


@pytest.fixture(params=["memory", "tcp", "shm"])
def bench(request: pytest.FixtureRequest, cluster: MemoryCluster, pool: Tensor) -> Iterator[Bench]:
    host = cluster.shards[ShardId("shard-0")]
    with ExitStack() as stack:
        client = cluster.client(SPEC)
        stack.callback(client.close)
        control = MemoryTransport(host, Caller(TENANT))
        space = control.attach(SPEC, soon()).namespace
        path = opened(request.param, host, stack)

        def again() -> Stored:
            known = len(client.hashes(TOKENS))
            cluster.wait_until(lambda: host.core.info().pages < known)
            cluster.wait_until(lambda: client.lookup(TOKENS).blocks < known)  # the coordinator has been told
            stored = client.store(TOKENS, pool)
            assert client.flush()
            return stored

        made = Bench(host, path, control, pool, client.hashes(TOKENS), space, own_attempts(), again)
        made.register(*(made.cut(number) for number in range(CUTS)))
        yield made


def asked(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(seed))


def row(position: int, tokens: int, spans: list[int], *subtrees: Subtree) -> AttendRow:
    return AttendRow(position, tokens, tuple(map(SpanId, spans)), tuple((each.level, each.index) for each in subtrees))


def test_results_have_the_bits_of_the_workers_own(bench: Bench) -> None:
    pair, last = Subtree(1, 0), Subtree(0, 2)
    query = asked(3)
    rows = [row(1400, 2, [0, 1, 2], pair, last), row(600, 1, [0, 1], pair)]
    answer, data = bench.attend(bench.request(*rows), query)
    assert isinstance(answer, Attended) and answer.loss is Loss.EXACT
    assert answer.nbytes == data.nbytes == result_bytes(5, HEADS * GROUP, DIM)
    first, second = unpack_results(data, [(2, [pair, last]), (1, [pair])], HEADS * GROUP, DIM)
    for found, (part, position) in zip(
        [*first, *second], [(slice(0, 2), 1400)] * 2 + [(slice(2, 3), 600)], strict=True
    ):
        out, lse = bench.expected(query[part], position, found.subtree)
        assert torch.equal(found.out, out) and torch.equal(found.lse, lse)
    whole = bench.expected(query[:2], 1400, Subtree(2, 0))
    assert torch.equal(merge(first).out, whole[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_query_of_fewer_bits_is_widened(bench: Bench, dtype: str) -> None:
    query = asked(1).to(getattr(torch, dtype))
    answer, data = bench.attend(bench.request(row(700, 1, [0, 1], Subtree(1, 0)), dtype=dtype), query)
    assert isinstance(answer, Attended)
    ((found,),) = unpack_results(data, [(1, [Subtree(1, 0)])], HEADS * GROUP, DIM)
    assert torch.equal(found.out, bench.expected(query, 700, Subtree(1, 0))[0])


def test_nothing_is_pinned_before_and_after_a_compute(bench: Bench) -> None:
    bench.attend(bench.request(row(700, 1, [0], Subtree(0, 0))), asked(1))
    bench.host.inspect(lambda: None)
    assert not any(page.pins for page in bench.host.core.pool.everything())


def test_what_was_read_under_a_lease_that_has_ended_meanwhile_does_not_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.request(row(1500, 1, [0, 1, 2], Subtree(2, 0)))

    def computed(*given: Any, **settings: Any) -> memoryview:
        data = attend_spans(*given, **settings)
        bench.host.ask(partial_of(Request, tenant=TENANT, namespace=None, question=Unpin(request.attempt)), 5.0)
        return data

    monkeypatch.setattr(span_results, "attend_spans", computed)
    with pytest.raises(Unavailable, match="the lease ended"):
        bench.attend(request, asked(1))
    monkeypatch.undo()
    answer, _ = bench.attend(bench.request(row(1500, 1, [0, 1, 2], Subtree(2, 0))), asked(1))
    assert isinstance(answer, Attended)


def test_spans_that_are_not_there_are_named_and_nothing_is_computed(bench: Bench) -> None:
    gone = SpanBlocks(SpanId(50), 0, WHOLE, 0, (BlockHash(b"x" * 32),))
    bench.register(gone)
    request = bench.request(row(700, 1, [0, 50, 99], Subtree(0, 0)))
    answer, data = bench.attend(request, asked(1))
    assert answer == SpansLacking(((SpanId(50), SpanMiss.GONE), (SpanId(99), SpanMiss.UNKNOWN)))
    assert not data.nbytes


def test_a_corrupt_page_is_found_when_its_layer_is_first_attended_to(bench: Bench, cluster: MemoryCluster) -> None:
    request = bench.request(row(700, 1, [0, 1], Subtree(1, 0)), layer=0)
    host = bench.host
    bad = bench.hashes[CUT_BLOCKS + 3]
    half = 8 * SPEC.page_bytes(0, WHOLE) // 2  # layer 1 begins there
    cluster.corrupt(ShardId("shard-0"), block=bad, bit=half + 5)
    try:
        assert isinstance(bench.attend(request, asked(1)).answer, Attended), "layer 0 is as it was"
        answer, _ = bench.attend(replace(request, layer=1, attempt=bench.attempts()), asked(1))
        assert answer == SpansLacking(((SpanId(1), SpanMiss.CORRUPT),))
        assert host.core.info().counters and dict(host.core.info().counters)["suspected"] > 0
        again, _ = bench.attend(replace(request, layer=1, attempt=bench.attempts()), asked(1))
        assert isinstance(again, SpansLacking)
    finally:
        assert bench.restore().blocks == 1


def test_another_worker_does_not_reach_these_spans(bench: Bench) -> None:
    stranger = replace(bench.request(row(700, 1, [0], Subtree(0, 0))), attempt=own_attempts()())
    answer, _ = bench.attend(stranger, asked(1))
    assert answer == SpansLacking(((SpanId(0), SpanMiss.UNKNOWN),))


def test_a_worker_of_another_arithmetic_is_declined(bench: Bench) -> None:
    request = replace(bench.request(row(700, 1, [0], Subtree(0, 0))), fused=not uses_fused())
    answer, _ = bench.attend(request, asked(1))
    assert isinstance(answer, AttendDeclined) and answer.reason is DeclineReason.ARITHMETIC


def test_another_incarnation_is_refused(bench: Bench) -> None:
    request = replace(bench.request(row(700, 1, [0], Subtree(0, 0))), epoch=Epoch(bench.host.core.epoch - 1))
    with pytest.raises(RefusedByShard) as refused:
        bench.attend(request, asked(1))
    assert refused.value.refused.kind is RefusedKind.STALE


HOSTILE: dict[str, tuple[dict[str, Any], AttendRow, str]] = {
    "a layer that it does not have": ({"layer": 2}, row(700, 1, [0], Subtree(0, 0)), "layer 2"),
    "heads that make no groups": ({"heads": 3}, row(700, 1, [0], Subtree(0, 0)), "grouped"),
    "channels of another model": ({"dim": 8}, row(700, 1, [0], Subtree(0, 0)), "query"),
    "values of a latent that is none": ({"latent_values": 4}, row(700, 1, [0], Subtree(0, 0)), "latent"),
    "a subtree outside the tree": ({}, row(700, 1, [0], Subtree(40, 7)), "outside"),
    "spans out of order": ({}, row(700, 1, [1, 0], Subtree(0, 0)), "order"),
    "a span twice": ({}, row(700, 1, [0, 0], Subtree(0, 0)), "order"),
    "no span": ({}, row(700, 1, [], Subtree(0, 0)), "one or more spans"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_does_not_fit_is_refused_and_the_connection_goes_on(bench: Bench, what: str) -> None:
    settings, bad, says = HOSTILE[what]
    request = bench.request(bad, **settings)
    query = torch.zeros(request.tokens, request.heads, request.dim)
    with pytest.raises(RefusedByShard, match=says) as refused:
        bench.attend(request, query)
    assert refused.value.refused.kind is RefusedKind.BAD
    assert isinstance(bench.attend(bench.request(row(700, 1, [0], Subtree(0, 0))), asked(1)).answer, Attended)
    assert not any(page.pins for page in bench.host.core.pool.everything())


def test_results_and_work_are_bounded_before_a_page_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    request = bench.request(row(700, 1, [0, 1], *(Subtree(0, 0),) * 4, Subtree(1, 0)))
    monkeypatch.setattr(limits, "ATTEND_BYTES", 5 * result_bytes(1, HEADS * GROUP, DIM))
    assert isinstance(bench.attend(request, asked(1)).answer, Attended)
    monkeypatch.setattr(limits, "ATTEND_WORK", attend_work(1, 6, heads=HEADS * GROUP, channels=2 * DIM) - 1)
    with pytest.raises(RefusedByShard, match="multiplications") as refused:
        bench.attend(replace(request, attempt=bench.attempts()), asked(1))
    assert refused.value.refused.kind is RefusedKind.LIMIT
    monkeypatch.setattr(limits, "ATTEND_BYTES", 5 * result_bytes(1, HEADS * GROUP, DIM) - 1)
    with pytest.raises(RefusedByShard, match="bytes"):
        bench.attend(replace(request, attempt=bench.attempts()), asked(1))


def test_a_score_counts_as_much_as_its_exponential_costs() -> None:
    tokens, cuts = 4_096, 8_192
    one = attend_work(tokens, cuts, heads=1, channels=2)
    assert one > limits.ATTEND_WORK, "four million keys and as many queries are minutes of exponentials"
    assert one == attend_work(tokens, cuts, heads=1, channels=64)
    assert attend_work(1, 1, heads=8, channels=256) == CUT_TOKENS * 8 * 256, "from there on every channel counts"


def test_keys_are_counted_by_whole_cuts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of a cut costs as much as all of it."""
    monkeypatch.setattr(limits, "ATTEND_WORK", 3 * attend_work(1, 1, heads=HEADS * GROUP, channels=2 * DIM) - 1)
    few = [SpanBlocks(SpanId(70 + cut), 0, WHOLE, at, (bench.hashes[at],)) for cut, at in enumerate((0, 32, 64))]
    bench.register(*few)
    request = bench.request(row(1500, 1, [70, 71], Subtree(2, 0)))
    assert isinstance(bench.attend(request, asked(1)).answer, Attended)
    with pytest.raises(RefusedByShard, match="multiplications"):
        bench.attend(bench.request(row(1500, 1, [70, 71, 72], Subtree(2, 0))), asked(1))


def test_one_subtree_is_computed_in_pieces_and_has_the_same_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With others' turns between them, and the deadline looked at."""
    gave_way: list[int] = []
    give_way = ComputePool.give_way
    monkeypatch.setattr(
        ComputePool, "give_way", lambda pool, job, look: (gave_way.append(1), give_way(pool, job, look))
    )
    whole, query = Subtree(2, 0), asked(5)
    request = bench.request(row(1400, 5, [0, 1, 2], whole))
    bench.attend(request, query)  # verifies the pages
    gave_way.clear()
    bench.attend(replace(request, attempt=bench.attempts()), query)
    undivided = len(gave_way)
    gave_way.clear()
    monkeypatch.setattr(limits, "ATTEND_PIECE_WORK", 1)
    answer, data = bench.attend(replace(request, attempt=bench.attempts()), query)
    assert isinstance(answer, Attended)
    assert len(gave_way) - undivided == 5 * CUTS - 1, "a piece for each query token and cut, not one for all"
    ((found,),) = unpack_results(data, [(5, [whole])], HEADS * GROUP, DIM)
    out, lse = bench.expected(query, 1400, whole)
    assert torch.equal(found.out, out) and torch.equal(found.lse, lse)


def test_a_compute_ends_at_its_deadline_within_a_piece(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*given: Any, **named: Any) -> memoryview:
        return attend_spans(*given, **named | {"deadline_ns": 1})

    monkeypatch.setattr(span_results, "attend_spans", late)
    with pytest.raises(Unavailable, match="took until then"):
        bench.attend(bench.request(row(700, 1, [0, 1], Subtree(1, 0))), asked(1))
    monkeypatch.undo()
    bench.host.inspect(lambda: None)
    assert not any(page.pins for page in bench.host.core.pool.everything())


def test_a_full_queue_declines_at_once_and_loads_go_on(
    bench: Bench, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ATTENDS_WAITING", 4)  # of which a tenant alone may have two
    pool, go_on, begun = ComputePool(1, "held"), threading.Event(), threading.Event()
    pool.start()
    monkeypatch.setattr(bench.host, "_compute", pool)

    def hold(turn: ComputeTurn) -> None:
        begun.set()
        assert go_on.wait(20)

    holders = [threading.Thread(target=lambda: pool.run(TENANT, hold, soon())) for _ in range(2)]
    try:
        holders[0].start()
        assert begun.wait(20)
        holders[1].start()
        cluster.wait_until(lambda: pool.waiting == 1)
        answer, _ = bench.attend(bench.request(row(700, 1, [0], Subtree(0, 0))), asked(1))
        assert isinstance(answer, AttendDeclined) and answer.reason is DeclineReason.BUSY
        into = torch.zeros_like(bench.pool)
        assert cluster.client(SPEC).load(TOKENS, into) == len(TOKENS), "loads do not wait for computes"
    finally:
        go_on.set()
        for holder in holders:
            holder.join()
        pool.close()


@pytest.mark.parametrize(("path", "imports"), [("tcp", True), ("shm", True), ("other", False)])
def test_a_shard_imports_what_attention_needs_before_it_joins_if_a_path_carries_queries(
    monkeypatch: pytest.MonkeyPatch, path: str, imports: bool
) -> None:
    """And not in the first Attend, whose deadline that would take, or while it serves others, who would wait for the
    interpreter's lock."""
    imported: list[bool] = []
    monkeypatch.setattr(shard_host, "import_attention", lambda: imported.append(reported.is_set()))
    reported = threading.Event()

    def tell(*report: object) -> Done:
        reported.set()
        return Done()

    host = ShardHost(
        ShardAddress(ShardId("s"), Epoch(1), "s", "here"),
        load(overrides={"shard": {"ram_bytes": 2**20}}),
        tell=tell,
        open_source=lambda *source: pytest.fail("no source"),
        on_end=lambda leave: None,
    )
    host.start(Offers(Epoch(1), (Offer(path, "there"),)))
    try:
        assert reported.wait(20)
        assert imported == ([False] if imports else [])
        assert host.compute(TENANT, lambda turn: 5, soon()) == 5
    finally:
        host.close()


def test_a_compute_that_waits_past_its_deadline_never_begins(cluster: MemoryCluster) -> None:
    pool, ran = ComputePool(1, "late"), []
    pool.start()
    with pytest.raises(Unavailable) as late:
        pool.run(TENANT, lambda turn: ran.append(1), Deadline.after_ms(-1))
    assert late.value.miss.reason is MissReason.DEADLINE and not ran
    pool.close()
    with pytest.raises(Unavailable) as over:
        pool.run(TENANT, lambda turn: ran.append(1), soon())
    assert over.value.miss.reason is MissReason.SHARD_LOST and not ran


def test_errors_of_a_compute_are_those_of_its_caller() -> None:
    pool = ComputePool(2, "failing")
    pool.start()

    def fail(turn: ComputeTurn) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pool.run(TENANT, fail, soon())
    assert pool.run(TENANT, lambda turn: 5, soon()) == 5
    pool.close()


# --------------------------------------------------------------------------------------- the wire alone


def sample(**settings: Any) -> AttendRequest:
    rows = (row(1400, 2, [3, 4], Subtree(1, 0), Subtree(0, 2)), row(600, 1, [3], Subtree(1, 0)))
    given: dict[str, Any] = {
        "layer": 1,
        "heads": 4,
        "dim": 16,
        "dtype": "bfloat16",
        "scale": 0.3,
        "rows": rows,
        "softcap": 30.0,
        "window": 512,
        "latent_values": 7,
        "fused": True,
    }
    return AttendRequest(own_attempts()(), Epoch(9), **(given | settings))


def test_requests_and_answers_come_back_as_they_were() -> None:
    request = sample()
    assert socket_frames.decode_attend(socket_frames.encode_attend(request, 77)) == (request, 77)
    for answer in (
        Attended(99, Loss.Q4),
        SpansLacking(((SpanId(3), SpanMiss.STORED), (SpanId(2**60), SpanMiss.LOSSY))),
        AttendDeclined(DeclineReason.BUSY, "why"),
    ):
        assert wire.decode_attend_answer(wire.encode_attend_answer(answer)) == answer


TOO_MUCH: dict[str, dict[str, Any]] = {
    "tokens": {"rows": (row(0, limits.ATTEND_TOKENS, [1]), row(0, 1, [1]))},
    "query bytes": {"rows": (row(0, 4_000, [1]),), "heads": 1_000, "dim": 1_000},
    "a dtype that is no query's": {"dtype": "float64"},
    "a scale that is no number": {"scale": float("nan")},
    "a softcap below nothing": {"softcap": -1.0},
    "rows": {"rows": (row(0, 1, [1]),) * (limits.ATTEND_ROWS + 1)},
    "spans": {"rows": (row(0, 1, list(range(limits.SPANS_PER_CALL))), row(0, 1, [limits.SPANS_PER_CALL]))},
    "levels": {"rows": (row(0, 1, [1], Subtree(64, 0)),)},
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_a_request_beyond_the_bounds_is_refused_before_its_query_is_read(what: str) -> None:
    with pytest.raises(KVClusterError):
        socket_frames.decode_attend(socket_frames.encode_attend(sample(**TOO_MUCH[what]), 1))


def test_an_answer_with_more_bytes_than_are_allowed_is_refused() -> None:
    with pytest.raises(KVClusterError, match="bytes of results"):
        wire.decode_attend_answer(wire.encode_attend_answer(Attended(limits.ATTEND_BYTES + 1, Loss.EXACT)))


def test_a_query_that_ends_early_ends_the_connection_and_pins_nothing(cluster: MemoryCluster, pool: Tensor) -> None:
    host = cluster.shards[ShardId("shard-0")]
    with ExitStack() as stack:
        path = opened("tcp", host, stack)
        assert isinstance(path, TcpPages)
        link = path._links.take(soon())
        link.send(FrameKind.ATTEND, socket_frames.encode_attend(sample(), 10**9), soon(), [memoryview(b"short")])
        path._links.discard(link)
    assert not any(page.pins for page in host.core.pool.everything())


def test_the_memory_of_a_query_grows_as_its_bytes_arrive(cluster: MemoryCluster, pool: Tensor) -> None:
    host = cluster.shards[ShardId("shard-0")]
    request = sample(rows=(row(0, 2_048, [1]),), heads=64, dim=128)
    assert wire.query_bytes(request) == 32 * MIB
    with ExitStack() as stack:
        path = opened("tcp", host, stack)
        assert isinstance(path, TcpPages)
        links = [path._links.take(soon()) for _ in range(8)]
        before = resident_bytes()
        tracemalloc.start()
        for link in links:
            link.send(FrameKind.ATTEND, socket_frames.encode_attend(request, 10**10), soon(), [memoryview(b"part")])
        held = served_by(path)._listener.requests
        cluster.wait_until(lambda: held.total == 2 * 32 * MIB)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB and resident_bytes() - before < 16 * MIB, "of 256 MiB that the requests claim"
        for link in links:
            path._links.discard(link)
        cluster.wait_until(lambda: not held.total)


def test_a_tenant_whose_queries_hold_its_share_is_declined_and_its_connection_goes_on(
    cluster: MemoryCluster, pool: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUESTS_BYTES", 5 * MIB)
    host = cluster.shards[ShardId("shard-0")]
    large = sample(rows=(row(0, 512, [1]),), heads=16, dim=128, fused=uses_fused())
    query = memoryview(bytes(wire.query_bytes(large)))
    with ExitStack() as stack:
        path = opened("tcp", host, stack)
        assert isinstance(path, TcpPages) and query.nbytes == 2 * MIB
        stalled = path._links.take(soon())
        stalled.send(FrameKind.ATTEND, socket_frames.encode_attend(large, 10**10), soon())
        held = served_by(path)._listener.requests
        cluster.wait_until(lambda: held.total == 2 * MIB)
        link = path._links.take(soon())
        for _ in range(2):
            answer, _ = ask_to_attend(link, replace(large, attempt=own_attempts()()), query, soon())
            assert isinstance(answer, AttendDeclined) and answer.reason is DeclineReason.BUSY
        assert held.total == 2 * MIB
        path._links.discard(stalled)
        cluster.wait_until(lambda: not held.total)
        with pytest.raises(RefusedByShard, match="epoch"):  # there is room again, and the shard looks at the request
            ask_to_attend(link, replace(large, attempt=own_attempts()()), query, soon())
        path._links.keep(link)


def served_by(path: TcpPages) -> TcpServer:
    server: TcpServer = SERVERS[path.address]
    return server
