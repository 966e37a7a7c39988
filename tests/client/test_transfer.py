"""Transfers under way: what they can be asked, how they are cancelled, and that memory is not touched after that."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.transfer import Loaded, Stored, Transfer
from kvcluster.transport.base import Deadline
from tests.client.build import (
    BLOCK,
    BOUND_S,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Hold,
    Port,
    Steps,
    kv,
    missed,
    prompt,
    room,
    same,
    unwritten,
    watched_client,
)
from tests.client.conftest import Start

TOKENS = prompt(3)
GIVEN_UP = Miss(MissReason.DEADLINE, "given up")
NEVER_BEGUN = Miss(MissReason.DEADLINE, "given up before it began")


@pytest.fixture
def cluster(start: Start, monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    """One shard, which sends and takes a layer of a page a frame, and has TOKENS."""
    monkeypatch.setattr(limits, "FRAME_BYTES", 1)
    monkeypatch.setattr(limits, "RECORD_BYTES", 1)
    running = start(shards=1, ram_bytes="1MiB")
    with watched_client(running) as client:
        assert client.store(TOKENS, kv(3)).blocks == 3
        assert client.flush()
    return running


@contextmanager
def loading(
    cluster: MemoryCluster, into: torch.Tensor, hold: Hold, tokens: list[int] = TOKENS, **options: Any
) -> Iterator[Transfer[Loaded]]:
    """A load that `hold` stops at one of its layers."""
    with (
        watched_client(cluster, Steps(receive=hold)) as client,
        client.prepare_load(client.hashes(tokens)) as ticket,
    ):
        yield client.begin_load(ticket, into, **options)
        hold.let_go()


# --------------------------------------------------------------------------------------- layer by layer


def test_a_layer_may_be_used_while_others_are_still_under_way(cluster: MemoryCluster) -> None:
    hold, into, values = Hold(at=3), room(1), kv(3)[:1]
    with loading(cluster, into, hold, TOKENS[:BLOCK]) as transfer:
        assert transfer.wait_layer(0) and transfer.wait_layer(1)
        hold.wait_reached()
        assert [transfer.layer_done(layer) for layer in range(LAYERS)] == [True, True, False]
        assert same(into[:, :2], values[:, :2])
        assert unwritten(into[:, 2])
        assert not transfer.wait_layer(2, deadline_ms=0)
        assert not transfer.done()
        hold.let_go()
        assert transfer.wait_layer(2)
        assert transfer.result() == Loaded(1, PAGE_BYTES)
        assert transfer.done()
    assert same(into, values)


def test_a_layer_is_done_when_it_has_come_of_every_block(cluster: MemoryCluster) -> None:
    hold = Hold(at=3)  # of the first layer, that of the last block is still to come
    with loading(cluster, room(3), hold) as transfer:
        hold.wait_reached()
        assert not any(transfer.layer_done(layer) for layer in range(LAYERS))
        hold.let_go()
        assert transfer.wait_layer(0)
        assert transfer.result().blocks == 3


def test_the_first_layer_of_all_blocks_comes_before_the_second_of_any(cluster: MemoryCluster) -> None:
    """A caller waits for one layer only: an engine computes it while the others are under way."""
    hold, into = Hold(at=3 + 1), room(3)
    with loading(cluster, into, hold) as transfer:
        assert transfer.wait_layer(0), "though nothing behind it comes"
        hold.wait_reached()
        assert same(into[:, :1], kv(3)[:, :1]) and unwritten(into[:, 1:])
        assert not transfer.layer_done(1) and not transfer.done()
        hold.let_go()
        assert transfer.result() == Loaded(3, 3 * PAGE_BYTES)
    assert same(into, kv(3))


def test_waiting_for_a_layer_ends_with_the_transfer(cluster: MemoryCluster) -> None:
    hold = Hold()
    with loading(cluster, room(3), hold) as transfer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(transfer.wait_layer, 0)
        hold.wait_reached()
        transfer.cancel()
        hold.let_go()
        assert waiting.result(BOUND_S) is False
        assert transfer.result().miss == GIVEN_UP


@pytest.mark.parametrize("layer", [LAYERS, 99, -1, None, "0"])
def test_a_layer_that_a_load_does_not_move_is_refused(cluster: MemoryCluster, layer: Any) -> None:
    with cluster.client(SPEC, part=Part(1, LAYERS, 0, 4)) as client:
        transfer = client.begin_load(client.prepare_load(client.hashes(TOKENS)), room(3, part=Part(1, LAYERS, 0, 4)))
        for call in (transfer.wait_layer, transfer.layer_done):
            for wrong in (layer, 0):  # which is of the model, but not of this client's part
                with pytest.raises(
                    CallerError, match=rf"no layer {wrong!r} .* moves 2 layers of the model, from 1 to 2"
                ):
                    call(wrong)
            assert call(1), "a layer that it moves"
        assert transfer.result().blocks == 3


def test_a_store_has_no_layers_to_wait_for(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        transfer = client.begin_store(client.hashes(TOKENS), kv(3))
        with pytest.raises(CallerError, match="only loads have layers to wait for"):
            transfer.wait_layer(0)
        transfer.result()


# ------------------------------------------------------------------------------------- memory let alone


def by_result(transfer: Transfer[Loaded]) -> None:
    assert transfer.result(deadline_ms=0) == missed(Miss(MissReason.DEADLINE), range(3), 3 * PAGE_BYTES // LAYERS)


def by_cancel(transfer: Transfer[Loaded]) -> None:
    transfer.cancel()


@pytest.mark.parametrize(("give_up", "why"), [(by_result, Miss(MissReason.DEADLINE)), (by_cancel, GIVEN_UP)])
def test_nothing_is_written_once_a_load_was_given_up(
    cluster: MemoryCluster, give_up: Callable[[Transfer[Loaded]], None], why: Miss
) -> None:
    hold, into = Hold(at=3 + 1), room(3)
    with loading(cluster, into, hold) as transfer:
        hold.wait_reached()
        give_up(transfer)
        before = into.clone()
        hold.let_go()
        assert transfer.done()
        assert transfer.result().miss == why
    assert same(into, before)
    assert same(into[:, :1], kv(3)[:, :1]) and unwritten(into[:, 1:])


def test_a_load_past_its_deadline_writes_nothing_even_if_its_result_is_never_read(cluster: MemoryCluster) -> None:
    hold, into = Hold(), room(3)
    with loading(cluster, into, hold, deadline_ms=500) as transfer:
        hold.wait_reached()
        assert not transfer.wait_layer(0), "until the deadline"
        hold.let_go()
        assert transfer.wait_ended(Deadline.after_ms(BOUND_S * 1e3))
        assert transfer.result() == missed(Miss(MissReason.DEADLINE), range(3))
    assert unwritten(into)


def test_a_cancelled_store_commits_nothing_and_may_be_retried(cluster: MemoryCluster) -> None:
    tokens, hold = prompt(3, seed=1), Hold(at=2)
    with watched_client(cluster, Steps(send=hold)) as client:
        transfer = client.begin_store(client.hashes(tokens), kv(3))
        hold.wait_reached()
        assert transfer.result(deadline_ms=0) == Stored(0, 0, 0, 0, Miss(MissReason.DEADLINE))
        hold.let_go()
        assert client.store(tokens, kv(3)) == Stored(3, 0, 0, 3 * PAGE_BYTES)


def test_a_store_whose_deadline_passed_on_its_way_may_be_retried(cluster: MemoryCluster) -> None:
    tokens, hold = prompt(3, seed=1), Hold(at=2)
    with watched_client(cluster, Steps(send=hold)) as client:
        transfer = client.begin_store(client.hashes(tokens), kv(3), deadline_ms=500)
        hold.wait_reached()
        assert transfer.result() == Stored(0, 0, 0, 0, Miss(MissReason.DEADLINE))
        hold.let_go()
        assert client.store(tokens, kv(3)).pending == 0, "not pending for the life of an unused ticket"
    assert cluster.client(SPEC).store(tokens, kv(3)).pending == 0


def test_the_source_is_free_before_the_store_is_done(cluster: MemoryCluster) -> None:
    tokens, values, hold = prompt(3, seed=1), kv(3), Hold()
    into = room(3)
    with watched_client(cluster, Steps(written=hold)) as client:
        source = values.clone()
        transfer = client.begin_store(client.hashes(tokens), source)
        hold.wait_reached()
        assert transfer.source_free() and not transfer.done()
        source.zero_()
        hold.let_go()
        assert transfer.result().blocks == 3
        client.flush()
        assert client.load(tokens, into) == 3 * BLOCK
    assert same(into, values)


def test_a_source_is_not_free_before_its_last_byte_has_gone(cluster: MemoryCluster) -> None:
    hold = Hold(at=3 * LAYERS)
    with watched_client(cluster, Steps(send=hold)) as client:
        transfer = client.begin_store(client.hashes(prompt(3, seed=1)), kv(3))
        hold.wait_reached()
        assert not transfer.source_free()
        hold.let_go()
        assert transfer.result().blocks == 3
        assert transfer.source_free()


def test_a_source_is_not_free_while_one_of_several_shards_has_not_taken_its_blocks(start: Start) -> None:
    spread = start(shards=2, ram_bytes="1MiB", config={"coordinator": {"run_blocks": 1}})
    hold = Hold(at=2)
    with watched_client(spread, Steps(write=hold)) as client:
        transfer = client.begin_store(client.hashes(prompt(16)), kv(16))
        hold.wait_reached()
        assert not transfer.source_free()
        hold.let_go()
        assert transfer.result().blocks == 16
    assert hold.calls == 2


def test_a_client_keeps_nothing_of_what_has_ended(cluster: MemoryCluster) -> None:
    with watched_client(cluster) as client:
        source, into = kv(3), room(3)
        with client.prepare_load(client.hashes(TOKENS)) as ticket:
            transfers: list[Any] = [client.begin_load(ticket, into), client.begin_store(ticket.hashes, source)]
            assert [transfer.result().miss for transfer in transfers] == [None, None]
        kept = [weakref.ref(thing) for thing in (source, into, *transfers)]
        del source, into, transfers
        cluster.wait_until(lambda: all(ref() is None for ref in kept))


# ---------------------------------------------------------------------------------------- one after another


def test_loads_do_not_wait_for_stores(cluster: MemoryCluster) -> None:
    hold = Hold()
    with watched_client(cluster, Steps(send=hold)) as client:
        storing = client.begin_store(client.hashes(prompt(3, seed=1)), kv(3))
        hold.wait_reached()
        assert client.load(TOKENS, room(3)) == 3 * BLOCK
        assert not storing.done()
        hold.let_go()
        assert storing.result().blocks == 3


def test_a_transfer_given_up_in_the_queue_never_begins(cluster: MemoryCluster) -> None:
    hold, into = Hold(), room(3)
    with watched_client(cluster, Steps(read=hold)) as client, client.prepare_load(client.hashes(TOKENS)) as ticket:
        first = client.begin_load(ticket, room(3))
        hold.wait_reached()
        second = client.begin_load(ticket, into)
        second.cancel()
        hold.let_go()
        assert first.result().blocks == 3
        assert second.result() == missed(NEVER_BEGUN, range(3))
    assert hold.calls == 1
    assert unwritten(into)


# ---------------------------------------------------------------------------------------------------- flush


def test_after_a_flush_others_hit_at_once(cluster: MemoryCluster) -> None:
    other = cluster.client(SPEC)
    with watched_client(cluster) as client:
        for seed in range(1, 6):
            tokens = prompt(3, seed)
            transfer = client.begin_store(client.hashes(tokens), kv(3, seed))
            assert client.flush()
            assert transfer.done()
            assert other.lookup(tokens).blocks == 3


def test_a_flush_waits_for_stores_that_are_under_way_and_queued(cluster: MemoryCluster) -> None:
    hold = Hold()
    with watched_client(cluster, Steps(send=hold)) as client, ThreadPoolExecutor(1) as pool:
        transfers = [client.begin_store(client.hashes(prompt(3, seed)), kv(3)) for seed in (1, 2)]
        hold.wait_reached()
        assert not client.flush(deadline_ms=0)
        flushing = pool.submit(client.flush)
        hold.let_go()
        assert flushing.result(BOUND_S)
        assert [transfer.done() for transfer in transfers] == [True, True]


def test_a_flush_that_came_too_early_leaves_the_rest_to_the_next(cluster: MemoryCluster) -> None:
    hold, tokens = Hold(at=3 * LAYERS), prompt(3, seed=1)
    with watched_client(cluster, Steps(send=hold)) as client:
        transfer = client.begin_store(client.hashes(tokens), kv(3))
        hold.wait_reached()
        cluster.stop_coordinator()
        hold.let_go()
        assert transfer.result().blocks == 3, "the shard commits, and says so when a client asks"
        assert not client.flush(deadline_ms=50)
        assert not client.flush(deadline_ms=50)
        cluster.start_coordinator()
        assert client.flush()
        assert client.lookup(tokens).blocks == 3


def test_a_flush_does_not_rely_on_another_that_is_still_waiting(cluster: MemoryCluster) -> None:
    hold = Hold()
    with watched_client(cluster, Steps(flush=hold)) as client, ThreadPoolExecutor(2) as pool:
        assert client.store(prompt(3, seed=1), kv(3)).blocks == 3
        flushing = [pool.submit(client.flush) for _ in range(2)]
        cluster.wait_until(lambda: hold.calls == 2)
        assert not any(flush.done() for flush in flushing)
        hold.let_go()
        assert [flush.result(BOUND_S) for flush in flushing] == [True, True]
        assert client.flush()
        assert hold.calls == 2, "an acknowledged store is not asked about again"


def test_a_flush_to_a_shard_that_is_gone_says_no_once(cluster: MemoryCluster) -> None:
    (shard,) = cluster.shards
    with watched_client(cluster) as client:
        assert client.store(prompt(3, seed=1), kv(3)).blocks == 3
        cluster.stop_shard(shard)
        assert not client.flush()
        assert client.flush(), "there is nothing left to wait for"
        cluster.start_shard(0)
        cluster.wait_until_up()


# ---------------------------------------------------------------------------------------------------- close


def test_closing_ends_transfers_that_are_under_way_and_queued(cluster: MemoryCluster) -> None:
    loading, storing = Hold(), Hold()
    into = [room(3), room(3)]
    client = watched_client(cluster, Steps(receive=loading, send=storing))
    ticket = client.prepare_load(client.hashes(TOKENS))
    loads = [client.begin_load(ticket, memory) for memory in into]
    stores = [client.begin_store(client.hashes(prompt(3, seed)), kv(3)) for seed in (1, 2)]
    loading.wait_reached()
    storing.wait_reached()
    closing = threading.Thread(target=client.close)
    closing.start()
    cluster.wait_until(lambda: all(transfer.done() for transfer in (*loads, *stores)))
    loading.let_go()
    storing.let_go()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert [transfer.done() for transfer in (*loads, *stores)] == [True] * 4
    assert [load.result().miss for load in loads] == [GIVEN_UP, NEVER_BEGUN]
    assert [store.result().miss for store in stores] == [GIVEN_UP, NEVER_BEGUN]
    assert all(map(unwritten, into))


def test_closing_gives_tickets_back(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    tickets = [client.prepare_load(client.hashes(TOKENS)) for _ in range(3)]
    assert len(cluster.coordinator_core().state.tickets) == 3
    client.close()
    client.close()
    assert len(cluster.coordinator_core().state.tickets) == 0
    for ticket in tickets:
        ticket.release()


def test_closing_does_not_wait_for_a_lost_coordinator(cluster: MemoryCluster) -> None:
    port = Port(cluster)
    client = watched_client(cluster, port=port)
    tickets = [client.prepare_load(client.hashes(TOKENS)) for _ in range(3)]
    cluster.stop_coordinator()
    asked = len(port.asked)
    client.close()
    assert all(ticket.blocks for ticket in tickets)
    assert len(port.asked) - asked == 1, "what ending one ticket shows of the coordinator holds for all"
