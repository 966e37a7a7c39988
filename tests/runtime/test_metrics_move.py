"""Every metric of the table moves: each test causes something and names the series that tell of it, and the last one
holds that no metric is left out.

One cannot move within a process: kvcluster_memory_limit_bytes, which is the machine's. tests/hosts/test_prometheus.py
moves all of them in a cluster of several hosts, as Prometheus sees them.
"""

from __future__ import annotations

import functools
import gc
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

import kvcluster
from kvcluster.client.metrics import WorkerCollector
from kvcluster.config import MetricsConfig
from kvcluster.core.ids import Caller, CallId, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import (
    Attach,
    Attached,
    Done,
    EndTicket,
    PageWant,
    Purge,
    Purged,
    ReadRequest,
    Reply,
    SetPolicy,
    SetQuotas,
    Tier,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.core.quotas import Quotas, TenantQuota, TierQuota
from kvcluster.core.shard.disk_recovery import NO_STORE
from kvcluster.errors import CredentialError, LostTokens
from kvcluster.memory import codec
from kvcluster.runtime.auth import Authenticator, TokenFile, digest, token_line
from kvcluster.runtime.coordinator_host import figures_of
from kvcluster.runtime.metric_samples import (
    CallMetrics,
    Histogram,
    OperatorFile,
    Sample,
    coordinator_samples,
    shard_samples,
)
from kvcluster.runtime.metrics import METRICS
from kvcluster.runtime.metrics_server import ProcessSamples, serve_metrics
from kvcluster.runtime.quota_file import QuotaFile
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance.world import ONE
from kvcluster.transport.base import BytesPayload, DataPath, Payload, RefusedByShard, run_to_completion
from kvcluster.transport.certificates import Certificates
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import GrpcPages, page_handlers
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.rpc import Connection, identity
from kvcluster.transport.sessions import WriteSession
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.transport.worker_exchange import RecordSink
from kvcluster.transports import NAMES
from kvcluster.wire.methods import COORDINATOR, SHARD
from tests.authority import Authority
from tests.client.build import BLOCK, DIM, HEADS, LAYERS, kv, prompt, room
from tests.client.build import SPEC as SMALL
from tests.client.test_disk import settings
from tests.client.test_tiers import FIRST, NUMBERS, RAM_BYTES, numbers, where
from tests.core.lone_coordinator import BLOCKS, A, B, LoneCoordinator, beat, pin
from tests.core.lone_shard import LoneShard
from tests.core.pulling import drain, others, want
from tests.core.samples import OURS, PAGE, SECOND, SPEC, attempt, gone, ours, pages
from tests.core.sequences import PAGES, PRIVATE_SPEC, Q, Syncing, private_page
from tests.ports import free_port
from tests.records import copied
from tests.runtime import hosts
from tests.transport.peers import OTHER_VERSION, StreamPeer, authenticator
from tests.transport.peers import token as token_of
from tests.waiting import eventually

DEFAULT = Tenant("default")
UNKNOWN = NamespaceId(bytes(32))
Series = dict[tuple[str, ...], float]
CAUSED: dict[str, None] = {}
"""The metrics that the tests of this module move."""

UNMOVED = "kvcluster_memory_limit_bytes"


def causes(*names: str) -> Callable[[Callable[..., Series]], Callable[..., None]]:
    """Makes a test of a function that returns the series that it has moved: these metrics must be among them."""
    metrics = [f"kvcluster_{name}" for name in names]
    CAUSED.update(dict.fromkeys(metrics))

    def tested(cause: Callable[..., Series]) -> Callable[..., None]:
        @functools.wraps(cause)
        def test(**fixtures: object) -> None:
            moved = {series[0] for series in cause(**fixtures)}
            assert not [name for name in metrics if name not in moved]

        return test

    return tested


def by_series(samples: Sequence[Sample | Histogram]) -> Series:
    """The value of each series; of a histogram the number of its values."""
    out = {
        (sample.name, *sample.labels): sample.value if isinstance(sample, Sample) else float(sample.counts[-1])
        for sample in samples
    }
    assert len(out) == len(samples), "one value a series"
    return out


def of_coordinator(lone: LoneCoordinator) -> Series:
    return by_series(coordinator_samples(figures_of(lone.core, lone.now)))


def of_shard(lone: LoneShard) -> Series:
    return by_series(shard_samples(lone.core.info(), lone.core.waiting, lone.core.pool.condemned))


def of_cluster(cluster: MemoryCluster) -> Series:
    """Those of the coordinator, and the sums over all shards."""
    out = by_series(cluster.running_coordinator().samples())
    for host in cluster.shards.values():
        for series, value in by_series(host.samples()).items():
            out[series] = out.get(series, 0.0) + value
    return out


def moved(before: Series, after: Series) -> Series:
    return {
        series: value - before.get(series, 0.0) for series, value in after.items() if value != before.get(series, 0.0)
    }


# ----------------------------------------------------------------------------------------------- the coordinator


@causes(
    *("lookups_total", "lookup_tokens_total", "missed_tokens_total", "reused_tokens_total", "stores_total"),
    *("store_blocks_total", "reported_pages_total", "tickets", "blocks", "eviction_age_seconds"),
)
def test_lookups_stores_and_an_eviction() -> Series:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    before = of_coordinator(coordinator)
    coordinator.load(attempt(1), BLOCKS[:6])
    coordinator.load(attempt(2), BLOCKS[:6], hold=False)
    coordinator.store(attempt(3), BLOCKS[3:6], first=3, parent=BLOCKS[2])
    coordinator.now += 40 * SECOND
    voice.report(gone(BLOCKS[3]))
    seen = moved(before, of_coordinator(coordinator))
    assert seen["kvcluster_reused_tokens_total",] == 4 * SPEC.block_tokens, "a lookup for routing reuses nothing"
    assert seen["kvcluster_store_blocks_total", "write"] == 2
    assert seen["kvcluster_eviction_age_seconds", "ram"] == 1
    [ages] = [
        sample
        for sample in coordinator_samples(figures_of(coordinator.core, coordinator.now))
        if isinstance(sample, Histogram) and sample.labels == ("ram",)
    ]
    assert ages.counts[2:4] == (0, 1), "more than 15 s and at most 60"
    assert ages.seconds == 40
    return seen


@causes("tenant_lookup_tokens_total", "tenant_written_blocks_total", "tenant_bytes")
def test_figures_of_each_tenant_where_they_are_asked_for() -> Series:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    quota = TenantQuota({Tier.RAM: TierQuota(floor=1_000, limit=2_000)})
    coordinator.step(SetQuotas(Quotas(tenants={OURS: quota})))
    coordinator.load(attempt(1), BLOCKS[:6])
    coordinator.store(attempt(2), BLOCKS[4:6], first=4, parent=BLOCKS[3])
    without = of_coordinator(coordinator)
    figures = figures_of(coordinator.core, coordinator.now, tenants=True)
    seen = moved(without, by_series(coordinator_samples(figures)))
    assert seen == {
        ("kvcluster_tenant_lookup_tokens_total", "ours", "hit"): 4 * SPEC.block_tokens,
        ("kvcluster_tenant_lookup_tokens_total", "ours", "miss"): 2 * SPEC.block_tokens,
        ("kvcluster_tenant_written_blocks_total", "ours"): 2,
        ("kvcluster_tenant_bytes", "ours", "ram", "used"): 4 * PAGE,
        ("kvcluster_tenant_bytes", "ours", "ram", "floor"): 1_000,
        ("kvcluster_tenant_bytes", "ours", "ram", "limit"): 2_000,
    }
    return seen


def test_the_age_of_what_was_not_evicted_is_not_counted() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    [other] = others(coordinator, "b")
    other.report(*pages([A]))
    voice.report(gone(A), gone(BLOCKS[3], corrupt=True))  # a copy is left of one, and the other was corrupt
    assert of_coordinator(coordinator)["kvcluster_eviction_age_seconds", "ram"] == 0


@causes("pinned_blocks", "orders", "replica_requests")
def test_pins_and_orders() -> Series:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS[:4]))
    before = of_coordinator(coordinator)
    assert pin(coordinator, BLOCKS[:2]) == 2
    want(coordinator, 2, A)
    voice.report(pressure=PAGE)
    seen = moved(before, of_coordinator(coordinator))
    assert seen["kvcluster_pinned_blocks",] == 2
    assert seen["kvcluster_orders", "evict"] == 1
    coordinator.now += 61 * SECOND
    assert of_coordinator(coordinator)["kvcluster_pinned_blocks",] == 0, "the pins have expired"
    return seen


