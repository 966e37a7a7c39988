"""The mutator of the fuzzer: makes almost valid inputs from valid ones.

Most inputs have one node changed in a way that its kind invites (a number for one at a limit, a list for one that is
longer than its fellows, a length that is a lie, a field from another message), some have bits spoiled wherever they
lie, and some have both. The same seed makes the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz.trees import Kind, Node, Path, Tree, varint

LONGEST = 32 * 1024
"""No piece is repeated beyond this: what is refused for its size costs time and finds nothing new after the first."""

NUMBERS = sorted(
    {
        around
        for edge in (
            0,
            16,
            32,
            64,
            127,
            256,
            1_024,
            4_096,
            8_192,
            2**14,
            2**16,
            2**24,
            2**31,
            2**32,
            2**53,
            2**62,
            2**63,
        )
        for around in (edge - 1, edge, edge + 1)
        if around >= 0
    }
    | {2, 3, 4, 5, 7, 10, 100, 2**64 - 2, 2**64 - 1}
)
"""Where limits of this project, of protobuf, and of machines lie."""

_VARINTS = [varint(number) for number in NUMBERS]
_ODD_VARINTS = [b"\x80\x00", b"\x81\x80\x00", b"\x80" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\x80" * 12, b"\xff" * 11]
_LENGTHS = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 253, 1_025)
_TIMES = (2, 3, 17, 65, 257, 1_025, 8_193)
_DEPTHS = (2, 9, 33, 101, 257, 1_025)
_TEXT = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\n", "é".encode(), "٣".encode(), "²".encode(), b"'", b'"')


class Mutator:
    """Makes inputs of `trees`; `words` are what else this parser knows, to be put anywhere."""

    def __init__(self, trees: Sequence[Tree], words: Sequence[bytes] = ()) -> None:
        assert trees
        self._trees = list(trees)
        self._words = [*words, *_TEXT]
        self._changes = {
            Kind.NUMBER: (self._number, self._number, self._number, *_ANYWHERE),
            Kind.FIXED: (self._fixed, self._fixed, self._fixed, _dropped, _repeated),
            Kind.BYTES: (self._resized, self._packed, self._packed, self._word, self._word, *_ANYWHERE),
            Kind.MANY: (_shuffled, _nested, *_ANYWHERE),
        }

    def make(self, rng: Random) -> bytes:
        """The next input."""
        draw = rng.random()
        tree = self._trees[int(rng.random() * len(self._trees))]
        data = self._changed(rng, tree) if draw < 0.8 else tree.whole
        return self._spoiled(rng, data) if draw > 0.65 else data

    def _changed(self, rng: Random, tree: Tree) -> bytes:
        """One node of the tree is another."""
        path = tree.paths[int(rng.random() * len(tree.paths))]
        changes = self._changes[path[0].kind]
        at = int(rng.random() * (len(changes) + 1))
        piece = changes[at](rng, path[0]) if at < len(changes) else self._transplanted(rng, path)
        return tree.with_piece(path, piece)

    def _transplanted(self, rng: Random, path: Path) -> bytes:
        """A node of another input, beside this one or in its place."""
        donor = self._trees[int(rng.random() * len(self._trees))]
        other = donor.paths[int(rng.random() * len(donor.paths))][0].whole
        return other if rng.random() < 0.5 else path[0].whole + other

    def _number(self, rng: Random, node: Node) -> bytes:
        numbers = _VARINTS if rng.random() < 0.9 else _ODD_VARINTS
        return node.head + numbers[int(rng.random() * len(numbers))]

    def _fixed(self, rng: Random, node: Node) -> bytes:
        width = len(node.body)
        number = NUMBERS[int(rng.random() * len(NUMBERS))] & (1 << 8 * width) - 1
        if rng.random() < 0.4:  # the next to what is true is where a bound is off by one
            number = (int.from_bytes(node.body, "little") + (1 if rng.random() < 0.5 else -1)) % (1 << 8 * width)
        return number.to_bytes(width, "little")

    def _resized(self, rng: Random, node: Node) -> bytes:
        """Hashes that are too long or too short, text that is none."""
        length = _LENGTHS[int(rng.random() * len(_LENGTHS))]
        return node.around((node.body * (length // len(node.body) + 1) if node.body else bytes(length))[:length])

    def _packed(self, rng: Random, node: Node) -> bytes:
        """One number of a list, or one more, or one less."""
        body = node.body
        at = int(rng.random() * (len(body) + 1))
        number = _VARINTS[int(rng.random() * len(_VARINTS))] if rng.random() < 0.8 else b""
        return node.around(body[:at] + number + body[at + (rng.random() < 0.7) :])

    def _word(self, rng: Random, node: Node) -> bytes:
        """Returns a word that a parser of text understands."""
        word = self._words[int(rng.random() * len(self._words))]
        at = int(rng.random() * (len(node.body) + 1))
        return node.around(word if rng.random() < 0.5 else node.body[:at] + word + node.body[at:])

    def _spoiled(self, rng: Random, data: bytes) -> bytes:
        """A few bytes are wrong, wherever they lie."""
        out = bytearray(data)
        for _ in range(1 + int(rng.random() * rng.random() * 4)):
            at = int(rng.random() * len(out)) if out else 0
            draw = rng.random()
            if draw < 0.35 and out:
                out[at] ^= 1 << int(rng.random() * 8)
            elif draw < 0.5 and out:
                out[at] = int(rng.random() * 256)
            elif draw < 0.6:
                del out[at:]
            elif draw < 0.7:
                del out[at : at + 1 + int(rng.random() * 40)]
            elif draw < 0.8:
                out[at:at] = _VARINTS[int(rng.random() * len(_VARINTS))]
            elif draw < 0.9:
                out[at:at] = out[at : at + 1 + int(rng.random() * 40)]
            else:
                other = self._trees[int(rng.random() * len(self._trees))].whole
                out[at:] = other[int(rng.random() * (len(other) + 1)) :]
        return bytes(out)


def _dropped(rng: Random, node: Node) -> bytes:
    return b""


def _repeated(rng: Random, node: Node) -> bytes:
    times = _TIMES[int(rng.random() * rng.random() * len(_TIMES))]
    return node.whole * times if len(node.whole) * times <= LONGEST else node.whole * 2


def _lying(rng: Random, node: Node) -> bytes:
    """A length that is not that of what follows."""
    if not node.sized:
        return node.whole
    if rng.random() < 0.5:
        length = max(0, len(node.body) + (1 if rng.random() < 0.5 else -1))
    else:
        length = NUMBERS[int(rng.random() * len(NUMBERS))]
    return node.head + varint(length) + node.body


def _renamed(rng: Random, node: Node) -> bytes:
    """Another field, or another wire type; an unknown field."""
    return bytes([int(rng.random() * 256)]) + node.whole[len(node.head) :]


def _shuffled(rng: Random, node: Node) -> bytes:
    pieces = node.pieces[:]
    rng.shuffle(pieces)
    return node.around(b"".join(pieces))


def _nested(rng: Random, node: Node) -> bytes:
    """The node within itself, again and again, or groups that never end."""
    depth = _DEPTHS[int(rng.random() * len(_DEPTHS))]
    if not node.sized:
        return (b"\x0b" if rng.random() < 0.5 else b"[") * depth + node.body
    inner = node.whole
    while depth and len(inner) < LONGEST:
        inner = node.around(inner)
        depth -= 1
    return inner


_ANYWHERE = (_dropped, _repeated, _lying, _renamed)
