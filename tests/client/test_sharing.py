"""What one client has stored, other clients load, whatever the layout of their memory and whichever part they hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvcluster.core.groups import LAST, Group, Part, Plane, window
from kvcluster.core.hashing import chain, root
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import PrepareStore
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers, Dense, Paged
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.transfer import Loaded, Stored
from kvcluster.transport.base import Unavailable
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
    blank,
    kv,
    noise,
    prompt,
    room,
    same,
    unwritten,
    watched_client,
)
from tests.client.conftest import Start

# ---------------------------------------------------------------------------------- every memory layout

Laid = tuple[Any, Callable[[], torch.Tensor]]
"""Memory of some layout, and what reads it as a dense tensor."""


def dense(values: torch.Tensor) -> Laid:
    tensor = values.clone()
    return Dense(tensor), lambda: tensor


def buffers(values: torch.Tensor) -> Laid:
    pages = [bytearray(bytes(page.contiguous().view(torch.uint8).flatten().tolist())) for page in values]

    def read() -> torch.Tensor:
        flat = torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8)
        return flat.view(values.dtype).view(values.shape)

    return Buffers(pages), read


def paged(
    values: torch.Tensor, cache: list[int], view: Callable[[torch.Tensor], torch.Tensor], make: Callable[..., Paged]
) -> Laid:
    """A cache of each layer with two blocks that belong to others; `view` shows it `[blocks, planes, ...]`."""
    blocks = values.shape[0]
    ids = random.Random(1).sample(range(blocks + 2), blocks)
    caches = [noise([blocks + 2 if n == -1 else n for n in cache], values.dtype, seed) for seed in range(LAYERS)]
    for layer, tensor in enumerate(caches):
        view(tensor)[ids] = values[:, layer]
    return make(caches, ids), lambda: torch.stack([view(tensor)[ids] for tensor in caches], 1)


def nhd(values: torch.Tensor) -> Laid:
    return paged(values, [2, -1, BLOCK, HEADS, DIM], lambda t: t.permute(1, 0, 2, 3, 4), Paged.nhd)


def hnd(values: torch.Tensor) -> Laid:
    return paged(values, [2, -1, HEADS, BLOCK, DIM], lambda t: t.permute(1, 0, 3, 2, 4), Paged.hnd)


def vllm(values: torch.Tensor) -> Laid:
    def view(t: torch.Tensor) -> torch.Tensor:
        return t.view(-1, HEADS, BLOCK, 2, DIM).permute(0, 3, 2, 1, 4)

    return paged(values, [-1, HEADS, BLOCK, 2 * DIM], view, Paged.vllm)


def vllm_cpu(values: torch.Tensor) -> Laid:
    """A head of a block is K transposed, then V: written value by value, since no one view shows it."""
    blocks = values.shape[0]
    ids = random.Random(1).sample(range(blocks + 2), blocks)
    caches = [noise([blocks + 2, HEADS, BLOCK, 2 * DIM], values.dtype, seed) for seed in range(LAYERS)]

    def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cache.view(blocks + 2, HEADS, 2, BLOCK * DIM).unbind(2)
        return k.view(-1, HEADS, DIM, BLOCK), v.view(-1, HEADS, BLOCK, DIM)

    for layer, cache in enumerate(caches):
        k, v = halves(cache)
        k[ids] = values[:, layer, 0].permute(0, 2, 3, 1)
        v[ids] = values[:, layer, 1].permute(0, 2, 1, 3)

    def read() -> torch.Tensor:
        pairs = [halves(cache) for cache in caches]
        return torch.stack(
            [torch.stack([k[ids].permute(0, 3, 1, 2), v[ids].permute(0, 2, 1, 3)], 1) for k, v in pairs], 1
        )

    return Paged.vllm_cpu(caches, ids), read


LAYOUTS = [dense, buffers, nhd, hnd, vllm, vllm_cpu]


@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("mine", LAYOUTS)
def test_another_client_hits_what_one_stored_in_any_layout(
    cluster: MemoryCluster, mine: Callable[..., Laid], theirs: Callable[..., Laid]
) -> None:
    tokens, values = prompt(5, rest=2), kv(5)
    one, other = cluster.client(SPEC), cluster.client(SPEC)
    source, _ = mine(values)
    assert one.store(tokens, source) == Stored(5, 0, 0, 5 * PAGE_BYTES)
    assert one.flush()

    into, read = theirs(room(5))
    assert other.lookup(tokens).tokens == 5 * BLOCK
    assert other.load(tokens, into) == 5 * BLOCK
    assert same(read(), values)


def test_a_prompt_that_goes_on_differently_hits_as_far_as_it_is_alike(cluster: MemoryCluster) -> None:
    tokens, values = prompt(4), kv(4)
    client = cluster.client(SPEC)
    client.store(tokens, values)
    client.flush()

    branch = tokens[: 2 * BLOCK] + prompt(2, seed=9)
    into = room(4)
    assert client.load(branch, into) == 2 * BLOCK
    assert same(into[:2], values[:2])
    assert unwritten(into[2:])
    assert client.lookup(branch).reason == Miss(MissReason.NEVER_SEEN)


def test_a_destination_may_have_room_for_more_than_there_is(cluster: MemoryCluster) -> None:
    tokens, values = prompt(2), kv(2)
    client = cluster.client(SPEC)
    client.store(tokens, values)
    client.flush()
    into = room(5)
    assert client.load(tokens, into) == 2 * BLOCK
    assert same(into[:2], values)
    assert unwritten(into[2:])


def test_tokens_that_fill_no_block_are_neither_stored_nor_found(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    below = Miss(MissReason.BELOW_BLOCK, f"3 tokens fill no block of {BLOCK}")
    assert client.store([1, 2, 3], kv(0)) == Stored(0, 0, 0, 0, below)
    assert client.lookup([1, 2, 3]).reason == below
    assert client.load([1, 2, 3], room(0)) == 0


def test_an_image_in_a_block_is_part_of_its_content(cluster: MemoryCluster) -> None:
    tokens, client = prompt(3), cluster.client(SPEC)
    client.store(Prompt(tokens, extra_keys={1: b"a cat"}), kv(3))
    client.flush()
    assert client.lookup(Prompt(tokens, extra_keys={1: b"a cat"})).blocks == 3
    assert client.lookup(Prompt(tokens, extra_keys={1: b"a dog"})).blocks == 1
    assert client.lookup(tokens).blocks == 1


def test_hashes_are_those_that_the_core_defines(cluster: MemoryCluster) -> None:
    tokens = prompt(3, rest=1)
    client = cluster.client(SPEC, tenant="t")
    namespace = SPEC.namespace(Tenant("t"))
    assert client.hashes(tokens) == chain(root(namespace), tokens, BLOCK)
    assert client.hashes(Prompt(tokens, salt=b"s")) == chain(root(namespace, b"s"), tokens, BLOCK)
    assert client.hashes(Prompt(tokens, extra_keys={0: b"x"})) == chain(root(namespace), tokens, BLOCK, {0: b"x"})


def test_hashes_of_a_spec_and_tenant_never_change(cluster: MemoryCluster) -> None:
    (block,) = cluster.client(SPEC).hashes([1, 2, 3, 4])
    assert block.hex() == "1fff08e5f137740fcef0df0b6160fe0587dbdaa5556f9918b94a0aa919e92fc1"


# ------------------------------------------------------------------------------------------------- parts

FIRST_HEADS = Part(0, LAYERS, 0, HEADS // 2)
LAST_HEADS = Part(0, LAYERS, HEADS // 2, HEADS)


def of(values: torch.Tensor, part: Part) -> torch.Tensor:
    """Returns that part of a dense tensor of everything."""
    return values[:, part.layer_start : part.layer_stop, :, :, part.head_start : part.head_stop].contiguous()


def test_a_ticket_is_redeemed_by_others_each_for_its_own_part(cluster: MemoryCluster) -> None:
    tokens, values = prompt(4), kv(4)
    scheduler = cluster.client(SPEC, part=Part(0, 1, 0, 1))
    engine = cluster.client(SPEC)
    engine.store(tokens, values)
    engine.flush()

    with scheduler.prepare_load(scheduler.hashes(tokens), whole=True) as ticket:
        assert (ticket.blocks, ticket.miss) == (4, None)
        for part in (Part(0, 2, 0, 2), Part(1, LAYERS, 1, HEADS)):
            worker = cluster.client(SPEC, part=part)
            redeemed = worker.redeem(bytes(ticket))
            assert redeemed.hashes == ticket.hashes
            into = room(4, part=part)
            loaded = worker.begin_load(redeemed, into).result()
            assert loaded.blocks == 4
            assert same(into, of(values, part))
            redeemed.release()  # it is not this client's to end
        assert len(cluster.coordinator_core().state.tickets) == 1


def test_a_rank_loads_the_layers_and_heads_that_are_its_own_and_no_other_bytes_of_them(cluster: MemoryCluster) -> None:
    tokens, values = prompt(2), kv(2)
    whole, part = cluster.client(SPEC), Part(1, 2, 0, HEADS)
    whole.store(tokens, values)
    whole.flush()
    rank = cluster.client(SPEC, part=part)
    with rank.prepare_load(rank.hashes(tokens)) as ticket:
        into = room(2, part=part)
        assert rank.begin_load(ticket, into).result() == Loaded(2, 2 * SPEC.page_bytes(0, part))
    assert same(into, of(values, part))


@pytest.mark.parametrize(
    "parts",
    [
        [FIRST_HEADS, LAST_HEADS],
        [Part(0, 2, 0, HEADS), Part(2, LAYERS, 0, HEADS)],
        [Part(0, 1, 0, 2), Part(0, 1, 2, HEADS), Part(1, LAYERS, 0, 2), Part(1, LAYERS, 2, HEADS)],
    ],
)
def test_parts_that_ranks_stored_are_loaded_as_one(cluster: MemoryCluster, parts: list[Part]) -> None:
    tokens, values = prompt(3), kv(3)
    whole = cluster.client(SPEC)
    for part in parts:
        assert whole.lookup(tokens).blocks == 0, "all parts have to be there"
        rank = cluster.client(SPEC, part=part)
        assert rank.store(tokens, of(values, part)).blocks == 3
        rank.flush()
    into = room(3)
    assert whole.load(tokens, into) == 3 * BLOCK
    assert same(into, values)


def test_a_ticket_over_parts_that_ranks_stored_is_redeemed_by_workers_of_any_part(cluster: MemoryCluster) -> None:
    tokens, values = prompt(3), kv(3)
    for part in (FIRST_HEADS, LAST_HEADS):
        rank = cluster.client(SPEC, part=part)
        rank.store(tokens, of(values, part))
        rank.flush()
    scheduler = cluster.client(SPEC)
    with scheduler.prepare_load(scheduler.hashes(tokens)) as ticket:
        for part in (FIRST_HEADS, Part(2, LAYERS, HEADS - 1, HEADS), Part(0, 2, 1, 3)):
            worker, into = cluster.client(SPEC, part=part), room(3, part=part)
            assert worker.begin_load(worker.redeem(bytes(ticket)), into).result().blocks == 3
            assert same(into, of(values, part))


# ------------------------------------------------------------------------------------- bytes move once


def test_storing_again_moves_nothing(cluster: MemoryCluster) -> None:
    tokens, values = prompt(4), kv(4)
    one, other = cluster.client(SPEC), cluster.client(SPEC)
    one.store(tokens, values)
    assert one.store(tokens, values) == Stored(0, 4, 0, 0), "not even before the coordinator has heard of it"
    one.flush()
    assert one.store(tokens, values) == Stored(0, 4, 0, 0)
    assert other.store(tokens, values) == Stored(0, 4, 0, 0)


def test_a_longer_prompt_moves_only_what_is_new(cluster: MemoryCluster) -> None:
    tokens, values = prompt(5), kv(5)
    client = cluster.client(SPEC)
    client.store(tokens[: 3 * BLOCK], values[:3])
    client.flush()
    assert client.store(tokens, values) == Stored(2, 3, 0, 2 * PAGE_BYTES)


def test_a_chain_goes_on_behind_its_first_blocks(cluster: MemoryCluster) -> None:
    tokens, values = prompt(5), kv(5)
    client = cluster.client(SPEC)
    hashes = client.hashes(tokens)
    assert client.begin_store(hashes[:3], values[:3]).result().blocks == 3
    assert client.begin_store(hashes, values[3:], first=3).result().blocks == 2
    assert client.begin_store(hashes, values[5:], first=5).result() == Stored(0, 0, 0, 0)
    client.flush()
    into = room(5)
    assert client.load(tokens, into) == 5 * BLOCK
    assert same(into, values)
    pages = [page for host in cluster.shards.values() for page in host.core.pool.ready()]
    parents = [page.parent for page in sorted(pages, key=lambda page: page.depth)]
    assert parents == [bytes(32), *hashes[:-1]]


def test_a_run_of_blocks_lies_together_though_it_came_in_pieces(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    for seed in range(10):
        hashes = client.hashes(prompt(4, seed))
        for first in range(4):
            assert client.begin_store(hashes[: first + 1], kv(1), first=first).result().blocks == 1
    for host in cluster.shards.values():
        assert len(host.core.pool) % 4 == 0
        assert 0 < len(host.core.pool) < 40, "and the runs are spread"


def test_a_writer_finds_pending_what_another_is_writing(cluster: MemoryCluster) -> None:
    tokens, values, hold = prompt(4), kv(4), Hold()
    other = cluster.client(SPEC)
    with watched_client(cluster, Steps(send=hold)) as one:
        transfer = one.begin_store(one.hashes(tokens), values)
        hold.wait_reached()
        assert other.store(tokens, values) == Stored(0, 0, 4, 0)
        assert other.lookup(tokens).reason == Miss(MissReason.PENDING), "half-written is never found"
        hold.let_go()
        assert transfer.result() == Stored(4, 0, 0, 4 * PAGE_BYTES)
        assert one.flush()
    assert other.store(tokens, values) == Stored(0, 4, 0, 0)


def test_a_shard_knows_who_writes_though_the_coordinator_has_forgotten(start: Start) -> None:
    cluster, hold = start(shards=1, ram_bytes="1MiB"), Hold()
    tokens, values, other = prompt(4), kv(4), cluster.client(SPEC)
    with watched_client(cluster, Steps(send=hold)) as one:
        transfer = one.begin_store(one.hashes(tokens), values)
        hold.wait_reached()
        cluster.stop_coordinator()
        cluster.start_coordinator()
        cluster.wait_until_up()
        assert other.store(tokens, values) == Stored(0, 0, 4, 0)
        hold.let_go()
        assert transfer.result() == Stored(4, 0, 0, 4 * PAGE_BYTES)


def test_writers_at_the_same_time_move_bytes_once(cluster: MemoryCluster) -> None:
    tokens, values, together = prompt(6), kv(6), threading.Barrier(3)

    def wait(message: object) -> None:
        if isinstance(message, PrepareStore):
            together.wait(BOUND_S)

    def write(port: Port) -> Stored:
        port.before = wait
        with watched_client(cluster, port=port) as client:
            return client.store(tokens, values)

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(write, [Port(cluster) for _ in range(3)]))
    assert sum(stored.nbytes for stored in outcomes) == 6 * PAGE_BYTES
    assert sum(stored.blocks for stored in outcomes) == 6
    assert all(stored.blocks + stored.deduplicated + stored.pending == 6 for stored in outcomes)
    assert all(stored.miss is None for stored in outcomes)


def test_a_lost_answer_to_a_prepare_does_not_make_ones_own_store_pending(cluster: MemoryCluster) -> None:
    tokens, port = prompt(3), Port(cluster)

    def lose_the_first(message: object) -> None:
        asked = [m for m in port.asked if isinstance(m, PrepareStore)]
        if isinstance(message, PrepareStore) and len(asked) == 1:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "the answer was lost"))

    port.after = lose_the_first
    with watched_client(cluster, port=port) as client:
        assert client.store(tokens, kv(3)) == Stored(3, 0, 0, 3 * PAGE_BYTES)
    first, again = (m for m in port.asked if isinstance(m, PrepareStore))
    assert again.attempt == first.attempt, "the same try, asked twice"


def test_a_store_whose_every_answer_was_lost_may_be_tried_anew_at_once(cluster: MemoryCluster) -> None:
    tokens, port = prompt(3), Port(cluster)
    lost = Miss(MissReason.SHARD_LOST, "the answer was lost")

    def lose(message: object) -> None:
        if isinstance(message, PrepareStore):
            raise Unavailable(lost)

    with watched_client(cluster, port=port) as client:
        port.after = lose
        assert client.store(tokens, kv(3)) == Stored(0, 0, 0, 0, lost)
        port.after = lambda message: None
        assert client.store(tokens, kv(3)) == Stored(3, 0, 0, 3 * PAGE_BYTES)


def test_what_was_committed_without_its_writer_hearing_of_it_is_there(cluster: MemoryCluster) -> None:
    tokens, lost = prompt(3), Miss(MissReason.SHARD_LOST, "the answer was lost")

    def lose() -> None:
        raise Unavailable(lost)

    with watched_client(cluster, Steps(written=lose)) as client:
        assert client.store(tokens, kv(3)).miss == lost
    other = cluster.client(SPEC)
    assert other.store(tokens, kv(3)) == Stored(0, 3, 0, 0)


# ------------------------------------------------------------------------------------------------ groups

GROUPS = KVSpec(
    model="hybrid",
    weights="sha256:1",
    block_tokens=BLOCK,
    groups=(
        Group((0, 3), (Plane("k", HEADS, DIM, "float32"), Plane("v", HEADS, DIM, "float32"))),
        Group((1,), (Plane("k", 2, DIM, "bfloat16"), Plane("v", 2, DIM, "bfloat16")), window(2 * BLOCK + 1)),
        Group((2,), (Plane.opaque("state", 100),), LAST),
    ),
)


def of_groups(blocks: int, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    return [
        make([blocks, 2, 2, BLOCK, HEADS, DIM], torch.float32),
        make([blocks, 1, 2, BLOCK, 2, DIM], torch.bfloat16),
        make([blocks, 1, 100], torch.uint8),
    ]


def test_a_store_may_leave_groups_out_whose_blocks_are_stored_by_others(cluster: MemoryCluster) -> None:
    tokens, (full, slides, state) = prompt(4), of_groups(4, noise)
    client = cluster.client(GROUPS)
    hashes = client.hashes(tokens)
    kv = client.begin_store(hashes, [full, slides, None]).result()
    assert (kv.blocks, client.lookup(tokens).blocks) == (4, 0)
    first, last = (
        client.begin_store(hashes[: at + 1], [None, None, state[at : at + 1]], first=at).result() for at in (1, 2)
    )
    assert (first.blocks, first.nbytes, last.blocks) == (1, 100, 1)
    client.flush()
    assert client.lookup(tokens).blocks == 3, "the last boundary whose state there is"
    into = of_groups(4, blank)
    with client.prepare_load(hashes) as ticket:
        assert client.begin_load(ticket, into).result().blocks == 3
    assert torch.equal(into[0][:3].view(torch.uint8), full[:3].view(torch.uint8))
    assert torch.equal(into[2][2], state[2])
    assert torch.equal(into[2][1], of_groups(4, blank)[2][1])


def test_a_store_of_no_group_is_refused(cluster: MemoryCluster) -> None:
    client = cluster.client(GROUPS)
    with pytest.raises(CallerError, match="memory for group 0 is None"):
        client.begin_store(client.hashes(prompt(1)), [None, None, None])


def test_each_group_loads_the_blocks_that_it_goes_on_from_and_no_others(cluster: MemoryCluster) -> None:
    tokens, values = prompt(5), of_groups(5, noise)
    one, other = cluster.client(GROUPS), cluster.client(GROUPS)
    assert one.store(tokens, values).blocks == 5
    one.flush()

    into = of_groups(5, blank)
    assert other.load(tokens, into) == 5 * BLOCK
    assert same(into[0], values[0]), "a prefix is needed from its beginning"
    assert same(into[1][3:], values[1][3:]) and unwritten(into[1][:3]), "a window of nine tokens: two blocks"
    assert same(into[2][4:], values[2][4:]) and unwritten(into[2][:4]), "the last state says it all"


def test_a_boundary_that_a_window_cannot_be_restored_to_is_none(cluster: MemoryCluster) -> None:
    tokens, values = prompt(5), of_groups(5, noise)
    hashes = cluster.client(GROUPS).hashes(tokens)
    prefix = cluster.client(GROUPS, part={0: GROUPS.whole(0)})
    assert prefix.begin_store(hashes, [values[0], None, None]).result().blocks == 5
    others = cluster.client(GROUPS, part={1: GROUPS.whole(1), 2: GROUPS.whole(2)})
    tail = [None, values[1][3:], values[2][3:]]
    assert others.begin_store(hashes, tail, first=3).result().blocks == 2
    assert prefix.flush() and others.flush()

    client = cluster.client(GROUPS)
    assert client.lookup(tokens).blocks == 5, "the window holds the blocks 3 and 4"
    shorter = client.lookup(tokens[: 4 * BLOCK])
    assert shorter.blocks == 0, "before block 4 the window lacks block 2"
    assert shorter.reason is not None and shorter.reason.reason is MissReason.PART
    assert prefix.lookup(tokens[: 4 * BLOCK]).blocks == 4, "a reader that needs no window misses none"

    into = of_groups(5, blank)
    assert client.load(tokens, into) == 5 * BLOCK
    assert same(into[0], values[0])
    assert same(into[1][3:], values[1][3:])
    assert same(into[2][4:], values[2][4:])


def test_groups_that_a_client_does_not_hold_are_not_moved(cluster: MemoryCluster) -> None:
    tokens, values = prompt(3), of_groups(3, noise)
    whole = cluster.client(GROUPS)
    whole.store(tokens, values)
    whole.flush()
    window_only = cluster.client(GROUPS, part={1: Part(0, 1, 1, 2)})
    into = blank([3, 1, 2, BLOCK, 1, DIM], torch.bfloat16)
    assert window_only.load(tokens, [None, into, None]) == 3 * BLOCK
    assert same(into[1:], values[1][1:, :, :, :, 1:])
    assert unwritten(into[:1])
