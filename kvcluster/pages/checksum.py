"""Checksums: what lets a reader take a layer of a page for the one that it asked for.

    identity = xxh3_64(domain | namespace | block hash | group | part | codec)      once a page
    seed     = identity + layer * A + length * B     mod 2**64; A, B odd            once a layer
    sum      = xxh3_64(encoded bytes of the layer, seed)

The writer makes the sums and every reader checks them, over its private copy, from the hash that *it* asked
for; nothing that the other side says enters an identity. So bytes that are torn, rotten, shifted by a layer,
in another codec, or of another block, part, model or tenant do not verify.

Why a seed binds the fields as well as hashing them with the bytes would: XXH3 adds its seed to, and
subtracts it from, the secret that every lane of input is mixed with before it is multiplied, so each seed is
another hash function, and the same bytes under two seeds agree no oftener than chance, 2**-64. Different
seeds is what different fields get. Identities are hashes of fixed-width fields, so two pages have the same
seed with that same chance. Within one page, layers of one length never do, because multiplying by an odd
number is a bijection; and layers of two lengths are told apart by XXH3 itself, which hashes the length too.
A and B are large and irregular, so that no small difference of the bytes undoes a difference of seeds, even
in layers of a few bytes where XXH3 mixes little. Hashing a header with the bytes would need a copy of them
or a streaming hash, several calls a layer; two multiplications are lost beside the one call that is needed.

This guards against accidents. It is no signature: who may reach a page is a matter of credentials.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvcluster.core import limits
from kvcluster.core.ids import HASH_BYTES, SUM_BYTES, NamespaceId
from kvcluster.core.messages import PageKey
from kvcluster.pages import native

_DOMAIN = b"kvcluster-sum-v1"
_IDENTITY = struct.Struct(f"<{len(_DOMAIN)}s{HASH_BYTES}s{HASH_BYTES}s5IH")
_A = 0x9E3779B97F4A7C15
_B = 0xC2B2AE3D27D4EB4F
_MASK = 2**64 - 1


def identity(namespace: NamespaceId, key: PageKey, codec: int) -> int:
    """64 bits of who a page is: namespace, block hash, group, part, and codec with its version (see codec.py)."""
    assert len(namespace) == HASH_BYTES and len(key.hash) == HASH_BYTES  # struct would cut or pad them silently
    return xxh3_64_intdigest(_IDENTITY.pack(_DOMAIN, namespace, key.hash, key.group, *key.part, codec))


def layer_sum(identity: int, layer: int, data: memoryview | bytes) -> int:
    """The checksum of one layer's encoded bytes. `layer` is counted from the page's own first layer."""
    return xxh3_64_intdigest(data, _seed(identity, layer, len(data)))


def layer_sums(identity: int, first_layer: int, layers: int, data: memoryview) -> tuple[int, ...]:
    """The checksums of `layers` layers of equal length, which `data`, flat bytes, holds one after the other."""
    step = _layer_bytes(layers, data)
    seed = _seed(identity, first_layer, step)
    if native.KERNELS is not None and step >= native.LEAST_LAYER_BYTES:
        return native.KERNELS.sums(data, layers, seed, _A)
    sums = []
    at = 0
    for _ in range(layers):
        sums.append(xxh3_64_intdigest(data[at : at + step], seed))
        at += step
        seed = (seed + _A) & _MASK
    return tuple(sums)


def copy_sums(identity: int, first_layer: int, layers: int, into: memoryview, data: memoryview) -> tuple[int, ...]:
    """Copies `data` to `into`, which is as long and lies elsewhere. Returns the checksums of what was written there,
    as `layer_sums` has them, whatever becomes of `data` meanwhile."""
    step = _layer_bytes(layers, data)
    if native.KERNELS is not None and step >= native.LEAST_LAYER_BYTES:
        return native.KERNELS.copy_sums(into, data, layers, _seed(identity, first_layer, step), _A)
    sums: list[int] = []
    at_once = max(1, limits.CHUNK_BYTES // step)
    for layer in range(0, layers, at_once):
        count = min(at_once, layers - layer)
        chunk = slice(layer * step, (layer + count) * step)
        into[chunk] = data[chunk]
        sums += layer_sums(identity, first_layer + layer, count, into[chunk])
    return tuple(sums)


def first_mismatch(identity: int, first_layer: int, sums: Sequence[int], data: memoryview) -> int | None:
    """The first layer whose bytes are not what its sum says, or None where all of `data` verifies.

    `data` holds len(sums) layers from `first_layer` on; the answer is counted as `first_layer` is, from
    the page's own first layer.
    """
    here = layer_sums(identity, first_layer, len(sums), data)
    if here == tuple(sums):
        return None
    return first_layer + next(layer for layer, pair in enumerate(zip(here, sums, strict=True)) if pair[0] != pair[1])


def pack_sums(sums: Sequence[int]) -> bytes:
    """Sums as they are kept and travel: little-endian uint64, eight bytes a layer."""
    return struct.pack(f"<{len(sums)}Q", *sums)


def unpack_sums(packed: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack_sums`. The length is a multiple of 8: the wire has seen to that."""
    assert len(packed) % SUM_BYTES == 0
    return struct.unpack(f"<{len(packed) // SUM_BYTES}Q", packed)


def _seed(identity: int, layer: int, nbytes: int) -> int:
    return (identity + layer * _A + nbytes * _B) & _MASK


def _layer_bytes(layers: int, data: memoryview) -> int:
    assert layers > 0 and data.nbytes == len(data) and len(data) % layers == 0
    return len(data) // layers