@causes("drains_total", "lost_shards_total", "restarted_shards_total", "shards")
def test_drains_that_end_in_time_and_late_and_a_shard_that_restarts_and_is_lost() -> Series:
    coordinator, one = LoneCoordinator.serving(*pages([A, B]))
    slow, empty, _ = others(coordinator, "bcd")
    before = of_coordinator(coordinator)
    drain(coordinator, one)
    drain(coordinator, empty)
    empty.report()
    assert slow.report().pull is not None
    coordinator.voice("d", 2).join()
    beat(coordinator, slow, one, until=coordinator.now + 301 * SECOND)
    seen = moved(before, of_coordinator(coordinator))
    assert seen["kvcluster_drains_total", "moved"] == 1, "it held nothing"
    assert seen["kvcluster_drains_total", "deadline"] == 1
    assert seen["kvcluster_lost_shards_total",] == seen["kvcluster_shards", "lost"] == 1
    assert seen["kvcluster_restarted_shards_total",] == 1
    return seen


@causes("sequences", "claimed_blocks", "private_blocks", "namespaces")
def test_an_open_sequence() -> Series:
    coordinator, voice = LoneCoordinator.serving()
    before = of_coordinator(coordinator)
    coordinator.ask(Attached, ours(Attach(PRIVATE_SPEC)))
    coordinator.ask(Attached, ours(Attach(replace(SPEC, model="other"))))
    Syncing(coordinator).opens(Q, BLOCKS[:2], PAGES[:3])
    voice.report(*pages(BLOCKS[:2]), *map(private_page, PAGES[:3]))
    seen = moved(before, of_coordinator(coordinator))
    assert (seen["kvcluster_sequences",], seen["kvcluster_claimed_blocks",]) == (1, 5)
    assert seen["kvcluster_private_blocks",] == 3
    return seen


