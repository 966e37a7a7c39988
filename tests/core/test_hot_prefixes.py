"""How often runs of blocks are loaded, counted in bounded memory and within one window."""

from __future__ import annotations

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator.hot_prefixes import HotPrefixes
from tests.core.build import SECOND_NS, chain

RUN = 4
TEN = chain(10)
RUNS = [TEN[:4], TEN[4:8], TEN[8:]]


def heat(loads: int = 3) -> HotPrefixes:
    return HotPrefixes(loads=loads, window_ns=SECOND_NS, run_blocks=RUN)


def test_a_run_is_hot_once_in_a_window_with_the_load_that_makes_it_so() -> None:
    counts = heat(loads=3)
    seen = [list(counts.record_load(TEN, at)) for at in range(5)]
    assert seen == [[], [], RUNS, [], []]


def test_only_what_is_loaded_is_hot() -> None:
    counts = heat(loads=2)
    assert list(counts.record_load(TEN, 0)) == []
    assert list(counts.record_load(TEN[:5], 1)) == [TEN[:4], TEN[4:5]]
    assert list(counts.record_load(TEN, 2)) == [RUNS[2]]


def test_a_window_forgets_what_was_before_it() -> None:
    counts = heat(loads=2)
    list(counts.record_load(TEN, 0))
    assert list(counts.record_load(TEN, SECOND_NS)) == []
    assert list(counts.record_load(TEN, 2 * SECOND_NS - 1)) == RUNS, "and what is hot in each is told in each"
    assert list(counts.record_load(TEN, 2 * SECOND_NS)) == []
    assert list(counts.record_load(TEN, 2 * SECOND_NS)) == RUNS


def test_more_runs_than_are_counted_are_not_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOT_RUNS", 2)
    counts = heat(loads=2)
    list(counts.record_load(TEN, 0))
    assert list(counts.record_load(TEN, 1)) == RUNS[:2]
    assert list(counts.record_load(TEN, 2)) == []
