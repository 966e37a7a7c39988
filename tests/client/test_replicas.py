"""A load that fails at one shard is tried at another within its deadline: with a second copy it succeeds, without one
it misses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import Explain, PageWant, ReadRequest, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.page import Page
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Deadline, PageSink, Transport, Unavailable
from tests.client.build import (
    BOUND_S,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Hold,
    Port,
    Steps,
    Watched,
    kv,
    missed,
    pinned,
    prompt,
    room,
    same,
    unwritten,
)
from tests.client.conftest import Start
from tests.waiting import eventually

TOKENS = prompt(4)
CORRUPT = Miss(MissReason.CORRUPT)
LOST = Miss(MissReason.SHARD_LOST, "no shard there")
WHOLE = Loaded(4, 4 * PAGE_BYTES)


def pages(cluster: MemoryCluster, shard: ShardId) -> list[Page]:
    """The pages that a shard can serve now."""
    return list(cluster.shard_core(shard).pool.ready())


def spoil(cluster: MemoryCluster, shard: ShardId, block: BlockHash) -> None:
    """Turns one bit of the middle of that block's page."""
    (page,) = [page for page in pages(cluster, shard) if page.key.hash == block]
    cluster.shards[shard].read(page.slot())[PAGE_BYTES // 2] ^= 1


def forget(cluster: MemoryCluster, shard: ShardId, *blocks: BlockHash) -> None:
    """The shard no longer serves these, as after an eviction of which the coordinator has not been told yet."""
    pool = cluster.shard_core(shard).pool
    gone = [page for page in pages(cluster, shard) if page.key.hash in blocks]
    cluster.shards[shard].inspect(lambda: [pool.condemn(page) for page in gone])


@pytest.fixture
def single(start: Start) -> MemoryCluster:
    """Two shards, of which one has TOKENS."""
    cluster = start(shards=2, ram_bytes="1MiB", config={"coordinator": {"rebuild_grace_ms": 100}})
    client = cluster.client(SPEC)
    assert client.store(TOKENS, kv(4)).blocks == 4
    assert client.flush()
    return cluster


@pytest.fixture
def doubled(single: MemoryCluster) -> MemoryCluster:
    """Two shards that both have TOKENS, as the coordinator knows."""
    client = single.client(SPEC)
    assert client.pin(TOKENS, 600.0, replicas=2) == pinned(4)
    core = single.coordinator_core()

    def known_twice() -> bool:
        (space,) = core.state.namespaces
        records = [space.index.get(block) for block in client.hashes(TOKENS)]
        return all(record is not None and len(record.copies.entries) == 2 for record in records)

    single.wait_until(known_twice)
    return single


class Bench:
    """A client with a ticket for TOKENS, and each shard's steps a test's to bend. `first` is the shard that the ticket
    names, `second` the other one."""

    def __init__(self, cluster: MemoryCluster, tokens: Sequence[int] = TOKENS, **config: int) -> None:
        self.cluster = cluster
        self.port = Port(cluster)
        self.steps: dict[ShardId, Steps] = {shard: Steps() for shard in cluster.shards}
        self.requests: list[tuple[ShardId, ReadRequest]] = []
        open_transport = cluster.opener()

        def opener(shard: ShardAddress) -> Transport:
            return _Noting(shard.shard, open_transport(shard), self)

        self.client = Client(self.port, opener, SPEC, config=ClientConfig(**config))
        self.hashes = self.client.hashes(tokens)
        self.ticket: Ticket = self.client.prepare_load(self.hashes)
        self.first = next(s.shard.shard for run in self.ticket.body.runs for plan in run.plan for s in plan or ())
        self.second = next((shard for shard in cluster.shards if shard != self.first), self.first)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.ticket.release()
        self.client.close()

    def load(self, **options: float) -> Loaded:
        """Loads the ticket. What it says has come holds the right bytes, whatever else happened."""
        into, values = room(self.ticket.blocks), kv(self.ticket.blocks)
        loaded = self.client.begin_load(self.ticket, into, **options).result()
        for block in range(self.ticket.blocks):
            assert block in loaded.failed or same(into[block], values[block])
        return loaded

    def wants(self, shard: ShardId) -> list[PageWant]:
        return [want for asked, request in self.requests if asked == shard for want in request.wants]


class _Noting(Watched):
    """Notes what is read of which shard."""

    def __init__(self, shard: ShardId, inner: Transport, bench: Bench) -> None:
        super().__init__(inner, bench.steps[shard])
        self._shard = shard
        self._bench = bench

    def read(self, request: ReadRequest, sink: PageSink, deadline: Deadline):  # type: ignore[no-untyped-def]
        self._bench.requests.append((self._shard, request))
        return super().read(request, sink, deadline)


def a_layer_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards send the first layer of every block, each by itself, then the second, and so on."""
    monkeypatch.setattr(limits, "FRAME_BYTES", 1)
    monkeypatch.setattr(limits, "RECORD_BYTES", 1)


def failing(miss: Miss = LOST, after: int = 0) -> Callable[[], None]:
    """Lets so many calls pass, and no more."""
    calls = Hold(at=10**9)

    def call() -> None:
        calls()
        if calls.calls > after:
            raise Unavailable(miss)

    return call


# ---------------------------------------------------------------------------------------- served elsewhere


def test_a_pin_with_replicas_is_kept_on_so_many_shards(doubled: MemoryCluster) -> None:
    assert [len(pages(doubled, shard)) for shard in doubled.shards] == [4, 4]


def test_a_shard_that_stops_after_the_prepare_goes_unnoticed(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        doubled.stop_shard(bench.first)
        assert bench.load() == WHOLE


def test_a_shard_that_refuses_connections_is_replaced(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        bench.steps[bench.first].read = failing()
        assert bench.load() == WHOLE


def test_blocks_that_were_evicted_since_the_prepare_come_from_elsewhere_and_no_others(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        forget(doubled, bench.first, bench.hashes[1], bench.hashes[3])
        assert bench.load() == WHOLE
        assert [want.key.hash for want in bench.wants(bench.second)] == [bench.hashes[1], bench.hashes[3]]


def test_a_page_gone_bad_comes_from_elsewhere_and_its_shard_finds_it(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        spoil(doubled, bench.first, bench.hashes[2])
        assert bench.load() == WHOLE
        assert [want.key.hash for want in bench.wants(bench.second)] == [bench.hashes[2]]
        doubled.wait_until(lambda: dict(bench.client.status()["counters"])["corrupt_pages"] == 1)
        assert bench.load() == WHOLE


def test_of_a_page_that_came_in_part_only_the_rest_is_read_from_elsewhere(
    doubled: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_layer_a_frame(monkeypatch)
    with Bench(doubled) as bench:
        bench.steps[bench.first].receive = failing(after=4 + 1)
        assert bench.load() == WHOLE, "no byte more than all of it"
        ranges = [(want.layer_start, want.layer_stop) for want in bench.wants(bench.second)]
        assert ranges == [(2, LAYERS), (1, LAYERS), (1, LAYERS), (1, LAYERS)]


def test_layers_are_done_once_the_last_of_them_came_from_elsewhere(
    doubled: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_layer_a_frame(monkeypatch)
    hold = Hold(at=2)
    with Bench(doubled) as bench:
        bench.steps[bench.first].receive = failing(after=4 * LAYERS - 2)
        bench.steps[bench.second].receive = hold
        transfer = bench.client.begin_load(bench.ticket, room(4))
        hold.wait_reached()
        assert [transfer.layer_done(layer) for layer in range(LAYERS)] == [True] * (LAYERS - 1) + [False]
        hold.let_go()
        assert all(transfer.wait_layer(layer) for layer in range(LAYERS))
        assert transfer.result() == WHOLE


def test_what_a_silent_shard_does_not_send_comes_from_elsewhere(doubled: MemoryCluster) -> None:
    hold, into = Hold(at=2), room(4)
    with Bench(doubled, breaker_failures=1, breaker_ms=60_000) as bench:
        bench.steps[bench.first].receive = hold
        transfer = bench.client.begin_load(bench.ticket, into, deadline_ms=6_000)
        assert transfer.result(deadline_ms=BOUND_S * 1e3) == WHOLE
        assert same(into, kv(4))
        assert bench.client.status()["breakers"][bench.first]["state"] == "open"
        into.view(-1).fill_(0)
        hold.let_go()
    assert not into.any(), "late bytes were not written"


def test_a_silent_shard_that_no_other_can_replace_is_waited_for(single: MemoryCluster) -> None:
    hold = Hold(at=2)
    with Bench(single) as bench:
        bench.steps[bench.first].receive = hold
        transfer = bench.client.begin_load(bench.ticket, room(4), deadline_ms=8_000)
        eventually(lambda: any(isinstance(message, Explain) for message in bench.port.asked))
        hold.let_go()
        assert transfer.result() == WHOLE


# ------------------------------------------------------------------------------------------ and where none is


def test_a_failed_load_names_what_failed_and_fills_the_rest(single: MemoryCluster) -> None:
    with Bench(single) as bench:
        forget(single, bench.first, bench.hashes[3])
        spoil(single, bench.first, bench.hashes[1])
        loaded = bench.load()
        assert loaded == Loaded(1, 2 * PAGE_BYTES, CORRUPT, {1: CORRUPT, 3: Miss(MissReason.EVICTED)})
        assert list(loaded.failed) == [1, 3]


def test_a_page_that_is_bad_everywhere_is_corrupt(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        for shard in doubled.shards:
            spoil(doubled, shard, bench.hashes[2])
        assert bench.load() == Loaded(2, 3 * PAGE_BYTES, CORRUPT, {2: CORRUPT})
        doubled.wait_until(lambda: dict(bench.client.status()["counters"])["corrupt_pages"] == 2)
        assert bench.client.explain(TOKENS)[2].reason is MissReason.CORRUPT


def test_each_shard_is_asked_once_and_the_first_reason_is_told(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        bench.steps[bench.first].read = failing()
        bench.steps[bench.second].read = failing(Miss(MissReason.DEADLINE))
        assert bench.load() == missed(LOST, range(4))
        assert [shard for shard, _ in bench.requests] == [bench.first, bench.second]
        avoided = [message.need.avoid for message in bench.port.asked if isinstance(message, Explain)]
        assert avoided == [(bench.first,), tuple(sorted([bench.first, bench.second]))]


def test_without_a_coordinator_to_ask_what_is_missing_is_told_at_once(doubled: MemoryCluster) -> None:
    with Bench(doubled) as bench:
        forget(doubled, bench.first, bench.hashes[2])
        doubled.stop_coordinator()
        evicted = Miss(MissReason.EVICTED)
        assert bench.load() == Loaded(2, 3 * PAGE_BYTES, evicted, {2: evicted})


def test_a_coordinator_that_hangs_does_not_delay_what_has_come(doubled: MemoryCluster) -> None:
    """The coordinator is asked with a part of the remaining time, so that the outcome is in time."""
    with Bench(doubled) as bench:
        forget(doubled, bench.first, bench.hashes[2])

        def hang(message: object) -> None:
            if isinstance(message, Explain):
                threading.Event().wait(bench.port.deadlines[-1].remaining_s())
                raise Unavailable(Miss(MissReason.DEADLINE))

        bench.port.before = hang
        evicted = Miss(MissReason.EVICTED)
        assert bench.load(deadline_ms=6_000) == Loaded(2, 3 * PAGE_BYTES, evicted, {2: evicted})


def test_where_the_deadline_comes_first_what_has_come_is_told(single: MemoryCluster) -> None:
    hold = Hold(at=3)
    with Bench(single) as bench:
        bench.steps[bench.first].receive = hold
        into = room(4)
        loaded = bench.client.begin_load(bench.ticket, into, deadline_ms=2_000).result()
        assert loaded == missed(Miss(MissReason.DEADLINE), range(2, 4), 2 * PAGE_BYTES)
        assert same(into[:2], kv(4)[:2]) and unwritten(into[2:])
        hold.let_go()


def test_a_shard_that_hangs_does_not_delay_what_other_shards_have(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="1MiB", config={"coordinator": {"run_blocks": 1}})
    tokens, hold = prompt(16), Hold()
    client = cluster.client(SPEC)
    assert client.store(tokens, kv(16)).blocks == 16
    assert client.flush()
    with Bench(cluster, tokens) as bench:
        there = {page.key.hash for page in pages(cluster, bench.second)}
        assert there and bench.hashes[0] not in there
        bench.steps[bench.first].read = hold
        loaded = bench.load(deadline_ms=2_000)
        assert loaded.failed == {
            block: Miss(MissReason.DEADLINE) for block, name in enumerate(bench.hashes) if name not in there
        }
        assert (loaded.blocks, loaded.nbytes) == (0, len(there) * PAGE_BYTES)
        hold.let_go()


# -------------------------------------------------------------------------------------------- suspicions


@pytest.mark.parametrize("error", [Unavailable(LOST), Unavailable(Miss(MissReason.DEADLINE))], ids=["lost", "late"])
def test_a_report_that_fails_costs_the_load_nothing(doubled: MemoryCluster, error: Unavailable) -> None:
    told = Hold(at=10**9)

    def fail() -> None:
        told()
        raise error

    with Bench(doubled) as bench:
        bench.steps[bench.first].suspect = fail
        spoil(doubled, bench.first, bench.hashes[2])
        assert bench.load() == WHOLE
        eventually(lambda: told.calls == 1)


def test_no_load_waits_for_a_report(doubled: MemoryCluster) -> None:
    hold = Hold()
    with Bench(doubled) as bench:
        bench.steps[bench.first].suspect = hold
        spoil(doubled, bench.first, bench.hashes[2])
        assert bench.load() == WHOLE, "while the report has not gone out"
        hold.wait_reached()
        hold.let_go()


def test_all_bad_pages_of_a_shard_are_one_report(doubled: MemoryCluster) -> None:
    told = Hold(at=10**9)
    with Bench(doubled) as bench:
        bench.steps[bench.first].suspect = told
        for block in bench.hashes:
            spoil(doubled, bench.first, block)
        assert bench.load() == WHOLE
        doubled.wait_until(lambda: dict(bench.client.status()["counters"])["corrupt_pages"] == 4)
    assert told.calls == 1


def test_a_shard_is_not_convicted_by_what_its_reader_says(
    doubled: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that change on their way: the reader goes elsewhere, and the shard finds its page sound."""
    with Bench(doubled) as bench:
        page = next(page for page in pages(doubled, bench.first) if page.key.hash == bench.hashes[0])
        view = doubled.shards[bench.first].read(page.slot())
        view[0] ^= 1
        bench.steps[bench.first].suspect = lambda: view.__setitem__(0, view[0] ^ 1)
        assert bench.load() == WHOLE

        def verified() -> bool:
            shards = {shard["shard"]: shard["counters"] for shard in bench.client.status()["shards"]}
            return bool(shards[bench.first]["verified"])

        doubled.wait_until(verified)
        assert len(pages(doubled, bench.first)) == 4
        assert bench.client.status()["counters"]["corrupt_pages"] == 0