@causes("purged_blocks_total", "cache_enabled", "rebuilding", "coordinator_epoch_seconds")
def test_a_purge_and_a_switch_and_another_coordinator() -> Series:
    coordinator, _ = LoneCoordinator.serving(*pages([A, B]))
    before = of_coordinator(coordinator)
    coordinator.ask(Purged, ours(Purge()))
    coordinator.ask(Done, ours(SetPolicy((("cache", "off"),))))
    seen = moved(before, of_coordinator(coordinator))
    assert seen["kvcluster_purged_blocks_total",] == 2
    assert seen["kvcluster_cache_enabled",] == -1
    again = moved(before, of_coordinator(LoneCoordinator(expected=1, epoch=5 * SECOND)))
    assert again["kvcluster_rebuilding",] == 1
    seen.update(again)
    return seen


# --------------------------------------------------------------------------------------------------- a shard


@causes("shard_pages_total", "tier_bytes", "tier_pages", "leases", "condemned_pages", "waiting", "draining")
def test_what_a_shard_holds_and_who_waits() -> Series:
    shard = LoneShard.joined(pages=2)
    before = of_shard(shard)
    shard.store(attempt(1), A, B)
    shard.pin(attempt(2), A)
    shard.reserving(attempt(3), BLOCKS[2], wait_ns=SECOND)
    shard.evict(A)
    seen = moved(before, of_shard(shard))
    shard.hear(drain=True)
    seen |= moved(before, of_shard(shard))
    assert seen["kvcluster_shard_pages_total", "commits"] == 2
    assert seen["kvcluster_condemned_pages",] == 1, "it is still read"
    assert seen["kvcluster_draining",] == 1
    return seen


@causes("degraded", "shard_epoch_seconds")
def test_a_shard_without_its_disk_and_another_incarnation() -> Series:
    before = of_shard(LoneShard())
    seen = moved(before, of_shard(LoneShard(epoch=3 * SECOND, found=replace(NO_STORE, trouble="no such folder"))))
    assert seen["kvcluster_degraded",] == 1
    return seen


def missing_page(cluster: MemoryCluster) -> None:
    """Reads one page that no shard holds."""
    [host, *_] = cluster.shards.values()
    transport = MemoryTransport(host, Caller(DEFAULT))
    space = transport.attach(SMALL, hosts.soon()).namespace
    want = PageWant(hosts.new_page(1).key._replace(part=SMALL.whole(0)), 0, 1)
    request = ReadRequest(space, hosts.attempt(), host.core.epoch, (want,), Loss.EXACT)
    [miss] = run_to_completion(transport.read(request, RefuseAll(), hosts.soon()))
    assert miss is not None and miss.reason is MissReason.EVICTED


