"""A coordinator's process: what runtime/coordinator_host.py does. Its disk outlives it.

If the world's scenario announces, a listener gets its KV events.
"""

from __future__ import annotations

from typing import Protocol

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import (
    Answer,
    Effect,
    KeepSettings,
    Leave,
    Persist,
    Publish,
    Purge,
    Purged,
    Republish,
    Request,
    Tombstone,
    Warn,
)
from kvcluster.replay.kernel import MS, Clock
from tests.sim.driver import SimulatedCore
from tests.sim.listener import EventListener
from tests.sim.surroundings import Supervisor, Surroundings

RETELL_NS = 300 * MS
"""The time between a dropped event and the request for all blocks."""


class CoordinatorJudge(Protocol):
    """What a coordinator shows to the oracle (coordinator_oracle.py)."""

    def stepped(self, c: CoordinatorProcess, message: object, effects: list[Effect], now: int) -> None:
        """Judges a step of a coordinator, before its effects are performed."""

    def purged(self, request: Request[Purge]) -> None:
        """Records that a purge was answered."""


class CoordinatorSurroundings(Surroundings, Supervisor, Protocol):
    """`kept`: the tombstones on the disk that outlives a coordinator; `coordinator`: the newest of them."""

    kept: tuple[Tombstone, ...]
    coordinator: CoordinatorProcess

    @property
    def coordinator_oracle(self) -> CoordinatorJudge: ...


class CoordinatorProcess(SimulatedCore):
    """One coordinator incarnation. `heard` is when, by its own clock, it last received a report of each shard
    incarnation."""

    core: Coordinator
    world: CoordinatorSurroundings

    def __init__(self, world: CoordinatorSurroundings, number: int, node: int, clock: Clock, epoch: Epoch) -> None:
        config = world.scenario.config
        core = Coordinator(
            epoch,
            config.coordinator,
            membership_ttl_ms=config.membership_ttl_ms,
            expected=config.shards,
            now=clock.read(world.kernel.now),
            tombstones=world.kept,
            announces=world.scenario.announces,
        )
        super().__init__(world, f"c{number}", node, clock, core)
        self.heard: dict[tuple[ShardId, Epoch], int] = {}
        self.listener = EventListener()

    def judge(self, message: object, effects: list[Effect], now: int) -> None:
        self.world.coordinator_oracle.stepped(self, message, effects, now)

    def answering(self, message: object, answer: Answer) -> None:
        if isinstance(message, Request) and isinstance(answer.reply, Purged):
            self.world.coordinator_oracle.purged(message)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Persist(tombstones):
                if self is self.world.coordinator:
                    self.world.kept = tombstones
                else:  # its volume is with its successor: it cannot persist, and ends
                    self.world.kill(self)
            case Publish():
                self._publish(effect)
            case KeepSettings() | Warn():
                pass  # no worker changes settings here, and no operator reads warnings
            case Leave():
                self.world.left(self, for_good=effect.for_good)
            case _:
                raise AssertionError(f"a coordinator does not perform {effect}")

    def _publish(self, told: Publish) -> None:
        """Publishes to the listener. While the world works, the publisher drops some events, and asks for all blocks
        again."""
        world = self.world
        if world.working and world.scenario.event_loss and world.later.random() < world.scenario.event_loss:
            world.count("event", "dropped")
            self.listener.lose(told)
            self._ask_again()
        else:
            world.count("event", "heard")
            self.listener.hear(told)

    def _ask_again(self) -> None:
        self.kernel.at(self.kernel.now + RETELL_NS, self, self._retell)

    def _retell(self) -> None:
        if self.core.republishing:  # it may have retold already what was dropped since
            self._ask_again()
        elif self.listener.behind:
            self.listener.republishing()
            self.step(Republish())
