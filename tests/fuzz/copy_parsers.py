"""The native core's reader of descriptors: batches of copies. An input is a descriptor's columns,
one after the other, each behind its length.

What is read is also carried out, in memory with guards around it: a descriptor is refused before a byte moves, or
moves bytes within that memory only, and never changes what it copies from. Pointers alone are true in every
descriptor: an input's bases count from the first byte of the memory, and its rows, if blocks are buffers, name blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvcluster.copies.batch import CopyStatus
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Plane
from kvcluster.memory import checksum, codec, native
from kvcluster.memory.region import address_of
from tests.fuzz.contract import Parser
from tests.fuzz.trees import Kind, Node, Tree, fields

BLOCKS, LAYERS, HEADS, TOKENS, DIM = 2, 2, 2, 2, 64
ROW = 2 * DIM
GROUP = Group(tuple(range(LAYERS)), tuple(Plane(name, HEADS, DIM, "bfloat16") for name in "kv"))
LAYER_BYTES = 2 * TOKENS * HEADS * ROW
PAGE_BYTES = LAYERS * LAYER_BYTES
IDENTITY = 7

_GUARD, _GUARD_BYTE = 256, 0xA5
_RAISES = (ValueError, TypeError, BufferError)
_MASK = 2**64 - 1


class Carried(NamedTuple):
    """A descriptor that was carried out: the statuses of its records."""

    records: tuple[object, ...]


class _Memory:
    """Bytes between two guards."""

    def __init__(self, nbytes: int) -> None:
        self._all = bytearray([_GUARD_BYTE]) * (_GUARD + nbytes + _GUARD)
        self.view = memoryview(self._all)[_GUARD : _GUARD + nbytes]
        self.view[:] = bytes(at * 37 % 251 for at in range(nbytes))
        self.start = address_of(self.view)
        self.stop = self.start + nbytes

    def check_guards(self) -> None:
        guard = bytes([_GUARD_BYTE]) * _GUARD
        assert self._all[:_GUARD] == guard == self._all[-_GUARD:], "bytes beside the memory have changed"


_BLOCKS = _Memory(BLOCKS * PAGE_BYTES)
_PAGES = _Memory(BLOCKS * PAGE_BYTES)


def copy_parsers() -> Iterator[Parser]:
    """All of them; none without the native core."""
    if native.KERNELS is not None:
        yield Parser("copy batch", _read_batch, lambda: [Tree(_node(each)) for each in _batches()], _RAISES)


# --------------------------------------------------------------------------------------------- a descriptor


@dataclass
class _Descriptor:
    """The columns of an input. `head`: loads or stores, whether blocks are buffers, the deadline, and the most bytes of
    a record. `odd`: pairs of a value's place and what it is replaced by."""

    head: bytes
    part: bytes
    planes: bytes
    rows: bytes
    bases: bytes
    strides: list[bytes]
    items: list[bytes]
    records: list[bytes]
    coded: bytes
    identities: bytes
    status: bytes
    cancel: bytes
    dropped: bytes
    odd: bytes = b""

    def columns(self) -> list[bytes]:
        first = [self.head, self.part, self.planes, self.rows, self.bases, *self.strides, *self.items, *self.records]
        return [*first, self.coded, self.identities, self.status, self.cancel, self.dropped, self.odd]


_RECORDS = [(4,), (4,), (4,), (8,), (8,), (8,), (4,), (8,)]
_WIDTHS = [(1, 1, 8, 8), *[(8,)] * 8, *[(4,)] * 8, *_RECORDS, (8,), (8,), (1,), (4,), (1,), (1,)]
"""Of the numbers of each column, over and over."""