class RefuseAll(RecordSink):
    """A sink to which nothing may come."""

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        raise AssertionError("a page that nobody holds")


@causes("exchanges_total", "exchange_seconds", "moved_bytes_total", "unmoved_pages_total", "ordered_pulls_total")
def test_exchanges_by_path_and_tier() -> Series:
    with MemoryCluster(shards=2, ram_bytes="4MiB", config={"shard": {"scrub_bytes": 0}}) as cluster:
        client, before = cluster.client(SMALL), of_cluster(cluster)
        assert client.store(prompt(8), kv(8)).blocks == 8 and client.flush()
        assert client.load(prompt(8), room(8)) == 8 * SMALL.block_tokens
        assert client.pin(prompt(8), 60.0, replicas=2).blocks == 8

        def copied() -> bool:
            after = of_cluster(cluster)
            return sum(after["kvcluster_tier_pages", tier] for tier in ("ram", "host")) == 16

        cluster.wait_until(copied)
        cluster.wait_until_idle()
        missing_page(cluster)
        seen = moved(before, of_cluster(cluster))
    nbytes = 8 * SMALL.page_bytes(0, SMALL.whole(0))
    for operation in ("load", "store", "replicate_in", "replicate_out"):
        assert seen["kvcluster_moved_bytes_total", operation, "memory", "ram"] == nbytes, operation
        ended = seen["kvcluster_exchanges_total", operation, "memory", "done"]
        assert ended == seen["kvcluster_exchange_seconds", operation, "memory"], operation
    assert seen["kvcluster_unmoved_pages_total", "load", "evicted"] == 1
    return seen


@contextmanager
def served(host: ShardHost, name: str) -> Iterator[DataPath]:
    """A path of that name to a shard, behind its server."""
    if name == "grpc":
        auth = Authenticator({digest("known"): hosts.ME}, "secret")
        handlers = unary_handlers(SHARD, host.ask) | page_handlers(host)
        with closing(GrpcServer(handlers, auth, "127.0.0.1", 0, 2)) as server:
            server.start()
            with closing(GrpcPages(server.address, Credentials("known"))) as path:
                yield path
        return
    serve, pages = (
        (TcpServer(host, lambda token: Caller(hosts.ME), "127.0.0.1"), TcpPages)
        if name == "tcp"
        else (ShmServer(host, lambda token: Caller(hosts.ME)), ShmPages)
    )
    with closing(serve) as beside:
        beside.start()
        with closing(pages(beside.address, Credentials("known"))) as path:
            yield path


@pytest.mark.parametrize("name", NAMES)
def test_each_path_counts_what_it_moves(name: str) -> None:
    with hosts.shard(hosts.Coordinator()) as host:
        eventually(lambda: not host.why_not_ready())
        MemoryTransport(host, Caller(hosts.ME)).attach(hosts.SPEC, hosts.soon())
        before = by_series(host.samples())
        with served(host, name) as path:
            write = WriteRequest(hosts.SPACE, hosts.attempt(), hosts.EPOCH, tuple(map(hosts.new_page, (1, 2))))
            assert path.write(write, hosts.Content([1, 2]), hosts.soon()) == [Written.COMMITTED] * 2
            wants = (PageWant(hosts.new_page(1).key, 0, 2), PageWant(hosts.new_page(2).key, 1, 2))
            read = ReadRequest(hosts.SPACE, hosts.attempt(), hosts.EPOCH, wants, Loss.EXACT)
            assert run_to_completion(path.read(read, KeepNothing(), hosts.soon())) == [None, None]

            def ended() -> bool:  # the shard's side ends after the worker's
                after = by_series(host.samples())
                return all(after["kvcluster_exchanges_total", what, name, "done"] == 1 for what in ("load", "store"))

            eventually(ended)
        seen = moved(before, by_series(host.samples()))
    assert seen["kvcluster_moved_bytes_total", "store", name, "ram"] == 2 * hosts.PAGE_BYTES
    assert seen["kvcluster_moved_bytes_total", "load", name, "ram"] == 1.5 * hosts.PAGE_BYTES, "of one layer of two"


