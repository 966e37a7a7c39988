"""The page allocator: bookkeeping of an arena cut into extents. It owns no bytes and knows no page, only ranges.

A *span* is one extent, or several neighbouring ones, that serves one size class until its last slot is free;
then its extents may serve any class again. So raw and encoded pages, and the pages of several models, share
one budget, and no split between them has to be configured. Each size, rounded up to ALIGN_BYTES, is its own
class: a shard sees few sizes (one per part and codec), and coarser classes would waste the difference. A class
wastes only the rest behind the last slot of a span. A span is made so wide that the rest is at most one part in
REST_PARTS, if the arena is large enough for that.

Slots are taken from the span at the lowest address that has one ("address-ordered first fit": Wilson et al.,
Dynamic Storage Allocation, 1995), so that the other spans of the class drain and can change class. Single
extents are taken from the bottom of the arena and wider spans from its top, so that single extents do not
fragment the space that wide spans need.

The invariant: used bytes + free slots + free extents + rests == capacity, and no two reserved ranges overlap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from kvcluster.core.file_allocator import Owner
from kvcluster.errors import ConfigError

ALIGN_BYTES = 64
"""One cache line: no two pages share one, and any dtype is aligned. A larger value would waste up to its size per
page."""

REST_PARTS = 16
"""A span wastes at most 1/16 of its bytes. Sixteen slots achieve that for every size; most sizes need fewer."""

MAX_EXTENTS = 65_536
"""Bounds the two tables that have an entry per extent (9 bytes each) and the time to search them (microseconds)."""

_EXTENTS_AIMED_AT = 256


def default_extent_bytes(capacity_bytes: int) -> int:
    """Returns the power of two, at least ALIGN_BYTES, that cuts the arena into 256 to 511 extents.

    That is enough extents for many size classes at once, and few enough that most pages are smaller than one.
    """
    wanted = max(capacity_bytes // _EXTENTS_AIMED_AT, ALIGN_BYTES)
    return 1 << (wanted.bit_length() - 1)


class _Span:
    """`width` extents from `first` on, cut into slots of `size` bytes, and which slots are taken."""

    __slots__ = ("first", "free", "size", "start", "taken", "width")

    def __init__(self, *, first: int, width: int, size: int, extent_bytes: int) -> None:
        self.first = first
        self.width = width
        self.size = size
        self.start = first * extent_bytes
        self.free = width * extent_bytes // size
        self.taken = bytearray(self.free)


class _SizeClass:
    """The spans of one size. Exists only while it has spans, so there are never more size classes than extents."""

    __slots__ = ("free_slots", "partial", "size", "spans", "width")

    def __init__(self, size: int, width: int) -> None:
        self.size = size
        self.width = width
        self.spans = 0
        self.free_slots = 0
        self.partial: list[int] = []  # first extents of the spans that have a free slot, ascending


class PageAllocator:
    """Allocates ranges of an arena of `capacity_bytes`, in extents of `extent_bytes` (0: a default by capacity).

    A remainder smaller than an extent is unused and is not part of the capacity. Raises ConfigError if not even one
    extent fits, if there are too many extents, or if their size is no multiple of ALIGN_BYTES.
    """

    def __init__(self, capacity_bytes: int, extent_bytes: int = 0) -> None:
        extent_bytes = extent_bytes or default_extent_bytes(capacity_bytes)
        if extent_bytes < 0 or extent_bytes % ALIGN_BYTES:
            raise ConfigError(f"extent_bytes={extent_bytes} must be a multiple of {ALIGN_BYTES}, or 0 for a default")
        extents = capacity_bytes // extent_bytes
        if extents < 1:
            raise ConfigError(
                f"a pool of {capacity_bytes} bytes is smaller than one extent of {extent_bytes}; "
                "raise the pool's size or lower extent_bytes"
            )
        if extents > MAX_EXTENTS:
            raise ConfigError(
                f"extents of {extent_bytes} bytes cut a pool of {capacity_bytes} into {extents} pieces, more than "
                f"{MAX_EXTENTS}; raise extent_bytes, or set it to 0 for a default"
            )
        self.extent_bytes = extent_bytes
        self.capacity_bytes = extents * extent_bytes
        self.used_bytes = 0  # reserved bytes, rounded up to size classes
        self._slot_bytes = 0  # free slots of spans
        self._free_extents = extents
        self._occupied = bytearray(extents)  # one byte each, so that a free run is found by a byte search
        self._spans: list[_Span | None] = [None] * extents  # by extent; a wide span stands in each of its own
        self._classes: dict[int, _SizeClass] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes of free extents and free slots. `room` returns how many pages of a given size fit."""
        return self._free_extents * self.extent_bytes + self._slot_bytes

    def size_class(self, nbytes: int) -> int:
        """The bytes that a page of `nbytes` takes: the next multiple of ALIGN_BYTES."""
        return nbytes + -nbytes % ALIGN_BYTES

    def fits_ever(self, nbytes: int) -> bool:
        """Whether a page of `nbytes` fits the empty arena."""
        return self.size_class(nbytes) <= self.capacity_bytes

    def reserve(self, nbytes: int, owner: object = None) -> int | None:
        """Reserves `nbytes` and returns their offset, a multiple of ALIGN_BYTES; None if there is no room for this
        size. `owner` is ignored: only the allocators of other tiers place pages by owner (tiers.py)."""
        assert nbytes > 0
        size = nbytes + -nbytes % ALIGN_BYTES
        held = self._classes.get(size)
        if held is None or not held.free_slots:
            held = self._open(size)
            if held is None:
                return None
        span = self._spans[held.partial[0]]
        assert span is not None
        slot = span.taken.find(0)
        assert slot >= 0, "a span in `partial` has a free slot"
        span.taken[slot] = 1
        span.free -= 1
        if not span.free:
            del held.partial[0]
        held.free_slots -= 1
        self._slot_bytes -= size
        self.used_bytes += size
        return span.start + slot * size

    def free(self, offset: int, nbytes: int) -> None:
        """Frees the range that `reserve(nbytes)` returned."""
        size = nbytes + -nbytes % ALIGN_BYTES
        span = self._spans[offset // self.extent_bytes]
        assert span is not None and span.size == size, "nothing of this size was reserved there"
        held = self._classes[size]
        slot, inside = divmod(offset - span.start, size)
        assert not inside and span.taken[slot], "never reserved, or freed twice"
        span.taken[slot] = 0
        if not span.free:
            insort(held.partial, span.first)
        span.free += 1
        held.free_slots += 1
        self._slot_bytes += size
        self.used_bytes -= size
        if span.free == len(span.taken):
            self._close(span, held)

    def room(self, nbytes: int) -> int:
        """Returns the number of pages of `nbytes` that could be reserved now, one after the other."""
        size = self.size_class(nbytes)
        if size > self.capacity_bytes:
            return 0
        held = self._classes.get(size)
        width = held.width if held is not None else self._width(size)
        free_slots = held.free_slots if held is not None else 0
        if width == 1:
            return free_slots + self._free_extents * (self.extent_bytes // size)
        # As in `_open`: every run of free extents is cut into wide spans, and its rest is one narrower span.
        runs = [len(run) for run in self._occupied.split(b"\1") if run]
        return free_slots + sum(
            run // width * (width * self.extent_bytes // size) + run % width * self.extent_bytes // size for run in runs
        )

    def extents_lacking(self, counts: Mapping[int, int]) -> int:
        """Returns the number of further free extents needed to have room for all of `counts` (page size -> pages) at
        once.

        Sizes that each have room alone (`room`) may not have room together. Spans are counted at their preferred
        width. The result is at most the number of extents in use, even if freeing all of them would not be enough.
        Each page must fit the empty arena.
        """
        wanted = 0
        for nbytes, count in counts.items():
            size = self.size_class(nbytes)
            held = self._classes.get(size)
            width = held.width if held is not None else self._width(size)
            beyond = count - (held.free_slots if held is not None else 0)
            wanted += max(0, -(-beyond // (width * self.extent_bytes // size))) * width
        return max(0, min(wanted, len(self._spans)) - self._free_extents)

    def check(self) -> None:
        """Asserts conservation, span by span. For tests and invariants.py."""
        spans = {span.first: span for span in self._spans if span is not None}
        assert sum(span.width for span in spans.values()) == len(self._spans) - self._free_extents
        assert [span is not None for span in self._spans] == [bool(byte) for byte in self._occupied]
        used = slots = rests = 0
        for held in self._classes.values():
            own = [span for span in spans.values() if span.size == held.size]
            assert len(own) == held.spans > 0
            assert held.partial == sorted(span.first for span in own if span.free)
            assert held.free_slots == sum(span.free for span in own)
            for span in own:
                assert span.free == span.taken.count(0) < len(span.taken), "an empty span goes back to the pool"
                used += (len(span.taken) - span.free) * held.size
                slots += span.free * held.size
                rests += span.width * self.extent_bytes - len(span.taken) * held.size
        assert (used, slots) == (self.used_bytes, self._slot_bytes)
        assert used + self.free_bytes + rests == self.capacity_bytes

    def _open(self, size: int) -> _SizeClass | None:
        """Opens another span for a class without a free slot: of the preferred width if that many adjacent extents are
        free, otherwise narrower. Returns None if no span fits."""
        held = self._classes.get(size)
        narrowest = -(-size // self.extent_bytes)
        if narrowest > self._free_extents:
            return None
        preferred = held.width if held is not None else self._width(size)
        for width in range(min(preferred, self._free_extents), narrowest - 1, -1):
            run = bytes(width)
            first = self._occupied.find(run) if width == 1 else self._occupied.rfind(run)
            if first >= 0:
                break
        else:
            return None
        span = _Span(first=first, width=width, size=size, extent_bytes=self.extent_bytes)
        if held is None:
            held = self._classes[size] = _SizeClass(size, preferred)
        self._occupied[first : first + width] = b"\1" * width
        self._spans[first : first + width] = [span] * width
        self._free_extents -= width
        self._slot_bytes += span.free * size
        held.spans += 1
        held.free_slots += span.free
        held.partial.append(first)  # the only one: all other spans of the class are full
        assert len(held.partial) == 1
        return held

    def _close(self, span: _Span, held: _SizeClass) -> None:
        """Frees the extents of a span without a taken slot; they may serve any class again."""
        stop = span.first + span.width
        self._occupied[span.first : stop] = bytes(span.width)
        self._spans[span.first : stop] = [None] * span.width
        self._free_extents += span.width
        self._slot_bytes -= span.free * span.size
        held.spans -= 1
        held.free_slots -= span.free
        del held.partial[bisect_left(held.partial, span.first)]
        if not held.spans:
            del self._classes[span.size]
        assert self.used_bytes + self.free_bytes <= self.capacity_bytes

    def _width(self, size: int) -> int:
        """Returns the extents per span of this class: the fewest that keep its rest to one part in REST_PARTS."""

        def rest(width: int) -> int:
            return width * self.extent_bytes % size

        narrowest = -(-size // self.extent_bytes)
        widths = range(narrowest, min(len(self._spans), REST_PARTS * narrowest) + 1)
        modest = (width for width in widths if rest(width) * REST_PARTS <= width * self.extent_bytes)
        return next(modest, None) or min(widths, key=lambda width: rest(width) / width)


class DeviceAllocator(PageAllocator):
    """The allocator of a tier in a device's memory: nothing is recovered there, and where a page finds no room it stays
    in the tier that it is in. A StoreAllocator (tiers.py)."""

    def adopt(self, offset: int, nbytes: int, owner: object) -> bool:
        return False

    def sparsest(self, nbytes: int, owner: object) -> list[tuple[Owner, int]]:
        return []

    def neighbours(self, offset: int) -> list[tuple[Owner, int]]:
        return []
