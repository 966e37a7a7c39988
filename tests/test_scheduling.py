"""Claims about tests/scheduling.py: tests that share a cluster are kept together, and no others."""

from __future__ import annotations

import pytest

from tests.scheduling import ROOT, group_of

SHARING = ("disk", "draining", "events", "local", "transports")


@pytest.mark.parametrize("name", SHARING)
def test_files_that_share_the_ray_are_one_group(name: str) -> None:
    assert group_of(f"tests/actors/test_{name}.py") == "ray"


@pytest.mark.parametrize("path", ["tests/actors/test_background.py", "tests/cli/test_cli.py"])
def test_a_file_that_starts_a_cluster_of_its_own_is_a_group(path: str) -> None:
    assert group_of(path) == path


def test_tests_without_a_cluster_run_anywhere() -> None:
    grouped = [path for path in (ROOT / "tests/core").glob("test_*.py") if group_of(str(path.relative_to(ROOT)))]
    assert not grouped
