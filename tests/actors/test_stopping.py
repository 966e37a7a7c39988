"""A real cluster is stopped in an orderly way, and the next one on the same disk finds what was stored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvcluster
from kvcluster.actors import background, stopping
from kvcluster.actors.local import LocalCluster
from kvcluster.client import Client
from kvcluster.config import ShardConfig, load
from kvcluster.errors import Unreachable
from tests.actors.processes import session
from tests.client.build import BLOCK, prompt, room, same
from tests.client.test_disk import FILE_BYTES
from tests.client.test_tiers import NUMBERS, numbers
from tests.ports import free_port
from tests.waiting import eventually

BLOCKS, PROMPTS = 6, 8
TOKENS = [prompt(BLOCKS, 100 * number) for number in range(PROMPTS)]
SIZES = {"ram_bytes": "16MiB", "host_bytes": "2MiB", "disk_bytes": 64 * FILE_BYTES}
CONFIG: dict[str, Any] = {
    "coordinator": {"hold_ms": 0, "host_codec": "raw"},
    "shard": {"scrub_bytes": 0, "disk_file_bytes": FILE_BYTES, "report_interval_ms": 50, "report_retry_ms": 20},
    "client": {"deadline_ms": 10_000},
}
"""All prompts fit on the disk of one shard, and nothing goes down by itself."""


def local(folder: Path, **shard: object) -> Any:
    config = {**CONFIG, "shard": {**CONFIG["shard"], **shard}}
    return kvcluster.local(disk_dir=folder, config=config, **SIZES)  # type: ignore[arg-type]


def store(client: Client) -> None:
    for number, tokens in enumerate(TOKENS):
        assert client.store(tokens, numbers(BLOCKS, number)).blocks == BLOCKS
    client.flush()


def hits(client: Client) -> int:
    """The blocks that can be loaded, each byte of which is right."""
    found = 0
    for number, tokens in enumerate(TOKENS):
        into = room(BLOCKS, NUMBERS)
        loaded = client.load(tokens, into) // BLOCK
        assert same(into[:loaded], numbers(BLOCKS, number)[:loaded]), "wrong bytes"
        found += loaded
    return found


def epoch(client: Client) -> int:
    """The incarnation of the shard that the coordinator knows; 0 if it knows none, or does not answer."""
    with suppress(Unreachable):
        return max((int(shard["epoch"]) for shard in client.status()["shards"]), default=0)
    return 0


@pytest.mark.cluster
@pytest.mark.usefixtures("shared_ray")
class TestLocal:
    def test_the_next_cluster_has_every_hit_of_the_one_that_ended(self, tmp_path: Path) -> None:
        with local(tmp_path) as cluster:
            store(cluster.client(NUMBERS))
        with local(tmp_path) as cluster:
            assert hits(cluster.client(NUMBERS)) == BLOCKS * PROMPTS

    def test_without_time_to_save_there_are_misses_and_no_error(self, tmp_path: Path) -> None:
        with local(tmp_path, stop_ms=0) as cluster:
            store(cluster.client(NUMBERS))
        with local(tmp_path) as cluster:
            client = cluster.client(NUMBERS)
            assert hits(client) == 0
            store(client)
            assert hits(client) == BLOCKS * PROMPTS

    def test_with_hardly_any_time_there_may_be_misses_and_no_wrong_byte(self, tmp_path: Path) -> None:
        with local(tmp_path, stop_ms=1) as cluster:
            store(cluster.client(NUMBERS))
        with local(tmp_path) as cluster:
            assert 0 <= hits(cluster.client(NUMBERS)) <= BLOCKS * PROMPTS

    def test_a_shard_that_gets_sigterm_saves_and_the_one_that_ray_starts_next_has_every_hit(
        self, tmp_path: Path
    ) -> None:
        with local(tmp_path) as cluster:
            client = cluster.client(NUMBERS)
            store(client)
            before = epoch(client)
            os.kill(shard_pid(cluster), signal.SIGTERM)
            eventually(lambda: epoch(client) > before and client.lookup(TOKENS[-1]).tokens == BLOCKS * BLOCK)
            assert hits(client) == BLOCKS * PROMPTS

    def test_a_shard_whose_coordinator_is_dead_saves_at_sigterm(self, tmp_path: Path) -> None:
        with local(tmp_path) as cluster:
            client = cluster.client(NUMBERS)
            store(client)
            before = epoch(client)
            coordinator, shard = cluster.pids()
            os.kill(coordinator, signal.SIGKILL)
            os.kill(shard, signal.SIGTERM)
            eventually(lambda: epoch(client) > before and client.lookup(TOKENS[-1]).tokens == BLOCKS * BLOCK)
            assert hits(client) == BLOCKS * PROMPTS


def shard_pid(cluster: LocalCluster) -> int:
    return cluster.pids()[1]


@pytest.mark.cluster
def test_down_has_the_shards_save_and_the_next_up_has_every_hit(tmp_path: Path) -> None:
    port = free_port()
    config = load(
        overrides={
            **CONFIG,
            "shards": 1,
            "shard": {**CONFIG["shard"], **SIZES, "disk_dir": str(tmp_path)},
            "server": {"port": port},
        }
    )
    try:
        for expected in (0, BLOCKS * PROMPTS):
            running = background.up(config).running
            with kvcluster.connect(running.address, NUMBERS, config=config.client) as client:
                assert hits(client) == expected
                if not expected:
                    store(client)
            assert background.down(port)
            assert not session(running.pid)
    finally:
        background.down(port)


def test_shards_without_a_disk_or_without_time_save_nothing() -> None:
    on_disk = ShardConfig(disk_bytes=2**30, disk_dir="/drive")
    assert stopping.save_ms(on_disk) == on_disk.stop_ms == 20_000
    assert stopping.save_ms(ShardConfig()) == 0
    assert stopping.save_ms(ShardConfig(disk_bytes=2**30, disk_dir="/drive", stop_ms=0)) == 0


def test_processes_that_are_no_shards_get_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stopping.end_shards([other.pid, 2**22 + 1], 1_000)
        other.communicate(b"\n")
    assert other.returncode == 0
