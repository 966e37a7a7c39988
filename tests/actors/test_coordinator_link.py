"""A shard goes on reporting to the coordinator that it knows while Ray's head does not answer."""

from __future__ import annotations

import threading
import time

import pytest
import ray

from kvcluster.actors import shard
from kvcluster.actors.shard import CoordinatorLink
from kvcluster.errors import Unreachable


def test_a_shard_keeps_its_coordinator_while_the_head_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    announced, away = ["127.0.0.1:1"], threading.Event()

    def look_up(cluster: str) -> str:
        if announced[0] == "away":
            away.wait(30)
            return "127.0.0.1:2"
        if announced[0] == "ended":
            raise ray.exceptions.RpcError("the head has ended")
        return announced[0]

    monkeypatch.setattr(shard, "report_address", look_up)
    monkeypatch.setattr(shard, "_LOOK_UP_S", 0.2)
    link = CoordinatorLink("kvcluster", "secret")
    link._connect()
    before = link._connection
    for announced[0] in ("ended", "away", "away"):
        began = time.monotonic()
        link._connect()
        assert link._connection is before and time.monotonic() - began < 5
    away.set()
    link._connect()
    assert link._connection is not before and link._address == "127.0.0.1:2"
    link.close()


def test_a_shard_that_knows_no_coordinator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "report_address", lambda cluster: "")
    with pytest.raises(Unreachable, match="no coordinator of cluster 'kvcluster' has announced itself yet"):
        CoordinatorLink("kvcluster", "secret")._connect()