def test_a_store_whose_worker_ends_the_stream_with_its_answer_is_whole() -> None:
    with hosts.shard(hosts.Coordinator()) as host:
        eventually(lambda: not host.why_not_ready())
        MemoryTransport(host, Caller(hosts.ME)).attach(hosts.SPEC, hosts.soon())
        before, source, page = by_series(host.samples()), hosts.Content([1]), memoryview(bytearray(hosts.PAGE_BYTES))
        write = WriteRequest(hosts.SPACE, hosts.attempt(), hosts.EPOCH, (hosts.new_page(1),))
        with pytest.raises(GeneratorExit), WriteSession(host, Caller(hosts.ME), write, path="grpc") as session:
            sums = copied(source, 0, 0, 2, page)
            session.receive(0, 0, codec.RAW, sums, BytesPayload(page))
            assert session.finish() == [Written.COMMITTED]
            raise GeneratorExit
        seen = moved(before, by_series(host.samples()))
    assert seen["kvcluster_exchanges_total", "store", "grpc", "done"] == 1
    assert seen["kvcluster_moved_bytes_total", "store", "grpc", "ram"] == hosts.PAGE_BYTES


def test_an_exchange_that_breaks_off_moves_no_bytes() -> None:
    with hosts.shard(hosts.Coordinator()) as host:
        eventually(lambda: not host.why_not_ready())
        hosts.store(host, [1, 2])
        before = by_series(host.samples())
        transport = MemoryTransport(host, Caller(hosts.ME))
        want = PageWant(hosts.new_page(1).key, 0, 2)
        request = ReadRequest(hosts.SPACE, hosts.attempt(), hosts.EPOCH, (want,), Loss.EXACT)
        reading = transport.read(request, KeepNothing(), hosts.soon())
        next(reading)
        reading.close()
        with pytest.raises(RefusedByShard):
            run_to_completion(transport.read(replace(request, epoch=Epoch(1)), KeepNothing(), hosts.soon()))
        with pytest.raises(RefusedByShard):
            run_to_completion(transport.read(replace(request, namespace=UNKNOWN), KeepNothing(), hosts.soon()))
        seen = moved(before, by_series(host.samples()))
    assert seen["kvcluster_exchanges_total", "load", "memory", "failed"] == 1
    assert seen["kvcluster_exchanges_total", "load", "memory", "refused"] == 1, "a trial before attaching is none"
    assert not [series for series in seen if series[0] == "kvcluster_moved_bytes_total"]


class KeepNothing(RecordSink):
    """A sink that drops what comes."""

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        """Leaves the layers unread."""


@causes("tier_move_seconds", "tier_moved_bytes_total")
def test_moves_between_tiers(tmp_path: Path) -> Series:
    with MemoryCluster(ram_bytes=RAM_BYTES, config=settings(tmp_path, codec="q8")) as cluster:
        client, before = cluster.client(NUMBERS), of_cluster(cluster)
        assert client.store(prompt(6), numbers()).blocks == 6 and client.flush()
        cluster.wait_until(lambda: where(client) == ["disk"] * 6)
        assert client.load(prompt(6), room(6, NUMBERS)) == 6 * NUMBERS.block_tokens
        cluster.wait_until_idle()
        seen = moved(before, of_cluster(cluster))
    assert seen["kvcluster_tier_moved_bytes_total", "ram", "host"] == 6 * NUMBERS.page_bytes(0, NUMBERS.whole(0))
    encoded = seen["kvcluster_tier_moved_bytes_total", "host", "disk"]
    assert seen["kvcluster_tier_moved_bytes_total", "disk", "host"] == encoded
    assert seen["kvcluster_moved_bytes_total", "load", "memory", "host"] == encoded, "they are lent from there"
    assert seen["kvcluster_tier_move_seconds", "demote"] >= 2 and seen["kvcluster_tier_move_seconds", "stage"] >= 1
    return seen


@causes("refused_connections_total")
def test_connections_of_strangers_and_of_other_releases() -> Series:
    with hosts.shard(hosts.Coordinator()) as host:
        before = by_series(host.samples())
        auth = authenticator()
        with closing(TcpServer(host, auth.caller, "127.0.0.1")) as server:
            server.start()
            for token in ("", "stolen"):
                with closing(TcpPages(server.address, Credentials(token))) as path, pytest.raises(CredentialError):
                    request = ReadRequest(hosts.SPACE, hosts.attempt(), hosts.EPOCH, (), Loss.EXACT)
                    run_to_completion(path.read(request, KeepNothing(), hosts.soon()))
            where_to = server.address.rpartition(":")
            for data in (OTHER_VERSION, bytes(64)):
                connected = socket.create_connection((where_to[0], int(where_to[2])), timeout=hosts.BOUND_S)
                with StreamPeer(connected, hello=True) as peer:
                    peer.send_bytes(data)
                    peer.refusal()
        seen = moved(before, by_series(host.samples()))
    assert {series[2]: count for series, count in seen.items()} == {"credential": 2, "version": 1, "protocol": 1}
    return seen


