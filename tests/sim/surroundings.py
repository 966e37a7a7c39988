"""What the processes of a simulation need of the world around them, as protocols that a world (world.py) satisfies.

The imports of this package go one way: the world builds processes and judges, and knows all of them; these name the
protocols instead of the world. A module that needs more of its world extends `Surroundings`, beside the class that
needs it.
"""

from __future__ import annotations

import random
from typing import Protocol

from kvcluster.replay.kernel import Kernel, Process
from tests.sim.journal import Journal
from tests.sim.network import Network
from tests.sim.scenario import Scenario


class Chance(Protocol):
    """The random draws. `later` is for choices that were added later: they leave what `rng` draws unchanged."""

    rng: random.Random
    later: random.Random

    def wire_flips(self) -> bool:
        """Draws whether the wire flips a bit of the layer that is sent now."""


class Setting(Protocol):
    """Time, links and the terms of the seed. `working` is False once the faults are over and work is to end."""

    kernel: Kernel
    network: Network
    scenario: Scenario
    working: bool


class RunRecord(Protocol):
    """The record of a run."""

    journal: Journal

    def stepped(self) -> None:
        """Counts a step of a core. At intervals all invariants are checked."""

    def count(self, operation: str, outcome: str) -> None:
        """Counts an operation with this outcome."""


class Surroundings(Chance, Setting, RunRecord, Protocol):
    """What every process needs."""


class Supervisor(Protocol):
    """Starts the next incarnation of a process that has ended."""

    def kill(self, process: Process) -> None:
        """Ends this process now."""

    def left(self, process: Process, *, for_good: bool) -> None:
        """Handles a process that has ended itself. With `for_good` it is not restarted."""