def _node(described: _Descriptor) -> Node:
    columns = []
    for data, widths in zip(described.columns(), _WIDTHS, strict=True):
        own = widths if len(widths) > 1 else widths * (len(data) // widths[0])
        columns.append(Node(Kind.MANY, sized=True, children=fields(data, own)))
    return Node(Kind.MANY, children=columns)


def _described(data: bytes) -> _Descriptor:
    """The inverse. Raises ValueError."""
    columns, at = [], 0
    while at < len(data):
        length = shift = 0
        while True:
            if at >= len(data) or shift > 21:
                raise ValueError("a column without a length")
            length |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 0x80:
                break
        columns.append(data[at : at + length])
        at += length
    if len(columns) != len(_WIDTHS) or len(columns[0]) != 18:
        raise ValueError("columns of another number")
    return _Descriptor(*columns[:5], columns[5:9], columns[9:17], columns[17:25], *columns[25:])


def _integers(data: bytes) -> list[int]:
    return [number for (number,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8])]


def _geometry(of: _Descriptor) -> list[object]:
    """The entries of a geometry, whose pointers are true."""
    planes = _integers(of.planes)
    own = tuple(tuple(planes[at : at + 3]) for at in range(0, len(planes), 3))
    places = len(of.bases) // 8
    if of.head[1] % 2:  # each block is a buffer
        rows = [_BLOCKS.start + row % BLOCKS * PAGE_BYTES for row in _integers(of.rows)]
        bases, spans = of.bases, struct.pack("<QQ", 0, PAGE_BYTES) * places
    else:
        rows = _integers(of.rows)
        bases = b"".join(struct.pack("<Q", base + _BLOCKS.start & _MASK) for base in _integers(of.bases))
        spans = struct.pack("<QQ", _BLOCKS.start, _BLOCKS.stop) * places
    columns = [struct.pack(f"<{len(rows)}Q", *rows), bases, *of.strides, spans]
    return [tuple(_integers(of.part)), own, *map(bytearray, columns), bool(of.head[1] % 2)]


def _coded(of: _Descriptor) -> list[tuple[object, ...]]:
    numbers = _integers(of.coded)
    rows = [numbers[at : at + 3] for at in range(0, len(numbers), 3)]
    return [(*row, _coder(Codec.Q4 if row[0] == Codec.Q4 else Codec.Q8)) for row in rows]


def _coder(which: Codec) -> codec.Coder:
    return codec.coder(which, GROUP, block_tokens=TOKENS, heads=HEADS)


_ODD: list[Callable[[Any], object]] = [
    lambda value: None,
    lambda value: "text",
    lambda value: 1.5,
    lambda value: -1,
    lambda value: 2**70,
    lambda value: (),
    lambda value: [value],
    lambda value: bytes(value) if isinstance(value, bytearray) else value,
    lambda value: memoryview(bytearray(b"\0" + value))[1:] if isinstance(value, bytearray) else value,
    lambda value: memoryview(bytearray(2 * len(value)))[::2] if isinstance(value, bytearray) else value,
]


def _with_odd(values: list[Any], odd: bytes, first: int) -> list[Any]:
    """Replaces values at some places, which are numbered from `first` on, by others of another type."""
    for place, kind in zip(odd[::2], odd[1::2], strict=False):
        if first <= place < first + len(values):
            values[place - first] = _ODD[kind % len(_ODD)](values[place - first])
    return values


# ---------------------------------------------------------------------------------------------- the readers


def _guarded(load: bool, carry_out: Callable[[], tuple[object, ...]]) -> Carried:
    """Carries a descriptor out, and checks which bytes have changed."""
    source, target = (_PAGES, _BLOCKS) if load else (_BLOCKS, _PAGES)
    before = bytes(source.view), bytes(target.view)
    try:
        return Carried(carry_out())
    except _RAISES:
        assert target.view == before[1], "bytes were moved before the refusal"
        raise
    finally:
        assert source.view == before[0], "what is copied from has changed"
        source.check_guards()
        target.check_guards()