# --------------------------------------------------------------------------------------------- every process


def only_stale(seen: Series, file: str) -> Series:
    """What was moved, which must be the one series of that file, by one."""
    assert seen == {("kvcluster_file_stale", file): 1.0}
    return seen


@causes("file_stale")
def test_a_token_file_that_cannot_be_used(tmp_path: Path) -> None:
    path, calls = tmp_path / "tokens", CallMetrics(())
    path.write_text(token_line("mine", "me"), encoding="utf-8")
    file = TokenFile(str(path), clock=lambda: float("inf"))  # it looks each time
    server = GrpcServer({}, Authenticator(None, "secret", file=file), "127.0.0.1", 0, 1, metrics=calls)
    with closing(server):
        before = by_series(calls.samples())
        path.write_text("no line of a token file\n", encoding="utf-8")
        return only_stale(moved(before, by_series(calls.samples())), "tokens")


@causes("file_stale")
def test_a_quota_file_that_cannot_be_used(tmp_path: Path) -> None:
    path, calls = tmp_path / "quotas", CallMetrics(())
    path.write_text("", encoding="utf-8")
    path.chmod(0o600)
    file = QuotaFile(str(path), clock=lambda: float("inf"))  # it looks each time
    calls.watch_file(OperatorFile.QUOTAS, file.trouble)
    before = by_series(calls.samples())
    path.write_text("ram = 3\n", encoding="utf-8")
    return only_stale(moved(before, by_series(calls.samples())), "quotas")


@causes("certificate_expires_seconds")
def test_a_certificate_that_is_replaced(tmp_path: Path) -> Series:
    authority = Authority(tmp_path)
    files = authority.issue("me", "shard", days=20).files
    process = ProcessSamples(Certificates(files, clock=lambda: float("inf")))  # it looks each time
    before = by_series(process())
    authority.issue("me", "shard", days=5)
    sooner = by_series(process())
    assert sooner["kvcluster_certificate_expires_seconds",] < before["kvcluster_certificate_expires_seconds",]
    return moved(before, sooner)


@causes("file_stale")
def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> Series:
    issued, calls = Authority(tmp_path).issue("me", "shard"), CallMetrics(())
    certificates = Certificates(issued.files, clock=lambda: float("inf"))  # it looks each time
    port = free_port()
    host = Mock(samples=list, why_not_alive=str, why_not_ready=str)
    server = serve_metrics(MetricsConfig(port=port), range(port, port + 1), host, calls, certificates)
    assert server is not None
    with closing(server):
        before = by_series(calls.samples())
        Path(issued.files.key).write_text("no key\n", encoding="utf-8")
        return only_stale(moved(before, by_series(calls.samples())), "certificates")


@causes("call_seconds", "refused_calls_total", "calls_under_way", "start_retries_total")
def test_calls_of_a_server() -> Series:
    asked, go_on = threading.Event(), threading.Event()

    def ask(build: Callable[[CallId], object], wait_s: float, tenant: Tenant) -> Reply:
        build(CallId(1))
        asked.set()
        assert go_on.wait(hosts.BOUND_S)
        return Done()

    calls = CallMetrics(COORDINATOR)
    before = by_series(calls.samples())
    auth = authenticator()
    server = GrpcServer(unary_handlers(COORDINATOR, ask, metrics=calls), auth, "127.0.0.1", 0, 2, metrics=calls)
    server.start()
    with closing(server), closing(Connection(server.address, Credentials(token_of(ONE)))) as ours:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ours.ask, COORDINATOR["EndTicket"], EndTicket(hosts.attempt()), hosts.soon())
            assert asked.wait(hosts.BOUND_S)
            assert by_series(calls.samples())["kvcluster_calls_under_way",] == 1
            go_on.set()
            assert answer.result() == Done()
        with closing(Connection(server.address, Credentials("stolen"))) as stranger, pytest.raises(CredentialError):
            stranger.ask(COORDINATOR["EndTicket"], EndTicket(hosts.attempt()), hosts.soon())
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
            older = channel.unary_unary(COORDINATOR["Attach"].path, identity, identity)
            older(b"", metadata=[("authorization", f"Bearer {token_of(ONE)}")], timeout=hosts.BOUND_S)
    calls.start_failed()
    seen = moved(before, by_series(calls.samples()))
    assert seen["kvcluster_refused_calls_total", "credential"] == 1
    assert seen["kvcluster_refused_calls_total", "version"] == 1, "a call without a version is of another one"
    return seen | {("kvcluster_calls_under_way",): 1.0}


