"""Encoding and decoding the layers of pages: with the native core if this process has it, otherwise with torch.

core/codecs.py lists the codecs and their encoded sizes, and docs/codecs.md draws the bytes. Both implementations
produce the same bytes. A process that has neither, such as a light client, cannot decode: for it an encoded page is a
miss.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

from kvcluster.core.codecs import Codec, coding, plane_bytes
from kvcluster.core.groups import Group
from kvcluster.memory import native

RAW = int(Codec.RAW)


_KNOWN = frozenset(map(int, Codec))


class Coder(Protocol):
    """One codec for layers of one shape. Thread-safe."""

    def encode(self, data: memoryview, into: memoryview, layers: int) -> bool:
        """Encodes `layers` raw layers, flat bytes in page layout, from `data` into `into`.

        Returns False if a plane to be encoded holds NaN, an infinity or a number that is too large (docs/codecs.md):
        the page stays raw, and the content of `into` is undefined.
        """
        ...

    def decode(self, data: memoryview, into: memoryview, layers: int) -> None:
        """Decodes `layers` encoded layers, which must have been verified, from `data` into `into`."""

    def error(self, data: memoryview, coded: memoryview, layers: int) -> float:
        """Returns the error of encoding the raw layers `data` as `coded`: the norm of the difference divided by the
        norm of the numbers, of the plane with the largest error; 0 if no plane is encoded, or all numbers are zero."""
        ...


def check_codec(codec: int) -> str | None:
    """Returns None if this process can decode `codec`; otherwise why not, as the detail of a miss."""
    if codec not in _KNOWN:
        return (
            f"encoded by codec {codec >> 8} version {codec & 0xFF}, which this kvcluster does not know: upgrade it here"
        )
    if codec != RAW and implementation() is None:
        return "encoded, and this process has neither kvcluster's native core nor torch to decode it: install either"
    return None


def implementation() -> str | None:
    """Returns the implementation in this process: "native", "torch", or None."""
    if native.KERNELS is not None:
        return "native"
    return "torch" if find_spec("torch") is not None else None


@lru_cache(maxsize=256)
def coder(codec: Codec, group: Group, *, block_tokens: int, heads: int) -> Coder:
    """Returns the coder for layers of `group` with `heads` of its heads, for a codec that `check_codec` has
    accepted."""
    if native.KERNELS is None:
        from kvcluster.memory.codec_torch import TorchCoder

        return TorchCoder(codec, group, block_tokens=block_tokens, heads=heads)
    planes = [
        (
            coding(codec, plane).value,
            plane.dtype,
            plane.dim,
            plane.nbytes(block_tokens=block_tokens, heads=heads),
            plane_bytes(codec, plane, block_tokens=block_tokens, heads=heads),
        )
        for plane in group.planes
    ]
    return native.KERNELS.Coder(block_tokens, heads, planes)
