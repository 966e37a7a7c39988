"""A shard that is stopped in an orderly way saves its pages to disk, and the next one serves them again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from kvcluster.core.messages import PagesSaved, Tier
from kvcluster.core.miss import Loss
from kvcluster.runtime import disk
from kvcluster.testing import MemoryCluster
from tests.client.build import BLOCK, prompt, room, same
from tests.client.conftest import Start
from tests.client.test_disk import FILE_BYTES, restarted
from tests.client.test_tiers import FIRST, FURTHEST, NUMBERS, far, numbers, stored, where

BLOCKS = 6
PAGES_PER_FILE = 5
"""A raw page takes three of the 16 sectors behind a file's head, one of which has its records."""

ENOUGH_MS = 20_000


def cluster_on(folder: Path, start: Start, *, codec: str = "raw", files: int = 64) -> MemoryCluster:
    """A cluster whose RAM tier has room for everything, so that nothing goes down by itself."""
    drive = {"disk_bytes": files * FILE_BYTES, "disk_file_bytes": FILE_BYTES, "disk_dir": str(folder)}
    config = {
        "coordinator": {"hold_ms": 0, "host_codec": codec, "low_free": 0.0, "high_free": 0.0},
        "shard": {"host_bytes": "2MiB", "scrub_bytes": 0, **drive},
    }
    return start(shards=1, ram_bytes="16MiB", config=config)


def saved(cluster: MemoryCluster, *, stop_ms: int = ENOUGH_MS) -> PagesSaved:
    return cluster.shards[FIRST].save(stop_ms)


@pytest.mark.parametrize("codec", ["raw", "q8", "q4"])
def test_all_that_fits_on_disk_is_found_again_after_a_stop(tmp_path: Path, start: Start, codec: str) -> None:
    cluster = cluster_on(tmp_path, start, codec=codec)
    client = cluster.client(NUMBERS)
    prompts = [prompt(BLOCKS, 100 * number) for number in range(8)]
    values = [numbers(BLOCKS, seed) for seed in range(len(prompts))]
    for tokens, kv in zip(prompts, values, strict=True):
        stored(client, kv, tokens)
    answer = saved(cluster)
    assert (answer.pages, answer.left_pages) == (len(prompts) * BLOCKS, 0)
    restarted(cluster)
    for tokens, kv in zip(prompts, values, strict=True):
        into = room(BLOCKS, NUMBERS)
        assert client.load(tokens, into) == BLOCKS * BLOCK
        assert same(into, kv) if codec == "raw" else all(error < FURTHEST[codec] for error in far(into, kv))
        assert same(into[:1], kv[:1]), "the first block of a sequence is saved raw"


def test_a_shard_whose_coordinator_is_dead_saves_all_the_same(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = cluster.client(NUMBERS)
    kv, tokens = numbers(), prompt(BLOCKS)
    stored(client, kv, tokens)
    cluster.stop_coordinator()
    assert saved(cluster).pages == BLOCKS
    cluster.stop_shard(FIRST)
    cluster.start_coordinator()
    cluster.start_shard(0)
    cluster.wait_until_up()
    into = room(BLOCKS, NUMBERS)
    assert client.load(tokens, into) == BLOCKS * BLOCK
    assert same(into, kv)


def test_with_a_full_disk_the_last_used_prompts_are_kept_and_whole(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start, files=2)
    client = cluster.client(NUMBERS)
    prompts = [prompt(5, 100 * number) for number in range(4)]
    for number, tokens in enumerate(prompts):
        stored(client, numbers(5, number), tokens)
    for number in (3, 1):
        assert client.load(prompts[number], room(5, NUMBERS)) == 5 * BLOCK
    answer = saved(cluster)
    assert (answer.pages, answer.left_pages) == (2 * PAGES_PER_FILE, 2 * PAGES_PER_FILE)
    restarted(cluster)
    assert [client.lookup(tokens).tokens for tokens in prompts] == [0, 5 * BLOCK, 0, 5 * BLOCK]
    for number in (1, 3):
        into = room(5, NUMBERS)
        assert client.load(prompts[number], into) == 5 * BLOCK
        assert same(into, numbers(5, number))


def test_without_time_everything_is_a_miss_and_nothing_else_fails(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = cluster.client(NUMBERS)
    kv, tokens = numbers(), prompt(BLOCKS)
    stored(client, kv, tokens)
    answer = saved(cluster, stop_ms=0)
    assert (answer.pages, answer.left_pages) == (0, BLOCKS)
    restarted(cluster)
    assert client.load(tokens, room(BLOCKS, NUMBERS)) == 0
    stored(client, kv, tokens)
    into = room(BLOCKS, NUMBERS)
    assert client.load(tokens, into) == BLOCKS * BLOCK
    assert same(into, kv)


def test_a_stopping_shard_is_shown_serves_loads_and_is_offered_no_stores(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = cluster.client(NUMBERS)
    kv, tokens = numbers(), prompt(BLOCKS)
    stored(client, kv, tokens)
    saved(cluster)
    cluster.wait_until(lambda: client.status()["shards"][0]["state"] == "stopping")
    into = room(BLOCKS, NUMBERS)
    assert client.load(tokens, into) == BLOCKS * BLOCK
    assert same(into, kv)
    assert where(client, tokens) == ["ram"] * BLOCKS
    assert client.store(prompt(BLOCKS, 500), kv).blocks == 0


def test_a_write_that_is_cut_off_is_a_miss_and_what_was_saved_before_is_whole(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_on(tmp_path, start)
    client = cluster.client(NUMBERS)
    kv, tokens = numbers(), prompt(BLOCKS)
    stored(client, kv, tokens)
    writes, write = [0], disk._write

    def cut_off(file: int, data: bytes | memoryview, at: int) -> None:
        writes[0] += 1
        if writes[0] == 9:  # the bytes of the third page, after the head and three writes for each page before
            write(file, memoryview(data)[:1_000], at)
        if writes[0] >= 9:
            raise OSError(errno.EIO, "the machine is going down")
        write(file, data, at)

    monkeypatch.setattr(disk, "_write", cut_off)
    assert saved(cluster).pages == 2
    assert "saved 2 pages" in caplog.text and "not saved: 4 pages" in caplog.text
    monkeypatch.undo()
    restarted(cluster)
    into = room(BLOCKS, NUMBERS)
    assert client.load(tokens, into) == 2 * BLOCK
    assert same(into[:2], kv[:2])


def test_what_rotted_in_memory_is_not_saved(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start, codec="q8")
    client = cluster.client(NUMBERS)
    kv, tokens = numbers(), prompt(BLOCKS)
    stored(client, kv, tokens)
    cluster.corrupt(FIRST, block=list(cluster.shard_core(FIRST).pool.ready())[2].key.hash)
    assert saved(cluster).pages == BLOCKS - 1
    restarted(cluster)
    into = torch.zeros_like(room(BLOCKS, NUMBERS))
    assert client.load(tokens, into, accept=Loss.Q8) == 2 * BLOCK


def test_pages_that_had_gone_down_before_are_not_written_again(tmp_path: Path, start: Start) -> None:
    cluster = cluster_on(tmp_path, start)
    client = cluster.client(NUMBERS)
    kv, tokens = numbers(), prompt(BLOCKS)
    stored(client, kv, tokens)
    first = saved(cluster)
    restarted(cluster)
    assert saved(cluster) == PagesSaved(0, 0, 0, 0)
    assert first.pages == cluster.shard_core(FIRST).pool.count(Tier.DISK) == BLOCKS