@causes("memory_bytes", "uptime_seconds")
def test_memory_and_uptime() -> Series:
    process = ProcessSamples()
    gc.collect()  # what clusters of other tests left must not be given back meanwhile
    before = by_series(process())
    held = bytearray(256 * 2**20)  # more than other tests give back meanwhile
    held[:: 2**12] = b"\1" * (len(held) // 2**12)  # touches every page
    after = by_series(process())
    assert after["kvcluster_memory_bytes",] - before["kvcluster_memory_bytes",] >= 32 * 2**20
    assert after["kvcluster_memory_limit_bytes",] > after["kvcluster_memory_bytes",]
    return moved(before, after)


# ----------------------------------------------------------------------------------------------- a worker


@causes("worker_breakers", "worker_paths")
def test_a_breaker_that_opens() -> Series:
    with MemoryCluster(ram_bytes="4MiB", config={"client": {"breaker_failures": 1}}) as cluster:
        client = cluster.client(SMALL)
        collector = WorkerCollector(client)
        before = by_series(collector.samples())
        assert client.store(prompt(8), kv(8)).blocks == 8 and client.flush()
        ticket = client.prepare_load(client.hashes(prompt(8)))
        cluster.stop_shard(FIRST)
        assert client.begin_load(ticket, room(8)).result().blocks == 0
        seen = moved(before, by_series(collector.samples()))
    assert seen["kvcluster_worker_breakers", "open"] == 1
    registry = CollectorRegistry()
    registry.register(collector)
    assert registry.get_sample_value("kvcluster_worker_breakers", {"state": "open"}) == 1
    assert registry.get_sample_value("kvcluster_worker_paths", {"path": "shm"}) == 0, "each exists from the start"
    return seen


@causes("worker_attended_spans_total", "worker_shipped_bytes_total", "worker_failed_attends_total")
def test_a_query_goes_to_a_shard_until_that_is_gone() -> Series:
    long = prompt(CUT_TOKENS // BLOCK)
    with MemoryCluster(ram_bytes="16MiB") as cluster, cluster.client(SMALL) as client:
        collector = WorkerCollector(client)
        before = by_series(collector.samples())
        assert client.store(long, kv(len(long) // BLOCK)).blocks == len(long) // BLOCK and client.flush()
        with client.sequence(long, prefetch=False) as sequence:
            values = torch.zeros(1, HEADS, DIM)
            for layer in range(LAYERS):
                sequence.append(layer, values, values)
            sequence.attend(0, values, planner=kvcluster.ShipAbsent())
            cluster.stop_shard(FIRST)
            with pytest.raises(LostTokens):
                sequence.attend(1, values, planner=kvcluster.ShipAbsent())
        seen = moved(before, by_series(collector.samples()))
    assert seen["kvcluster_worker_attended_spans_total", "ship"] > 0
    assert {series[1] for series in seen if "shipped_bytes" in series[0]} == {"query", "result"}
    return seen


def test_the_breaker_of_a_shard_that_is_asked_no_more_does_not_stay_open() -> None:
    with MemoryCluster(ram_bytes="4MiB", config={"client": {"breaker_failures": 1, "breaker_ms": 1}}) as cluster:
        client = cluster.client(SMALL)
        assert client.store(prompt(8), kv(8)).blocks == 8 and client.flush()
        ticket = client.prepare_load(client.hashes(prompt(8)))
        cluster.stop_shard(FIRST)
        assert client.begin_load(ticket, room(8)).result().blocks == 0
        collector = WorkerCollector(client)
        eventually(lambda: by_series(collector.samples())["kvcluster_worker_breakers", "open"] == 0)
        assert by_series(collector.samples())["kvcluster_worker_breakers", "probing"] == 1


def test_no_metric_of_the_table_is_left_out() -> None:
    assert {*CAUSED, UNMOVED} == set(METRICS)
