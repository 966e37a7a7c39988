"""A coordinator's process: what runtime/coordinator_host.py does. What is on disk outlives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import Answer, Effect, KeepSettings, Leave, Persist, Purge, Purged
from kvcluster.testing.kernel import Clock
from kvcluster.testing.sim.driver import SimulatedCore

if TYPE_CHECKING:
    from kvcluster.testing.sim.world import World


class CoordinatorProcess(SimulatedCore):
    """One coordinator incarnation. `heard` is when, by its own clock, it last heard of each shard incarnation."""

    core: Coordinator

    def __init__(self, world: World, number: int, node: int, clock: Clock, epoch: Epoch) -> None:
        config = world.scenario.config
        core = Coordinator(
            epoch,
            config.coordinator,
            membership_ttl_ms=config.membership_ttl_ms,
            expected=config.shards,
            now=clock.read(world.kernel.now),
            tombstones=world.kept,
        )
        super().__init__(world, f"c{number}", node, clock, core)
        self.heard: dict[tuple[ShardId, Epoch], int] = {}

    def judge(self, message: object, effects: list[Effect], now: int) -> None:
        self.world.oracle.coordinator_stepped(self, message, effects, now)

    def answering(self, message: object, answer: Answer) -> None:
        if isinstance(message, Purge) and isinstance(answer.reply, Purged):
            self.world.oracle.purged(message)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Persist(tombstones):
                if self is self.world.coordinator:
                    self.world.kept = tombstones
                else:  # its volume is where its successor runs: it cannot do what it must, and ends
                    self.world.kill(self)
            case KeepSettings():
                pass  # nobody sets any here
            case Leave():
                self.world.left(self, for_good=effect.for_good)
            case _:
                raise AssertionError(f"a coordinator does not perform {effect}")
