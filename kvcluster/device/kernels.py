"""The kernels that move records between staging and the blocks of an engine's memory, and that decode them in staging:
as data, and as a reference implementation, whose results a device's own code must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Group
from kvcluster.device.device import Range
from kvcluster.device.moves import Launch, StagedRecord
from kvcluster.memory import codec

Opened = Callable[[Range], memoryview]


@dataclass(frozen=True, slots=True)
class _Move:
    """Moves of `records`, by `table` in the device's memory and `launches` (moves.py). Only a check of the order of
    accesses (ordering.py) iterates over `records`."""

    table: Range
    launches: Sequence[Launch]
    records: Iterable[StagedRecord]

    @property
    def staged(self) -> Sequence[Range]:
        """The ranges of staging that it touches."""
        return [record.staged for record in self.records]

    @property
    def touched(self) -> Sequence[Range]:
        """The ranges of blocks that it touches."""
        return [touched for record in self.records for touched in record.touched()]

    def pieces(self, opened: Opened) -> Iterator[tuple[memoryview, memoryview]]:
        """Yields each run of bytes in staging and in a block, by the table alone."""
        words = opened(self.table).cast("q")
        for launch in self.launches:
            for plane in launch.planes(words):
                nbytes, staging, blocks = plane.numbers.element_bytes, plane.staged, plane.block
                staged, block = opened(staging), opened(blocks)
                for at, there in plane.pieces(staging.address, blocks.address):
                    yield staged[at : at + nbytes], block[there : there + nbytes]


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
    """From blocks into staging. If a block has only a part of its page, the rest of that page in staging stays as it
    is."""

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


@dataclass(frozen=True, slots=True)
class Decode:
    """`layers` encoded layers of a group, with `heads` of its heads, into as many raw ones, both in staging."""

    codec: Codec
    group: Group
    block_tokens: int
    heads: int
    layers: int
    coded: Range
    raw: Range

    @property
    def reads(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return [self.coded]

    @property
    def writes(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return [self.raw]

    def run(self, opened: Opened) -> None:
        """As DeviceKernel."""
        coder = codec.coder(self.codec, self.group, block_tokens=self.block_tokens, heads=self.heads)
        coder.decode(opened(self.coded), opened(self.raw), self.layers)

    def followed_by(self, other: Decode) -> Decode | None:
        """Returns one for both, if they are of one kind and the layers of `other` lie behind these."""
        coded, raw = self.coded, self.raw
        lie = other.coded.address == coded.address + coded.nbytes and other.raw.address == raw.address + raw.nbytes
        if not lie or replace(other, layers=self.layers, coded=coded, raw=raw) != self:
            return None
        both = self.layers + other.layers
        return replace(
            self,
            layers=both,
            coded=coded._replace(nbytes=coded.nbytes + other.coded.nbytes),
            raw=raw._replace(nbytes=raw.nbytes + other.raw.nbytes),
        )
