"""What holds for every test: how far it looks, that no verdict depends on a clock, and which worker runs it.

`make test` draws the same examples each time, so that its verdict belongs to the change. With `--nightly`, which `make
nightly` gives, hypothesis draws more and new ones, and tests that ask for `nightly` look further than CI has time for;
a failure prints the line that repeats it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# The claims of shipped suites, whose asserts pytest rewrites only where it is told before they are imported.
pytest.register_assert_rewrite("kvcluster.testing.conformance")

# A slow machine is no failure: neither an example nor the making of one is timed.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _untimed, max_examples=50, stateful_step_count=30, derandomize=True, database=None)
settings.register_profile("nightly", _untimed, max_examples=300, stateful_step_count=60, print_blob=True)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="look further than CI has time for")
    parser.addoption("--rewrite", action="store_true", help="write what the cores do into the transcripts")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly") and config.getoption("--hypothesis-profile") is None:
        settings.load_profile("nightly")


@pytest.fixture(scope="session")
def nightly(pytestconfig: pytest.Config) -> bool:
    """Is there time to look further?"""
    return bool(pytestconfig.getoption("--nightly"))


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
