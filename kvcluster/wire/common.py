"""Encoders and decoders that all messages share: hashes, parts, specs, misses, plans.

Pairs of functions `encode_x` and `decode_x`. Encoding trusts the core's own values. Decoding trusts nothing: it checks
a size before it allocates anything of that size, and every number before it is used.

Three techniques keep messages small and fast. Hashes are packed into one `bytes`. Repeated values are *interned*: each
is stored once in a table of its message, so that decoding builds it once and all references share one object. And
lists of records travel as parallel lists of numbers instead of a list of messages.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Generic, TypeVar, cast

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError, Message

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Need,
    Plan,
    Refused,
    RefusedKind,
    Run,
    ShardAddress,
    Source,
    Tier,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import Group, KVSpec, Part, Plane, Reuse
from kvcluster.errors import LimitError, ProtocolError
from kvcluster.wire.v1 import common_pb2 as pb

M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Enum)
P = TypeVar("P", bound=int)
T = TypeVar("T")

INDEX_MAX = 65_535
"""Layers and heads of a part: frames count layers in 16 bits, and no model has nearly as many."""

QUANTITY_MAX = 2**62
"""Durations, epochs, stream numbers, bytes: a sum of two still fits the wire's 64 bits."""

TEXT_CHARS = 1_024
"""The name of a shard, host, tenant, counter or state, or an address: DNS allows 253."""

_CHUNK = struct.Struct(f"{HASH_BYTES}s" * 64)
"""Splits 64 hashes at a time: a fifth of the time of one slice per hash."""

# -------------------------------------------------------------------------------------------- checks


def check_opening(magic: int, version: int, *, own: tuple[int, int], of: str) -> None:
    """Raises ProtocolError unless a frame begins with our own magic and version, `own`."""
    if magic != own[0]:
        raise ProtocolError(f"a frame begins with {magic:#06x}, not kvcluster's magic; is this another service?")
    if version != own[1]:
        raise ProtocolError(
            f"this side speaks version {own[1]} of kvcluster's {of}, the other side version {version}: "
            "install the same release of kvcluster in the engine and in the cluster"
        )


def parse(kind: type[M], data: bytes) -> M:
    """The protobuf message in `data`. Raises LimitError or ProtocolError."""
    if len(data) > limits.MESSAGE_BYTES:
        raise LimitError(f"message bytes: {len(data)} exceeds the limit of {limits.MESSAGE_BYTES}")
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:  # the latter if protobuf runs without its C core
        raise ProtocolError(f"these bytes are not a valid {kind.DESCRIPTOR.name} of kvcluster: {error}") from None


def check_version(theirs: int) -> None:
    """Raises ProtocolError unless the other side speaks this version of the protocol."""
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(
            f"this side speaks version {PROTOCOL_VERSION} of kvcluster's protocol, the other side version {theirs}: "
            "install the same release of kvcluster in the engine and in the cluster"
        )


def at_most(value: int, most: int, what: str) -> int:
    """Returns `value`. Raises LimitError that names `what` if it is more than `most`."""
    if value > most:
        raise LimitError(f"{what}: {value} exceeds the limit of {most}")
    return value


def quantity(value: int, what: str) -> int:
    """Returns `value` if it is at most QUANTITY_MAX, so that sums do not overflow. Otherwise raises LimitError."""
    return at_most(value, QUANTITY_MAX, what)


def epoch(value: int) -> Epoch:
    """Returns `value` as an epoch. Raises LimitError."""
    return Epoch(quantity(value, "epoch"))


def text(value: str, what: str) -> str:
    """Returns `value` if it has at most TEXT_CHARS characters. Otherwise raises LimitError."""
    at_most(len(value), TEXT_CHARS, f"characters of {what}")
    return value


def numbers(field: Collection[int], most: int, what: str) -> list[int]:
    """Returns the numbers as a list. Raises LimitError, before copying them, if there are more than `most`."""
    at_most(len(field), most, what)
    return list(field)


def agree(what: str, *lists: Collection[object]) -> int:
    """Returns the common length of parallel lists. Raises ProtocolError if their lengths differ."""
    lengths = [len(one) for one in lists]
    if len(set(lengths)) > 1:
        raise ProtocolError(f"the lists of {what} must be equally long, not {lengths}")
    return lengths[0]


def pick(table: Sequence[T], indices: Iterable[int], what: str) -> list[T]:
    """Returns the entries of `table` at `indices` (unsigned, from 0). Raises ProtocolError if one is out of range."""
    try:
        return [table[index] for index in indices]
    except IndexError:
        raise ProtocolError(f"a message refers to {what} beyond the {len(table)} that it holds") from None


