"""The connector's sides in modes "off" and "observe": they move nothing and decide nothing.

In mode "observe" the scheduler's side is derived from this one and takes notes (observer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from kvcluster.engines.vllm.stats import Stats
from kvcluster.engines.vllm.step_metadata import BlockIds, Step, StepReport


class IdleScheduler:
    """The scheduler's side that loads and stores nothing."""

    keeps_blocks = False

    def __init__(self) -> None:
        self.stats = Stats()
        self._step = 0

    def matched(self, of_engine: Any, local_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, of_engine: Any, table: BlockIds, tokens: int) -> None:
        """Nothing was matched, so nothing is loaded."""

    def step(self, output: Any) -> Step:
        self._step += 1
        return Step(self._step, weights="")

    def reported(self, report: StepReport) -> None:
        """No order was given."""

    def finished(self, of_engine: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def blocks_released(self, names: Collection[str]) -> None:
        """No block was held."""

    def reset(self, *, ready: bool = False) -> None:
        """Nothing is shared."""

    def close(self) -> None:
        """Nothing is open."""


class IdleWorker:
    """The workers' side that moves nothing. It reports the steps' ends, by which the scheduler's side times them."""

    def __init__(self) -> None:
        self._step = 0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """No KV is touched, so its layout does not matter."""

    def unregister(self) -> None:
        """Nothing uses it."""

    def restore(self) -> None:
        """Nothing uses it."""

    def before(self, step: Step) -> None:
        """No store reads anything."""

    def load(self, step: Step) -> None:
        """There are no orders."""

    def wait_layer(self, name: str) -> None:
        """Nothing is on its way."""

    def after(self, step: Step) -> None:
        self._step = step.number

    def settle(self) -> tuple[set[str], set[str], set[str]]:
        return set(), set(), set()

    def invalid_blocks(self) -> set[int]:
        return set()

    def take_report(self) -> StepReport:
        return StepReport(self._step)

    def close(self) -> None:
        """Nothing is open."""
