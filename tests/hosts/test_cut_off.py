"""A node is cut off from all others for 12 s and for a minute, with and without Redis: no process ends, and every page
that was stored before is loaded afterwards, with the right bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.hosts.hosts import HOSTS, Cluster
from tests.hosts.netns import missing
from tests.hosts.processes import processes
from tests.hosts.redis import SETTINGS, Redis, is_installed
from tests.hosts.worker import BLOCKS

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
NETWORKS = [] if missing() or not is_installed() else [("with Redis", SETTINGS), ("without Redis", "")]
"""None where the machine gives us none, or has no Redis: then nothing here runs."""

PROMPTS = 12
CUTS = ((12.0, 40.0), (60.0, 165.0))
"""For how long a node is cut off, and when after the cut it is known whether Ray has given it up: it may do so when the
link is back and a connection has recovered, at which TCP tries for as long again."""


@contextmanager
def cut_off(cluster: Cluster, host: str) -> Iterator[None]:
    """Nothing passes between that host and all others within the block."""
    pairs = [pair for other in HOSTS if other != host for pair in ((host, other), (other, host))]
    for pair in pairs:
        cluster.network.cut(*pair)
    try:
        yield
    finally:
        for pair in pairs:
            cluster.network.heal(*pair)


@pytest.mark.parametrize(("name", "settings"), NETWORKS)
def test_a_node_that_is_cut_off_keeps_its_pages(name: str, settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(settings) as cluster, Redis(cluster) if settings else nullcontext():
        cluster.up()
        for host in ("one", "two"):
            cluster.join(host)
        homes = cluster.wait_shards(lambda shards: sorted(shards.values()) == ["one", "two"])
        assert cluster.worker("worker", "store", 0, PROMPTS)["stored"] == PROMPTS * BLOCKS
        before, epochs = processes(cluster, ("head", "one", "two")), _epochs(cluster)
        for seconds, known in CUTS:
            began = time.monotonic()
            with cut_off(cluster, "one"):
                cluster.wait_shards(lambda shards: list(shards.values()) == ["two"])
                away = cluster.worker("worker", "load", 0, PROMPTS)
                _wait_until(began + seconds)
            healed = time.monotonic()
            assert cluster.wait_shards(lambda shards: len(shards) == 2, 120) == homes
            back = time.monotonic() - healed
            _wait_until(began + known)
            found = cluster.worker("worker", "load", 0, PROMPTS)
            with capsys.disabled():
                print(
                    f"\n{name}, cut off for {seconds:.0f} s: {away['blocks']} of {away['of']} blocks meanwhile, "
                    f"{found['blocks']} afterwards; its shard reported again {back:.1f} s after the link was back"
                )
            assert (found["blocks"], found["wrong"], away["wrong"]) == (PROMPTS * BLOCKS, 0, 0)
            assert 0 < away["blocks"] < PROMPTS * BLOCKS
            assert processes(cluster, ("head", "one", "two")) == before
            assert _epochs(cluster) == epochs


def _epochs(cluster: Cluster) -> dict[str, int]:
    """The epochs of the shards, by name: a restarted one has another."""
    return {each["shard"]: each["epoch"] for each in cluster.status()["shards"]}


def _wait_until(moment: float) -> None:
    """A cut takes its time: nothing tells when it has lasted."""
    threading.Event().wait(max(0.0, moment - time.monotonic()))
