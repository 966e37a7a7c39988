"""What holds for every test: how hard hypothesis looks, and that no verdict depends on a clock.

`fast` is what `make check` runs: the same examples each time, so that its verdict belongs to the change.
`ci` is what `make test` runs: more and new ones; a failure prints the line that repeats it. Choose by
HYPOTHESIS_PROFILE or by pytest's --hypothesis-profile, which wins.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The claims of shipped suites, whose asserts pytest rewrites only where it is told before they are imported.
pytest.register_assert_rewrite("kvcluster.testing.conformance")

# A slow machine is no failure: neither an example nor the making of one is timed.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _untimed, max_examples=50, stateful_step_count=30, derandomize=True, database=None)
settings.register_profile("ci", _untimed, max_examples=300, stateful_step_count=60, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist one worker runs all tests that share the Ray of tests/actors/conftest.py; it runs them in a row. The
    other tests of one module that need a cluster go to one worker too, so that a module starts its cluster once."""
    items.sort(key=_shares_ray)
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.xdist_group("ray" if _shares_ray(item) else item.path.stem))


def _shares_ray(item: pytest.Item) -> bool:
    return "shared_ray" in getattr(item, "fixturenames", ())
