"""Codecs of page keys and, for pages to be written, of their positions in a chain.

The pages of a message share few blocks and even fewer parts, so both are interned in tables. Parents are in the table
of blocks: in a chain the parent of one block is another block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import NewPage, PageKey
from kvcluster.core.spec import Part
from kvcluster.wire import common
from kvcluster.wire.common import Interned, agree, at_most, pick
from kvcluster.wire.v1 import common_pb2 as pb


def encode_keys(keys: Collection[PageKey]) -> pb.PageKeys:
    """Encodes the keys of pages."""
    return _encode_keys(keys, Interned())


def decode_keys(m: pb.PageKeys, most: int, what: str) -> list[PageKey]:
    """The inverse. Raises LimitError that names `what` if there are more than `most`."""
    at_most(agree("pages", m.hash_of, m.part_of), most, what)
    blocks = pick(_decode_table(m, most), m.hash_of, "a hash")
    places = pick(common.decode_parts(m.parts), m.part_of, "a part")
    return [PageKey(block, group, part) for block, (group, part) in zip(blocks, places, strict=True)]


def encode_new_pages(pages: Collection[NewPage]) -> pb.NewPages:
    """Encodes pages to be written."""
    hashes: Interned[BlockHash] = Interned()
    return pb.NewPages(
        parent_of=[hashes[page.parent] for page in pages],
        depths=[page.depth for page in pages],
        losses=[common.LOSS.encode[page.loss] for page in pages],
        keys=_encode_keys([page.key for page in pages], hashes),
    )


def decode_new_pages(m: pb.NewPages, most: int, what: str) -> tuple[NewPage, ...]:
    """The inverse. Raises LimitError that names `what` if there are more than `most`."""
    keys = decode_keys(m.keys, most, what)
    agree("pages", keys, m.parent_of, m.depths, m.losses)
    parents = pick(_decode_table(m.keys, most), m.parent_of, "a parent")
    at_most(max(m.depths, default=0), limits.TOKENS_PER_SEQUENCE, "depth")
    return tuple(map(NewPage, keys, parents, m.depths, common.LOSS.decode_all(m.losses)))


def _encode_keys(keys: Iterable[PageKey], hashes: Interned[BlockHash]) -> pb.PageKeys:
    """Encodes keys. `hashes` may contain parents already; all its entries become the table."""
    parts: Interned[tuple[int, Part]] = Interned()
    pairs = [(hashes[key.hash], parts[key.group, key.part]) for key in keys]
    return pb.PageKeys(
        hashes=b"".join(hashes),
        parts=common.encode_parts(parts),
        hash_of=[block for block, _ in pairs],
        part_of=[part for _, part in pairs],
    )


def _decode_table(m: pb.PageKeys, most: int) -> tuple[BlockHash, ...]:
    """Decodes the table of blocks and parents; each page has at most one of each."""
    return common.decode_hashes(m.hashes, 2 * most, "hashes in a table")
