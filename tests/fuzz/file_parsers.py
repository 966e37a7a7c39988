"""The readers of page files: what a shard finds on disk, where files may be damaged in any way.

Both halves are under checksums, which a mutated input seldom bears out. So each is also read as if they were right,
whatever it says: a drive, a later version or a forger could leave nothing worse there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from kvcluster.core import codecs
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, Shape
from kvcluster.core.groups import Group, Part, Plane, window
from kvcluster.core.ids import SUM_BYTES, BlockHash, Tenant
from kvcluster.core.messages import PageKey
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import RecoveredPage
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.wire import page_files
from kvcluster.wire.page_files import Head
from tests.fuzz.contract import Parser, trees
from tests.fuzz.trees import Kind, Node, Tree, fields, message
from tests.fuzz.wire_parsers import ERRORS, drawn
from tests.wire import strategies as of

_OPENING = (8, 8, 4, 4, 8)
_BODY = (8, 8, 8, 8, 4, 2)
_OPENING_BYTES, _BODY_BYTES = sum(_OPENING), sum(_BODY)
_ZEROS = bytes(64)
"""As much of what fills a head up as is worth changing."""

_KEYS = (Plane("k", 2, 8, "float32"),)
_SPEC = KVSpec("m", "sha256:1", 2, (Group((0, 2), _KEYS), Group((1, 3), _KEYS, window(4))))
_PART = Part(0, 2, 0, 1)
_NBYTES, _SLOTS = codecs.page_bytes(Codec.Q8, _SPEC, 0, _PART), 6
_SHAPE = Shape(_NBYTES, _PART.layers)
_FILE = Head(b"life" * 4, _SHAPE.first_slot(_SLOTS) + _SLOTS * _SHAPE.slot_bytes, _SHAPE, Tenant("t"), _SPEC)
"""Whose records are read: pages of two groups, and of either half of the heads, could lie there."""

_RECORD = (*(8,) * 8, 8, 4, 4, 4, 4, 4, 2, 1, 1, *(8,) * _SHAPE.layers)
_CHECK_BYTES = 8


def file_parsers() -> Iterator[Parser]:
    """All of them."""
    yield Parser("page file head", _read_head, lambda: trees(_heads(), _head), ERRORS, page_files.encode_head)
    yield Parser(
        "page file head, resealed",
        lambda data: _read_head(_sealed(data)),
        lambda: trees([_unsealed(head) for head in _heads()], _body),
        ERRORS,
        lambda head: _unsealed(page_files.encode_head(head)),
    )
    yield Parser("page file records", _read_records, lambda: _record_trees(checks=True), ERRORS, _write_records)
    yield Parser(
        "page file records, resealed",
        lambda data: _read_records(_resealed(data)),
        lambda: _record_trees(checks=False),
        ERRORS,
        lambda found: _unchecked(_write_records(found)),
    )


# ------------------------------------------------------------------------------------------------------- heads


def _heads() -> list[bytes]:
    """Without most of the zeros that fill them up."""
    heads = [page_files.encode_head(head) for head, _ in drawn(of.page_files())]
    return [head[:_OPENING_BYTES] + _unsealed(head) + _ZEROS for head in heads]


def _read_head(data: bytes) -> Head:
    """As a shard does, which reads no more than a head can take."""
    return page_files.decode_head(data[:HEAD_BYTES])


def _sealed(body: bytes) -> bytes:
    return struct.pack("<16sIIQ", b"kvcluster-pages\0", 1, len(body), xxh3_64_intdigest(body)) + body


def _unsealed(head: bytes) -> bytes:
    """The body of a head."""
    return head[_OPENING_BYTES : _OPENING_BYTES + int.from_bytes(head[20:24], "little")]


def _head(data: bytes) -> Node:
    return Node(Kind.MANY, children=[*fields(data, _OPENING), _body(_unsealed(data)), Node(Kind.BYTES, _ZEROS)])


def _body(data: bytes) -> Node:
    spec_at = _BODY_BYTES + int.from_bytes(data[_BODY_BYTES - 2 : _BODY_BYTES], "little")
    tenant = Node(Kind.BYTES, data[_BODY_BYTES:spec_at])
    return Node(Kind.MANY, children=[*fields(data, _BODY), tenant, message(data[spec_at:])])


# ----------------------------------------------------------------------------------------------------- records


def _read_records(data: bytes) -> list[RecoveredPage]:
    """A file in which no page is found counts as refused."""
    found = page_files.decode_records(_FILE, _FILE.namespace, data, 0)
    if not found:
        raise ProtocolError("no record of these is whole")
    return found


def _write_records(found: list[RecoveredPage]) -> bytes:
    data = bytearray(_FILE.records_bytes)
    for page in found:
        slot = (page.offset - _SHAPE.first_slot(_SLOTS)) // _SHAPE.slot_bytes
        at = slot * _SHAPE.record_bytes
        data[at : at + _SHAPE.record_bytes] = page_files.encode_record(_FILE, slot, page)
    return bytes(data)


def _resealed(data: bytes) -> bytes:
    """Records of which each has the checksum that it should have."""
    size = _SHAPE.record_bytes - _CHECK_BYTES
    contents = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(
        content + struct.pack("<Q", xxh3_64_intdigest(_FILE.life + content, slot))
        for slot, content in enumerate(contents)
    )


def _unchecked(data: bytes) -> bytes:
    size = _SHAPE.record_bytes
    return b"".join([data[at : at + size - _CHECK_BYTES] for at in range(0, len(data), size)])


def _page(slot: int) -> RecoveredPage:
    return RecoveredPage(
        namespace=_FILE.namespace,
        key=PageKey(BlockHash(bytes([slot + 1]) * 32), slot % 2, Part(0, 2, slot // 3, slot // 3 + 1)),
        parent=BlockHash(bytes([slot]) * 32),
        depth=slot,
        loss=Loss.Q4 if slot == 5 else Loss.Q8,
        codec=Codec.Q8,
        nbytes=_NBYTES,
        sums=bytes(range(_SHAPE.layers * SUM_BYTES)),
        offset=_SHAPE.first_slot(_SLOTS) + slot * _SHAPE.slot_bytes,
    )


def _record_trees(*, checks: bool) -> list[Tree]:
    pages = [_page(slot) for slot in range(_SLOTS)]
    inputs = [_write_records(pages[first:]) for first in range(_SLOTS)]
    widths = (*_RECORD, _CHECK_BYTES) if checks else _RECORD

    def dissect(data: bytes) -> Node:
        starts = range(0, len(data), sum(widths))
        return Node(Kind.MANY, children=[Node(Kind.MANY, children=fields(data[at:], widths)) for at in starts])

    return trees(inputs if checks else [_unchecked(data) for data in inputs], dissect)
