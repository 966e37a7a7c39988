"""The structure of an input: a tree of nodes, so that a mutation changes one node and leaves the rest unchanged.

Bytes flipped at random seldom get past the first length of a message. A mutation of one node keeps all lengths
around it true, and so reaches the checks that lie deep within. Trees are made once from valid inputs and are never
changed; what a mutation makes of a node is a piece of bytes, which `Tree.with_piece` sets in its place.

    message     protobuf, told from its bytes alone: what parses as fields may as well be some
    fields      integers of fixed width, as in the headers of frames
    words       text, cut where its words begin and end
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

_MAX_DEPTH = 12
_MAX_FIELD = 32
_WORD = re.compile(rb"[A-Za-z_]+|[0-9]+|\s|[^\sA-Za-z_0-9]", re.DOTALL)


class Kind(Enum):
    """How a node's body is to be understood."""

    NUMBER = auto()  # a varint, after its tag
    FIXED = auto()  # an integer of as many bytes, little-endian
    BYTES = auto()  # anything
    MANY = auto()  # nodes


class Node:
    """A piece of an input: its tag, its length where it has one written before it, and its body or children."""

    __slots__ = ("body", "children", "head", "kind", "pieces", "sized", "whole")

    def __init__(
        self, kind: Kind, body: bytes = b"", *, head: bytes = b"", sized: bool = False, children: Sequence[Node] = ()
    ) -> None:
        self.kind = kind
        self.head = head
        self.sized = sized
        self.children = tuple(children)
        self.pieces = [child.whole for child in children]
        self.body = b"".join(self.pieces) if kind is Kind.MANY else body
        self.whole = self.around(self.body)

    def around(self, body: bytes) -> bytes:
        """This node with another body, of which its length is true."""
        return self.head + varint(len(body)) + body if self.sized else self.head + body


Path = tuple[Node, tuple[tuple[Node, int], ...]]
"""A node, and its ancestors from the nearest on, each with the place of the child on the way to it."""


class Tree:
    """An input, and every way to change one node of it."""

    def __init__(self, root: Node) -> None:
        self.whole = root.whole
        self.paths: list[Path] = []
        self._gather(root, ())

    def _gather(self, node: Node, above: tuple[tuple[Node, int], ...]) -> None:
        self.paths.append((node, above))
        for place, child in enumerate(node.children):
            self._gather(child, ((node, place), *above))

    @staticmethod
    def with_piece(path: Path, piece: bytes) -> bytes:
        """The input with `piece` in place of the path's node."""
        for node, place in path[1]:
            pieces = node.pieces
            piece = node.around(b"".join([*pieces[:place], piece, *pieces[place + 1 :]]))
        return piece


def varint(number: int) -> bytes:
    """As protobuf writes numbers and lengths."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def message(data: bytes) -> Node:
    """A protobuf message."""
    return Node(Kind.MANY, children=_fields(data, 0) or [Node(Kind.BYTES, data)])


def fields(data: bytes, widths: Sequence[int]) -> list[Node]:
    """Integers of these widths, one after the other."""
    nodes = []
    at = 0
    for width in widths:
        nodes.append(Node(Kind.FIXED, data[at : at + width]))
        at += width
    assert at <= len(data)
    return nodes


def words(data: bytes) -> Node:
    """Text."""
    return Node(Kind.MANY, children=[Node(Kind.BYTES, word) for word in _WORD.findall(data)])


def _fields(data: bytes, depth: int) -> list[Node]:
    """The fields of a message, or nothing where `data` is none."""
    nodes: list[Node] = []
    at = 0
    while at < len(data):
        start = at
        tag, at = _read_varint(data, at)
        wire_type = tag & 7
        if at < 0 or not 0 < tag >> 3 <= _MAX_FIELD or wire_type not in (0, 2):
            return []
        head = data[start:at]
        start = at
        number, at = _read_varint(data, at)
        if at < 0:
            return []
        if wire_type == 0:
            nodes.append(Node(Kind.NUMBER, data[start:at], head=head))
            continue
        body = data[at : at + number]
        at += number
        if at > len(data):
            return []
        children = _fields(body, depth + 1) if depth < _MAX_DEPTH else []
        kind = Kind.MANY if children else Kind.BYTES
        nodes.append(Node(kind, body, head=head, sized=True, children=children))
    return nodes


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends, or -1 where it does not."""
    number = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    return 0, -1
