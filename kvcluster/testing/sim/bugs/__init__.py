"""Planted bugs: each breaks one promise of the real core or its shells, so that the simulator can show that it sees.

None hides: each is what a tired author might write, a forgotten comparison, a missing margin, a step in the wrong
order. Each module of bugs adds its own to BUGS when it is imported, as it is here.
"""

from kvcluster.testing.sim.bugs import clients, coordinators, shards
from kvcluster.testing.sim.bugs.planting import BUGS, active

__all__ = ["BUGS", "active", "clients", "coordinators", "shards"]
