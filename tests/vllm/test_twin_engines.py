"""Engines whose KV lies in the memory of a twin, in vLLM's order of calls by both of its model runners: every text is
right, nothing is unordered, and faults that are planted in the connector are found.

    python -m tests.vllm.differential --twin --operations 400000 --seed 1
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcluster.core.miss import Loss
from kvcluster.device.snapshots import Snapshots
from kvcluster.device.twin import Twin
from kvcluster.engines.vllm import worker
from kvcluster.engines.vllm.scheduler import SchedulerSide
from kvcluster.engines.vllm.snapshot_stores import SnapshotStores
from kvcluster.engines.vllm.step_metadata import LoadReport, Step
from kvcluster.engines.vllm.worker import WorkerSide
from tests.vllm import differential
from tests.vllm.conftest import Bench
from tests.vllm.scripted import PATIENT
from tests.vllm.toy import Engine
from tests.vllm.twin_toy import TwinRank, twins


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with differential.models(tmp_path_factory.mktemp("twins")) as made:
        yield made


@pytest.mark.parametrize("seed", range(4))
def test_every_text_is_right_and_nothing_is_unordered(folders: dict[str, Path], seed: int) -> None:
    events = differential.run_scenario(folders, seed, differential.TWIN_OPERATIONS, twin=True)
    assert events["loads"]


# --------------------------------------------------------------------------------------------------- planted faults


def _stores_read_blocks_that_were_given_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotStores, "before", lambda self, written: self.begun())


def _what_a_step_takes_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "_computed_into", lambda self, scheduled: [])


def _loads_are_received_before_their_event(patch: pytest.MonkeyPatch) -> None:
    def all_came(self: Any) -> LoadReport:
        return LoadReport(self.order.first + len(self.order.into[0]), 0, 1, Loss.EXACT, None)

    patch.setattr(worker._Load, "over", lambda self: True)
    patch.setattr(worker._Load, "report", all_came)


def _nothing_waits_for_an_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Twin, "wait", lambda self, stream, event: None)


def _loads_go_on_when_their_request_has_gone(patch: pytest.MonkeyPatch) -> None:
    before = WorkerSide.before

    def forgets(self: WorkerSide, step: Step) -> None:
        for load in self._loads:
            if load.order.request in step.gone:
                load.transfer = None
        before(self, step)

    patch.setattr(WorkerSide, "before", forgets)


def _a_slot_is_given_back_early(patch: pytest.MonkeyPatch) -> None:
    take = Snapshots.take

    def early(self: Snapshots, blocks: Any) -> Any:
        made = take(self, blocks)
        if made is not None:
            self.give_back(made._slot)
        return made

    patch.setattr(Snapshots, "take", early)


FAULTS = [
    _stores_read_blocks_that_were_given_away,
    _what_a_step_takes_is_not_told,
    _loads_are_received_before_their_event,
    _nothing_waits_for_an_event,
    _loads_go_on_when_their_request_has_gone,
    _a_slot_is_given_back_early,
]


def found_at(folders: dict[str, Path], most: int) -> int | None:
    """Returns the first seed whose scenario finds something."""
    for seed in range(most):
        try:
            differential.run_scenario(folders, seed, differential.TWIN_OPERATIONS, twin=True)
        except Exception:
            return seed
    return None


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_found(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert found_at(folders, 200) is not None
