"""Groups of shards with and without pools on GPUs, side by side: Ray places them by the GPUs that they claim. The GPUs
are twins, and Ray's in name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import kvcluster
from kvcluster import Dense
from kvcluster.actors import background, ray_node
from kvcluster.config import load
from kvcluster.errors import ConfigError
from tests.actors.processes import session, title
from tests.actors.test_shared_pool import engine
from tests.ports import free_port
from tests.runtime.test_device_memory import BLOCKS, SPEC, kv, prompt
from tests.waiting import eventually

pytestmark = pytest.mark.cluster

EACH = BLOCKS * SPEC.block_bytes
TIERS = {"ram_bytes": 4 * EACH, "host_bytes": 4 * EACH, "report_interval_ms": 100}
GPU = {**TIERS, "gpu_bytes": 4 * EACH, "gpu_device": "twin", "num_gpus": 0.5}


def has_pool(pid: int) -> bool:
    return "memfd:twin-0" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(("shown", "gpus"), [("", 1), ("0", 2), ("0,1", 3)])
def test_gpus_in_name_that_ray_would_refuse_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, shown: str, gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(ConfigError, match="unset it for this command"):
        ray_node.check_shown(gpus)
    ray_node.check_shown(gpus - 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ray_node.check_shown(gpus)


def test_shards_on_half_a_gpu_each_beside_one_without_and_one_that_is_killed() -> None:
    config = load(
        overrides={
            "server": {"port": free_port()},
            "groups": {"gpu": {"shards": 2, "shard": GPU}, "cpu": {"shards": 1, "shard": TIERS}},
            "coordinator": {"promote_loads": 1, "host_codec": "raw", "hold_ms": 0},
            "client": {"deadline_ms": 10_000},
        }
    )
    running = background.up(config).running
    try:
        with engine() as reader, kvcluster.connect(running.address, SPEC) as client:
            shards = {shard["shard"]: shard for shard in client.status()["shards"]}
            assert {name: [tier["tier"] for tier in shard["above"]] for name, shard in shards.items()} == {
                "cpu-0": [],
                "gpu-0": ["gpu"],
                "gpu-1": ["gpu"],
            }
            assert not any(shard["trouble"] for shard in shards.values())
            for number in range(8):
                client.store(prompt(number), kv(number))
            assert client.flush()
            tensor = reader.tensor(*kv(0).shape)

            def promoted() -> int:
                for number in range(8):
                    blocks = client.load(prompt(number), Dense(tensor)) // SPEC.block_tokens
                    assert torch.equal(reader.read(tensor)[:blocks], kv(number)[:blocks])
                return sum(tier["pages"] for shard in client.status()["shards"] for tier in shard["above"])

            eventually(promoted)
            before = {shard["shard"]: shard["epoch"] for shard in client.status()["shards"]}
            own = [pid for pid in session(running.pid) if "ShardActor" in title(pid) and has_pool(pid)]
            assert len(own) == 2
            os.kill(own[0], signal.SIGKILL)

            def back() -> bool:
                now = {shard["shard"]: shard for shard in client.status()["shards"]}
                again = [name for name, epoch in before.items() if now[name]["epoch"] > epoch]
                return len(again) == 1 and [tier["tier"] for tier in now[again[0]]["above"]] == ["gpu"]

            eventually(back)
            eventually(promoted)
    finally:
        background.down(running.port)
