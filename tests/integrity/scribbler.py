"""Copies pages while another thread overwrites their source, and checks that nothing torn is taken for right.

The scribbler alternates a span of the source between two versions, without the GIL, so that it runs while an executor
copies. The sums of a load are those of the first version: a record that a load accepts must hold exactly that version.
A store takes whatever it finds: the sums that it produces must be those of the bytes that it has written.

A try is one batch, of BLOCKS pages of LAYERS records each.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import NamedTuple

from kvcluster.copies.batch import (
    CopyBatch,
    CopyDirection,
    CopyItems,
    CopyRecords,
    CopyStatus,
    HostMemory,
    MappedMemory,
    RunRecords,
)
from kvcluster.copies.native_verified_copies import NativeCopies
from kvcluster.core.codecs import Codec
from kvcluster.memory import checksum
from kvcluster.memory.region import HostRegion, RegionKind, address_of
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.python_verified_copies import PythonCopies
from tests.integrity.destinations import EVEN, Destination, pages_of, spec_of, values
from tests.integrity.executors import EXECUTORS, PYTHON, executed_by

BLOCKS, LAYERS = 2, 2
SPEC = spec_of(layers=LAYERS, heads=8, tokens=16, dims=(128, 128))
LAYER_BYTES = SPEC.layer_bytes(0, SPEC.whole(0))
PAGE_BYTES = LAYERS * LAYER_BYTES
IDENTITY = 7
LAYOUTS = ("dense", "nhd", "vllm cpu")
"""One for each way of copying: one run of bytes, rows, and keys of which each value lies by itself beside rows."""

_NEVER = 2**62
_SWITCH_S = 1e-5


class Kind(NamedTuple):
    """What is copied how."""

    direction: CopyDirection
    layout: str
    executor: str


KINDS = [Kind(*each) for each in product(CopyDirection, LAYOUTS, EXECUTORS)]


@dataclass
class Tally:
    """Counts records. A load accepts or refuses each; a store is `torn` if its bytes are not the first version. `wrong`
    are records that were accepted, and whose bytes do not have the sums."""

    tries: Counter[Kind] = field(default_factory=Counter)
    accepted: Counter[Kind] = field(default_factory=Counter)
    raced: Counter[Kind] = field(default_factory=Counter)
    wrong: Counter[Kind] = field(default_factory=Counter)

    @property
    def idle(self) -> list[Kind]:
        """The kinds in which no try met the scribbler, so that they prove nothing."""
        return [kind for kind in self.tries if not self.raced[kind]]

    def table(self) -> str:
        """Returns a row for each kind."""
        lines = [f"{'records of scribbled sources':<36}{'tries':>8}{'accepted':>10}{'raced':>10}{'wrong':>8}"]
        for kind in self.tries:
            name = f"{kind.direction.value:<6} {kind.layout:<13} {kind.executor}"
            counts = self.tries[kind], self.accepted[kind], self.raced[kind], self.wrong[kind]
            lines.append(f"{name:<36}{counts[0]:>8,}{counts[1]:>10,}{counts[2]:>10,}{counts[3]:>8,}")
        return "\n".join(lines)


def scribble(tries: int, seed: int) -> Tally:
    """Makes that many tries, equally many of each kind."""
    tally = Tally()
    with _frequent_switches():
        for number, kind in enumerate(KINDS):
            share = tries * (number + 1) // len(KINDS) - tries * number // len(KINDS)
            with executed_by(kind.executor):
                _try(kind, share, seed, tally)
    return tally


def _try(kind: Kind, tries: int, seed: int, tally: Tally) -> None:
    """Makes the tries of one kind."""
    memory = EVEN[kind.layout](SPEC, BLOCKS)
    page_bytes = bytearray(BLOCKS * PAGE_BYTES)
    right = values(SPEC, BLOCKS, seed)
    loads = kind.direction is CopyDirection.LOAD
    if loads:
        page_bytes[:] = b"".join(pages_of(right))
        source, nbytes = address_of(memoryview(page_bytes)), len(page_bytes)
    else:
        memory.fill(right)
        source, nbytes = memory.owners[0].data_ptr(), memory.owners[0].nbytes
    expected = _sums(b"".join(pages_of(right)))
    with _scribbling(source, nbytes, seed):
        for _ in range(tries):
            tally.tries[kind] += 1
            if loads:
                memory.clear()
            batch, run = _open(kind, memory, page_bytes, expected)
            run(0, len(batch.records))
            _count(kind, batch, _sums(b"".join(memory.pages()) if loads else page_bytes), expected, tally)


def _count(kind: Kind, batch: CopyBatch, found: list[int], expected: list[int], tally: Tally) -> None:
    """Counts the records of one try. `found` are the sums of the bytes at their destination."""
    for at, status in enumerate(batch.status):
        if kind.direction is CopyDirection.LOAD:
            tally.accepted[kind] += status == CopyStatus.DONE
            tally.raced[kind] += status == CopyStatus.MISMATCH
            tally.wrong[kind] += status == CopyStatus.DONE and found[at] != expected[at]
        else:
            tally.accepted[kind] += 1
            tally.raced[kind] += found[at] != expected[at]
            tally.wrong[kind] += batch.records.sums_of(at) != (found[at],)


def _sums(pages: bytes | bytearray) -> list[int]:
    """Returns the sum of each layer of each page."""
    view = memoryview(pages)
    starts = range(0, BLOCKS * PAGE_BYTES, PAGE_BYTES)
    return [each for at in starts for each in checksum.layer_sums(IDENTITY, 0, LAYERS, view[at : at + PAGE_BYTES])]


def _open(kind: Kind, memory: Destination, pages: bytearray, sums: list[int]) -> tuple[CopyBatch, RunRecords]:
    """Returns a batch of one record for each layer, and what carries it out."""
    loads = kind.direction is CopyDirection.LOAD
    bound = bind(memory.memory, SPEC, (memory.part,), BLOCKS, writable=loads)
    items, records = CopyItems(bound.geometries()), CopyRecords()
    for block, layer in product(range(BLOCKS), range(LAYERS)):
        if layer == 0:
            items.add(0, block, SPEC.whole(0))
        at = len(records)
        records.add(block, layer, at * LAYER_BYTES, LAYER_BYTES, Codec.RAW, sums[at : at + 1] if loads else [0])
    mapped = MappedMemory(HostRegion(memoryview(pages), 0, RegionKind.SHARED))
    batch = CopyBatch(
        kind.direction,
        mapped if loads else HostMemory(),
        HostMemory() if loads else mapped,
        records,
        items,
        array("Q", [IDENTITY]) * len(records),
        bytearray(len(records)),
        array("I", [0]),
        bytearray(len(items)),
        _NEVER,
        keeps=(pages, bound),
    )
    run = PythonCopies(bound).open(batch) if kind.executor == PYTHON else NativeCopies().open(batch)
    assert run is not None
    return batch, run


# ------------------------------------------------------------------------------------------- the scribbler


@contextmanager
def _scribbling(address: int, nbytes: int, seed: int) -> Iterator[None]:
    """Within it, a thread overwrites drawn spans of that memory with their complement, and then restores them. At the
    end the memory is as it was at the beginning."""
    right = ctypes.string_at(address, nbytes)
    other = bytes(byte ^ 255 for byte in right)
    over = threading.Event()
    thread = threading.Thread(target=_alternate, args=(address, right, other, Random(f"{seed}/spans"), over.is_set))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _alternate(address: int, right: bytes, other: bytes, rng: Random, over: Callable[[], bool]) -> None:
    versions = [ctypes.cast(ctypes.c_char_p(each), ctypes.c_void_p).value or 0 for each in (other, right)]
    while not over():
        at = rng.randrange(len(right))
        length = min(len(right) - at, rng.choice((1, 64, 4_096, len(right))))
        for version in versions:
            ctypes.memmove(address + at, version + at, length)


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Within it, threads that wait for the GIL get it soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
