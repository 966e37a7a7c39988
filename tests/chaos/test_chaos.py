"""The short form: every kind of fault once, on a real cluster under load. `make chaos` is the long one."""

from __future__ import annotations

import functools

import pytest

from tests.chaos.faults import one_of_each
from tests.chaos.run import Run

SEED = 2
"""Its links are cut between nodes and workers and between nodes, and a shard is stopped until it is given up."""


@pytest.mark.cluster
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_no_fault_brings_wrong_bytes_errors_or_leaks(capsys: pytest.CaptureFixture[str]) -> None:
    """Late calls, and how soon all is well again, are printed and not judged here: they belong to the machine too."""
    with capsys.disabled():
        with Run(SEED, say=functools.partial(print, flush=True)) as run:
            run.inflict(one_of_each(SEED, run.stage))
            run.drain()
            report = run.finish()
        print(report.table())
    assert report.wrong == []
    assert set(report.faults) == {kind.value for kind in run.stage.kinds} | {"shard drained"}
    assert report.outcomes["bytes checked"] > 0
    assert report.outcomes["pages with a flipped bit"] > 0
