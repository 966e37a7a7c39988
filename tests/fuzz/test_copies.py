"""What the copying shells promise holds in drawn exchanges, and the fuzzer that says so finds what is planted. One run
in CI; `make fuzz-clients` has more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcluster.copies.batch import CopyStatus
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transfers.python_verified_copies import PythonCopies
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.store_source import StoreSource
from tests.fuzz.copies import FAULTS, Finding, run

EPISODES = 500

WITHIN = 200
"""Episodes within which a planted fault is found."""


@pytest.mark.parametrize("seed", range(2))
def test_the_copying_shells_keep_what_they_promise(seed: int) -> None:
    met = run(EPISODES, seed).events
    for event in (
        *FAULTS,
        "native executor",
        "threads",
        "given to others meanwhile",
        "encoded",
        "stopped",
        "given to others",
        "stopped within a copy",
        "store stopped",
        "refused",
    ):
        assert met[event], f"seed {seed} never met: {event}"


Plant = Callable[[pytest.MonkeyPatch], None]


def layers_behind_a_gap_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink counts whatever layers of a page have come."""
    monkeypatch.setattr(ReadRanges, "is_next", lambda self, item, layer: True)


def layers_that_come_again_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink has whatever layers of a page come copied."""
    monkeypatch.setattr(ReadRanges, "unexpected", lambda self, items, layers, counts: [])


def codecs_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw bytes are counted of every page as if it had all heads of its group."""
    layers_of = LoadSink._layers_of

    def counted(self: Any, item: int, layer: int, stop: int) -> Any:
        return layers_of(self, item, layer, stop)[0], self._spec.page_bytes(0, self._spec.whole(0))

    monkeypatch.setattr(LoadSink, "_layers_of", counted)


def kinds_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer of a page counts for is remembered by its number alone."""
    layers_of = LoadSink._layers_of
    seen: dict[tuple[int, int, int], Any] = {}

    def counted(self: Any, item: int, layer: int, stop: int) -> Any:
        return seen.setdefault((id(self._progress), layer, stop), layers_of(self, item, layer, stop))

    monkeypatch.setattr(LoadSink, "_layers_of", counted)


def what_was_given_to_others_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that were given to others are written by this exchange, too."""
    monkeypatch.setattr("kvcluster.copies.batch.CopyBatch.is_stopped", lambda self, at, now: bool(self.cancel[0]))


def a_stop_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are given to others while this exchange copies bytes of them."""

    def stop(self: Any, items: Any = None) -> None:
        if items is None:
            self.cancel[0] = 1
        for item in items or ():
            self.dropped[item] = 1

    monkeypatch.setattr(ReadRanges, "stop", stop)


def stores_go_on_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that was stopped is read all the same."""

    def stop(self: Any) -> None:
        """Forgets to set the flag."""

    monkeypatch.setattr(StoreSource, "stop", stop)


def taken_by_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each slice of a store, only the first page counts as read."""
    carried_out = StoreSource.run

    def run_some(self: Any, batch: Any, run: Any, start: int, stop: int) -> None:
        before = dict(self.taken)
        carried_out(self, batch, run, start, stop)
        self.taken = {**before, batch.records.items[start]: None}

    monkeypatch.setattr(StoreSource, "run", run_some)


def layers_from_the_first_of_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in Python takes the layers of a page from the first of its part on."""
    store = PythonCopies._store

    def from_the_first(self: Any, batch: Any, at: int, into: memoryview) -> CopyStatus:
        layers = batch.records.layers
        batch.records.layers = layers[:at] + type(layers)("I", [0]) + layers[at + 1 :]
        try:
            return store(self, batch, at, into)
        finally:
            batch.records.layers = layers

    monkeypatch.setattr(PythonCopies, "_store", from_the_first)


@pytest.mark.parametrize(
    "plant",
    [
        layers_behind_a_gap_count,
        layers_that_come_again_are_written,
        codecs_are_not_looked_at,
        kinds_are_mixed_up,
        what_was_given_to_others_is_written,
        a_stop_does_not_wait,
        stores_go_on_after_a_stop,
        taken_by_its_first,
        layers_from_the_first_of_the_part,
    ],
)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Finding, match="--seed 0 --first "):
        run(WITHIN)
