"""The two phases of a seed's run.

In the first anything may fail, and the oracles judge every step. Then all faults are healed, work ends, and within a
bounded time everything must have come to rest (liveness.py).
"""

from __future__ import annotations

from tests.sim.faults import Faults
from tests.sim.liveness import come_to_rest
from tests.sim.world import SimulatedWorld


def run(world: SimulatedWorld) -> None:
    """Runs both phases. Raises Violation, or another error that shows a bug in the core."""
    Faults(world).begin()
    world.kernel.run(world.scenario.safety_ns)
    come_to_rest(world)
