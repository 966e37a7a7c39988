"""The conditions that the judges of a simulated world check, one by one. Planted bugs show that they find
violations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcluster.core.messages import Drain, Purge
from kvcluster.replay.core_stepper import build_request
from kvcluster.replay.kernel import MS, SECOND
from tests.sim import content, liveness, scenario
from tests.sim.violation import Violation
from tests.sim.world import SimulatedWorld

QUIET = 131
"""Of two large shards without a tier below, and slow writers."""


def quiet_world() -> SimulatedWorld:
    """A world without faults and without requests."""
    world = SimulatedWorld(QUIET)
    world.scenario = scenario.without_faults(world.scenario)
    world.network.heal()
    world.working = False
    world.kernel.run(SECOND)
    return world


def run_until(world: SimulatedWorld, so: Callable[[], bool]) -> None:
    give_up = world.kernel.now + 10 * SECOND
    while not so():
        assert world.kernel.now < give_up, "it never comes about"
        world.kernel.run(world.kernel.now + MS // 10)


def test_a_drained_shard_may_take_what_was_committed_before_it_heard_of_a_purge() -> None:
    world = quiet_world()
    world.scenario = replace(world.scenario, frame_ns=50 * MS)  # the shard reports while it is written to, and but once
    worker, model = world.workers[0], world.models[0]
    worker.start(worker.store(model, content.chain(model, 0, 0), 0, model.whole(), 0))
    run_until(world, lambda: any(len(shard.core.leases) for shard in world.shards.values()))
    shard = next(shard for shard in world.shards.values() if len(shard.core.leases))
    world.told_to_go[shard.shard] = None
    worker.start(worker.ask(build_request(Drain(shard.shard), content.RED), worker.now() + SECOND))
    member = world.coordinator.core.state.members.get(shard.shard)
    assert member is not None
    run_until(world, lambda: member.info.draining)
    assert not shard.ready
    worker.start(worker.ask(model.asks(Purge()), worker.now() + SECOND))
    run_until(world, lambda: shard.told_to_leave)
    assert shard.ready and not shard.purged, "it was to forget these pages, and did not know"


def test_a_world_is_not_at_rest_while_a_shard_has_room_to_make() -> None:
    world = quiet_world()
    liveness._all_is_at_rest(world, 0)
    coordinator = replace(world.scenario.config.coordinator, low_free=1.1)
    world.scenario = replace(world.scenario, config=replace(world.scenario.config, coordinator=coordinator))
    with pytest.raises(Violation, match="has too little free room"):
        liveness._all_is_at_rest(world, 0)
