"""Messages as large as a server takes, and as expensive to parse as their form allows, whether or not they are valid.

A protobuf message of a few MiB may name millions of elements, each of which costs its parser many times the two bytes
that it has on the wire. `fills` makes one such message for each field that can be repeated or has a length, wherever it
lies in a message, so that a new field is tried without anyone's help.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_LENGTH = 2
_DEEPEST = 8
_HEADER = 64
"""More than the tags and lengths around the field have, at each of _DEEPEST levels."""

_IN_BYTES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def fills(message: Descriptor, nbytes: int) -> Iterator[tuple[str, bytes]]:
    """Yields the path of each such field in `message`, and a message of at most `nbytes` bytes that is full of it."""
    yield from _fills(message, nbytes - _HEADER * _DEEPEST, (), ())


def _fills(
    message: Descriptor, nbytes: int, path: tuple[str, ...], around: tuple[FieldDescriptor, ...]
) -> Iterator[tuple[str, bytes]]:
    for field in message.fields:
        of = field.message_type
        if field.is_repeated or field.type in _IN_BYTES:
            yield ".".join((*path, field.name)), _within(around, _many(field, nbytes))
        if of is not None and len(around) < _DEEPEST and all(field is not other for other in around):
            yield from _fills(of, nbytes, (*path, field.name), (*around, field))


def _many(field: FieldDescriptor, nbytes: int) -> bytes:
    """Returns `nbytes` of one field: as many elements as there can be."""
    tag = _tag(field, _LENGTH)
    if not field.is_repeated:  # a text, or bytes
        return tag + _varint(nbytes) + b"\x01" * nbytes
    if field.type in _IN_BYTES or field.message_type is not None:
        return (tag + b"\x00") * (nbytes // (len(tag) + 1))
    return tag + _varint(nbytes) + b"\x01" * nbytes  # numbers, packed


def _within(around: tuple[FieldDescriptor, ...], data: bytes) -> bytes:
    for field in reversed(around):
        data = _tag(field, _LENGTH) + _varint(len(data)) + data
    return data


def _tag(field: FieldDescriptor, wire_type: int) -> bytes:
    return _varint(field.number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
