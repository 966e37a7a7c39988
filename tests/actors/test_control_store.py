"""A control store of Ray that has failed is started again if its state lies in Redis, and the reconciler makes no pass
meanwhile. And Ray knows the settings by which a node is given up."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from kvcluster.actors import foreground
from kvcluster.actors.foreground import ConfigSource
from kvcluster.actors.lean_ray import lean_ray
from kvcluster.actors.own_ray import ray_of_nodes
from kvcluster.actors.ray_private import Node
from kvcluster.config import load

CUTS_OFF = "RAY_grpc_client_keepalive_timeout_ms"


class FakeNode:
    """What `dead_processes` needs of Ray's node."""

    def __init__(self, codes: dict[str, int | None], redis_address: str) -> None:
        self.redis_address = redis_address
        self.all_processes = {kind: [self.process(code)] for kind, code in codes.items()}
        self.did: list[str] = []

    @staticmethod
    def process(code: int | None) -> Any:
        return SimpleNamespace(process=SimpleNamespace(returncode=code, poll=lambda: code))

    def kill_gcs_server(self, check_alive: bool) -> None:
        assert not check_alive  # Ray refuses to kill a process that has ended
        self.did.append("kill")
        del self.all_processes["gcs_server"]

    def start_gcs_server(self) -> None:
        self.did.append("start")
        self.all_processes["gcs_server"] = [self.process(None)]


@pytest.mark.parametrize(
    ("codes", "redis", "restarted"),
    [
        ({"gcs_server": -6, "raylet": None}, "10.0.0.1:6379", True),
        ({"gcs_server": 1, "raylet": 0}, "10.0.0.1:6379", True),
        ({"gcs_server": -6, "raylet": None}, "", False),
        ({"gcs_server": -6, "raylet": 1}, "10.0.0.1:6379", False),
        ({"gcs_server": None, "raylet": 1}, "10.0.0.1:6379", False),
        ({"gcs_server": -15, "raylet": -15}, "10.0.0.1:6379", False),
        ({"gcs_server": 0, "raylet": None}, "10.0.0.1:6379", False),
    ],
)
def test_a_control_store_that_failed_is_started_again(
    codes: dict[str, int | None], redis: str, restarted: bool
) -> None:
    node = FakeNode(codes, redis)
    with lean_ray():
        dead = Node.dead_processes(node)  # type: ignore[arg-type]
    assert node.did == (["kill", "start"] if restarted else [])
    assert ("gcs_server" in dict(dead)) == (codes["gcs_server"] is not None and not restarted)


def test_no_pass_is_made_while_the_head_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True, True, True])
    stop, said, passes = threading.Event(), [], itertools.count(1)

    class Reconciler:
        def step(self) -> None:
            if next(passes) == 1:
                raise ray.exceptions.RpcError("the head has ended")
            stop.set()
            raise foreground.KVClusterError("a pass")

    monkeypatch.setattr(foreground, "answers", lambda _: next(answers))
    monkeypatch.setattr(foreground, "_PASS_S", 0.01)
    config = load()
    reconciler: Any = Reconciler()
    foreground._reconcile(reconciler, config, ConfigSource(lambda: config), said.append, stop, lambda: True, "a:1")
    assert said == [foreground._AWAY, "Ray does not answer: the head has ended", "a pass"]


@pytest.mark.parametrize("node_timeout_ms", [8_000, 150_000, 600_000])
def test_a_silent_node_has_the_configured_time(node_timeout_ms: int, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32, encoding="ascii")
    secret.chmod(0o600)
    ours = {"server": {"secret_file": str(secret)}, "ray": {"node_timeout_ms": node_timeout_ms}}
    before = dict(os.environ)
    with ray_of_nodes(load(overrides=ours)):
        found = {name: int(os.environ[name]) for name in os.environ if name.startswith("RAY_health_check_")}
        cuts_off = int(os.environ[CUTS_OFF])
    assert dict(os.environ) == before
    check, period = found["RAY_health_check_timeout_ms"], found["RAY_health_check_period_ms"]
    checks = found["RAY_health_check_failure_threshold"]
    assert checks * (check + period) == node_timeout_ms
    assert cuts_off >= node_timeout_ms
    assert checks * period <= 3_000  # a process that has ended refuses at once
    store = (Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server").read_bytes()
    assert all(name.encode() in store for name in (*found, CUTS_OFF))
