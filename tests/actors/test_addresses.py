"""Where a shard listens, given where its coordinator does; and how a coordinator that listens everywhere is found."""

from __future__ import annotations

import socket

import pytest
import ray

from kvcluster.actors.cluster import check
from kvcluster.actors.settings import announced_host, reachable_host
from kvcluster.config import load
from kvcluster.errors import ConfigError
from tests.ports import free_port


@pytest.mark.parametrize(
    ("coordinator", "node", "shard"),
    [
        ("127.0.0.1", "192.0.2.7", "127.0.0.1"),
        ("localhost", "192.0.2.7", "localhost"),
        ("0.0.0.0", "192.0.2.7", "192.0.2.7"),
        ("192.0.2.1", "192.0.2.7", "192.0.2.7"),
        ("192.0.2.1", "127.0.0.1", "192.0.2.1"),
    ],
)
def test_a_shard_is_reached_by_all_that_reach_its_coordinator(
    monkeypatch: pytest.MonkeyPatch, coordinator: str, node: str, shard: str
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    assert reachable_host(coordinator) == shard


def test_a_shard_of_an_embedded_ray_is_reached_the_way_that_leads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda self, _: connect(self, ("127.0.0.1", 9)))
    assert reachable_host("0.0.0.0") == "127.0.0.1"


def test_a_machine_without_a_way_out_asks_for_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(ConfigError, match=r"give its address instead of 0\.0\.0\.0"):
        reachable_host("0.0.0.0")


@pytest.mark.parametrize(
    ("host", "found_at"), [("0.0.0.0", "192.0.2.7"), ("::", "192.0.2.7"), ("192.0.2.1", "192.0.2.1")]
)
def test_a_coordinator_that_listens_everywhere_is_found_at_its_node(
    monkeypatch: pytest.MonkeyPatch, host: str, found_at: str
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    assert announced_host(host) == found_at


def test_a_free_port_for_reports_is_none_of_the_shards() -> None:
    """Many of the ports that the system gives away are the shards' here."""
    config = load(overrides={"server": {"port": free_port(), "shard_ports": "32768-40000"}})
    assert not any(32_768 <= check(config)[1] <= 40_000 for _ in range(20))
