"""The frames that only shm has: where granted pages lie in the arena, and which pages were written there.

A grant names thousands of pages, so it consists of arrays: little-endian, one entry per granted page, in order.

    WELCOME   arena bytes u64, ns that a lease runs u64; the descriptor of the arena is sent with it
    GRANT     bytes of the head u32, the head (MissTable or WrittenTable), offsets u64[], page bytes u64[];
              after a READ, the codecs u64[], and the checksums u64[] of the layers that each page was asked for
    WRITTEN   the processor that the writer runs on u16, its complement u16, so that a flipped bit is detected;
              pages u32, their places among the pages of the request u32[], the checksums u64[] of all their layers
    RENEW     u8, 1 if an answer is wanted: RENEW, u8 1
    POOL      empty, from a worker with blocks on the device that the offer names. The answer: bytes of the shard's pool
              there u64, and a descriptor of it. From then on a READ may ask for pages of it

A worker has opened only its shard's arena and pool. An offset is one of the arena, or behind its end one of the pool: a
place in neither, or of a size that does not fit the layers it asked for, is refused. Every decoder raises ProtocolError
or LimitError for malformed input.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple, TypeVar

from kvcluster.core import limits
from kvcluster.core.ids import SUM_BYTES
from kvcluster.core.messages import NewPage, NewPages, PageSlot, PageWant, PageWants, Tier, Written
from kvcluster.core.miss import Miss
from kvcluster.errors import LimitError, ProtocolError
from kvcluster.wire import shard
from kvcluster.wire.checks import must, quantity

T = TypeVar("T")

_WELCOME = struct.Struct("<QQ")
_COUNT = struct.Struct("<I")
_POOL = struct.Struct("<Q")
_PROGRESS = struct.Struct("<HHI")
_CODEC_BYTES = 8
_PAGE_BYTES = 16
_OUTCOME_BYTES = 512

NO_PROCESSOR = 2**16 - 1


class Welcome(NamedTuple):
    """A shard's answer to HELLO: the size of its arena, and how long a lease lasts without renewal."""

    arena_bytes: int
    lease_ttl_ns: int


class Places(NamedTuple):
    """Where granted pages lie in the arena, or behind its end in the pool: columns with an entry for each page. `items`
    are their places among the wants or pages of the request, ascending; `layer_bytes` the bytes of each of its layers.
    For a read also its codec, and in `sums` those of the layers that were asked for, one page after the other."""

    items: Sequence[int]
    offsets: Sequence[int]
    layer_bytes: Sequence[int]
    codecs: Sequence[int] = ()
    sums: Sequence[int] = ()


def encode_welcome(welcome: Welcome) -> bytes:
    """Encodes the body of a WELCOME."""
    return _WELCOME.pack(*welcome)


def decode_welcome(body: bytes) -> Welcome:
    """The inverse."""
    must(len(body) == _WELCOME.size, f"a WELCOME has {len(body)} bytes, not {_WELCOME.size}")
    arena_bytes, lease_ttl_ns = _WELCOME.unpack(body)
    return Welcome(quantity(arena_bytes, "bytes"), quantity(lease_ttl_ns, "nanoseconds"))


def encode_pool(nbytes: int) -> bytes:
    """Encodes the body of a shard's POOL."""
    return _POOL.pack(nbytes)


def decode_pool(body: bytes) -> int:
    """The inverse."""
    must(len(body) == _POOL.size, f"a POOL has {len(body)} bytes, not {_POOL.size}")
    nbytes = quantity(_POOL.unpack(body)[0], "bytes")
    must(nbytes > 0, "a POOL of no bytes")
    return nbytes


# ---------------------------------------------------------------------------------------------- grants


def encode_read_grant(
    wants: Sequence[PageWant],
    outcome: Sequence[Miss | None],
    granted: Mapping[int, PageSlot],
    starts: Mapping[Tier, int],
) -> bytes:
    """Encodes where each page lies that is not a miss; `granted` is in the order of the wants. `starts`: where the
    region of each tier begins in the arena, from whose start offsets count here, or the arena's end for the pool.
    Raises LimitError if that does not fit a frame."""
    codecs = struct.pack(f"<{len(granted)}Q", *[slot.codec for slot in granted.values()])
    return _grant(shard.encode_read_head(outcome), granted.values(), starts, [codecs, *wanted_sums(wants, granted)])


