"""Block hashes: the chained digest that identifies a block in every process.

    h(-1) = SHA-256(domain | namespace | salt)
    h(i)  = SHA-256(h(i-1) | extra | tokens)      tokens as little-endian uint32, extra length-framed

The root carries the namespace, so that a hash of one model, adapter, weights or tenant is never a hash of
another. Nothing is seeded per process: the same tokens have the same hash in every process and release
(golden vectors in the tests check it). SHA-256, because only the hash separates a request from another tenant's KV.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.errors import CallerError

_ROOT = b"kvcluster-root-v1"
_FOREIGN = b"kvcluster-foreign-v1"
MIN_FOREIGN_BYTES = 16
"""An engine's own hash shorter than 128 bits is likely to collide in a large cache."""


def root(namespace: NamespaceId, salt: bytes = b"") -> BlockHash:
    """Returns the parent of a sequence's first block. Requests with different `salt` share no blocks."""
    return BlockHash(hashlib.sha256(_ROOT + namespace + _frame(salt)).digest())


def chain(
    parent: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    extra_keys: Mapping[int, bytes] | None = None,
) -> list[BlockHash]:
    """Returns the hashes of the full blocks of `token_ids`, which follow the block `parent`. Tokens that fill no block
    are ignored.

    `extra_keys` maps the index of a block to the content hash and offset of each image, audio or
    embedding span that overlaps it. Raises CallerError if a token id is not an unsigned 32-bit integer.
    """
    data = token_bytes(token_ids)
    step = 4 * block_tokens
    hashes: list[BlockHash] = []
    digest: bytes = parent
    empty = _frame(b"")
    sha256 = hashlib.sha256
    for i in range(len(data) // step):
        extra = _frame(extra_keys.get(i, b"")) if extra_keys else empty
        digest = sha256(digest + extra + data[i * step : (i + 1) * step]).digest()
        hashes.append(BlockHash(digest))
    return hashes


def foreign(namespace: NamespaceId, engine_hashes: Iterable[bytes]) -> list[BlockHash]:
    """Re-roots an engine's own chained cryptographic hashes in the namespace.

    An engine's hash already covers its parents, so each is hashed with the namespace on its own. Raises CallerError
    for hashes under 16 bytes: those of a non-cryptographic or seeded function must not be shared.
    """
    out: list[BlockHash] = []
    for engine_hash in engine_hashes:
        if len(engine_hash) < MIN_FOREIGN_BYTES:
            raise CallerError(
                f"an engine hash of {len(engine_hash)} bytes cannot name shared blocks: "
                "use a cryptographic prefix-hash such as sha256_cbor"
            )
        out.append(BlockHash(hashlib.sha256(_FOREIGN + namespace + _frame(engine_hash)).digest()))
    return out


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns the token ids as little-endian uint32. Raises CallerError that names the first invalid one."""
    tokens = token_array(token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def token_ids(data: bytes) -> array[int]:
    """Returns the token ids of which `data` is the token_bytes."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def token_array(token_ids: Sequence[int]) -> array[int]:
    """Returns a copy of the token ids, which are iterated only once. Raises as token_bytes."""
    try:
        # array() would accept bytes as machine words, a boolean mask as the tokens 0 and 1, and the keys of a mapping.
        if isinstance(token_ids, (bytes, bytearray, Mapping)) or (len(token_ids) and type(token_ids[0]) is bool):
            raise TypeError
        tokens = array("I", token_ids)
    except (TypeError, OverflowError, ValueError, LookupError):
        raise CallerError(
            f"token ids must be a flat sequence of integers from 0 to 2**32-1, not {_culprit(token_ids)!r:.80}; "
            "pass tensor.tolist() of one row"
        ) from None
    assert tokens.itemsize == 4
    return tokens


def _culprit(token_ids: object) -> object:
    """Returns the first element that is not a token id, or `token_ids` itself if it is not a sequence."""
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, (bytes, bytearray, Mapping)):
        return token_ids
    return next((t for t in token_ids if type(t) is not int or not 0 <= t < 2**32), token_ids)


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data
