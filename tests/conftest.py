"""What holds for every test: how many examples are drawn, that no verdict depends on a clock, and which tests run in
sequence.

`make test` draws the same examples each time, so that its verdict belongs to the change. With `--nightly`, which `make
nightly` gives, hypothesis draws more and new ones, and tests that ask for `nightly` look further than CI has time for;
a failure prints the line that repeats it.
"""

from __future__ import annotations

import os

# Before torch is loaded, which reads it once; processes that tests start inherit it. Tests run on all cores already: if
# torch has a thread for each core as well, these wait for one another, and tests of attention take six times the CPU.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvcluster.memory import native

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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs, and inherited by children
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def nightly(pytestconfig: pytest.Config) -> bool:
    """Is there time to look further?"""
    return bool(pytestconfig.getoption("--nightly"))


@pytest.fixture(params=[] if native.KERNELS is None else native.KERNELS.names())
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for each instruction set of this machine, with the native core using that set."""
    assert native.KERNELS is not None
    before = native.KERNELS.chosen()
    native.KERNELS.choose(request.param)
    yield request.param
    native.KERNELS.choose(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests that share the Ray of tests/actors/conftest.py run in a row, so that it is started once. Those marked
    `nightly` are left out unless `--nightly` is given."""
    if not config.getoption("--nightly"):
        later = [item for item in items if item.get_closest_marker("nightly")]
        if later:
            config.hook.pytest_deselected(items=later)
            items[:] = [item for item in items if item not in later]
    items.sort(key=lambda item: "shared_ray" in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """What is imported and collected by now lives as long as the process: the collector need not walk it in each test
    that asks for a collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: a quarter of the time of these tests is waiting, for processes that start
    and for deadlines. With two more, processes wait for cores."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, tests that share a cluster run in one worker (scheduling.py)."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.scheduling import ByCluster

    return ByCluster(config, log)