class Interned(dict[T, int]):
    """A table being built: `table[value]` is the value's index in it, `list(table)` its entries."""

    def __missing__(self, value: T) -> int:
        index = self[value] = len(self)
        return index


def reference(table: Interned[T], value: T | None) -> int:
    """Returns index + 1 into the table, 0 for None."""
    return 0 if value is None else table[value] + 1


class EnumCodec(Generic[E, P]):
    """Maps an enum of the core to the protobuf enum with the same member names. A missing member fails at import."""

    def __init__(self, ours: type[E], theirs: EnumTypeWrapper, prefix: str) -> None:
        self.encode: dict[E, P] = {member: cast("P", theirs.Value(prefix + member.name)) for member in ours}
        self._members = {int(number): member for member, number in self.encode.items()}
        self._name = ours.__name__

    def decode(self, number: int) -> E:
        """Returns the member. Raises ProtocolError if it is not known."""
        return self.decode_all((number,))[0]

    def decode_all(self, numbers: Iterable[int]) -> list[E]:
        """Returns the members. Raises ProtocolError if one is not known."""
        members = self._members
        try:
            return [members[number] for number in numbers]
        except KeyError as unknown:
            raise ProtocolError(
                f"{self._name} {unknown} is not known here; a newer kvcluster sent it: upgrade this side"
            ) from None


LOSS: EnumCodec[Loss, pb.Loss] = EnumCodec(Loss, pb.Loss, "LOSS_")
TIER: EnumCodec[Tier, pb.Tier] = EnumCodec(Tier, pb.Tier, "TIER_")
_CODECS = {int(codec): codec for codec in Codec}
_REASON: EnumCodec[MissReason, pb.MissReason] = EnumCodec(MissReason, pb.MissReason, "MISS_REASON_")
_REFUSED: EnumCodec[RefusedKind, pb.RefusedKind] = EnumCodec(RefusedKind, pb.RefusedKind, "REFUSED_KIND_")

# ---------------------------------------------------------------------------------- hashes and names


def decode_hashes(packed: bytes, most: int, what: str) -> tuple[BlockHash, ...]:
    """Splits 32 * n bytes into n hashes. Raises ProtocolError or LimitError."""
    count, rest = divmod(len(packed), HASH_BYTES)
    if rest:
        raise ProtocolError(f"{what} take {HASH_BYTES} bytes each; {len(packed)} bytes came")
    at_most(count, most, what)
    hashes: list[bytes] = []
    whole = len(packed) // _CHUNK.size * _CHUNK.size
    for at in range(0, whole, _CHUNK.size):
        hashes += _CHUNK.unpack_from(packed, at)
    hashes += [packed[at : at + HASH_BYTES] for at in range(whole, len(packed), HASH_BYTES)]
    return cast("tuple[BlockHash, ...]", tuple(hashes))


def decode_blocks(packed: bytes) -> tuple[BlockHash, ...]:
    """Decodes the block hashes of a call."""
    return decode_hashes(packed, limits.BLOCKS_PER_CALL, "block hashes in a call")


def decode_hash(data: bytes) -> BlockHash:
    """Decodes one block hash."""
    return BlockHash(_exactly(data, HASH_BYTES, "a block hash"))


def decode_namespace(data: bytes) -> NamespaceId:
    """Decodes one namespace id."""
    return NamespaceId(_exactly(data, HASH_BYTES, "a namespace"))


def decode_namespaces(packed: bytes, most: int) -> list[NamespaceId]:
    """Decodes a packed table of namespace ids."""
    return [NamespaceId(digest) for digest in decode_hashes(packed, most, "namespaces in a message")]


def decode_attempt(holder: bytes, counter: int) -> Attempt:
    """Decodes an attempt of a client."""
    return Attempt(Holder(_exactly(holder, HOLDER_BYTES, "a holder")), counter)


def _exactly(data: bytes, length: int, what: str) -> bytes:
    if len(data) != length:
        raise ProtocolError(f"{what} is {length} bytes, not {len(data)}")
    return data


def encode_address(address: ShardAddress) -> pb.ShardAddress:
    """Encodes the address of a shard."""
    return pb.ShardAddress(shard=address.shard, epoch=address.epoch, address=address.address, host=address.host)


def decode_address(m: pb.ShardAddress) -> ShardAddress:
    """The inverse."""
    shard = ShardId(text(m.shard, "a shard's name"))
    return ShardAddress(shard, epoch(m.epoch), text(m.address, "an address"), text(m.host, "a host"))


# ------------------------------------------------------------------------------------ parts and needs