def wanted_sums(wants: Sequence[PageWant], granted: Mapping[int, PageSlot]) -> list[bytes]:
    """Returns for each granted page the packed checksums of the layers that were asked for."""
    columns = PageWants.of(wants)
    spans = [slice(SUM_BYTES * kind.layer_start, SUM_BYTES * kind.layer_stop) for kind in columns.kinds]
    return [slot.sums[spans[columns.kind_of[item]]] for item, slot in granted.items()]


def decode_read_grant(
    body: bytes, wants: Sequence[PageWant], arena_bytes: int, pool_bytes: int = 0
) -> tuple[list[Miss | None], Places]:
    """The inverse, for a worker that has opened so many bytes. Returns the outcome for each want, and the places of the
    granted ones."""
    head, at = _head(body, len(wants))
    outcome = _of_length(shard.decode_read_head(head), len(wants))
    items = [item for item, miss in enumerate(outcome) if miss is None]
    granted = PageWants.of(wants).select(items)
    kinds = granted.kinds
    layers_of_kind = [kind.part.layers for kind in kinds]
    offsets, layer_bytes, at = _spots(body, at, granted.kind_of, layers_of_kind, arena_bytes, pool_bytes)
    layers = _layers(granted)
    _check_end(body, at + _CODEC_BYTES * len(items) + SUM_BYTES * layers)
    codecs = _numbers(body, at, len(items))
    sums = _numbers(body, at + _CODEC_BYTES * len(items), layers)
    return outcome, Places(items, offsets, layer_bytes, codecs, sums)


def read_grant_bytes(wants: Sequence[PageWant]) -> int:
    """Returns the most bytes of an honest GRANT for these wants."""
    layers = _layers(PageWants.of(wants))
    return _COUNT.size + _head_bytes(len(wants)) + (_PAGE_BYTES + _CODEC_BYTES) * len(wants) + SUM_BYTES * layers


def write_grant_bytes(pages: int) -> int:
    """As `read_grant_bytes`, for a store of so many pages."""
    return _COUNT.size + _head_bytes(pages) + _PAGE_BYTES * pages


def _layers(wants: PageWants) -> int:
    """Returns how many layers are asked for, of all pages."""
    layers_of = [kind.layer_stop - kind.layer_start for kind in wants.kinds]
    return sum([layers_of[number] for number in wants.kind_of])


def _head_bytes(asked: int) -> int:
    """Returns the most bytes of a head with an outcome, which may have a text of its own, for each of so many pages. A
    head that claims to be longer is refused, since protobuf would allocate many times its size."""
    return min(limits.BODY_BYTES, limits.WORDS_BYTES + _OUTCOME_BYTES * asked)


def encode_write_grant(
    outcome: Sequence[Written | None], granted: Mapping[int, PageSlot], starts: Mapping[Tier, int]
) -> bytes:
    """Encodes where each page without an outcome is to be written. Offsets and errors are as of `encode_read_grant`."""
    return _grant(shard.encode_write_head(outcome), granted.values(), starts, ())


def decode_write_grant(body: bytes, pages: Sequence[NewPage], arena_bytes: int) -> tuple[list[Written | None], Places]:
    """The inverse, as `decode_read_grant`; without codecs and sums."""
    head, at = _head(body, len(pages))
    outcome = _of_length(shard.decode_write_head(head), len(pages))
    items = [item for item, fate in enumerate(outcome) if fate is None]
    granted = NewPages.of(pages).select(items)
    layers_of = [part.layers for _, part in granted.places]
    offsets, layer_bytes, at = _spots(body, at, granted.place_of, layers_of, arena_bytes)
    _check_end(body, at)
    return outcome, Places(items, offsets, layer_bytes)


def _grant(head: bytes, slots: Iterable[PageSlot], starts: Mapping[Tier, int], sums: Iterable[bytes]) -> bytes:
    offsets, sizes = [starts[slot.tier] + slot.offset for slot in slots], [slot.nbytes for slot in slots]
    arrays = struct.pack(f"<{2 * len(offsets)}Q", *offsets, *sizes)
    body = b"".join([_COUNT.pack(len(head)), head, arrays, *sums])
    if len(body) > limits.MESSAGE_BYTES:
        raise LimitError(f"an answer about {len(offsets)} pages takes {len(body)} bytes; ask for fewer at once")
    return body


def _head(body: bytes, asked: int) -> tuple[bytes, int]:
    """Returns the message in a grant about so many pages, and the offset of its arrays."""
    nbytes = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else len(body)
    must(nbytes <= _head_bytes(asked), f"a GRANT says {nbytes} bytes about {asked} pages before it says where they lie")
    at = _COUNT.size + nbytes
    must(at <= len(body), "a GRANT ends before it says what was granted")
    return body[_COUNT.size : at], at


