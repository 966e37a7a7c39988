"""The short form of the differential fuzzer: it is clean, it draws the same operations each time, and it finds faults
that are planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcluster.engines.vllm import compat
from kvcluster.engines.vllm.request_state import LoadsInFlight
from kvcluster.engines.vllm.scheduler import SchedulerSide, StorePlanner
from kvcluster.engines.vllm.worker import WorkerSide
from tests.vllm import differential

LATENTS = (23, 33)
"""Seeds of engines that keep latents."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with differential.models(tmp_path_factory.mktemp("differential")) as made:
        yield made


@pytest.mark.parametrize("seed", [4, 6, 9, 11, 17, 22, *LATENTS])
def test_no_engine_takes_a_block_for_another(folders: dict[str, Path], seed: int) -> None:
    events = differential.run_scenario(folders, seed)
    assert events["loads"]
    assert events["loads within a pass"] or seed not in (11, 22)


def test_a_seed_draws_the_same_operations(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []

    def noting(kind: str) -> Callable[[Any, int], None]:
        original = getattr(differential.Scenario, f"_{kind}")

        def note(self: Any, at: int) -> None:
            drawn[-1].append(f"{kind} {at}")
            original(self, at)

        return note

    for kind in differential._OPERATIONS:
        monkeypatch.setattr(differential.Scenario, f"_{kind}", noting(kind))
    for _ in range(2):
        drawn.append([])
        differential.run_scenario(folders, 3, operations=60)
    assert len(drawn[0]) == 60 and drawn[0] == drawn[1]


def _names_are_trusted(patch: pytest.MonkeyPatch) -> None:
    keys = compat.extra_keys
    patch.setattr(
        compat, "extra_keys", lambda request, step, first, stop, engine: keys(request, step, first, stop, b"")
    )


def _salts_are_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compat, "salt", lambda request: b"")


def _failed_loads_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    settle = WorkerSide.settle

    def all_came(self: WorkerSide) -> tuple[set[str], set[str], set[str]]:
        sent, received, failed = settle(self)
        return sent, received | failed, set()

    patch.setattr(WorkerSide, "invalid_blocks", lambda self: set())
    patch.setattr(WorkerSide, "settle", all_came)


def _stores_go_on_after_their_blocks_are_given_away(patch: pytest.MonkeyPatch) -> None:
    """And each takes so long that the engine gets to write into them."""
    patch.setattr(differential, "_PAUSES_S", (0.06,))
    patch.setattr(SchedulerSide, "_computed_into", lambda self, scheduled: [])


def _blocks_are_stored_before_they_are_full(patch: pytest.MonkeyPatch) -> None:
    plan = StorePlanner.plan

    def ahead(self: StorePlanner, request: Any, one: compat.Scheduled) -> Any:
        return plan(self, request, replace(one, tokens=one.tokens + 2))

    patch.setattr(StorePlanner, "plan", ahead)


def _only_what_did_not_come_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "_distrust", lambda self, failed, blocks: self._forget(blocks))


def _nothing_is_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadsInFlight, "in_doubt", lambda self: set())


FAULTS = [
    (_names_are_trusted, 2),
    (_salts_are_left_out, 0),
    (_failed_loads_are_not_reported, 11),
    (_stores_go_on_after_their_blocks_are_given_away, 2),
    (_blocks_are_stored_before_they_are_full, 4),
    (_only_what_did_not_come_is_forgotten, 19),
    (_nothing_is_in_doubt, 97),
]
"""With the seed that usually finds each, so that the search is short."""


@pytest.mark.parametrize(("plant", "first"), FAULTS, ids=[plant.__name__.lstrip("_") for plant, _ in FAULTS])
def test_a_planted_fault_is_found_within_2_000_operations(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], first: int
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="was told nonsense"):
        for seed in range(first, first + 2_000 // differential.OPERATIONS):
            differential.run_scenario(folders, seed)
