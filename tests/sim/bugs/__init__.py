"""Planted bugs: each breaks one promise of the real core or its shells, to show that the simulator detects it.

None is hidden: each is a plausible mistake, such as a forgotten comparison, a missing margin or a step in the wrong
order. Each module of bugs adds its own to BUGS when it is imported, as it is here.
"""

from tests.sim.bugs import attention, clients, coordinators, sequences, shards
from tests.sim.bugs.planting import BUGS, planted_bug

__all__ = ["BUGS", "attention", "clients", "coordinators", "planted_bug", "sequences", "shards"]