def _spots(
    body: bytes, at: int, kind_of: Sequence[int], layers_of: Sequence[int], arena_bytes: int, pool_bytes: int = 0
) -> tuple[array[int], array[int], int]:
    """Returns the offsets and the bytes per layer of the granted pages, and the offset of what follows in the body.
    Page i has `layers_of[kind_of[i]]` layers."""
    count = len(kind_of)
    end = at + _PAGE_BYTES * count
    must(end <= len(body), f"a GRANT of {len(body)} bytes cannot say where {count} pages lie")
    offsets, sizes = _numbers(body, at, count), _numbers(body, at + _PAGE_BYTES // 2 * count, count)
    layer_bytes: dict[tuple[int, int], int] = {}  # by kind and bytes, of which thousands of pages have few
    for number, nbytes in dict.fromkeys(zip(kind_of, sizes, strict=True)):
        layers = layers_of[number]
        if not nbytes or nbytes % layers or nbytes > limits.LAYER_BYTES * layers:
            raise ProtocolError(f"a page of {nbytes} bytes for {layers} layers is invalid")
        layer_bytes[number, nbytes] = nbytes // layers
    if max(map(add, offsets, sizes), default=0) > arena_bytes + pool_bytes:
        raise ProtocolError(f"a page is outside an arena of {arena_bytes} bytes and a pool of {pool_bytes}")
    if pool_bytes and any(at < arena_bytes < at + nbytes for at, nbytes in zip(offsets, sizes, strict=True)):
        raise ProtocolError(f"a page begins in an arena of {arena_bytes} bytes and ends outside")
    return offsets, array("Q", [layer_bytes[kind] for kind in zip(kind_of, sizes, strict=True)]), end


def _numbers(body: bytes, at: int, count: int) -> array[int]:
    """Returns the `count` numbers of 64 bits that begin at this offset. The body must be long enough."""
    numbers = array("Q", body[at : at + 8 * count])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _of_length(outcome: list[T], asked: int) -> list[T]:
    must(len(outcome) == asked, f"a GRANT answers for {len(outcome)} pages of {asked}")
    return outcome


def _check_end(body: bytes, end: int) -> None:
    must(len(body) == end, f"a GRANT of {len(body)} bytes was announced as one of {end}")


# ---------------------------------------------------------------------------------------------- stores


class Progress(NamedTuple):
    """Progress of a store: the completed pages, by their index in the request; the checksums of all their layers, one
    page after the other; and the processor that the writer runs on, NO_PROCESSOR if it does not know."""

    items: Sequence[int]
    sums: Sequence[int]
    processor: int


def encode_written(progress: Progress) -> bytes:
    """Encodes the body of a WRITTEN."""
    items, sums, processor = progress
    head = _PROGRESS.pack(processor, NO_PROCESSOR - processor, len(items))
    return head + struct.pack(f"<{len(items)}I{len(sums)}Q", *items, *sums)


def decode_written(body: bytes, pages: Sequence[NewPage]) -> Progress:
    """The inverse, for a request of these pages."""
    must(len(body) >= _PROGRESS.size, f"a WRITTEN of {len(body)} bytes is too short")
    processor, complement, count = _PROGRESS.unpack_from(body)
    must(
        processor + complement == NO_PROCESSOR,
        f"a WRITTEN names processor {processor}, and {complement} as its complement",
    )
    at = _PROGRESS.size + _COUNT.size * count
    must(at <= len(body), f"a WRITTEN of {len(body)} bytes cannot name {count} pages")
    items = struct.unpack_from(f"<{count}I", body, _PROGRESS.size)
    must(max(items, default=-1) < len(pages), f"a WRITTEN names a page beyond the {len(pages)} of its request")
    layers = sum([pages[item].key.part.layers for item in items])
    must(
        at + SUM_BYTES * layers == len(body),
        f"a WRITTEN of {len(body)} bytes must have one sum for each of {layers} layers",
    )
    return Progress(items, struct.unpack_from(f"<{layers}Q", body, at), processor)


# ---------------------------------------------------------------------------------------------- leases


def encode_renew(*, answer: bool) -> bytes:
    """Encodes a RENEW: from a worker, that it is alive; from a shard, that its lease is."""
    return bytes([answer])


def decode_renew(body: bytes) -> bool:
    """Returns whether an answer is wanted."""
    must(body in (b"\0", b"\1"), "the body of a RENEW must be one byte, 0 or 1: whether an answer is wanted")
    return body == b"\1"
