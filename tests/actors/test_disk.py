"""A shard of a real cluster dies and restarts by itself: its pages on disk are found at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import kvcluster
from tests.client.build import BLOCK, prompt, room, shape_of
from tests.client.test_disk import FILE_BYTES, HOST_BYTES
from tests.client.test_tiers import EAGER, FURTHEST, NUMBERS, RAM_BYTES, far
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shared_ray")]

BLOCKS, TOKENS = 6, prompt(6)


def test_a_shard_that_was_killed_serves_from_its_disk_as_soon_as_it_is_back(tmp_path: Path) -> None:
    config = {
        "coordinator": {"hold_ms": 0, **EAGER},
        "shard": {"scrub_bytes": 0, "disk_file_bytes": FILE_BYTES, "report_interval_ms": 50, "report_retry_ms": 20},
        "client": {"deadline_ms": 10_000},
    }
    values = torch.randn(shape_of(BLOCKS, NUMBERS), generator=torch.Generator().manual_seed(1))
    with kvcluster.local(
        ram_bytes=RAM_BYTES,
        host_bytes=HOST_BYTES,
        disk_bytes=64 * FILE_BYTES,
        disk_dir=tmp_path,
        config=config,
    ) as cluster:
        client = cluster.client(NUMBERS)
        client.store(TOKENS, values)
        client.flush()
        eventually(lambda: [block.tier for block in client.explain(TOKENS)] == ["disk"] * BLOCKS)
        epoch = client.status()["shards"][0]["epoch"]
        os.kill(cluster.pids()[1], signal.SIGKILL)
        eventually(
            lambda: client.status()["shards"][0]["epoch"] > epoch and client.lookup(TOKENS).tokens == len(TOKENS)
        )
        into = room(BLOCKS, NUMBERS)
        assert client.load(TOKENS, into) == BLOCKS * BLOCK
        assert all(error < FURTHEST["q8"] for error in far(into, values))
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0"]
