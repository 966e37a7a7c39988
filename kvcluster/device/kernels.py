"""The kernels that move records between staging and the blocks of an engine's memory, as data and as their definition:
what a device's own code does has to have the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcluster.device.device import Range
from kvcluster.device.moves import Launch, StagedRecord

Opened = Callable[[Range], memoryview]


@dataclass(frozen=True, slots=True)
class _Move:
    """Moves of `records`, by `table` in the device's memory and `launches` (moves.py)."""

    table: Range
    launches: Sequence[Launch]
    records: Sequence[StagedRecord]

    @property
    def staged(self) -> Sequence[Range]:
        """What it touches of staging."""
        return [record.staged for record in self.records]

    @property
    def touched(self) -> Sequence[Range]:
        """What it touches of blocks: computed for who judges their order."""
        return [touched for record in self.records for touched in record.touched()]

    def pieces(self, opened: Opened) -> Iterator[tuple[memoryview, memoryview]]:
        """Yields each run of bytes in staging and in a block, by the table alone."""
        words = opened(self.table).cast("q")
        for launch in self.launches:
            for staged, block, nbytes in launch.pieces(words):
                yield opened(Range(staged, nbytes)), opened(Range(block, nbytes))


class Scatter(_Move):
    """From staging into blocks."""

    @property
    def reads(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return [self.table, *self.staged]

    @property
    def writes(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return self.touched

    def run(self, opened: Opened) -> None:
        """As DeviceKernel."""
        for staged, block in self.pieces(opened):
            block[:] = staged


class Gather(_Move):
    """From blocks into staging. Of a page whose block has only a part, the rest of the staging stays as it is."""

    @property
    def reads(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return [self.table, *self.touched]

    @property
    def writes(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return self.staged

    def run(self, opened: Opened) -> None:
        """As DeviceKernel."""
        for staged, block in self.pieces(opened):
            staged[:] = block
