"""Codecs: which encodings of a page there are, and how many bytes each takes. memory/codec.py does the encoding.

A codec is 16 bits, `id << 8 | version`; they travel with every layer and enter its checksum. A new codec
takes an id that was never used, and its bytes never change without a new version. An encoded layer is its planes
one after the other, so all layers of a page are equally long, and each can be located, sent and checked without
decoding the others. docs/codecs.md draws the bytes.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec

GROUP_CHANNELS = 32
"""Channels per group in a plane that q4 codes by groups. In every q4 plane, codes share bytes within such a group."""

_CODED_DTYPES = ("bfloat16", "float16", "float32")


class Codec(IntEnum):
    """How a page is encoded."""

    RAW = 0x0001
    Q8 = 0x0101
    Q4 = 0x0201

    @property
    def loss(self) -> Loss:
        """The loss of encoding and decoding once."""
        return _LOSS[self]


class Coding(Enum):
    """How one plane of an encoded page is encoded."""

    RAW = "raw"
    ROWS = "rows"  # 8 bits: for each (token, head) a scale and a minimum
    CHANNELS = "channels"  # 4 bits: for each (head, channel) over the page's tokens
    GROUPS = "groups"  # 4 bits: for each (token, head) and 32 channels


def coding(codec: Codec, plane: Plane) -> Coding:
    """Returns how `codec` encodes this plane. A plane that is opaque, already 8 bits, or no multiple of 8 channels
    stays raw.

    Keys have channels that are large in every token, so each channel has one scale over all tokens; other planes have
    scales per token (Liu et al., KIVI, 2024).
    """
    if codec is Codec.RAW or plane.dtype not in _CODED_DTYPES or plane.dim % 8:
        return Coding.RAW
    if codec is Codec.Q8:
        return Coding.ROWS
    return Coding.CHANNELS if plane.name == "k" else Coding.GROUPS


def plane_bytes(codec: Codec, plane: Plane, *, block_tokens: int, heads: int) -> int:
    """Bytes of one layer of one block of a plane, for that many heads, with scales and minima or zero points."""
    how, rows = coding(codec, plane), block_tokens * heads
    if how is Coding.ROWS:
        return rows * (4 + plane.dim)
    if how is Coding.CHANNELS:
        return 2 * heads * plane.dim + rows * plane.dim // 2
    if how is Coding.GROUPS:
        return rows * (2 * -(-plane.dim // GROUP_CHANNELS) + plane.dim // 2)
    return plane.nbytes(block_tokens=block_tokens, heads=heads)


def layer_bytes(codec: Codec, group: Group, *, block_tokens: int, heads: int) -> int:
    """Bytes of one layer of one block for that many heads, all planes."""
    return sum(plane_bytes(codec, plane, block_tokens=block_tokens, heads=heads) for plane in group.planes)


def page_bytes(codec: Codec, spec: KVSpec, group: int, part: Part) -> int:
    """Bytes of a page: one block of that part of a group."""
    return part.layers * layer_bytes(codec, spec.groups[group], block_tokens=spec.block_tokens, heads=part.heads)


_LOSS = {Codec.RAW: Loss.EXACT, Codec.Q8: Loss.Q8, Codec.Q4: Loss.Q4}
