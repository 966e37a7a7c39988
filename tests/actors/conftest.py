"""One Ray for all tests of embedded clusters, which costs ten seconds to start, and one cluster on it that they share.

`shared_cluster` is for tests that leave the cluster as it was: they use a model or prompts of their own. Tests that
kill its processes, drain a shard or need other settings start a cluster of their own on `shared_ray`, which takes about
a second. The Ray ends after the last of these tests in a row, because the tests of `kvcluster up` and of Ray Serve
connect the same process to another Ray. Those tests do not ask for these fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import kvcluster
from kvcluster.actors.local import LocalCluster

QUICK = {"shard": {"report_interval_ms": 100}, "client": {"deadline_ms": 10_000}}
"""Reports are frequent, so that tests see soon that a page was counted. Leases last as long as by default, and clients
wait longer: the machine may have so much else to do that a process gets no turn for seconds."""


class SharedRay:
    """A Ray of this process and a cluster on it, started when they are first asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cluster: LocalCluster | None = None

    def cluster(self) -> LocalCluster:
        """The cluster of two shards; the Ray runs as long as it does."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(kvcluster.local(shards=2, ram_bytes="64MiB", config=QUICK))
        return self._cluster

    def stop(self) -> None:
        """Ends the cluster and the Ray, if they run."""
        self._cluster = None
        self._stack.close()


_SHARED = SharedRay()


@pytest.fixture(scope="module")
def shared_ray() -> None:
    """The Ray runs: `kvcluster.local()` starts its actors there."""
    _SHARED.cluster()


@pytest.fixture
def shared_cluster(shared_ray: None) -> LocalCluster:
    return _SHARED.cluster()


@pytest.fixture(scope="module")
def own_cluster(shared_ray: None) -> Iterator[LocalCluster]:
    """Two shards for the tests of one module, which may kill and drain what they like."""
    with kvcluster.local(shards=2, ram_bytes="64MiB", config=QUICK) as running:
        yield running


def _shares(item: pytest.Item | None) -> bool:
    return "shared_ray" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)  # when the fixtures of the test and of its module have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if _shares(item) and not _shares(nextitem):
        _SHARED.stop()