def _read_batch(data: bytes) -> Carried:
    of = _described(data)
    load, deadline, most = of.head[0] % 2 == 1, *struct.unpack("<qQ", of.head[2:])
    status = bytearray(of.status)

    def carry_out() -> tuple[object, ...]:
        geometry: object = tuple(_with_odd(_geometry(of), of.odd, 20))
        items = tuple(_with_odd(list(map(bytearray, of.items)), of.odd, 40))
        records = tuple(_with_odd(list(map(bytearray, of.records)), of.odd, 60))
        columns = [bytearray(of.identities), status, bytearray(of.cancel), bytearray(of.dropped)]
        arguments = [load, _PAGES.view, (geometry, None), items, records, _coded(of), *columns, deadline, most]
        arguments = _with_odd(arguments, of.odd, 0)
        if arguments[1] is None:  # then offsets are pointers
            arguments[1] = _PAGES.view
        copies = native.KERNELS.Copies(*arguments)  # type: ignore[union-attr]
        copies.run(0, len(status))
        return tuple(status)

    carried = _guarded(load, carry_out)
    for was, now in zip(of.status, status, strict=True):
        assert now == was or was == CopyStatus.PENDING < now <= CopyStatus.STOPPED, "a final status has changed"
    return carried


# ------------------------------------------------------------------------------------------------- valid inputs


def _packed(form: str, *numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}{form}", *numbers)


def _batches() -> list[_Descriptor]:
    """Loads and stores of whole pages and of some heads, by each way of copying, raw and encoded."""
    whole, one = (0, HEADS), (1, HEADS)
    return [
        _batch(load=True, buffers=True, heads=whole),
        _batch(load=True, buffers=False, heads=whole),
        _batch(load=True, buffers=False, heads=one),
        _batch(load=True, buffers=False, heads=whole, elements=DIM),
        _batch(load=True, buffers=True, heads=whole, coded=Codec.Q8),
        _batch(load=True, buffers=False, heads=one, coded=Codec.Q4),
        _batch(load=False, buffers=True, heads=whole),
        _batch(load=False, buffers=False, heads=whole, elements=DIM),
    ]


def _batch(
    *, load: bool, buffers: bool, heads: tuple[int, int], elements: int = 1, coded: Codec = Codec.RAW
) -> _Descriptor:
    """A record for each layer of each block. `buffers`: blocks are in page layout; otherwise K and V of a layer are
    tensors `[heads, blocks, tokens, dim]`."""
    nbytes = layer_bytes(coded, GROUP, block_tokens=TOKENS, heads=HEADS)
    places = range(2 * LAYERS)  # of a layer's K and V
    plane = TOKENS * HEADS * ROW
    if buffers:
        strides = [1, HEADS * ROW, ROW, ROW // elements]
        bases = [place * plane for place in places]
    else:
        strides = [TOKENS * ROW, ROW, BLOCKS * TOKENS * ROW, ROW // elements]
        bases = [place * BLOCKS * plane for place in places]
    rows = [(block, layer) for block in range(BLOCKS) for layer in range(LAYERS)]
    offsets = [block * PAGE_BYTES + layer * nbytes for block, layer in rows]
    sums = [
        checksum.layer_sums(IDENTITY, layer, 1, _PAGES.view[offset : offset + nbytes])[0]
        for offset, (_, layer) in zip(offsets, rows, strict=True)
    ]
    count = len(rows)
    every = [0] * BLOCKS, range(BLOCKS), [0] * BLOCKS, [LAYERS] * BLOCKS, [0] * BLOCKS, [HEADS] * BLOCKS
    fills = [heads[0]] * BLOCKS, [heads[1]] * BLOCKS
    return _Descriptor(
        struct.pack("<BBqQ", load, buffers, 2**62, 2**20),
        _packed("Q", 0, LAYERS, 0, HEADS),
        _packed("Q", *[TOKENS, elements, ROW // elements] * 2),
        _packed("Q", *range(BLOCKS)),
        _packed("Q", *bases),
        [_packed("q", *[stride] * len(places)) for stride in strides],
        [_packed("I", *column) for column in (*every, *fills)],
        [
            _packed("I", *[block for block, _ in rows]),
            _packed("I", *[layer for _, layer in rows]),
            _packed("I", *[1] * count),
            _packed("Q", *offsets),
            _packed("Q", *[nbytes] * count),
            _packed("Q", *[coded] * count),
            _packed("I", *range(count)),
            _packed("Q", *sums),
        ],
        b"" if coded is Codec.RAW else _packed("Q", coded, 0, HEADS),
        _packed("Q", *[IDENTITY] * count),
        bytes(count),
        _packed("I", 0),
        bytes(BLOCKS),
        bytes([255, 0]),
    )
