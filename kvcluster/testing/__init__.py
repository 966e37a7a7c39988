"""For the tests of projects that build on kvcluster: a whole cluster in one process, and the conformance suites for
transports."""

from kvcluster.testing.cluster import MemoryCluster

__all__ = ["MemoryCluster"]
