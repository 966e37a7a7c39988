"""Loads that begin after the blocks that their caller has, and blocks that a sliding window does not need."""

from __future__ import annotations

import pytest
import torch

from kvcluster.core.groups import LAST, Group, Plane, Reuse, chunk, window
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Dense, Paged
from tests.client.build import BLOCK, DIM, HEADS, PAGE_BYTES, SPEC, kv, noise, prompt, room, same, unwritten

PLANES = (Plane("k", HEADS, DIM, "float32"), Plane("v", HEADS, DIM, "float32"))
SLIDING = KVSpec("sliding", "sha256:1", BLOCK, (Group((0, 2), PLANES), Group((1,), PLANES, window(BLOCK + 2))))
"""One group needs every block, the other the last two."""


def fill(cluster: MemoryCluster) -> torch.Tensor:
    """Four blocks, which every client finds."""
    writer, content = cluster.client(SPEC), kv(4)
    writer.store(prompt(4), content)
    assert writer.flush()
    return content


def fill_groups(cluster: MemoryCluster) -> list[torch.Tensor]:
    writer, content = cluster.client(SLIDING), of_groups(4, seed=1)
    stored = writer.begin_store(writer.hashes(prompt(4)), [Dense(tensor) for tensor in content]).result()
    assert stored.blocks == 4 and writer.flush()
    return content


@pytest.mark.parametrize("first", [0, 1, 3, 4])
def test_only_the_blocks_from_first_on_are_read_and_put_first(cluster: MemoryCluster, first: int) -> None:
    stored = fill(cluster)
    client = cluster.client(SPEC)
    into = room(5)
    with client.prepare_load(client.hashes(prompt(4))) as ticket:
        loaded = client.begin_load(ticket, into, first=first).result()
    assert (loaded.blocks, loaded.nbytes, loaded.miss) == (4, (4 - first) * PAGE_BYTES, None)
    assert same(into[: 4 - first], stored[first:]) and unwritten(into[4 - first :])
    assert loaded.took_ns > 0


def test_what_does_not_come_is_counted_from_the_sequence_start(cluster: MemoryCluster) -> None:
    fill(cluster)
    client = cluster.client(SPEC)
    with client.prepare_load(client.hashes(prompt(4))) as ticket:
        for shard in list(cluster.shards):
            cluster.stop_shard(shard)
        loaded = client.begin_load(ticket, room(2), first=2).result()
    assert loaded.blocks == 2 and sorted(loaded.failed) == [2, 3]
    assert loaded.miss is not None and loaded.miss.reason is not MissReason.DEADLINE


@pytest.mark.parametrize("first", [-1, 5, True, 1.0])
def test_a_load_begins_within_its_ticket(cluster: MemoryCluster, first: object) -> None:
    fill(cluster)
    client = cluster.client(SPEC)
    with (
        client.prepare_load(client.hashes(prompt(4))) as ticket,
        pytest.raises(CallerError, match="does not lie within the 4 hashes"),
    ):
        client.begin_load(ticket, room(4), first=first)  # type: ignore[arg-type]


def of_groups(blocks: int, seed: int) -> list[torch.Tensor]:
    return [noise([blocks, len(g.layers), 2, BLOCK, HEADS, DIM], seed=seed + n) for n, g in enumerate(SLIDING.groups)]


@pytest.mark.parametrize("first", [0, 2, 3])
def test_blocks_before_a_window_need_no_place_of_their_own(cluster: MemoryCluster, first: int) -> None:
    stored = fill_groups(cluster)
    client = cluster.client(SLIDING)
    hashes = client.hashes(prompt(4))
    caches = [[torch.zeros(9, 2, BLOCK, HEADS, DIM) for _ in group.layers] for group in SLIDING.groups]
    table = [[5, 6, 7, 8], [0, 0, 3, 4]]  # as engines have it: 0 stands for what they no longer keep
    with client.prepare_load(hashes) as ticket:
        into = [Paged(layers, ids[first:]) for layers, ids in zip(caches, table, strict=True)]
        loaded = client.begin_load(ticket, into, first=first).result()
    assert loaded.blocks == 4
    for group, (layers, ids) in enumerate(zip(caches, table, strict=True)):
        needed = [block for block in range(first, 4) if group == 0 or block >= 2]
        for number, cache in enumerate(layers):
            for block in needed:
                assert same(cache[ids[block]], stored[group][block, number])
            untouched = sorted(set(range(9)) - {ids[block] for block in needed})
            assert not cache[untouched].any()


