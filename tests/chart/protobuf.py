"""The little of protobuf's encoding that Helm's record of a release needs: fields of length-delimited bytes."""

from __future__ import annotations

MAGIC = b"k8s\x00"
"""What a Kubernetes client puts before a message in protobuf."""

_BYTES = 2


def fields(data: bytes) -> dict[int, list[bytes]]:
    """Returns the length-delimited fields of a message by number. Raises ValueError if it cannot be read."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == _BYTES:
            length, at = _varint(data, at)
            found.setdefault(tag >> 3, []).append(data[at : at + length])
            at += length
        elif tag & 7 == 0:
            _, at = _varint(data, at)
        else:
            raise ValueError(f"a field of type {tag & 7} is not expected")
    return found


def entry(data: bytes) -> tuple[bytes, bytes]:
    """Returns key and value of an entry of a map."""
    parts = fields(data)
    return parts.get(1, [b""])[0], parts.get(2, [b""])[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
