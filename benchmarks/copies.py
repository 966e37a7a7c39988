"""Measures the native core alone: batches of copies between mapped pages and engines' layouts, beside memcpy.

    .venv/bin/python -m benchmarks.copies --turns 21

Every turn runs each copy once, in random order and after the CPU caches were filled with other data, and a memcpy of as
many raw bytes, page by page, right before it. It prints milliseconds and the median ratio of memcpy's time to the
copy's: 1 is as fast as memcpy on one thread, which verifies nothing. Every copy verifies (loads) or sums (stores) what
it writes. Two threads divide the pages. After the last turn every loaded byte is compared.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import statistics
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.codec.coded import CodedPages
from benchmarks.rounds import paired
from benchmarks.specs import BY_PAGE_BYTES, page_shape
from benchmarks.transfer.end_to_end import fill, paged
from benchmarks.transfer.layout import LAYOUTS, EngineMemory
from kvcluster.copies.batch import (
    CopyBatch,
    CopyDirection,
    CopyItems,
    CopyRecords,
    CopyStatus,
    HostMemory,
    MappedMemory,
)
from kvcluster.copies.native_verified_copies import NativeCopies
from kvcluster.core.codecs import Codec
from kvcluster.memory import checksum, native
from kvcluster.memory.region import HostRegion, RegionKind, address_of
from kvcluster.transfers.bound_memory import bind
from kvcluster.transport.worker_exchange import runs_of

MOVED_BYTES = 128 * 2**20
NEVER = 2**62
Work = Callable[[], object]


class Pages:
    """Pages in one codec, in memory that other processes could have written, and the caches of an engine with their raw
    content."""

    def __init__(self, page_bytes: int, layout: str, which: Codec) -> None:
        self.spec, self.which, count = BY_PAGE_BYTES[page_bytes], which, MOVED_BYTES // page_bytes
        self.count, self.part, group = count, self.spec.whole(0), self.spec.groups[0]
        values = torch.randn(count, *page_shape(self.spec)).bfloat16()
        raw = memoryview(values.view(-1).view(torch.uint8).numpy())
        coded = CodedPages(which, group, self.spec.block_tokens, raw)
        coded.encode()
        coded.decode(raw)
        self.layer_bytes = coded.page_bytes // self.part.layers
        self.memory = EngineMemory(layout, page_shape(self.spec), count)
        self.source, self.into = (paged(layout, blocks, self.spec) for blocks in (self.memory.source, self.memory.into))
        self.mapped = memoryview(mmap.mmap(-1, coded.coded.nbytes))
        self.mapped[:] = coded.coded
        fill(self.source, values)

    def runs(self, direction: CopyDirection, threads: int) -> list[Work]:
        """Returns the work of each thread."""
        bound = bind(
            self.into if direction is CopyDirection.LOAD else self.source, self.spec, (self.part,), self.count,
            writable=direction is CopyDirection.LOAD,
        )  # fmt: skip
        share = -(-self.count // threads)
        return [
            self._run(direction, bound, range(at, min(at + share, self.count))) for at in range(0, self.count, share)
        ]

    def _run(self, direction: CopyDirection, bound: object, blocks: range) -> Work:
        records, identities, items = CopyRecords(), array("Q"), CopyItems(bound.geometries())  # type: ignore[attr-defined]
        for block in blocks:
            items.add(0, block, self.part)
        runs = runs_of(0, self.part.layers, self.layer_bytes)
        loads = direction is CopyDirection.LOAD
        order = itertools.product(runs, blocks) if loads else ((run, block) for block in blocks for run in runs)
        for (layer, count), block in order:
            offset, nbytes = (block * self.part.layers + layer) * self.layer_bytes, count * self.layer_bytes
            sums = checksum.layer_sums(block, layer, count, self.mapped[offset : offset + nbytes])
            records.add(block - blocks.start, layer, offset, nbytes, self.which, sums)
            identities.append(block)
        pages = MappedMemory(HostRegion(self.mapped, address_of(self.mapped), RegionKind.SHARED))
        ends = (pages, HostMemory()) if loads else (HostMemory(), pages)
        status = bytearray(len(records))
        batch = CopyBatch(
            direction, *ends, records, items, identities, status, array("I", [0]), bytearray(len(items)), NEVER,
            keeps=(self.mapped, bound),
        )  # fmt: skip
        run = NativeCopies().open(batch)
        assert run is not None, "there is no native core"

        def work() -> None:
            status[:] = bytes(len(status))
            run(0, len(records))
            assert set(status) == {CopyStatus.DONE}, "a copy did not verify"

        return work


def memcpy(page_bytes: int) -> Work:
    """Returns the copy of as many bytes, page by page."""
    from_, into = (memoryview(mmap.mmap(-1, MOVED_BYTES)) for _ in range(2))
    from_[:] = into[:] = bytes(MOVED_BYTES)
    source, target = address_of(from_), address_of(into)

    def work() -> None:
        for at in range(0, MOVED_BYTES, page_bytes):
            ctypes.memmove(target + at, source + at, page_bytes)

    work.__dict__["keeps"] = from_, into
    return work


def main() -> None:
    """Prints one row for each copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=11, help="number of turns (default 11)")
    parser.add_argument("--pages", type=int, nargs="+", default=[2 * 2**20, 64 * 2**10], help="page sizes in bytes")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="(default all)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default 1 2)")
    parser.add_argument(
        "--sets", nargs="+", default=None, help="instruction sets (default the fastest of this machine)"
    )
    options = parser.parse_args()
    assert native.KERNELS is not None, "there is no native core"
    sets = options.sets or [native.KERNELS.chosen()]
    torch.set_num_threads(1)
    print(f"{MOVED_BYTES >> 20} MiB a copy, {options.turns} turns; instruction sets here: {native.KERNELS.names()}")
    with ThreadPoolExecutor(max(options.threads)) as pool:
        for page_bytes in options.pages:
            beside = memcpy(page_bytes)
            for layout, which in itertools.product(options.layouts, Codec):
                if which is Codec.RAW or (layout, page_bytes) == ("nhd", 2 * 2**20):
                    _measure(Pages(page_bytes, layout, which), layout, page_bytes, beside, pool, sets, options)


def _measure(
    pages: Pages, layout: str, page_bytes: int, beside: Work, pool: ThreadPoolExecutor, sets: list[str],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    kernels = native.KERNELS
    assert kernels is not None, "there is no native core"
    directions = [CopyDirection.LOAD, CopyDirection.STORE] if pages.which is Codec.RAW else [CopyDirection.LOAD]
    runs = {
        kind: partial(_together, pool, pages.runs(kind[0], kind[1]))
        for kind in itertools.product(directions, options.threads, sets)
    }
    took = paired(beside, runs, options.turns, before=lambda kind: kernels.choose(kind[2]))
    assert pages.memory.same(), "what was loaded is not what was stored"
    for (direction, threads, name), pairs in took.items():
        ms = statistics.median(own for _, own in pairs) * 1e3
        ratio = statistics.median(base / own for base, own in pairs)
        what = f"{page_bytes >> 10:>5} KiB  {layout:12} {pages.which.name.lower():3} {direction.value:5}"
        print(f"{what} {threads} thread(s)  {name:6} {ms:7.1f} ms  {ratio:.2f} of memcpy", flush=True)


def _together(pool: ThreadPoolExecutor, works: list[Work]) -> None:
    """Does each work in a thread of its own."""
    list(pool.map(lambda work: work(), works))


if __name__ == "__main__":
    main()
