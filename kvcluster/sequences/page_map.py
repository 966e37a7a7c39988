"""The address and codec of each page of one sequence, as attention takes them, kept up to date with its block table.

Only what has changed in the table is written again, so a step costs the same at any length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from kvcluster.attention import PageAddresses, PageLayout, PageSpan
from kvcluster.core.codecs import Codec
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.missing_tokens import AbsentBlocks, BlockFetch
from kvcluster.sequences.resident_memory import ResidentMemory
from kvcluster.sequences.state import SequenceState
from kvcluster.transfers.zero_copy import BorrowedBlocks

_NO_ADDRESS = 0  # stands for a block that has no page


class PageMap:
    """One sequence's pages. Used under the lock of the sequences; the spans that it makes are read without."""

    def __init__(self, state: SequenceState, memory: ResidentMemory, absent: AbsentBlocks) -> None:
        self.version = 0
        """Counts the changes of addresses."""
        self.loans: tuple[BorrowedBlocks, ...] = ()
        self._state = state
        self._memory = memory
        self._absent = absent
        self._generation = absent.generation
        self._read = 0  # the version of the table up to which the addresses are those of its entries
        self._stop = 0  # the length of the table then
        self._unplaced: set[int] = set()  # depths whose address is _NO_ADDRESS
        self._lent: dict[int, SequenceBlock] = {}  # depths whose page is borrowed
        self._fetched: dict[int, BlockFetch] = {}  # the load of each depth whose page is on its way
        self._addresses = torch.zeros(0, dtype=torch.int64)
        self._codecs = torch.zeros(0, dtype=torch.int32)
        self._kinds = frozenset({Codec.RAW})
        self._keeps: tuple[object, ...] = ()  # of the spans; the resident set is not freed while they are read
        self._under_way: tuple[tuple[int, tuple[range, ...]], Sequence[BlockFetch]] = ((-1, ()), ())
        self._span: tuple[tuple[int, PageLayout, int, int], PageAddresses] | None = None

    def missing(self, first: int, stop: int) -> list[SequenceBlock]:
        """Brings the addresses up to date, and returns the blocks from depth `first` up to `stop` that have no page."""
        state, changed = self._state, self._state.table.changed_since(self._read)
        self._read = state.table.version
        if self._generation != self._absent.generation:
            self._generation, changed = self._absent.generation, 0
        if changed is not None:
            self._write(changed)
        if not self._unplaced:
            return []
        few = len(self._unplaced) < stop - first
        holes = sorted(self._unplaced) if few else range(first, stop)
        holes = [depth for depth in holes if first <= depth < stop and depth in self._unplaced]
        absent = [depth for depth in holes if not self._find(depth)]
        if len(absent) < len(holes):
            self._changed()
        return [state.blocks[depth] for depth in absent]

    def fetches(self, ranges: tuple[range, ...]) -> Sequence[BlockFetch]:
        """Returns the loads of blocks of these ranges of depths."""
        if self._under_way[0] != (self.version, ranges):
            seen = [fetch for depth, fetch in self._fetched.items() if any(depth in depths for depths in ranges)]
            self._under_way = (self.version, ranges), [*dict.fromkeys(seen)]
        return self._under_way[1]

    def span(
        self,
        layout: PageLayout,
        first: int,
        stop: int,
        tokens: int,
        places: Mapping[SequenceBlock, int] | None = None,
    ) -> PageSpan:
        """Returns the blocks from depth `first` up to `stop` as far as they lie before position `tokens`. With
        `places`, those that have no page are read raw at these addresses."""
        key = (self.version, layout, first, stop)
        if places is not None:
            pages = self._pages_with(layout, first, stop, places)
        elif self._span is not None and self._span[0] == key:
            pages = self._span[1]
        else:
            at = slice(first, stop)
            pages = PageAddresses(layout, self._addresses[at], self._codecs[at], self._kinds, self._keeps)
            self._span = key, pages
        position = first * self._state.block_tokens
        return PageSpan(pages, position, min(tokens, stop * self._state.block_tokens) - position)

    # ------------------------------------------------------------------------------------------- helpers

    def _pages_with(
        self, layout: PageLayout, first: int, stop: int, places: Mapping[SequenceBlock, int]
    ) -> PageAddresses:
        addresses, codecs, blocks = self._addresses[first:stop].clone(), self._codecs[first:stop], self._state.blocks
        if self._unplaced:
            holes = (addresses == _NO_ADDRESS).nonzero().flatten()
            found = [places[blocks[first + at]] for at in holes.tolist()]
            addresses[holes] = torch.tensor(found, dtype=torch.int64)
            codecs = codecs.index_fill(0, holes, int(Codec.RAW))
        return PageAddresses(layout, addresses, codecs, self._kinds | {Codec.RAW}, self._keeps)

    def _write(self, first: int) -> None:
        """Writes the addresses from depth `first` on."""
        table, stop = self._state.table, len(self._state.table)
        if stop > len(self._addresses):
            room = max(64, 2 * len(self._addresses), stop)
            self._addresses = torch.cat([self._addresses, self._addresses.new_zeros(room - len(self._addresses))])
            self._codecs = torch.cat([self._codecs, self._codecs.new_zeros(room - len(self._codecs))])
        for depths in (self._lent, self._fetched):
            for depth in [depth for depth in depths if depth >= first]:
                del depths[depth]
        self._unplaced.difference_update(range(first, self._stop))
        self._stop = stop
        if not first:
            self._kinds = frozenset({Codec.RAW})
        if first < stop:
            addresses, codecs = self._memory.addresses(torch.frombuffer(table.memory, dtype=torch.int32)[first:stop])
            self._addresses[first:stop] = addresses
            self._codecs[first:stop] = codecs
            for at in (addresses == _NO_ADDRESS).nonzero().flatten().tolist():
                self._unplaced.add(first + at)
                self._find(first + at)
            self._kinds |= {codec for codec in Codec if bool((self._codecs[first:stop] == int(codec)).any())}
        self._changed()

    def _find(self, depth: int) -> bool:
        """Writes the address of an absent block, if it is borrowed or being loaded."""
        block = self._state.blocks[depth]
        if block in self._absent.lent:
            page = self._absent.lent[block]
            self._addresses[depth], self._codecs[depth] = page.memory.data_ptr(), page.codec
            self._kinds |= {page.codec}
            self._lent[depth] = block
        elif block in self._absent.fetched:
            number, self._fetched[depth] = self._absent.fetched[block]
            self._addresses[depth] = self._memory.address(number)
            self._codecs[depth] = Codec.RAW
        else:
            return False
        self._unplaced.discard(depth)
        return True

    def _changed(self) -> None:
        self.version += 1
        if not (self._lent or self.loans):
            return
        lent = [self._absent.lent[block] for block in self._lent.values()]
        self.loans = tuple({page.loan: None for page in lent})
        self._keeps = tuple(page.memory for page in lent)

    def addresses(self, depths: range) -> torch.Tensor:
        """Returns where the blocks of these depths are, int64: 0 for those that have no page."""
        return self._addresses[depths.start : depths.stop]


def groups_of_same_pages(maps: Sequence[PageMap], depths: range) -> Iterator[tuple[range, list[list[int]]]]:
    """Yields parts of these depths, in order, and the indices of the maps that have the same pages there, together."""
    addresses = torch.stack([each.addresses(depths) for each in maps])
    same = (addresses == addresses[0]).all(0)
    edges = [0, *((same[1:] != same[:-1]).nonzero().flatten() + 1).tolist(), len(depths)]
    for first, stop in itertools.pairwise(edges):
        groups: dict[bytes, list[int]] = {}
        for at, there in enumerate(addresses[:, first:stop]):
            groups.setdefault(b"" if same[first] else there.numpy().tobytes(), []).append(at)
        yield range(depths.start + first, depths.start + stop), [*groups.values()]
