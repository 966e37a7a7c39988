"""Which tests pytest-xdist keeps together: those that share a cluster, so that one worker starts it, once.

xdist has the mark `xdist_group` for this; xdist 3.8 ignores it under pytest 9.2, whose ids of tests cannot be changed.
The scheduler knows tests by their ids alone, so groups are files here: a test that shares nothing is a group by itself.
"""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]


class ByCluster(LoadScopeScheduling):
    """Hands out groups of tests, the largest first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0]) or nodeid


@functools.cache
def group_of(path: str) -> str | None:
    """The group of the tests of a file: of all that share the Ray of tests/actors/conftest.py, or of the file where it
    starts a cluster of its own; None where its tests may run anywhere."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if any(fixture in text for fixture in ("shared_ray", "shared_cluster", "own_cluster")):
        return "ray"
    return path if "pytest.mark.cluster" in text else None
