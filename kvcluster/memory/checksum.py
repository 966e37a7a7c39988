"""Checksums: they let a reader verify that the bytes it received are those of the layer that it asked for.

    identity = xxh3_64(domain | namespace | block hash | group | part | codec)      once per page
    seed     = identity + layer * A + length * B     mod 2**64; A, B odd            once per layer
    sum      = xxh3_64(encoded bytes of the layer, seed)

The writer makes the sums. Every reader checks them over its private copy, with an identity computed from the hash that
*it* asked for; no data from the other side enters an identity. So bytes that are torn, corrupt, shifted by a layer, in
another codec, or of another block, part, model or tenant do not verify.

A seed binds the fields as well as hashing them with the bytes would. XXH3 adds its seed to, and subtracts it from, the
secret that every lane of input is mixed with before it is multiplied, so each seed is another hash function, and the
same bytes under two seeds agree no more often than by chance, 2**-64. Different fields get different seeds. Identities
are hashes of fixed-width fields, so two pages have the same seed with that same chance. Within one page, layers of one
length never do, because multiplying by an odd number is a bijection; and XXH3 itself distinguishes layers of two
lengths, since it hashes the length too. A and B are large and irregular, so that no small difference of the bytes
undoes a difference of seeds, even in layers of a few bytes where XXH3 mixes little. Hashing a header with the bytes
would need a copy of them or a streaming hash, several calls per layer; two multiplications are negligible beside the
one call that is needed.

This guards against accidents. It is not a signature: access to pages is controlled by credentials.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, SUM_BYTES, BlockHash, NamespaceId
from kvcluster.core.messages import PageKey
from kvcluster.memory import native

_DOMAIN = b"kvcluster-sum-v1"
_REST = struct.Struct("<5IH")
LAYER_STEP = 0x9E3779B97F4A7C15
"""A of the description above."""

_B = 0xC2B2AE3D27D4EB4F
_MASK = 2**64 - 1


def identity(namespace: NamespaceId, key: PageKey, codec: int) -> int:
    """Returns 64 bits that identify a page: a hash of namespace, block hash, group, part, and codec with its
    version."""
    assert len(namespace) == HASH_BYTES and len(key.hash) == HASH_BYTES  # the fields have fixed widths
    return xxh3_64_intdigest(_DOMAIN + namespace + key.hash + _rest(key.group, key.part, codec))


def identities(
    namespace: NamespaceId, hashes: Sequence[BlockHash], places: Sequence[tuple[int, Part]], codecs: Sequence[int]
) -> array[int]:
    """Returns the identity of each of these pages in its codec, from its block hash and its (group, part)."""
    assert len(namespace) == HASH_BYTES
    before = _DOMAIN + namespace
    found: list[int] = []
    last: tuple[object, int] = (None, -1)  # place and codec of the page before: thousands of pages share them
    rest = b""
    for name, place, codec in zip(hashes, places, codecs, strict=True):
        if place is not last[0] or codec != last[1]:
            last, rest = (place, codec), _rest(*place, codec)
        found.append(xxh3_64_intdigest(before + name + rest))
    return array("Q", found)


@lru_cache(maxsize=1_024)
def _rest(group: int, part: Part, codec: int) -> bytes:
    """Returns the packed end of an identity. Cached, since thousands of pages have the same one."""
    return _REST.pack(group, *part, codec)


def layer_sum(identity: int, layer: int, data: memoryview | bytes) -> int:
    """Returns the checksum of one layer's encoded bytes. `layer` counts from the page's own first layer."""
    return xxh3_64_intdigest(data, first_seed(identity, layer, len(data)))


def layer_sums(identity: int, first_layer: int, layers: int, data: memoryview) -> tuple[int, ...]:
    """Returns the checksums of `layers` layers of equal length, which `data` (flat bytes) holds one after the other."""
    return seeded_sums(first_seed(identity, first_layer, _layer_bytes(layers, data)), layers, data)


def first_seed(identity: int, layer: int, nbytes: int) -> int:
    """Returns the seed of a layer of `nbytes` bytes. That of the layer behind it is LAYER_STEP more, mod 2**64."""
    return (identity + layer * LAYER_STEP + nbytes * _B) & _MASK


def seeded_sums(seed: int, layers: int, data: memoryview) -> tuple[int, ...]:
    """As `layer_sums`, with the seed of the first layer."""
    step = _layer_bytes(layers, data)
    if native.KERNELS is not None and step >= native.LEAST_LAYER_BYTES:
        return native.KERNELS.sums(data, layers, seed, LAYER_STEP)
    sums = []
    at = 0
    for _ in range(layers):
        sums.append(xxh3_64_intdigest(data[at : at + step], seed))
        at += step
        seed = (seed + LAYER_STEP) & _MASK
    return tuple(sums)


def copy_sums(identity: int, first_layer: int, layers: int, into: memoryview, data: memoryview) -> tuple[int, ...]:
    """Copies `data` to `into`, which has the same length and does not overlap it. Returns the checksums, as
    `layer_sums` does, of the bytes that were written, even if `data` changes during the copy."""
    step = _layer_bytes(layers, data)
    if native.KERNELS is not None and step >= native.LEAST_LAYER_BYTES:
        return native.KERNELS.copy_sums(into, data, layers, first_seed(identity, first_layer, step), LAYER_STEP)
    sums: list[int] = []
    at_once = max(1, limits.CHUNK_BYTES // step)
    for layer in range(0, layers, at_once):
        count = min(at_once, layers - layer)
        chunk = slice(layer * step, (layer + count) * step)
        into[chunk] = data[chunk]
        sums += layer_sums(identity, first_layer + layer, count, into[chunk])
    return tuple(sums)


def first_mismatch(identity: int, first_layer: int, sums: Sequence[int], data: memoryview) -> int | None:
    """Returns the first layer whose bytes do not match its sum, or None if all of `data` verifies.

    `data` holds len(sums) layers from `first_layer` on. Like `first_layer`, the result counts from the page's own first
    layer.
    """
    here = layer_sums(identity, first_layer, len(sums), data)
    if here == tuple(sums):
        return None
    return first_layer + next(layer for layer, pair in enumerate(zip(here, sums, strict=True)) if pair[0] != pair[1])


def pack_sums(sums: Sequence[int]) -> bytes:
    """Returns the sums as they are stored and sent: little-endian uint64, eight bytes per layer."""
    return struct.pack(f"<{len(sums)}Q", *sums)


def unpack_sums(packed: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack_sums`. The length must be a multiple of 8, which the wire has checked."""
    assert len(packed) % SUM_BYTES == 0
    return struct.unpack(f"<{len(packed) // SUM_BYTES}Q", packed)


def _layer_bytes(layers: int, data: memoryview) -> int:
    assert layers > 0 and data.nbytes == len(data) and len(data) % layers == 0
    return len(data) // layers
