"""Encoding and decoding the layers of pages: with the native core where this process has it, else with torch.

core/codecs.py says which codecs there are and how large what they make is, and docs/codecs.md draws the bytes. What
both make is the same, bit for bit. A process that has neither, as a light client may, can decode nothing: to it an
encoded page is a miss.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

from kvcluster.core.codecs import Codec, coding, plane_bytes
from kvcluster.core.spec import Group
from kvcluster.pages import native

RAW = int(Codec.RAW)


_KNOWN = frozenset(map(int, Codec))


class Coder(Protocol):
    """One codec for layers of one shape. Thread-safe."""

    def encode(self, data: memoryview, into: memoryview, layers: int) -> bool:
        """`layers` raw layers, flat bytes in page layout, into as many encoded ones.

        False where a plane that is encoded holds NaN, an infinity or what is too large (docs/codecs.md): the page stays
        raw, and `into` holds anything.
        """
        ...

    def decode(self, data: memoryview, into: memoryview, layers: int) -> None:
        """Encoded layers, that have been verified, into as many raw ones."""

    def error(self, data: memoryview, coded: memoryview, layers: int) -> float:
        """What raw layers have lost by being encoded: the norm of the difference by that of the numbers, of the plane
        that has lost most; 0 where no plane is encoded, or all are zero."""
        ...


def check_codec(codec: int) -> str | None:
    """None where this process can decode `codec`; otherwise why not, as the detail of a miss."""
    if codec not in _KNOWN:
        return (
            f"encoded by codec {codec >> 8} version {codec & 0xFF}, which this kvcluster does not know: upgrade it here"
        )
    if codec != RAW and implementation() is None:
        return "encoded, and this process has neither kvcluster's native core nor torch to decode it: install either"
    return None


def implementation() -> str | None:
    """What encodes and decodes in this process: "native", "torch", or nothing."""
    if native.KERNELS is not None:
        return "native"
    return "torch" if find_spec("torch") is not None else None


@lru_cache(maxsize=256)
def coder(codec: Codec, group: Group, *, block_tokens: int, heads: int) -> Coder:
    """The coder for layers of that group and so many of its heads, for a codec that `check_codec` has passed."""
    if native.KERNELS is None:
        from kvcluster.pages.codec_torch import TorchCoder

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