def encode_parts(parts: Iterable[tuple[int, Part]]) -> list[int]:
    """Encodes each (group, part) as five numbers."""
    return [number for group, part in parts for number in (group, *part)]


def decode_parts(flat: Collection[int], most: int = limits.PARTS_PER_BLOCK) -> list[tuple[int, Part]]:
    """The inverse. Does not check whether a spec has these parts; the core does."""
    count, rest = divmod(len(flat), 5)
    if rest:
        raise ProtocolError(f"parts take five numbers each; {len(flat)} came")
    at_most(count, most, "parts in a message")
    fives = iter(flat)
    parts = []
    for group, *bounds in zip(fives, fives, fives, fives, fives, strict=True):
        part = Part(*bounds)
        if not (part.layer_start < part.layer_stop <= INDEX_MAX and part.head_start < part.head_stop <= INDEX_MAX):
            raise ProtocolError(f"{part} is not a part: each range must be non-empty and end at {INDEX_MAX} or before")
        if group >= limits.PARTS_PER_BLOCK:
            raise LimitError(f"group {group} of a part; a spec may have {limits.PARTS_PER_BLOCK} groups")
        parts.append((group, part))
    return parts


def decode_codec(number: int) -> Codec:
    """Decodes a codec. Raises ProtocolError if it is not known."""
    codec = _CODECS.get(number)
    if codec is None:
        raise ProtocolError(f"codec {number >> 8} version {number & 0xFF} is not known here: upgrade this side")
    return codec


def decode_codecs(values: Sequence[int]) -> list[Codec]:
    """As `decode_codec`, for many."""
    return [_CODECS.get(value) or decode_codec(value) for value in values]


def encode_need(need: Need) -> pb.Need:
    """Encodes what a load needs of each group."""
    parts = [(group, part) for group, part in enumerate(need.parts) if part is not None]
    return pb.Need(groups=len(need.parts), parts=encode_parts(parts), accept=LOSS.encode[need.accept], avoid=need.avoid)


def decode_need(m: pb.Need) -> Need:
    """The inverse."""
    at_most(m.groups, limits.PARTS_PER_BLOCK, "groups in a need")
    parts: list[Part | None] = [None] * m.groups
    expected = 0
    for group, part in decode_parts(m.parts):
        if not expected <= group < m.groups:
            raise ProtocolError(f"group {group} of a need of {m.groups} groups: each at most once, in ascending order")
        parts[group] = part
        expected = group + 1
    at_most(len(m.avoid), limits.AVOIDED_SHARDS, "shards to avoid")
    avoid = tuple([ShardId(text(shard, "a shard's name")) for shard in m.avoid])
    return Need(tuple(parts), LOSS.decode(m.accept), avoid)


# ---------------------------------------------------------------------------------------------- specs


def encode_spec(spec: KVSpec) -> bytes:
    """Encodes a spec, as bytes, so that its size can be checked before it is parsed."""
    groups = [
        pb.Group(
            layers=group.layers,
            planes=[
                pb.Plane(name=p.name, heads=p.heads, dim=p.dim, dtype=p.dtype, packing=p.packing) for p in group.planes
            ],
            reuse=group.reuse.kind,
            window_tokens=group.reuse.tokens,
        )
        for group in spec.groups
    ]
    return pb.Spec(
        model=spec.model,
        weights=spec.weights,
        adapter=spec.adapter,
        rope=spec.rope,
        block_tokens=spec.block_tokens,
        groups=groups,
        extra=[pb.Pair(key=key, value=value) for key, value in spec.extra],
    ).SerializeToString()


def decode_spec(data: bytes) -> KVSpec:
    """The inverse. Raises SpecError for an invalid spec."""
    at_most(len(data), limits.SPEC_BYTES, "bytes of a spec")
    m = parse(pb.Spec, data)
    groups = [
        Group(
            tuple(group.layers),
            tuple([Plane(p.name, p.heads, p.dim, p.dtype, p.packing) for p in group.planes]),
            Reuse(group.reuse, group.window_tokens),
        )
        for group in m.groups
    ]
    return KVSpec(
        model=m.model,
        weights=m.weights,
        block_tokens=m.block_tokens,
        groups=tuple(groups),
        adapter=m.adapter,
        rope=m.rope,
        extra=tuple([(pair.key, pair.value) for pair in m.extra]),
    )


# -------------------------------------------------------------------------------- misses and refusals


def encode_miss(miss: Miss | None) -> pb.Miss | None:
    """Encodes a miss; None as an absent field."""
    return None if miss is None else pb.Miss(reason=_REASON.encode[miss.reason], detail=miss.detail)


