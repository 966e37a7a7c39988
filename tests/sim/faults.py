"""What goes wrong: one fault after another while the world works, drawn from those that the seed has.

Every stopped process is resumed after a while, every cut is mended, and a killed process is restarted by a supervisor,
as Ray does it. Faults overlap.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvcluster.replay.kernel import MS, SECOND, Process
from tests.sim.world import SimulatedWorld

Fault = Callable[[], bool]
"""Causes the fault; False if there was nothing to apply it to."""


class Faults:
    """Causes the faults of one world."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._rng: random.Random = world.rng
        self._kinds: dict[str, Fault] = {
            "crash shard": lambda: self._crash(self._shard()),
            "crash coordinator": lambda: self._crash(world.coordinator),
            "crash worker": lambda: self._crash(self._rng.choice(world.workers)),
            "shard told to stop": self._tell_to_stop,
            "crash node": lambda: self._on_node(self._crash),
            "stop shard": lambda: self._stop(self._shard()),
            "stop coordinator": lambda: self._stop(world.coordinator),
            "stop worker": lambda: self._stop(self._rng.choice(world.workers)),
            "stop node": lambda: self._on_node(self._stop),
            "cut both ways": lambda: self._cut(both=True),
            "cut one way": lambda: self._cut(both=False),
            "clog": self._clog,
            "second coordinator": self._second_coordinator,
            "second shard": self._second_shard,
            "stale name": self._stale_name,
            "rot": self._rot,
            "bad wire": self._bad_wire,
            "lossy network": self._lossy_network,
        }

    def begin(self) -> None:
        if self._world.scenario.faults:
            self._next()

    def _next(self) -> None:
        world = self._world
        world.kernel.at(
            world.kernel.now + int(world.scenario.fault_ns * self._rng.expovariate(1.0)), None, self._strike
        )

    def _strike(self) -> None:
        world = self._world
        if not world.working:
            return
        kind = self._rng.choice(world.scenario.faults)
        if self._kinds[kind]():
            world.faults[kind] += 1
            world.journal.add((world.kernel.now, "world", kind, ()))
        self._next()

    def _lasts(self) -> int:
        """Returns when the fault ends: mostly soon, sometimes after every term and timeout has passed."""
        return self._world.kernel.now + int(self._rng.choice((50, 300, 1_000, 3_000)) * MS * (0.5 + self._rng.random()))

    # ------------------------------------------------------------------------------------------ processes

    def _shard(self) -> Process:
        return self._world.shards[self._rng.choice(self._world.names)]

    def _crash(self, process: Process) -> bool:
        if process.dead:
            return False
        self._world.kill(process)
        return True

    def _tell_to_stop(self) -> bool:
        """An operator stops a shard in an orderly way. Its deadline comes soon, late, or before it has begun."""
        shard = self._world.shards[self._rng.choice(self._world.names)]
        if not shard.running or shard.core.state.stopping:
            return False
        shard.save_and_end(self._rng.choice((0, 20, 200, 2_000)) * MS)
        return True

    def _stop(self, process: Process) -> bool:
        if not process.running:
            return False
        process.stop()
        self._world.kernel.at(self._lasts(), None, process.resume)
        return True

    def _on_node(self, act: Callable[[Process], bool]) -> bool:
        node = self._rng.randrange(self._world.scenario.nodes)
        done = [act(process) for process in self._world.processes() if process.node == node]
        return any(done)

    def _second_coordinator(self) -> bool:
        """The supervisor takes the coordinator for lost and starts another, while it is only cut off."""
        world = self._world
        if world.scenario.nodes < 2 or world.coordinator.dead:
            return False
        self._cut_for_a_while(self._around(world.coordinator.node))
        world.replace_coordinator()
        return True

    def _second_shard(self) -> bool:
        """A shard is restarted elsewhere, while its last incarnation is only cut off."""
        world = self._world
        shard = world.shards[self._rng.choice(world.names)]
        if world.scenario.nodes < 2 or shard.dead or shard.shard not in world.names:
            return False
        self._cut_for_a_while(self._around(shard.node))
        world.replace_shard(shard)
        return True

    def _stale_name(self) -> bool:
        """The nodes' name for the coordinator points to an older one, on one node."""
        world = self._world
        older = [c for c in world.coordinators if not c.dead and c is not world.coordinator]
        if not older:
            return False
        node = self._rng.randrange(world.scenario.nodes)
        world.bind(node, self._rng.choice(older))
        world.kernel.at(self._lasts(), None, world.bind, node, None)
        return True

    # --------------------------------------------------------------------------------------------- network

    def _around(self, node: int) -> list[tuple[int, int]]:
        others = [other for other in range(self._world.scenario.nodes) if other != node]
        return [(node, other) for other in others] + [(other, node) for other in others]

    def _cut(self, *, both: bool) -> bool:
        world = self._world
        if world.scenario.nodes < 2:
            return False
        nodes = list(range(world.scenario.nodes))
        self._rng.shuffle(nodes)
        here, there = nodes[: (size := self._rng.randint(1, len(nodes) - 1))], nodes[size:]
        links = [(a, b) for a in here for b in there]
        if both:
            links += [(b, a) for a, b in links]
        self._cut_for_a_while(links)
        return True

    def _cut_for_a_while(self, links: list[tuple[int, int]]) -> None:
        self._world.network.cut(links)
        self._world.kernel.at(self._lasts(), None, self._world.network.mend, links)

    def _clog(self) -> bool:
        world = self._world
        if world.scenario.nodes < 2:
            return False
        links = self._around(self._rng.randrange(world.scenario.nodes))
        world.network.clog([link for link in links if self._rng.random() < 0.7], self._lasts())
        return True

    def _lossy_network(self) -> bool:
        network = self._world.network
        before = network.loss, network.twice
        network.set_quality(0.15, 0.1)
        self._world.kernel.at(self._lasts(), None, network.set_quality, *before)
        return True

    # ----------------------------------------------------------------------------------------------- bytes

    def _rot(self) -> bool:
        shard = self._world.shards[self._rng.choice(self._world.names)]
        return not shard.dead and shard.rot()

    def _bad_wire(self) -> bool:
        world = self._world
        world.bad_wire_until = max(world.bad_wire_until, min(self._lasts(), world.kernel.now + SECOND))
        return True
