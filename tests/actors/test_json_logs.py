"""The processes of a real cluster log JSON where they are told to: one line a decision, on their standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

import kvcluster
from tests.actors.conftest import QUICK
from tests.actors.worker import SPEC, kv, tokens
from tests.waiting import eventually

pytestmark = pytest.mark.cluster


def logged(events: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The last line of each of these events that any process of this Ray has logged."""
    folder = Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"
    lines = [line for file in folder.glob("worker-*.err") for line in file.read_text(encoding="utf-8").splitlines()]
    decisions = [json.loads(line) for line in lines if line.startswith('{"time"')]
    return {line["event"]: line for line in decisions if line.get("event") in events}


def test_a_cluster_logs_its_decisions_as_json(shared_ray: None) -> None:
    config = {"log": {"format": "json"}, **QUICK}
    with kvcluster.local(shards=1, ram_bytes="16MiB", config=config) as cluster:
        client = cluster.client(SPEC)
        assert client.store(tokens(8), kv(8)).blocks == 8 and client.flush()
        assert client.lookup(tokens(8)).blocks == 8
        wanted = ("store_prepared", "lookup", "exchange_ended")
        eventually(lambda: len(logged(wanted)) == len(wanted))
        found = logged(wanted)
    assert {event: line["process"] for event, line in found.items()} == {
        "store_prepared": "coordinator",
        "lookup": "coordinator",
        "exchange_ended": "shard-0",
    }
    assert found["exchange_ended"]["bytes"] == 8 * SPEC.page_bytes(0, SPEC.whole(0))
    assert (found["lookup"]["found"], found["lookup"]["tenant"]) == (8, "default")
