"""Blocks that are cleared and shards that are drained, on a real Ray: which actors it restarts, and which not."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.cli.main import main
from kvcluster.client import Client
from kvcluster.core.miss import MissReason
from tests.actors.processes import descendants
from tests.actors.worker import PATIENT, SPEC, kv, tokens
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


def store(client: Client, seed: int) -> None:
    stored = client.store(tokens(seed), kv(seed))
    assert (stored.blocks + stored.deduplicated, stored.miss) == (8, None)
    assert client.flush()


def load(client: Client, seed: int) -> None:
    out = torch.zeros_like(kv(seed))
    assert client.load(tokens(seed), out) == 128, f"a block of {seed} is gone"
    assert torch.equal(out, kv(seed))


def states(client: Client) -> dict[str, Any]:
    return {shard["shard"]: shard["state"] for shard in client.status()["shards"]}


def test_what_was_cleared_is_gone_for_the_next_coordinator_too(
    own_cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvcluster.connect(own_cluster.address, SPEC, config=PATIENT) as client:
        for seed in (1, 2, 3):
            store(client, seed)
        assert main(["clear", "--yes", "--address", own_cluster.address]) == 0
        assert capsys.readouterr().out == "24 block(s) purged\n"
        coordinator, epoch = own_cluster.pids()[0], client.status()["epoch"]
        os.kill(coordinator, signal.SIGKILL)
        eventually(lambda: epoch_of(client) > epoch)
        eventually(lambda: client.status()["state"] == "serving" and set(states(client).values()) == {"up"})
        for seed in (1, 2, 3):
            assert client.lookup(tokens(seed)).blocks == 0
            assert client.explain(tokens(seed))[0].reason in (MissReason.NEVER_SEEN, MissReason.EVICTED)
        eventually(lambda: sum(shard["pages"] for shard in client.status()["shards"]) == 0)
        store(client, 1)
        load(client, 1)


def epoch_of(client: Client) -> int:
    """0 while no coordinator answers."""
    try:
        epoch: int = client.status(deadline_ms=1_000)["epoch"]
    except kvcluster.errors.Unreachable:
        return 0
    return epoch


def test_a_shard_that_is_drained_under_load_leaves_every_block_on_the_other_and_does_not_come_back(
    own_cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    done, failed, stored = threading.Event(), list[BaseException](), list[int]()
    going = own_cluster.pids()[1]

    def work() -> None:
        try:
            with kvcluster.connect(own_cluster.address, SPEC, config=PATIENT) as worker:
                for seed in range(10, 200):
                    if done.is_set():
                        return
                    store(worker, seed)
                    load(worker, max(10, seed - 5))
                    stored.append(seed)
        except BaseException as error:
            failed.append(error)

    with kvcluster.connect(own_cluster.address, SPEC, config=PATIENT) as client:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            eventually(lambda: len(stored) >= 20 or failed)
            assert main(["drain", "shard-0", "--address", own_cluster.address]) == 0
        finally:
            done.set()
            thread.join()
        assert failed == []
        said = capsys.readouterr()
        assert said.err.startswith("shard-0 is draining: ")
        assert said.out.startswith("shard-0 is gone; other shards have copied ")
        assert states(client) == {"shard-1": "up"}
        for seed in stored:
            load(client, seed)
            assert {block.shard for block in client.explain(tokens(seed))} == {"shard-1"}

        # Ray has had time enough by now to start another, as it does with one that merely died.
        eventually(lambda: going not in descendants(os.getpid()))
        os.kill(own_cluster.pids()[1], signal.SIGKILL)
        eventually(lambda: states(client) == {"shard-1": "lost"} or client.status()["shards"][0]["pages"] == 0)
        eventually(lambda: states(client) == {"shard-1": "up"})
        assert len(own_cluster.pids()) == 2
