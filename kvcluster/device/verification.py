"""Verification on a device: records are copied into staging and compared with their checksums there, by words of the
same table that has their moves (moves.py).

Sums are made of what is written to staging, so that nothing else can change it: the source may be memory that another
process writes. The kernel sets the verdict of a record that does not match its sums, and the number of its layers in
the table of moves to 0, so that a move by that table leaves its block as it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from kvcluster.device.device import Range
from kvcluster.memory import checksum

LEAST_LAYER_BYTES = 241
"""XXH3 hashes shorter input in other ways."""

UNIT = 8
"""Divides addresses and the bytes of a layer: the input is read in words of 64 bits."""

HASHED_BYTES = 1_024
"""A block of XXH3. What it adds to the hash does not depend on what comes before it."""

LANES_BYTES = 64
"""Bytes of XXH3's state, and of what a block adds to it."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LANES = (
    *(0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)
CONSTANTS = array("Q", _SECRET).tolist() + list(_LANES)
"""XXH3's secret and its state before the first block: the words with which the table begins."""

_NOTHING = 2**64 - 1
_ROW_WORDS = 8


class SummedRecord(NamedTuple):
    """A record that the device reads: as many layers of equal length as it has sums, which are copied to the address
    `into`, or compared where they lie if that is their own. `seed`: of its first layer (checksum.first_seed).
    `layers_at`: the word of the table at which the move of it has its number of layers; None if nothing is moved."""

    data: Range
    into: int
    seed: int
    sums: Sequence[int]
    layers_at: int | None

    @property
    def copied(self) -> Range:
        return Range(self.into, self.data.nbytes)

    @property
    def layer_bytes(self) -> int:
        return self.data.nbytes // len(self.sums)


class SumLaunch(NamedTuple):
    """One launch: `records` of them, whose rows begin at word `rows` of the table, of at most `layers` layers of
    `layer_bytes` each."""

    rows: int
    records: int
    layers: int
    layer_bytes: int

    @property
    def blocks(self) -> int:
        """The blocks of a layer. The last of them is not whole, and may have no stripe but the last of all."""
        return _blocks(self.layer_bytes)


class Verification(NamedTuple):
    """Words for the table, what is launched, and the word at which the records have their verdicts, in their order: 0
    if the record's bytes match its sums. `scratch`: memory for what the blocks of all layers add."""

    words: bytes
    launches: list[SumLaunch]
    verdicts: int
    scratch: Range


def can_verify(layer_bytes: int) -> bool:
    """Whether a device can verify layers of this length."""
    return layer_bytes >= LEAST_LAYER_BYTES and layer_bytes % UNIT == 0


def constant_bytes() -> int:
    """Returns the bytes of the table for CONSTANTS."""
    return 8 * len(CONSTANTS)


def row_bytes(layers: int) -> int:
    """Returns the bytes of the table for a record of so many layers."""
    return 8 * (_ROW_WORDS + layers + 1)


def scratch_bytes(layers: int, layer_bytes: int) -> int:
    """Returns the scratch memory for a record of so many layers of this length."""
    return layers * _blocks(layer_bytes) * LANES_BYTES


def verification(records: Sequence[SummedRecord], first: int, scratch: int) -> Verification:
    """Returns what verifies these records, with words for the table from its word `first` on, and scratch memory from
    this address on: LANES_BYTES for each block that a layer begins, about a quarter of the records at most."""
    table = array("Q", CONSTANTS)
    order = sorted(range(len(records)), key=lambda at: records[at].layer_bytes)
    rows = first + len(table)
    sums = rows + _ROW_WORDS * len(records)
    verdicts = sums + sum(len(record.sums) for record in records)
    launches: list[SumLaunch] = []
    own = scratch
    for at in order:
        record = records[at]
        layers = len(record.sums)
        moved = _NOTHING if record.layers_at is None else record.layers_at
        table.extend((record.data.address, record.seed, layers, sums, moved, verdicts + at, record.into, own))
        sums += layers
        own += scratch_bytes(layers, record.layer_bytes)
    for layer_bytes, alike in groupby(order, lambda at: records[at].layer_bytes):
        same = list(alike)
        layers = max(len(records[at].sums) for at in same)
        launches.append(SumLaunch(rows, len(same), layers, layer_bytes))
        rows += _ROW_WORDS * len(same)
    for at in order:
        table.extend(records[at].sums)
    table.extend([0] * len(records))
    return Verification(table.tobytes(), launches, verdicts, Range(scratch, own - scratch))


def _blocks(layer_bytes: int) -> int:
    return -(-layer_bytes // HASHED_BYTES)


@dataclass(frozen=True, slots=True)
class CopySums:
    """Copies records, and compares what it has written with their sums: by `table`, in which CONSTANTS begin at word
    `constants`, and `launches`. Only a check of the order of accesses (ordering.py) iterates over `records`."""

    table: Range
    constants: int
    launches: Sequence[SumLaunch]
    scratch: Range
    records: Sequence[SummedRecord]

    @property
    def reads(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return [record.data for record in self.records]

    @property
    def writes(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return [self.table, self.scratch, *(record.copied for record in self.records)]

    def run(self, opened: Callable[[Range], memoryview]) -> None:
        """As DeviceKernel."""
        words = opened(self.table).cast("Q")
        for launch in self.launches:
            for at in range(launch.rows, launch.rows + _ROW_WORDS * launch.records, _ROW_WORDS):
                address, seed, layers, sums, moved, verdict, into, _ = words[at : at + _ROW_WORDS]
                nbytes = layers * launch.layer_bytes
                copied = opened(Range(into, nbytes))
                copied[:] = opened(Range(address, nbytes))
                if checksum.seeded_sums(seed, layers, copied) != tuple(words[sums : sums + layers]):
                    words[verdict] = 1
                    if moved != _NOTHING:
                        words[moved] = 0
