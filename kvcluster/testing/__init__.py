"""For the tests of whoever builds on kvcluster: a whole cluster in one process, and the suites that a transport must
pass."""

from kvcluster.testing.cluster import MemoryCluster

__all__ = ["MemoryCluster"]