def encode_misses(misses: Iterable[Miss]) -> list[pb.Miss]:
    """Encodes a table of misses."""
    return [pb.Miss(reason=_REASON.encode[miss.reason], detail=miss.detail) for miss in misses]


def decode_miss(m: pb.Miss) -> Miss:
    """The inverse."""
    return Miss(_REASON.decode(m.reason), m.detail)


def decode_misses(table: Collection[pb.Miss], miss_of: Iterable[int]) -> list[Miss | None]:
    """Returns for each reference (index + 1, or 0) its miss or None."""
    at_most(len(table), limits.PAGES_PER_CALL, "misses in a message")
    return pick([None, *map(decode_miss, table)], miss_of, "a miss")


def encode_refusal(refused: Refused) -> pb.Refused:
    """Encodes a refusal."""
    return pb.Refused(kind=_REFUSED.encode[refused.kind], detail=refused.detail)


def decode_refusal(m: pb.Refused) -> Refused:
    """The inverse."""
    return Refused(_REFUSED.decode(m.kind), m.detail)


# ---------------------------------------------------------------------------------------------- plans


def encode_plans(plans: Iterable[Plan]) -> pb.Plans:
    """Encodes plans, with each source and each shard once."""
    sources: Interned[Source] = Interned()
    shards: Interned[ShardAddress] = Interned()
    groups = [
        [pb.Cover(absent=True) if cover is None else pb.Cover(sources=[sources[s] for s in cover]) for cover in plan]
        for plan in plans
    ]
    return pb.Plans(
        plans=[pb.Plan(groups=covers) for covers in groups],
        sources=[
            pb.Source(
                shard=shards[source.shard],
                part=(source.group, *source.part),
                tier=TIER.encode[source.tier],
                loss=LOSS.encode[source.loss],
            )
            for source in sources
        ],
        shards=[encode_address(shard) for shard in shards],
    )


def decode_plans(m: pb.Plans) -> list[Plan]:
    """The inverse."""
    at_most(len(m.plans), limits.BLOCKS_PER_CALL, "plans in a message")
    at_most(len(m.sources), limits.PAGES_PER_CALL, "sources in a message")
    shards = [decode_address(shard) for shard in m.shards]
    sources = [_decode_source(source, shards) for source in m.sources]
    return [_decode_plan(plan, sources) for plan in m.plans]


def _decode_source(m: pb.Source, shards: Sequence[ShardAddress]) -> Source:
    (shard,) = pick(shards, (m.shard,), "a shard")
    if len(m.part) != 5:
        raise ProtocolError(f"the part of a source takes five numbers; {len(m.part)} came")
    ((group, part),) = decode_parts(m.part)
    return Source(group, part, shard, TIER.decode(m.tier), LOSS.decode(m.loss))


def _decode_plan(m: pb.Plan, sources: Sequence[Source]) -> Plan:
    at_most(len(m.groups), limits.PARTS_PER_BLOCK, "groups in a plan")
    plan: list[tuple[Source, ...] | None] = []
    for group, cover in enumerate(m.groups):
        at_most(len(cover.sources), limits.PARTS_PER_BLOCK, "sources for one group")
        found = tuple(pick(sources, cover.sources, "a source"))
        if (cover.absent and found) or any(source.group != group for source in found):
            raise ProtocolError(f"a plan serves group {group} from sources that do not belong to it")
        plan.append(None if cover.absent else found)
    return tuple(plan)


def encode_runs(runs: Iterable[Run]) -> pb.Runs:
    """Encodes runs: consecutive blocks that share a plan."""
    plans: Interned[Plan] = Interned()
    pairs = [(run.count, plans[run.plan]) for run in runs]
    return pb.Runs(plans=encode_plans(plans), counts=[count for count, _ in pairs], plan_of=[plan for _, plan in pairs])


def decode_runs(m: pb.Runs, *, blocks: int) -> tuple[Run, ...]:
    """The inverse. Raises ProtocolError unless the runs cover exactly `blocks` blocks."""
    counts = decode_counts(m.counts)
    agree("runs", counts, m.plan_of)
    if sum(counts) != blocks:
        raise ProtocolError(f"runs cover {sum(counts)} blocks instead of {blocks}")
    return tuple(map(Run, counts, pick(decode_plans(m.plans), m.plan_of, "a plan")))


def decode_counts(field: Collection[int]) -> list[int]:
    """Returns the number of blocks of each run. Raises unless each is at least one and the sum is within a call's
    limit."""
    counts = numbers(field, limits.BLOCKS_PER_CALL, "runs in a message")
    if 0 in counts:
        raise ProtocolError("a run must have at least one block")
    at_most(sum(counts), limits.BLOCKS_PER_CALL, "blocks in the runs of a message")
    return counts
