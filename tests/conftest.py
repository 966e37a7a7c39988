"""What holds for every test: how hard hypothesis looks, that no verdict depends on a clock, and what runs in a row.

`fast` is what `make check` runs: the same examples each time, so that its verdict belongs to the change.
`ci` is what `make test` runs: more and new ones; a failure prints the line that repeats it. Choose by
HYPOTHESIS_PROFILE or by pytest's --hypothesis-profile, which wins.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The claims of shipped suites, whose asserts pytest rewrites only where it is told before they are imported.
pytest.register_assert_rewrite("kvcluster.testing.conformance")

# A slow machine is no failure: neither an example nor the making of one is timed.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _untimed, max_examples=50, stateful_step_count=30, derandomize=True, database=None)
settings.register_profile("ci", _untimed, max_examples=300, stateful_step_count=60, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that share the Ray of tests/actors/conftest.py run in a row, so that it is started once."""
    items.sort(key=lambda item: "shared_ray" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, tests that share a cluster run in one worker (scheduling.py)."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.scheduling import ByCluster

    return ByCluster(config, log)
