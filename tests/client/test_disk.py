"""Pages that leave the host tier go to disk, are read back unchanged, and are found by the next shard that starts. If
the files are damaged meanwhile, the result is a miss, never a wrong byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcluster.client.client import Client
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.ids import ShardId
from kvcluster.core.miss import Loss, MissReason
from kvcluster.testing import MemoryCluster
from tests.client.build import BLOCK, prompt, room, same
from tests.client.conftest import Start
from tests.client.test_tiers import EAGER, FIRST, FURTHEST, NUMBERS, RAM_BYTES, drain, far, numbers, stored, where

TOKENS, BLOCKS = prompt(6), 6
HOST_BYTES = 100_000
"""A tenth of it, which EAGER leaves, has no room for a page."""

FILE_BYTES = HEAD_BYTES + 16 * SECTOR_BYTES


def cluster_on(folder: Path, start: Start, *, codec: str = "q8", shards: int = 1, **shard: Any) -> MemoryCluster:
    """A cluster that demotes everything that is stored to files in that folder."""
    return start(shards=shards, ram_bytes=RAM_BYTES, config=settings(folder, codec=codec, **shard))


def settings(folder: Path, *, codec: str = "q8", **shard: Any) -> dict[str, Any]:
    disk = {"disk_bytes": 64 * FILE_BYTES, "disk_file_bytes": FILE_BYTES, "disk_dir": str(folder)}
    return {
        "coordinator": {"hold_ms": 0, "host_codec": codec, **EAGER},
        "shard": {"host_bytes": HOST_BYTES, "scrub_bytes": 0, **disk, **shard},
    }


def wait_until_on_disk(cluster: MemoryCluster, client: Client, tokens: Sequence[int] = TOKENS) -> None:
    cluster.wait_until(lambda: where(client, tokens) == ["disk"] * (len(tokens) // BLOCK))


def went_to_disk(cluster: MemoryCluster, tokens: Sequence[int] = TOKENS, *, tenant: str = "default") -> Client:
    """A client that has stored these tokens, all of which are on disk now."""
    client = cluster.client(NUMBERS, tenant=tenant)
    stored(client, numbers(len(tokens) // BLOCK), tokens)
    wait_until_on_disk(cluster, client, tokens)
    return client


def restarted(cluster: MemoryCluster, meanwhile: Callable[[], object] = lambda: None, shard: ShardId = FIRST) -> None:
    """Another incarnation of the shard, and what happens between the two."""
    cluster.stop_shard(shard)
    meanwhile()
    cluster.start_shard(int(shard.rpartition("-")[2]))
    cluster.wait_until_up()


def counted(client: Client, name: str) -> int:
    return int(client.status()["totals"][name])


def files(folder: Path) -> list[Path]:
    """Those that hold pages, or may."""
    return sorted(folder.glob("*/*.pages"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
def test_what_lies_on_disk_is_loaded_as_near_as_its_codec_and_stays_there(
    tmp_path: Path, start: Start, codec: str
) -> None:
    cluster, values, into = cluster_on(tmp_path, start, codec=codec), numbers(), room(BLOCKS, NUMBERS)
    client = went_to_disk(cluster)
    assert client.load(TOKENS, into) == BLOCKS * BLOCK
    assert same(into[0], values[0])
    assert all(error < FURTHEST.get(codec, 1e-9) for error in far(into, values))
    assert where(client) == ["disk"] * BLOCKS
    cluster.wait_until(lambda: counted(client, "staged") == BLOCKS)


def test_what_is_loaded_from_disk_again_and_again_comes_up_to_the_ram_tier(tmp_path: Path, start: Start) -> None:
    config = settings(tmp_path, host_bytes=40_000)
    config["coordinator"] |= {"low_free": 0.5, "promote_loads": 2}
    cluster = start(shards=1, ram_bytes=RAM_BYTES, config=config)
    client = cluster.client(NUMBERS)
    stored(client, numbers())
    for number in range(1, 8):  # push it down
        stored(client, numbers(seed=number), prompt(BLOCKS, number))
    cluster.wait_until(lambda: "disk" in where(client))
    first, into = list(where(client)), room(BLOCKS, NUMBERS)

    def has_come_up() -> bool:
        client.load(TOKENS, into)
        return any(before == "disk" and now == "ram" for before, now in zip(first, where(client), strict=True))

    cluster.wait_until(has_come_up)
    assert client.load(TOKENS, into) == BLOCKS * BLOCK
    assert all(error < FURTHEST["q8"] for error in far(into, numbers()))


def test_what_is_on_disk_is_not_stored_again(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start, codec="raw")
    client = went_to_disk(cluster)
    again = client.store(TOKENS, numbers())
    assert (again.blocks, again.deduplicated) == (0, BLOCKS)


def test_a_reader_who_accepts_no_loss_is_told_of_what_has_lost_on_disk(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = went_to_disk(cluster)
    assert client.load(TOKENS, room(BLOCKS, NUMBERS), accept=Loss.EXACT) == BLOCK
    assert [block.reason for block in client.explain(TOKENS, accept=Loss.EXACT)][1:] == [MissReason.LOSSY] * (
        BLOCKS - 1
    )


def test_the_disk_tier_keeps_to_its_size_and_evicts_the_coldest(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start, disk_bytes=8 * FILE_BYTES)
    client = cluster.client(NUMBERS)
    for number in range(40):
        stored(client, numbers(seed=number), prompt(BLOCKS, number))
    cluster.wait_until(lambda: counted(client, "evicted") > 0)
    (disk,) = [below for shard in client.status()["shards"] for below in shard["below"] if below["tier"] == "disk"]
    assert disk["capacity_bytes"] == 8 * FILE_BYTES
    assert sum(path.stat().st_size for path in files(tmp_path)) == 8 * FILE_BYTES


# ----------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
def test_a_shard_that_starts_with_a_warm_disk_serves_it_at_once(tmp_path: Path, start: Start, codec: str) -> None:
    cluster, values, into = cluster_on(tmp_path, start, codec=codec), numbers(), room(BLOCKS, NUMBERS)
    client = went_to_disk(cluster)
    restarted(cluster)
    assert client.load(TOKENS, into) == BLOCKS * BLOCK
    assert same(into[0], values[0])
    assert all(error < FURTHEST.get(codec, 1e-9) for error in far(into, values))


def test_another_cluster_finds_what_the_last_one_has_left(tmp_path: Path, start: Start) -> None:
    first = MemoryCluster(shards=1, ram_bytes=RAM_BYTES, config=settings(tmp_path))
    with first:
        went_to_disk(first)
    client, into = cluster_on(tmp_path, start).client(NUMBERS), room(BLOCKS, NUMBERS)
    assert client.load(TOKENS, into) == BLOCKS * BLOCK
    assert all(error < FURTHEST["q8"] for error in far(into, numbers()))


def test_tenants_find_only_their_own_after_a_restart(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    ours = went_to_disk(cluster, tenant="ours")
    theirs = cluster.client(NUMBERS, tenant="theirs")
    restarted(cluster)
    assert ours.load(TOKENS, room(BLOCKS, NUMBERS)) == BLOCKS * BLOCK
    assert theirs.load(TOKENS, room(BLOCKS, NUMBERS)) == 0


def test_without_a_disk_tier_a_restart_forgets_all(tmp_path: Path, start: Start) -> None:
    cluster = start(shards=1, ram_bytes=RAM_BYTES, config={"shard": {"host_bytes": HOST_BYTES}})
    client = cluster.client(NUMBERS)
    stored(client, numbers())
    restarted(cluster)
    assert client.load(TOKENS, room(BLOCKS, NUMBERS)) == 0
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- damage


def damaged(folder: Path, how: str) -> None:
    for path in files(folder):
        size = path.stat().st_size
        if how == "cut in the middle":
            os.truncate(path, HEAD_BYTES + 2 * SECTOR_BYTES)
        elif how == "cut within the head":
            os.truncate(path, 40)
        elif how == "emptied":
            os.truncate(path, 0)
        elif how == "removed":
            path.unlink()
        elif how == "a bit of the head":
            flip(path, 100)
        elif how == "a bit of each record":
            for at in range(HEAD_BYTES, HEAD_BYTES + SECTOR_BYTES, 8):
                flip(path, at)
        else:
            for at in range(HEAD_BYTES + SECTOR_BYTES, size, 97):
                flip(path, at, bit=at % 8)


@pytest.mark.parametrize(
    "how",
    [
        *("cut in the middle", "cut within the head", "emptied", "removed"),
        *("a bit of the head", "a bit of each record", "a bit of each page"),
    ],
)
def test_a_damaged_file_is_a_miss_and_never_a_wrong_byte(tmp_path: Path, start: Start, how: str) -> None:
    cluster, values, into = cluster_on(tmp_path, start), numbers(), room(BLOCKS, NUMBERS)
    client = went_to_disk(cluster)
    restarted(cluster, lambda: damaged(tmp_path, how))
    blocks = client.load(TOKENS, into) // BLOCK
    assert blocks < BLOCKS
    assert all(error < FURTHEST["q8"] for error in far(into[:blocks], values[:blocks]))
    told = (MissReason.SHARD_LOST, MissReason.CORRUPT)
    cluster.wait_until(lambda: client.explain(TOKENS)[blocks].reason in told)
    stored(client, values)  # and is there again
    wait_until_on_disk(cluster, client)
    assert client.load(TOKENS, into) == BLOCKS * BLOCK
    assert all(error < FURTHEST["q8"] for error in far(into, values))


def test_what_rots_under_a_running_shard_is_a_miss_that_is_counted_and_forgotten(tmp_path: Path, start: Start) -> None:
    cluster, into = cluster_on(tmp_path, start), room(BLOCKS, NUMBERS)
    client = went_to_disk(cluster)
    damaged(tmp_path, "a bit of each page")
    assert client.load(TOKENS, into) == 0
    cluster.wait_until(lambda: counted(client, "corrupt") == BLOCKS)
    cluster.wait_until(lambda: {block.reason for block in client.explain(TOKENS)} == {MissReason.CORRUPT})


def test_a_file_that_goes_under_a_running_shard_is_a_miss(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = went_to_disk(cluster)
    for path in files(tmp_path):
        path.unlink()
    assert client.load(TOKENS, room(BLOCKS, NUMBERS)) == 0
    stored(client, numbers(seed=1), prompt(BLOCKS, 1))  # nothing can be written any more, and nothing hangs
    cluster.wait_until(lambda: counted(client, "evicted") > 0)


# ------------------------------------------------------------------------------------------------------- purges


def test_what_was_purged_is_not_found_by_the_shard_that_starts_next(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = went_to_disk(cluster)
    client.clear()
    cluster.wait_until(lambda: counted(client, "purged") == BLOCKS)
    restarted(cluster)
    assert client.load(TOKENS, room(BLOCKS, NUMBERS)) == 0


def test_what_was_purged_while_its_shard_was_away_is_not_found_again(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = went_to_disk(cluster)
    restarted(cluster, client.clear)
    cluster.wait_until(lambda: counted(client, "purged") == BLOCKS)
    assert client.load(TOKENS, room(BLOCKS, NUMBERS)) == 0
    restarted(cluster)
    assert client.load(TOKENS, room(BLOCKS, NUMBERS)) == 0


def test_what_was_stored_after_a_purge_is_found_by_the_shard_that_starts_next(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = went_to_disk(cluster)
    client.clear()
    cluster.wait_until(lambda: counted(client, "purged") == BLOCKS)
    stored(client, numbers(seed=1))
    wait_until_on_disk(cluster, client)
    into = room(BLOCKS, NUMBERS)
    restarted(cluster)
    assert client.load(TOKENS, into) == BLOCKS * BLOCK
    assert all(error < FURTHEST["q8"] for error in far(into, numbers(seed=1)))


def test_what_was_evicted_before_a_purge_does_not_come_back_from_its_old_place(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start, disk_bytes=20 * FILE_BYTES)
    client = went_to_disk(cluster)
    for number in range(1, 6):
        stored(client, numbers(seed=number), prompt(BLOCKS, number))
    cluster.wait_until(lambda: where(client) != ["disk"] * BLOCKS)
    client.clear()
    restarted(cluster)
    for number in range(6):
        assert client.load(prompt(BLOCKS, number), room(BLOCKS, NUMBERS)) == 0


# ------------------------------------------------------------------------------------------------------ trouble


def test_a_shard_whose_folder_another_process_holds_runs_without_and_says_so(tmp_path: Path, start: Start) -> None:
    holder = cluster_on(tmp_path, start)
    went_to_disk(holder)
    cluster = cluster_on(tmp_path, start)
    client, into = cluster.client(NUMBERS), room(BLOCKS, NUMBERS)
    (shard,) = client.status()["shards"]
    assert "another process uses" in shard["trouble"]
    assert [below["tier"] for below in shard["below"]] == ["host"]
    assert client.load(TOKENS, into) == 0
    stored(client, numbers(2), prompt(2))


def test_a_shard_whose_folder_cannot_be_made_runs_without_and_says_so(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").write_text("in the way")
    client = cluster_on(tmp_path / "file", start).client(NUMBERS)
    (shard,) = client.status()["shards"]
    assert "shard.disk_dir" in shard["trouble"] and "Not a directory" in shard["trouble"]
    stored(client, numbers(2), prompt(2))


def test_what_a_drained_shard_has_on_disk_goes_where_there_is_room(tmp_path: Path, start: Start) -> None:
    config = settings(tmp_path, host_bytes=60_000)
    config["coordinator"]["low_free"] = 0.5  # so that the other takes half of what makes this one write to disk
    cluster = start(shards=1, ram_bytes=RAM_BYTES, config=config)
    client, tokens, values, into = cluster.client(NUMBERS), prompt(7), numbers(7), room(7, NUMBERS)
    stored(client, values, tokens)
    cluster.wait_until(lambda: where(client, tokens)[3:] == ["disk"] * 4)
    cluster.start_shard(1)
    cluster.wait_until(lambda: len(client.status()["shards"]) == 2)
    drain(cluster, FIRST)
    cluster.wait_until(lambda: cluster.drained == [FIRST])
    blocks = client.load(tokens, into) // BLOCK
    assert blocks >= 4
    assert all(error < FURTHEST["q8"] for error in far(into[:blocks], values[:blocks]))
