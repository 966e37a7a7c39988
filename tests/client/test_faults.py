"""What an engine sees when the cluster fails: a miss with a reason, within the deadline, and never a wrong byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import BlockHash, Caller, ShardId, Tenant
from kvcluster.core.messages import EndTicket, PrepareLoad, Refused, RefusedKind, WriteRequest
from kvcluster.core.messages import Written as Outcome
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError, LimitError, Unreachable
from kvcluster.testing import MemoryCluster
from kvcluster.testing.cluster import RecordSource
from kvcluster.transfers.transfer import Loaded, Lookup, Pinned, Stored
from kvcluster.transport.base import Deadline, PageSource, RefusedByShard, Unavailable
from kvcluster.transport.in_process_transport import MemoryTransport
from tests.client.build import (
    BLOCK,
    BOUND_S,
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
    spec_of,
    unwritten,
    watched_client,
)
from tests.client.conftest import Start
from tests.records import copied

SHARD = ShardId("shard-0")
TOKENS = prompt(4)
NOT_RUNNING = Miss(MissReason.COORDINATOR_LOST, "not running")


@pytest.fixture
def alone(start: Start) -> MemoryCluster:
    """A cluster of one shard, which may go away without a long wait for it."""
    return start(
        shards=1,
        ram_bytes="1MiB",
        config={"coordinator": {"rebuild_grace_ms": 100}, "client": {"store_wait_ms": 50}},
    )


def storing(cluster: MemoryCluster) -> Client:
    """A client that has stored TOKENS."""
    client = cluster.client(SPEC)
    assert client.store(TOKENS, kv(4)).blocks == 4
    assert client.flush()
    return client


def spoil(cluster: MemoryCluster, block: BlockHash, byte: int = 0) -> None:
    """Turns one bit of a resident page."""
    for host in cluster.shards.values():
        for page in host.core.pool.ready():
            if page.key.hash == block:
                host.read(page.slot())[byte] ^= 0x10


# ----------------------------------------------------------------------------------------- no coordinator


def check_that_all_miss(client: Client, miss: Miss) -> None:
    """Every call of both levels, each with its answer where there is no coordinator."""
    into = room(4)
    assert client.lookup(TOKENS) == Lookup(0, 0, None, miss)
    assert client.load(TOKENS, into) == 0
    assert unwritten(into)
    assert client.store(TOKENS, kv(4)) == Stored(0, 0, 0, 0, miss)
    assert [(e.hit, e.reason, e.detail) for e in client.explain(TOKENS)] == [(False, miss.reason, miss.detail)] * 4
    assert client.pin(TOKENS, 60.0) == client.unpin(TOKENS) == Pinned(0, 0, miss)
    hashes = [BlockHash(bytes(32))]
    ticket = client.prepare_load(hashes)
    assert (ticket.blocks, ticket.miss) == (0, miss)
    assert client.begin_load(ticket, into).result() == Loaded(0, 0)
    ticket.release()
    assert client.begin_store(hashes, kv(1)).result() == Stored(0, 0, 0, 0, miss)
    for claim in (client.status, client.clear, lambda: client.purge(model="tiny")):
        with pytest.raises(Unreachable, match=miss.reason.value):
            claim()


def test_without_a_coordinator_every_call_is_a_miss_that_says_so(alone: MemoryCluster) -> None:
    known, stranger = storing(alone), alone.client(SPEC)
    alone.stop_coordinator()
    check_that_all_miss(known, NOT_RUNNING)
    check_that_all_miss(stranger, NOT_RUNNING)


def test_a_coordinator_that_hangs_holds_no_call_past_the_deadline(alone: MemoryCluster) -> None:
    storing(alone)
    port, hold = Port(alone), Hold()
    port.before = lambda message: hold()
    config = ClientConfig(deadline_ms=100)
    with watched_client(alone, port=port, config=config) as client:
        transfer = client.begin_store([BlockHash(bytes(32))], kv(1))
        assert transfer.result() == Stored(0, 0, 0, 0, Miss(MissReason.DEADLINE)), "while the coordinator still hangs"
        hold.let_go()


def test_a_release_does_not_wait(alone: MemoryCluster) -> None:
    storing(alone)
    port, hold = Port(alone), Hold()
    port.before = lambda message: hold() if isinstance(message, EndTicket) else None
    with watched_client(alone, port=port) as client:
        assert client.load(TOKENS, room(4)) == 4 * BLOCK, "though no coordinator hears of the end of its ticket"
        hold.wait_reached()
        hold.let_go()


def test_loads_already_ticketed_go_on_without_a_coordinator(alone: MemoryCluster) -> None:
    client, into = storing(alone), room(4)
    ticket = client.prepare_load(client.hashes(TOKENS))
    alone.stop_coordinator()
    assert client.begin_load(ticket, into).result() == Loaded(4, 4 * PAGE_BYTES)
    assert same(into, kv(4))
    ticket.release()


def test_a_new_coordinator_learns_from_the_shards_what_there_is(alone: MemoryCluster) -> None:
    client, into = storing(alone), room(4)
    alone.stop_coordinator()
    alone.start_coordinator()
    alone.wait_until_up()
    assert client.lookup(TOKENS).blocks == 4
    assert client.load(TOKENS, into) == 4 * BLOCK
    assert same(into, kv(4))
    assert client.store(TOKENS, kv(4)) == Stored(0, 4, 0, 0)


def test_a_client_attaches_again_where_a_new_coordinator_knows_nothing_of_its_spec(alone: MemoryCluster) -> None:
    client = alone.client(SPEC)
    assert client.lookup(TOKENS).blocks == 0
    alone.stop_coordinator()
    alone.start_coordinator()
    alone.wait_until_up()
    assert client.lookup(TOKENS).reason == Miss(MissReason.NEVER_SEEN)
    assert client.store(TOKENS, kv(4)).blocks == 4


def test_a_ticket_outlives_the_coordinator_that_gave_it(alone: MemoryCluster) -> None:
    client, into = storing(alone), room(4)
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        alone.stop_coordinator()
        alone.start_coordinator()
        alone.wait_until_up()
        assert client.begin_load(ticket, into).result().blocks == 4
    assert same(into, kv(4))


def test_a_coordinator_that_is_rebuilding_says_so_and_grants_no_store(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="1MiB", config={"coordinator": {"rebuild_grace_ms": 60_000}})
    client = storing(cluster)
    held = next(shard for shard, host in cluster.shards.items() if len(host.core.pool))
    other = next(shard for shard in cluster.shards if shard != held)
    cluster.stop_shard(other)
    cluster.stop_coordinator()
    cluster.start_coordinator()
    cluster.wait_until(lambda: client.lookup(TOKENS).blocks == 4)
    assert client.status()["state"] == "rebuilding"
    assert client.lookup(prompt(2, seed=5)).reason == Miss(MissReason.REBUILDING)
    assert client.store(prompt(2, seed=5), kv(2)) == Stored(0, 0, 0, 0, Miss(MissReason.REBUILDING))
    cluster.start_shard(int(other.rpartition("-")[2]))
    cluster.wait_until_up()
    assert client.store(prompt(2, seed=5), kv(2)).blocks == 2


# ----------------------------------------------------------------------------------------------- no shard


def test_a_shard_that_stopped_after_the_prepare_is_a_miss(alone: MemoryCluster) -> None:
    client, into = storing(alone), room(4)
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        alone.stop_shard(SHARD)
        for _ in range(2):  # by the transport that was in use, and by one that cannot be opened
            loaded = client.begin_load(ticket, into).result()
            assert (loaded.blocks, loaded.nbytes) == (0, 0)
            assert loaded.miss is not None and loaded.miss.reason is MissReason.SHARD_LOST
        assert client.load(TOKENS, into) == 0
    assert alone.client(SPEC).load(TOKENS, into) == 0
    assert unwritten(into)


def test_what_lies_on_other_shards_is_valid_as_far_as_the_prefix_goes(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="1MiB", config={"coordinator": {"run_blocks": 1}})
    tokens, values = prompt(16), kv(16)
    client = cluster.client(SPEC)
    client.store(tokens, values)
    client.flush()
    where = {page.key.hash: shard for shard, host in cluster.shards.items() for page in host.core.pool.ready()}
    hashes = client.hashes(tokens)
    lost = where[hashes[-1]]
    first_lost = next(block for block, name in enumerate(hashes) if where[name] == lost)
    assert len(set(where.values())) == 2, "single blocks are spread"
    with client.prepare_load(hashes) as ticket:
        cluster.stop_shard(lost)
        into = room(16)
        loaded = client.begin_load(ticket, into).result()
    assert (loaded.blocks, loaded.miss and loaded.miss.reason) == (first_lost, MissReason.SHARD_LOST)
    assert same(into[:first_lost], values[:first_lost])


def test_a_store_whose_shard_has_stopped_is_reported_as_lost(alone: MemoryCluster) -> None:
    client = storing(alone)
    alone.stop_shard(SHARD)
    stored = client.store(prompt(2, seed=3), kv(2))
    assert (stored.blocks, stored.nbytes) == (0, 0)
    assert stored.miss is not None and stored.miss.reason is MissReason.SHARD_LOST


def test_a_shard_that_came_back_is_another_one(alone: MemoryCluster) -> None:
    client, into = storing(alone), room(4)
    ticket = client.prepare_load(client.hashes(TOKENS))
    alone.stop_shard(SHARD)
    alone.start_shard(0)
    alone.wait_until_up()
    loaded = client.begin_load(ticket, into).result()
    assert (loaded.blocks, loaded.miss and loaded.miss.reason) == (0, MissReason.SHARD_LOST)
    assert unwritten(into)
    ticket.release()

    assert client.lookup(TOKENS).blocks == 0
    assert client.store(TOKENS, kv(4)) == Stored(4, 0, 0, 4 * PAGE_BYTES)
    assert client.flush()
    assert client.load(TOKENS, into) == 4 * BLOCK
    assert same(into, kv(4))


def test_an_old_ticket_does_not_cost_the_way_to_the_shard_that_came_back(alone: MemoryCluster) -> None:
    storing(alone)
    with watched_client(alone) as client:
        old = client.prepare_load(client.hashes(TOKENS))
        alone.stop_shard(SHARD)
        alone.start_shard(0)
        alone.wait_until_up()
        assert client.store(TOKENS, kv(4)).blocks == 4
        assert client.begin_load(old, room(4)).result().miss == Miss(MissReason.SHARD_LOST, "not running")
        old.release()
        assert client.flush()
        assert client.load(TOKENS, room(4)) == 4 * BLOCK


def test_a_shard_that_came_back_on_a_node_whose_clock_is_behind_is_asked(alone: MemoryCluster) -> None:
    """Epochs are wall-clock time, and a coordinator that has restarted knows none of before."""
    storing(alone)
    with watched_client(alone) as client:
        assert client.load(TOKENS, room(4)) == 4 * BLOCK
        alone.stop_shard(SHARD)
        alone.stop_coordinator()
        alone.start_coordinator()
        alone.start_shard(0, behind_ns=3_600_000_000_000)
        alone.wait_until_up()
        assert client.store(TOKENS, kv(4)) == Stored(4, 0, 0, 4 * PAGE_BYTES)
        assert client.flush()
        assert client.load(TOKENS, room(4)) == 4 * BLOCK


class ByAddress:
    """A way to whatever incarnation of a shard there is, as an address would be."""

    name = "by address"

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    def __getattr__(self, call: str) -> Any:
        (host,) = self._cluster.shards.values()
        return getattr(MemoryTransport(host, Caller(Tenant("default"))), call)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_another_incarnation_at_the_same_address_is_not_taken_for_the_old_one(
    alone: MemoryCluster, known: bool, attached: bool
) -> None:
    storing(alone)
    with Client(alone.port(), lambda shard: ByAddress(alone), SPEC) as client:
        ticket, into = client.prepare_load(client.hashes(TOKENS)), room(4)
        if attached:
            assert client.begin_load(ticket, room(4)).result().blocks == 4
        alone.stop_shard(SHARD)
        alone.start_shard(0)
        alone.wait_until_up()
        if known:
            storing(alone)
        restarted = Miss(MissReason.SHARD_LOST, "shard-0 has restarted")
        assert client.begin_load(ticket, into).result() == missed(restarted, range(4))
        assert unwritten(into)
        ticket.release()


class Forgetful:
    """A shard that has forgotten the namespace, `times` times in a row."""

    def __init__(self, times: int) -> None:
        self.attached = 0
        self._left = times

    def attach(self) -> None:
        self.attached += 1

    def refuse(self) -> None:
        self._left -= 1
        if self._left >= 0:
            raise RefusedByShard(Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach first"))


def test_a_namespace_that_the_shard_forgot_is_named_to_it_again(alone: MemoryCluster) -> None:
    shard = Forgetful(times=1)
    with watched_client(alone, Steps(attach=shard.attach, write=shard.refuse)) as client:
        assert client.store(TOKENS, kv(4)).blocks == 4
        assert client.flush()
    assert shard.attached == 2
    shard = Forgetful(times=1)
    with watched_client(alone, Steps(attach=shard.attach, read=shard.refuse)) as client:
        assert client.load(TOKENS, room(4)) == 4 * BLOCK
    assert shard.attached == 2


def test_a_shard_that_forgets_the_namespace_again_and_again_is_a_miss(alone: MemoryCluster) -> None:
    storing(alone)
    miss = Miss(MissReason.SHARD_LOST, "shard-0 forgets the namespace: attach first")
    with watched_client(alone, Steps(write=Forgetful(times=2).refuse)) as client:
        assert client.store(prompt(2, seed=1), kv(2)) == Stored(0, 0, 0, 0, miss)
    reading = watched_client(alone, Steps(read=Forgetful(times=2).refuse))
    with reading as client, client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert client.begin_load(ticket, room(4)).result() == missed(miss, range(4))


@pytest.mark.parametrize(
    ("kind", "error"), [(RefusedKind.LIMIT, LimitError), (RefusedKind.BAD, CallerError)], ids=["limit", "bad"]
)
def test_what_the_shard_finds_wrong_with_a_call_is_the_callers_to_know(
    alone: MemoryCluster, kind: RefusedKind, error: type[CallerError]
) -> None:
    def refuse() -> None:
        raise RefusedByShard(Refused(kind, "for this reason"))

    with watched_client(alone, Steps(write=refuse)) as client, pytest.raises(error, match="for this reason"):
        client.store(TOKENS, kv(4))


def test_a_warm_up_ignores_a_shard_that_refuses_it(alone: MemoryCluster) -> None:
    asked: list[None] = []

    def refuse() -> None:
        asked.append(None)
        raise RefusedByShard(Refused(RefusedKind.STALE, "it has restarted"))

    with watched_client(alone, Steps(read=refuse)) as client:
        client.warm_up()
    assert asked


def test_of_what_was_lost_with_its_shard_explain_says_so(start: Start) -> None:
    cluster = start(
        shards=1,
        ram_bytes="1MiB",
        config={"membership_ttl_ms": 600, "coordinator": {"rebuild_grace_ms": 100}},
    )
    client = storing(cluster)
    cluster.stop_shard(SHARD)
    cluster.wait_until(lambda: client.status()["shards"][0]["state"] == "lost")
    assert {e.reason for e in client.explain(TOKENS)} == {MissReason.SHARD_LOST}
    assert client.store(TOKENS, kv(4)) == Stored(0, 0, 0, 0, Miss(MissReason.SHARD_LOST, "no shard is up"))


def test_a_shard_without_a_coordinator_for_its_term_serves_no_more(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="1MiB", config={"membership_ttl_ms": 600})
    client, into = storing(cluster), room(4)
    ticket = client.prepare_load(client.hashes(TOKENS))
    cluster.stop_coordinator()

    def load() -> Loaded:
        return client.begin_load(ticket, into).result()

    cluster.wait_until(lambda: load().miss == Miss(MissReason.SHARD_LOST, "the shard has no coordinator"))
    ticket.release()


# -------------------------------------------------------------------------------------------- bad content


@pytest.mark.parametrize("byte", [0, PAGE_BYTES // 2, PAGE_BYTES - 1])
def test_a_page_gone_bad_is_a_miss_and_the_prefix_before_it_is_valid(alone: MemoryCluster, byte: int) -> None:
    client, into, values = storing(alone), room(4), kv(4)
    hashes = client.hashes(TOKENS)
    spoil(alone, hashes[2], byte)
    with client.prepare_load(hashes) as ticket:
        loaded = client.begin_load(ticket, into).result()
    assert (loaded.blocks, loaded.miss) == (2, Miss(MissReason.CORRUPT))
    assert same(into[:2], values[:2])
    assert client.load(TOKENS, into) == 2 * BLOCK


def test_no_layer_is_called_done_of_which_a_block_is_bad(alone: MemoryCluster) -> None:
    client = storing(alone)
    hashes = client.hashes(TOKENS)
    spoil(alone, hashes[1])
    with client.prepare_load(hashes) as ticket:
        transfer = client.begin_load(ticket, room(4))
        assert transfer.result().blocks == 1
    assert not transfer.wait_layer(0)


class Spoiling(Watched):
    """A way on which one bit of the first page of every store is turned."""

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Outcome]:
        return super().write(request, SpoiledSource(source), deadline)


class SpoiledSource(RecordSource):
    def __init__(self, inner: PageSource) -> None:
        self._inner = inner

    def layer_bytes(self, item: int) -> int:
        return self._inner.layer_bytes(item)

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        sums = copied(self._inner, item, layer, layers, into)
        into[-1] ^= item == 0
        return sums

    def drained(self) -> None:
        self._inner.drained()


def test_a_block_that_arrives_changed_is_not_committed(alone: MemoryCluster) -> None:
    open_transport = alone.opener()
    with Client(alone.port(), lambda shard: Spoiling(open_transport(shard), Steps()), SPEC) as client:
        changed = Miss(MissReason.CORRUPT, "what arrived did not match its checksum")
        assert client.store(TOKENS, kv(4)) == Stored(3, 0, 0, 4 * PAGE_BYTES, changed)
        assert not client.flush(), "a store has missed"
        assert client.flush(), "and none since"
    client = alone.client(SPEC)
    assert client.lookup(TOKENS).blocks == 0
    assert client.store(TOKENS, kv(4)) == Stored(1, 3, 0, PAGE_BYTES)


# -------------------------------------------------------------------------------------------------- room


def fits(cluster: MemoryCluster) -> int:
    """Returns the number of pages for which a shard has room."""
    return cluster.shard_core(SHARD).pool.allocator.room(PAGE_BYTES)


def test_a_full_pool_makes_room_by_evicting_the_coldest(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="64KiB", config={"coordinator": {"hold_ms": 1}})
    client, count = cluster.client(SPEC), fits(cluster)
    prompts = [prompt(1, seed) for seed in range(3 * count)]
    for seed, tokens in enumerate(prompts):
        assert client.store(tokens, kv(1, seed)).blocks == 1
        assert client.flush()
        assert client.load(prompts[0], room(1)) == BLOCK, "used blocks stay"
    resident = [client.lookup(tokens).blocks for tokens in prompts]
    assert resident[-1] == 1 and 0 < sum(resident) <= count
    assert resident[1] == 0
    (gone,) = client.explain(prompts[1])
    assert (gone.reason, gone.detail) == (MissReason.EVICTED, "0 s ago")
    into = room(1)
    assert client.load(prompts[-1], into) == BLOCK
    assert same(into, kv(1, seed=len(prompts) - 1))


def test_of_more_blocks_than_fit_the_first_are_stored(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="64KiB", config={"client": {"store_wait_ms": 50}})
    client, count = cluster.client(SPEC), fits(cluster)
    tokens, values = prompt(2 * count), kv(2 * count)
    stored = client.store(tokens, values)
    assert stored == Stored(count, 0, 0, count * PAGE_BYTES, Miss(MissReason.FULL))
    assert not client.flush(), "a store has missed"
    blocks = client.lookup(tokens).blocks
    assert blocks > 0
    into = room(2 * count)
    assert client.load(tokens, into) == blocks * BLOCK
    assert same(into[:blocks], values[:blocks])


def test_a_store_waits_for_room_no_longer_than_it_has_time(start: Start) -> None:
    cluster = start(
        shards=1,
        ram_bytes="64KiB",
        config={"client": {"store_wait_ms": 60_000}, "coordinator": {"low_free": 0.0, "high_free": 0.0}},
    )
    client, count = cluster.client(SPEC), fits(cluster)
    assert client.store(prompt(count), kv(count)).blocks == count
    assert client.flush()
    with client.prepare_load(client.hashes(prompt(count))) as promised:
        assert promised.blocks == count
        transfer = client.begin_store(client.hashes(prompt(1, seed=1)), kv(1), deadline_ms=50)
        assert transfer.wait_ended(Deadline.after_ms(BOUND_S / 4 * 1e3))
        assert transfer.result().blocks == 0
    assert client.lookup(prompt(count)).blocks == count, "promised blocks are not evicted"


def test_a_page_larger_than_the_pool_says_what_to_do(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="64KiB")
    large = spec_of(num_kv_heads=64, head_dim=128)
    client = cluster.client(large)
    with pytest.raises(CallerError, match=r"never fits.*raise ram_bytes or lower block_tokens"):
        client.store(prompt(1), kv(1, spec=large))
    assert client.lookup(prompt(1)).blocks == 0
    counters = client.status()["counters"]
    assert (counters["write_blocks"], counters["refused_blocks"]) == (0, 1), "it is refused, not written"


def test_pinned_blocks_outlast_pressure_and_go_once_unpinned(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="64KiB", config={"coordinator": {"hold_ms": 1, "pinned_share": 0.5}})
    client, count = cluster.client(SPEC), fits(cluster)

    def press(first_seed: int) -> None:
        for seed in range(first_seed, first_seed + 2 * count):
            assert client.store(prompt(1, seed), kv(1, seed)).blocks == 1
        assert client.flush()

    client.store(TOKENS, kv(4))
    client.flush()
    assert client.pin(TOKENS, 600.0) == pinned(4)
    press(100)
    assert client.lookup(TOKENS).blocks == 4
    assert client.unpin(TOKENS) == pinned(4)
    press(200)
    assert client.lookup(TOKENS).blocks == 0


def test_pins_take_their_share_and_no_more(start: Start) -> None:
    cluster = start(shards=1, ram_bytes="64KiB", config={"coordinator": {"pinned_share": 0.25}})
    client = cluster.client(SPEC)
    share = int(0.25 * cluster.shard_core(SHARD).pool.allocator.capacity_bytes) // PAGE_BYTES
    client.store(prompt(2 * share), kv(2 * share))
    client.flush()
    assert client.pin(prompt(2 * share), 600.0) == pinned(share)
    assert client.unpin(prompt(2 * share)) == pinned(share)


def test_what_is_not_cached_cannot_be_pinned(alone: MemoryCluster) -> None:
    client = storing(alone)
    assert client.pin(TOKENS + prompt(1, seed=8), 60.0) == pinned(4)
    assert client.pin(prompt(2, seed=8), 60.0) == pinned(0)
    assert client.unpin(TOKENS) == pinned(4)


# ------------------------------------------------------------------------------------------------ deadlines


def test_a_deadline_of_nothing_is_a_miss_and_not_an_error(alone: MemoryCluster) -> None:
    client, into = storing(alone), room(4)
    late = Miss(MissReason.DEADLINE)
    assert client.lookup(TOKENS, deadline_ms=0) == Lookup(0, 0, None, late)
    assert client.load(TOKENS, into, deadline_ms=0) == 0
    assert client.store(prompt(2, seed=4), kv(2), deadline_ms=0) == Stored(0, 0, 0, 0, late)
    assert client.pin(TOKENS, 60.0, deadline_ms=0) == Pinned(0, 0, late)
    assert {e.reason for e in client.explain(TOKENS, deadline_ms=0)} == {MissReason.DEADLINE}
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert client.begin_load(ticket, into, deadline_ms=0).result() == missed(late, range(4))
    with pytest.raises(Unreachable, match="deadline"):
        client.status(deadline_ms=0)
    assert unwritten(into)


def test_a_prepare_whose_answer_is_lost_is_asked_again(alone: MemoryCluster) -> None:
    storing(alone)
    port = Port(alone)

    def lose_the_first(message: object) -> None:
        if isinstance(message, PrepareLoad) and sum(isinstance(m, PrepareLoad) for m in port.asked) == 1:
            raise Unavailable(NOT_RUNNING)

    port.after = lose_the_first
    with watched_client(alone, port=port) as client, client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert ticket.blocks == 4
        assert len(alone.coordinator_core().state.tickets) == 1
