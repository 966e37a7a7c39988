"""Prometheus scrapes a cluster of three nodes by what docs/metrics.md prints: every target is up, every metric of the
table is there with its type and moves by a real cause, and every alert fires by one and is quiet otherwise.

The tests of one cluster run in order, each on what the one before has left. test_causes.py holds that no metric and no
alert is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvcluster.runtime.metrics import METRICS
from tests.deploy.alert_rules import rules
from tests.deploy.programs import programs
from tests.hosts.causes import CAUSES, Cause
from tests.hosts.metered import NODES, MeteredCluster
from tests.hosts.netns import missing
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
PROGRAMS = [] if missing() else programs("prometheus")
"""None where the machine gives us no network namespaces, or has no Prometheus: then nothing that scrapes runs."""


@pytest.fixture(scope="module", params=PROGRAMS)
def world(request: pytest.FixtureRequest) -> Iterator[MeteredCluster]:
    """The head, three nodes with a shard each, a worker, and Prometheus beside it."""
    with MeteredCluster(request.param) as running:
        yield running


def test_every_target_is_up(world: MeteredCluster) -> None:
    wanted = {f"{host}:9401": "up" for host in NODES} | {"head:9400": "up", "worker:9500": "up"}
    eventually(lambda: world.prometheus.targets() == wanted)


def test_every_metric_of_the_table_is_there_with_its_type(world: MeteredCluster) -> None:
    world.worker("store", 90, 91)  # a tenant has series from its first call on
    world.worker("load", 90, 91)
    eventually(lambda: world.prometheus.types().keys() >= METRICS.keys(), 10)
    types = world.prometheus.types()
    assert {name: types[name] for name in METRICS} == {name: metric.kind.value for name, metric in METRICS.items()}


def test_no_alert_fires_on_a_healthy_cluster(world: MeteredCluster) -> None:
    loaded = [rule for group in world.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in rules()]
    eventually(lambda: world.prometheus.firing() == set())


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_cause_moves_its_metrics_and_fires_its_alerts(world: MeteredCluster, cause: Cause) -> None:
    eventually(lambda: world.prometheus.firing() == set(), 150)
    began, before = time.monotonic(), world.prometheus.series()
    running = cause.run(world)
    next(running)
    left = {f"{movement.metric} {dict(movement.labels)} {sign:+}": (movement, sign) for movement, sign in cause.moves}
    quiet = set(cause.fires)

    def all_seen() -> bool:
        after = world.prometheus.series()
        for text, (movement, sign) in list(left.items()):
            if movement.holds(before, after, sign):
                del left[text]
        quiet.difference_update(world.prometheus.fired(time.monotonic() - began))
        return not left and not quiet

    try:
        eventually(all_seen, 120)
    except AssertionError:
        said = "\n".join(f"--- {host}\n{world.cluster.said(host)}" for host in ("head", *NODES))
        raise AssertionError(f"not moved: {sorted(left)}; not fired: {sorted(quiet)}; {said}") from None
    finally:
        next(running, None)
    eventually(lambda: world.prometheus.firing() == set(), 150)
    assert world.prometheus.fired(time.monotonic() - began) <= cause.fires | cause.also
