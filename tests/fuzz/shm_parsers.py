"""The readers of shared memory's control messages: what a shard says of its arena, and what a worker says that it
wrote.

A grant is read for a request, so the readers here know one; what they are fed need not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import cast

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, BlockHash
from kvcluster.core.messages import NewPage, PageKey, PageSlot, PageWant, Tier, Written
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import LimitError, ProtocolError, SpecError
from kvcluster.memory import checksum
from kvcluster.wire import shm_frames
from kvcluster.wire.shm_frames import Places, Progress, Welcome
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node, Tree, fields, message

_ERRORS = (ProtocolError, LimitError, SpecError)
_ARENA_BYTES = 2**20
_STARTS = {Tier.RAM: 0}
_LAYERS = (4, 1, 8)
_KEYS = [
    PageKey(BlockHash(bytes([item]) * HASH_BYTES), item, Part(item, item + layers, 0, 1))
    for item, layers in enumerate(_LAYERS)
]
_WANTS = [PageWant(_KEYS[0], 0, 4), PageWant(_KEYS[1], 0, 1), PageWant(_KEYS[2], 2, 5)]
_PAGES = [NewPage(key, _KEYS[0].hash, 1) for key in _KEYS]
_GONE = Miss(MissReason.EVICTED, "gone")

ReadGrant = tuple[list[Miss | None], Places]
WriteGrant = tuple[list[Written | None], Places]


def shm_parsers() -> Iterator[Parser]:
    """All of them."""
    yield Parser("shm welcome", shm_frames.decode_welcome, _welcomes, _ERRORS, shm_frames.encode_welcome)
    yield Parser("shm pool", shm_frames.decode_pool, _pools, _ERRORS, shm_frames.encode_pool)
    yield Parser("shm read grant", _read_grant, _read_grants, _ERRORS, _write_read_grant)
    yield Parser("shm write grant", _write_grant, _write_grants, _ERRORS, _write_write_grant)
    yield Parser(
        "shm written",
        lambda data: shm_frames.decode_written(data, _PAGES),
        _writtens,
        _ERRORS,
        shm_frames.encode_written,
    )
    yield Parser(
        "shm renew", shm_frames.decode_renew, _renewals, _ERRORS, lambda read: shm_frames.encode_renew(answer=read)
    )


def _slots(places: Places) -> dict[int, PageSlot]:
    """As a shard has them, with sums of all layers."""
    slots, left = {}, iter(places.sums)
    for at, item in enumerate(places.items):
        layers, want = _LAYERS[item], _WANTS[item]
        sums = [0] * layers
        if places.sums:
            sums[want.layer_start : want.layer_stop] = islice(left, want.layer_stop - want.layer_start)
        # Any codec number is passed on: the decoder of the page rejects an unknown one.
        codec = cast("Codec", places.codecs[at]) if places.codecs else Codec.RAW
        nbytes = places.layer_bytes[at] * layers
        slots[item] = PageSlot(_KEYS[item], places.offsets[at], nbytes, 1, Loss.EXACT, checksum.pack_sums(sums), codec)
    return slots


def _places(items: list[int], *, sums: bool) -> Places:
    offsets, sizes = [4_096 * item for item in items], [24] * len(items)
    if not sums:
        return Places(items, offsets, sizes)
    counts = [_WANTS[item].layer_stop - _WANTS[item].layer_start for item in items]
    return Places(items, offsets, sizes, [Codec.RAW] * len(items), [n for count in counts for n in range(count)])


# ----------------------------------------------------------------------------------------------- readers, writers


def _read_grant(data: bytes) -> ReadGrant:
    return shm_frames.decode_read_grant(data, _WANTS, _ARENA_BYTES)


def _write_read_grant(read: ReadGrant) -> bytes:
    outcome, places = read
    return shm_frames.encode_read_grant(_WANTS, outcome, _slots(places), _STARTS)


def _write_grant(data: bytes) -> WriteGrant:
    return shm_frames.decode_write_grant(data, _PAGES, _ARENA_BYTES)


def _write_write_grant(read: WriteGrant) -> bytes:
    outcome, places = read
    return shm_frames.encode_write_grant(outcome, _slots(places), _STARTS)


# ----------------------------------------------------------------------------------------------------- valid inputs


def _welcomes() -> list[Tree]:
    bodies = [shm_frames.encode_welcome(Welcome(*numbers)) for numbers in [(0, 0), (2**40, 10**10)]]
    return trees(bodies, lambda data: Node(Kind.MANY, children=fields(data, (8, 8))))


def _pools() -> list[Tree]:
    return trees(
        [shm_frames.encode_pool(nbytes) for nbytes in (1, 2**40)],
        lambda data: Node(Kind.MANY, children=fields(data, (8,))),
    )


def _read_grants() -> list[Tree]:
    outcomes: list[list[Miss | None]] = [[None] * 3, [_GONE] * 3, [None, _GONE, None]]
    bodies = [_write_read_grant((outcome, _places(_none(outcome), sums=True))) for outcome in outcomes]
    return trees(bodies, _grant)


def _write_grants() -> list[Tree]:
    outcomes: list[list[Written | None]] = [[None] * 3, [Written.FULL] * 3, [Written.PENDING, None, None]]
    bodies = [_write_write_grant((outcome, _places(_none(outcome), sums=False))) for outcome in outcomes]
    return trees(bodies, _grant)


def _none(outcome: list[Miss | None] | list[Written | None]) -> list[int]:
    return [item for item, fate in enumerate(outcome) if fate is None]


def _writtens() -> list[Tree]:
    bodies = [
        shm_frames.encode_written(Progress(items, [n for item in items for n in range(_LAYERS[item])], processor))
        for processor, items in enumerate(([], [1], [0, 1, 2]))
    ]

    def dissect(data: bytes) -> Node:
        count = int.from_bytes(data[4:8], "little")
        sums = (len(data) - 8 - 4 * count) // 8
        return Node(Kind.MANY, children=fields(data, (4,) * (2 + count) + (8,) * sums))

    return trees(bodies, dissect)


def _renewals() -> list[Tree]:
    bodies = [shm_frames.encode_renew(answer=answer) for answer in (False, True)]
    return trees(bodies, lambda data: Node(Kind.MANY, children=fields(data, (1,))))


def _grant(data: bytes) -> Node:
    """The length of a message, the message, and numbers."""
    size = int.from_bytes(data[:4], "little")
    head, arrays = data[4 : 4 + size], data[4 + size :]
    numbers = fields(arrays, (8,) * (len(arrays) // 8))
    return Node(Kind.MANY, children=[*fields(data, (4,)), message(head), *numbers])