def test_blocks_within_a_window_do(cluster: MemoryCluster) -> None:
    fill_groups(cluster)
    client = cluster.client(SLIDING)
    hashes = client.hashes(prompt(4))
    caches = [[torch.zeros(9, 2, BLOCK, HEADS, DIM) for _ in group.layers] for group in SLIDING.groups]
    with (
        client.prepare_load(hashes) as ticket,
        pytest.raises(CallerError, match="block id 4 of the destination of group 1 occurs twice"),
    ):
        client.begin_load(ticket, [Paged(caches[0], [5, 6, 7, 8]), Paged(caches[1], [0, 0, 4, 4])])


NARROW = (Plane("k", 1, DIM, "float32"),)


@pytest.mark.parametrize("reuse", [window(BLOCK + 1), window(2 * BLOCK + 1), chunk(8 * BLOCK), LAST], ids=str)
@pytest.mark.parametrize("cached", range(1, 7))
def test_a_window_ends_where_the_cached_prefix_ends(cluster: MemoryCluster, reuse: Reuse, cached: int) -> None:
    """A load of a longer prompt than is cached: the blocks before that boundary lie at their own ids."""
    spec = KVSpec("narrow", "sha256:1", BLOCK, (Group((0,), NARROW, reuse),))
    client, content = cluster.client(spec), noise([6, 1, 1, BLOCK, 1, DIM])
    client.store(prompt(6)[: cached * BLOCK], content[:cached])
    assert client.flush()
    cache, ids = torch.zeros(9, 1, BLOCK, 1, DIM), [8, 1, 6, 3, 5, 2]
    assert client.load(prompt(6), Paged([cache], ids)) == cached * BLOCK
    needed = range(cached - reuse.blocks_needed(cached, BLOCK), cached)
    assert all(same(cache[ids[block]], content[block, 0]) for block in needed)
    assert not cache[sorted(set(range(9)) - {ids[block] for block in needed})].any()


@pytest.mark.parametrize("placeholder", [-1, 0, 8])
def test_a_load_that_may_end_anywhere_takes_no_placeholders(cluster: MemoryCluster, placeholder: int) -> None:
    """Whatever is cached: the mistake does not wait for a shorter prefix."""
    stored, client = fill_groups(cluster), cluster.client(SLIDING)
    caches = [[torch.zeros(9, 2, BLOCK, HEADS, DIM) for _ in group.layers] for group in SLIDING.groups]
    table = [[5, 6, 7, 8], [placeholder, placeholder, 3, 4]]
    into = [Paged(layers, ids) for layers, ids in zip(caches, table, strict=True)]
    with pytest.raises(CallerError, match="may end after any block, so none may have a placeholder"):
        client.load(prompt(4), into)
    with client.prepare_load(client.hashes(prompt(4))) as ticket:
        assert client.begin_load(ticket, into).result().blocks == 4
    assert same(caches[1][0][[3, 4]], stored[1][2:, 0])


def test_a_placeholder_within_a_window_is_refused(cluster: MemoryCluster) -> None:
    fill_groups(cluster)
    client = cluster.client(SLIDING)
    caches = [[torch.zeros(9, 2, BLOCK, HEADS, DIM) for _ in group.layers] for group in SLIDING.groups]
    with (
        client.prepare_load(client.hashes(prompt(4))) as ticket,
        pytest.raises(CallerError, match=r"go from -1 to 4.*only the first 2, which are not loaded, may have a placeh"),
    ):
        client.begin_load(ticket, [Paged(caches[0], [5, 6, 7, 8]), Paged(caches[1], [-1, -1, -1, 4])])
