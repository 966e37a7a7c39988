"""Files of pages on disk, version 1: each describes itself, so that a shard can recover it without other state.

    head at 0           "kvcluster-pages\\0" | version u32 | body's bytes u32 | xxh3_64 of the body u64 | body
        body            life 16 | file_bytes u64 | page bytes u64 | layers u32 | tenant's bytes u16 | tenant | Spec
    record of slot i    block 32 | parent 32 | depth u64 | group u32 | part 4 u32 | codec u16 | loss u8 | 0
                        | a u64 a layer: its checksum | xxh3_64 of all that and the life, seeded by i, u64
    slots               core/file_allocator.py computes where records and slots lie

Little-endian. The life is drawn at random when a file begins to hold pages of another kind, so that records of an
earlier life are invalid. A page's bytes are those of its codec (docs/codecs.md). Records that are corrupt, torn or of a
later version are skipped; the only loss is that their pages are computed again. A valid record does not mean that its
page is intact: a reader verifies that with the checksums.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from kvcluster.core import codecs, limits
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, RECORD_BYTES, Shape
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, SUM_BYTES, BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import PageKey
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import RecoveredPage
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.wire import common
from kvcluster.wire.checks import QUANTITY_MAX, at_most, must

VERSION = 1
LIFE_BYTES = 16
NO_HEAD = bytes(HEAD_BYTES)
"""The head of a file that holds no pages."""

_MAGIC = b"kvcluster-pages\0"
_OPENING = struct.Struct("<16sIIQ")
_BODY = struct.Struct(f"<{LIFE_BYTES}sQQIH")
_RECORD = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}sQI4IHBx")
_CHECK = struct.Struct("<Q")
_MOST_PAGE_BYTES = 2**40
_MOST_LAYERS = 2**20

assert _RECORD.size + _CHECK.size == RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a file: the tenant, spec and size of its pages."""

    life: bytes
    file_bytes: int
    shape: Shape
    tenant: Tenant
    spec: KVSpec

    @property
    def namespace(self) -> NamespaceId:
        return self.spec.namespace(self.tenant)

    @property
    def slots(self) -> int:
        return self.shape.slots(self.file_bytes)

    @property
    def records_bytes(self) -> int:
        """Bytes of all records together, which begin at HEAD_BYTES."""
        return self.slots * self.shape.record_bytes

    def slot_at(self, inside: int) -> int:
        """Returns the slot that begins at offset `inside` of its file."""
        return self.shape.slot_at(inside, self.slots)[0]

    def record_at(self, slot: int) -> int:
        """Returns the offset of the slot's record in the file."""
        return HEAD_BYTES + slot * self.shape.record_bytes


def encode_head(head: Head) -> bytes:
    """Encodes a head as HEAD_BYTES bytes."""
    tenant = head.tenant.encode()
    fixed = _BODY.pack(head.life, head.file_bytes, *head.shape, len(tenant))
    body = fixed + tenant + common.encode_spec(head.spec)
    data = _OPENING.pack(_MAGIC, VERSION, len(body), xxh3_64_intdigest(body)) + body
    assert len(data) <= HEAD_BYTES, "limits.py bounds the size of a spec and a tenant"
    return data + bytes(HEAD_BYTES - len(data))


def decode_head(data: bytes) -> Head:
    """The inverse. Raises ProtocolError for anything that `encode_head` did not write."""
    must(len(data) >= _OPENING.size, "a page file is truncated within its head")
    magic, version, length, check = _OPENING.unpack_from(data)
    must(magic == _MAGIC and version == VERSION, "a file does not begin like a page file of version 1")
    body = data[_OPENING.size : _OPENING.size + length]
    if len(body) < max(length, _BODY.size) or xxh3_64_intdigest(body) != check:
        raise ProtocolError("the head of a page file does not match its checksum")
    life, file_bytes, nbytes, layers, tenant_bytes = _BODY.unpack_from(body)
    shape = Shape(at_most(nbytes, _MOST_PAGE_BYTES, "bytes of a page"), layers)
    at_most(layers, _MOST_LAYERS, "layers of a page")
    at_most(file_bytes, QUANTITY_MAX, "bytes of a file")
    try:
        tenant = Tenant(body[_BODY.size : _BODY.size + tenant_bytes].decode())
    except UnicodeDecodeError:
        raise ProtocolError("the tenant of a page file is not UTF-8") from None
    spec = common.decode_spec(body[_BODY.size + tenant_bytes :])
    must(nbytes and layers, "a page file has pages without bytes or layers")
    return Head(life, file_bytes, shape, tenant, spec)


def encode_record(head: Head, slot: int, page: RecoveredPage) -> bytes:
    """Encodes the record of that page in that slot."""
    fixed = _RECORD.pack(page.key.hash, page.parent, page.depth, page.key.group, *page.key.part, page.codec, page.loss)
    assert len(page.sums) == head.shape.layers * SUM_BYTES
    return fixed + page.sums + _CHECK.pack(_check(head, slot, fixed + page.sums))


def decode_records(head: Head, namespace: NamespaceId, data: bytes, at: int) -> list[RecoveredPage]:
    """Returns the pages of the valid records in `data`, which begins with the first record. `namespace` is that of the
    head, and `at` the offset of the file in its tier."""
    found: list[RecoveredPage] = []
    size, slots = head.shape.record_bytes, head.slots
    first = at + head.shape.first_slot(slots)
    for slot in range(min(slots, len(data) // size)):
        record = data[slot * size : (slot + 1) * size]
        (check,) = _CHECK.unpack_from(record, size - _CHECK.size)
        content = record[: size - _CHECK.size]
        if check == _check(head, slot, content):
            try:
                found.append(_page(head, namespace, content, first + slot * head.shape.slot_bytes))
            except (KVClusterError, ValueError):  # of a later version, with more codecs or other limits
                continue
    return found


def _page(head: Head, namespace: NamespaceId, content: bytes, offset: int) -> RecoveredPage:
    values: tuple[Any, ...] = _RECORD.unpack_from(content)
    block, parent, depth, group, *bounds, codec_number, loss = values
    codec, part = Codec(codec_number), Part(*bounds)
    must(
        depth <= limits.TOKENS_PER_SEQUENCE and group < len(head.spec.groups),
        "a record's group or depth is out of range",
    )
    head.spec.check_part(group, part)
    if Shape(codecs.page_bytes(codec, head.spec, group, part), part.layers) != head.shape or loss < codec.loss:
        raise ProtocolError("a record does not match the page size of its file")
    key = PageKey(BlockHash(block), group, part)
    sums = content[_RECORD.size :]
    return RecoveredPage(
        *(namespace, key, BlockHash(parent), depth, Loss(loss), codec), head.shape.nbytes, sums, offset
    )


def _check(head: Head, slot: int, content: bytes) -> int:
    return xxh3_64_intdigest(head.life + content, slot)
