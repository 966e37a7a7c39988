"""The fields that several messages share: hashes, parts, specs, misses (fields.py explains declarations)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, cast

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.columns import make_rows
from kvcluster.core.groups import Group, Part, Plane, Reuse
from kvcluster.core.ids import (
    HASH_BYTES,
    HOLDER_BYTES,
    SEQUENCE_BYTES,
    Attempt,
    BlockHash,
    Epoch,
    Holder,
    NamespaceId,
    SequenceId,
)
from kvcluster.core.messages import (
    Done,
    Need,
    NewPage,
    NewPages,
    PageKey,
    Refused,
    RefusedKind,
    ShardAddress,
    Tier,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import LimitError, ProtocolError
from kvcluster.wire.checks import at_most, must, numbers
from kvcluster.wire.fields import (
    NUMBERS,
    PLAIN,
    Columns,
    EnumField,
    Interned,
    Rows,
    Scalar,
    Struct,
    Values,
    amount,
    amounts,
    each,
    in_bytes,
    words,
)
from kvcluster.wire.v1 import common_pb2 as pb

INDEX_MAX = 65_535
"""Layers and heads of a part: frames count layers in 16 bits, and no model has nearly as many."""

_ATTEMPT = struct.Struct(f"<{HOLDER_BYTES}sQ")

LOSS: EnumField[Loss] = EnumField(Loss, pb.Loss, "LOSS_")
TIER: EnumField[Tier] = EnumField(Tier, pb.Tier, "TIER_")
REASON: EnumField[MissReason] = EnumField(MissReason, pb.MissReason, "MISS_REASON_")
REFUSED_KIND: EnumField[RefusedKind] = EnumField(RefusedKind, pb.RefusedKind, "REFUSED_KIND_")
_CODECS = {int(codec): codec for codec in Codec}

EPOCH = cast("Scalar[Epoch]", amount("epoch"))
SHARD = words("a shard's name")
TENANT = words("a tenant's name")
NS = amount("nanoseconds")


def decode_codec(number: int) -> Codec:
    """Decodes a codec. Raises ProtocolError if it is not known."""
    codec = _CODECS.get(number)
    if codec is None:
        raise ProtocolError(f"codec {number >> 8} version {number & 0xFF} is not known here: upgrade this side")
    return codec


def _decode_codecs(wire: Collection[int], most: int, what: str) -> list[Codec]:
    return [_CODECS.get(value) or decode_codec(value) for value in numbers(wire, most, what)]


CODEC = Scalar(int, decode_codec)
CODECS: Values[Codec] = Values(list, _decode_codecs)

PAIRS: Columns[tuple[str, str]] = Columns(pb.Pairs, None, key=NUMBERS, value=NUMBERS)


def pairs(key: str, value: str) -> Columns[tuple[str, str]]:
    """A column of pairs of texts; `key` and `value` name them."""
    return Columns(pb.Pairs, None, key=each(words(key)), value=each(words(value)))


# ---------------------------------------------------------------------------------- hashes and names


def _packed(size: int) -> Values[Any]:
    """A column of byte strings of that size, one behind the other."""
    chunk = struct.Struct(f"{size}s" * 64)  # many at a time: a fifth of the time of one slice for each

    def decode(packed: bytes, most: int, what: str) -> list[Any]:
        count, rest = divmod(len(packed), size)
        must(not rest, f"{what} take {size} bytes each; {len(packed)} bytes came")
        at_most(count, most, what)
        found: list[bytes] = []
        whole = len(packed) // chunk.size * chunk.size
        for at in range(0, whole, chunk.size):
            found += chunk.unpack_from(packed, at)
        return found + [packed[at : at + size] for at in range(whole, len(packed), size)]

    return Values(b"".join, decode)


def exactly(length: int, what: str) -> Callable[[bytes], Any]:
    """Returns a decoder of so many bytes. It raises ProtocolError for any other number."""

    def decode(data: bytes) -> bytes:
        if len(data) != length:
            raise ProtocolError(f"{what} is {length} bytes, not {len(data)}")
        return data

    return decode


def _encode_attempt(attempt: Attempt) -> bytes:
    return _ATTEMPT.pack(attempt.holder, attempt.counter)


def _decode_attempt(data: bytes) -> Attempt:
    holder, counter = _ATTEMPT.unpack(exactly(_ATTEMPT.size, "an attempt")(data))
    return Attempt(Holder(holder), counter)


HASH: Scalar[BlockHash] = Scalar(bytes, exactly(HASH_BYTES, "a block hash"))
NAMESPACE: Scalar[NamespaceId] = Scalar(bytes, exactly(HASH_BYTES, "a namespace"))
HOLDER: Scalar[Holder] = Scalar(bytes, exactly(HOLDER_BYTES, "a holder"))
ATTEMPT = Scalar(_encode_attempt, _decode_attempt)
HASHES = _packed(HASH_BYTES)
"""Packed block hashes, or namespaces."""

MESSAGE_BLOCKS: Values[BlockHash] = Values(
    HASHES.encode, lambda wire, most, what: HASHES.decode(wire, min(most, limits.BLOCKS_PER_CALL), what)
)
"""Packed block hashes, of which the lists of one message have limits.BLOCKS_PER_CALL in all."""

SEQUENCES: Values[SequenceId] = _packed(SEQUENCE_BYTES)
"""Packed sequence ids."""

BLOCKS: Rows[BlockHash] = Rows(HASHES, limits.BLOCKS_PER_CALL, "block hashes in a call")
BLOCKS_OF_TICKET: Rows[BlockHash] = Rows(HASHES, limits.BLOCKS_PER_PROMPT, "block hashes in a ticket")
NAMESPACES: Interned[NamespaceId] = Interned(pb.HashTable, HASHES, "a namespace")

ADDRESS = Struct(
    pb.ShardAddress,
    ShardAddress,
    shard=SHARD,
    epoch=EPOCH,
    address=words("an address"),
    host=words("a host"),
    server_name=words("a server's name"),
)
ADDRESSES: Interned[ShardAddress] = Interned(pb.AddressTable, each(ADDRESS), "a shard")
MAYBE_ADDRESSES: Interned[ShardAddress | None] = Interned(pb.AddressTable, each(ADDRESS), "a shard", absent=True)

# ------------------------------------------------------------------------------------ parts and needs


def _part(bounds: Sequence[int]) -> Part:
    part = Part(*bounds)
    if not (part.layer_start < part.layer_stop <= INDEX_MAX and part.head_start < part.head_stop <= INDEX_MAX):
        raise ProtocolError(f"{part} is not a part: each range must be non-empty and end at {INDEX_MAX} or before")
    return part


def _several(flat: Collection[int], size: int, most: int, what: str) -> Iterable[tuple[int, ...]]:
    """Returns the numbers by `size`, at most `most` times as many."""
    count, rest = divmod(len(flat), size)
    must(not rest, f"{what} take {size} numbers each; {len(flat)} came")
    at_most(count, most, what)
    return zip(*[iter(flat)] * size, strict=True)


def _encode_places(places: Iterable[tuple[int, Part]]) -> list[int]:
    return [number for group, part in places for number in (group, *part)]


def _decode_places(flat: Collection[int], most: int, what: str) -> list[tuple[int, Part]]:
    places = [(group, _part(bounds)) for group, *bounds in _several(flat, 5, most, what)]
    highest = max((group for group, _ in places), default=0)
    if highest >= limits.PARTS_PER_BLOCK:
        raise LimitError(f"group {highest} of a part; a spec may have {limits.PARTS_PER_BLOCK} groups")
    return places


PLACES: Values[tuple[int, Part]] = Values(_encode_places, _decode_places)
"""Parts of groups. Whether a spec has them, the core checks."""

PLACE_TABLE: Interned[tuple[int, Part]] = Interned(pb.PlaceTable, PLACES, "a part")

_BLOCK_TABLE: Interned[BlockHash] = Interned(pb.HashTable, HASHES, "a hash")


def _join_keys(hashes: Sequence[BlockHash], places: Sequence[tuple[int, Part]]) -> list[PageKey]:
    return make_rows(PageKey, hashes, [place[0] for place in places], [place[1] for place in places])


KEYS: Columns[PageKey] = Columns(
    pb.PageKeys,
    join=_join_keys,
    split=itemgetter(0, slice(1, None)),
    hash=_BLOCK_TABLE,
    place=PLACE_TABLE,
)
"""The keys of pages: those of a message share few blocks and even fewer parts."""


def encode_keys(hashes: Sequence[BlockHash], places: Sequence[tuple[int, Part]]) -> Any:
    """As `KEYS.encode`, from columns."""
    return cast("Any", pb.PageKeys)(hash=_BLOCK_TABLE.encode(hashes), place=PLACE_TABLE.encode(places))


def decode_keys(m: pb.PageKeys, most: int, what: str) -> tuple[list[BlockHash], list[tuple[int, Part]]]:
    """As `KEYS.decode`, to columns, whose lengths are still to be compared."""
    return _BLOCK_TABLE.decode(m.hash, most, what), PLACE_TABLE.decode(m.place, most, what)


DEPTHS = amounts("depth", limits.TOKENS_PER_SEQUENCE)
_PARENTS: Interned[BlockHash] = Interned(pb.HashTable, HASHES, "a parent")
_NEW_PAGE_ROWS: Columns[NewPage] = Columns(
    pb.NewPages, NewPage, key=KEYS, parent=_PARENTS, depth=DEPTHS, loss=LOSS.column
)


def _encode_new_pages(pages: Sequence[NewPage]) -> pb.NewPages | None:
    """As `_NEW_PAGE_ROWS.encode`, but without an object for each page."""
    if not pages:
        return None
    columns = NewPages.of(pages)
    key = encode_keys(columns.hashes, [columns.places[number] for number in columns.place_of])
    parent: Any = _PARENTS.encode(columns.parents)
    return pb.NewPages(key=key, parent=parent, depth=columns.depths, loss=LOSS.column.encode(columns.losses))


NEW_PAGES: Values[NewPage] = Values(_encode_new_pages, _NEW_PAGE_ROWS.decode)

_ABSENT = (0, 0, 0, 0)


def _encode_need_parts(parts: Sequence[Part | None]) -> list[int]:
    return [number for part in parts for number in part or _ABSENT]


def _decode_need_parts(flat: Collection[int]) -> tuple[Part | None, ...]:
    fours = _several(flat, 4, limits.PARTS_PER_BLOCK, "parts in a need")
    return tuple([_part(four) if any(four) else None for four in fours])


NEED = Struct(
    pb.Need,
    Need,
    parts=Scalar(_encode_need_parts, _decode_need_parts),
    accept=LOSS,
    avoid=Rows(each(SHARD), limits.AVOIDED_SHARDS, "shards to avoid"),
)

# ---------------------------------------------------------------------------------------------- specs


def _in_spec(column: Values[Any] | Columns[Any]) -> Rows[Any]:
    return Rows(column, limits.SPEC_BYTES, "values in a spec")


_PLANE = Struct(pb.Plane, Plane, name=PLAIN, heads=PLAIN, dim=PLAIN, dtype=PLAIN, packing=PLAIN)
_REUSE = Struct(pb.Reuse, Reuse, kind=PLAIN, tokens=PLAIN)
_GROUP = Struct(pb.Group, Group, layers=_in_spec(NUMBERS), planes=_in_spec(each(_PLANE)), reuse=_REUSE)
_SPEC = Struct(
    pb.Spec,
    KVSpec,
    model=PLAIN,
    weights=PLAIN,
    adapter=PLAIN,
    rope=PLAIN,
    block_tokens=PLAIN,
    groups=_in_spec(each(_GROUP)),
    extra=_in_spec(PAIRS),
    private=PLAIN,
)
encode_spec, _decode_spec = in_bytes(pb.Spec, _SPEC)


def decode_spec(data: bytes) -> KVSpec:
    """The inverse of `encode_spec`. Raises SpecError for an invalid spec, LimitError before it parses too large a
    one."""
    at_most(len(data), limits.SPEC_BYTES, "bytes of a spec")
    return _decode_spec(data)


SPEC = Scalar(encode_spec, decode_spec)
"""A spec, as bytes."""

# -------------------------------------------------------------------------------- misses and refusals

MISS = Struct(pb.Miss, Miss, reason=REASON, detail=PLAIN)
MISSES: Interned[Miss | None] = Interned(pb.MissTable, each(MISS), "a miss", absent=True)
REFUSED = Struct(pb.Refused, Refused, kind=REFUSED_KIND, detail=PLAIN)
DONE = Struct(pb.Done, Done, ok=PLAIN)
