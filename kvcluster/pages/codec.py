"""Codecs: how the bytes of a page are encoded. This knows which there are, not when to use one.

A codec is 16 bits, `id << 8 | version`; they travel with every layer and are bound by its checksum. `raw`
is id 0: the bytes of the tensors themselves, in page layout.

A codec that joins is an id here, never reused; a new version wherever its bytes change; and a branch in
`encode` and `decode`, which then need the group's planes. Encoded layers of a page stay equally long, so that
a layer can be found, sent and checked without decoding the others. A reader that meets a codec that it
does not know has met a newer peer, not a fault: it recomputes.
"""

from __future__ import annotations

RAW = 0x0001


def check_codec(codec: int) -> str | None:
    """None where this process can decode `codec`; otherwise why not, as the detail of a miss."""
    if codec == RAW:
        return None
    return f"encoded by codec {codec >> 8} version {codec & 0xFF}, which this kvcluster does not know: upgrade it here"


def encode(codec: int, data: memoryview) -> memoryview:
    """Whole layers in page layout -> their encoded bytes. Raw is the identity: no copy is made."""
    assert codec == RAW
    return data


def decode(codec: int, data: memoryview) -> memoryview:
    """The inverse of `encode`, for a codec that `check_codec` has passed. Raw is the identity."""
    assert codec == RAW
    return data
