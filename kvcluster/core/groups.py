"""Groups of layers: what a model keeps of each token or block, in which layers, and which part of that a rank holds.

A *group* is a set of layers with one block table; a *plane* is one tensor kind of a group (K, V, a latent); a *part* is
the rectangle of layers and heads of a group that one rank holds. Layers of a part are counted within the group, from
zero. This module knows sizes, never an address.

`cover` finds which of several parts are needed to fill another one. The rectangle to fill is cut at every edge of a
part, into rows of layers and columns of heads that no edge crosses. What is still missing of this grid is one integer
with a bit for each cell, so a part is compared with it in a few operations on integers, whatever the number of cells
that it spans. For n parts that is n operations on at most (2n + 1)^2 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.errors import SpecError

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "opaque": 1,
}

_MAX_NUMBER = 2**63

MAX_LAYERS = limits.SPEC_BYTES // 8
"""The most layers of a spec: each takes 8 of its bytes."""


def check_number(value: object, least: int, what: str) -> None:
    """Raises SpecError, which names `what`, unless the value is an integer of at least `least` and below 2**63."""
    if type(value) is not int or not least <= value < _MAX_NUMBER:
        raise SpecError(f"{what} must be an integer of at least {least} and below 2**63, not {value!r}")


def check_text(value: object, what: str) -> None:
    """Raises SpecError, which names `what`, unless the value is text that UTF-8 can encode."""
    try:
        if not isinstance(value, str):
            raise SpecError(f"{what} must be text, not {value!r}")
        value.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{what} {value!r} cannot be encoded as UTF-8") from None


def as_tuple(values: object, kind: type, what: str) -> tuple[Any, ...]:
    """Returns the values, each of this type, as a tuple. Raises SpecError, which names `what`, if they are something
    else, or more than a spec can have."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise SpecError(f"{what} must be a sequence, each of type {kind.__name__}, not {values!r}")
    taken = tuple(islice(values, MAX_LAYERS + 1))
    if len(taken) > MAX_LAYERS:
        raise SpecError(f"{what} has more than {MAX_LAYERS} items, which is more than a spec can have")
    for value in taken:
        if type(value) is not kind:
            raise SpecError(f"{what} must be a sequence, each of type {kind.__name__}, and has {value!r}")
    return taken


def dtype_name(dtype: object) -> str:
    """Returns the name of a dtype that is given by its name, or as torch, numpy or JAX have it: `torch.float16`,
    `numpy.float16` and `numpy.dtype("float16")` are "float16". Something else is returned as text, and so is a dtype of
    numpy in another byte order than that of this machine: ">f4"."""
    if getattr(dtype, "isnative", True) is False:
        return str(dtype)
    if isinstance(dtype, type):
        return dtype.__name__
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return str(name or dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor kind of a group. `heads` and `dim` are those of the whole model, not of a rank.

    A plane that is not interpreted is `Plane.opaque(name, nbytes)`: one run of bytes per layer, block and head,
    whatever the number of tokens. Recurrent state is opaque, and so is KV that an attention kernel packs in its own
    order: then `packing` names that order, and only engines with the same packing share a namespace. All other planes
    are in page layout, and their `packing` is "".

        kvcluster.Plane("k", heads=8, dim=128, dtype="bfloat16")

    `dtype` is one of DTYPE_BYTES, or the dtype of torch, numpy or JAX of that name. Raises SpecError for another dtype
    or impossible sizes.
    """

    name: str
    heads: int
    dim: int
    dtype: str
    packing: str = ""

    def __post_init__(self) -> None:
        check_text(self.name, "a plane's name")
        if not self.name:
            raise SpecError("a plane needs a name, such as 'k'")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"plane {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        check_number(self.heads, 1, f"plane {self.name!r}: heads")
        check_number(self.dim, 1, f"plane {self.name!r}: dim")
        check_text(self.packing, f"plane {self.name!r}: packing")
        if self.packing and self.dtype != "opaque":
            raise SpecError(
                f"plane {self.name!r}: packing {self.packing!r} is allowed for opaque planes only: give the "
                "values in page layout, or use Plane.opaque"
            )

    @classmethod
    def opaque(cls, name: str, nbytes: int, *, heads: int = 1, packing: str = "") -> Plane:
        """Returns a plane of `nbytes` uninterpreted bytes per layer, block and head."""
        return cls(name, heads, nbytes, "opaque", packing)

    def nbytes(self, *, block_tokens: int, heads: int) -> int:
        """Bytes of one layer of one block for that many heads."""
        if self.dtype == "opaque":
            return heads * self.dim
        return block_tokens * heads * self.dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Which blocks before a boundary a group needs in order to continue from it.

    `prefix`: every one. `window`: those that hold the last `tokens` - 1 tokens. `chunk`: those that hold tokens of the
    chunk of the next token, where positions are divided into chunks of `tokens`. `last`: only the last. There are the
    constants PREFIX and LAST, and the functions `window(tokens)` and `chunk(tokens)`.

        kvcluster.Group(layers=range(8), planes=[kvcluster.Plane.opaque("state", 4_096)], reuse=kvcluster.LAST)
    """

    kind: str
    tokens: int = 0

    def __post_init__(self) -> None:
        check_text(self.kind, "the kind of a reuse")
        if self.kind not in ("prefix", "window", "chunk", "last"):
            raise SpecError(f"reuse {self.kind!r} is not one of prefix, window, chunk, last")
        check_number(self.tokens, 0, f"the tokens of a {self.kind}")
        if (self.tokens > 0) != (self.kind in ("window", "chunk")):
            raise SpecError("reuse 'window' and 'chunk' need their number of tokens; the others take none")

    def blocks_needed(self, boundary: int, block_tokens: int) -> int:
        """Returns the number of blocks immediately before block number `boundary` that are needed."""
        if self.kind != "chunk":
            return self.most_needed(boundary, block_tokens)
        begins = boundary * block_tokens // self.tokens * self.tokens
        return boundary - begins // block_tokens

    def most_needed(self, boundary: int, block_tokens: int) -> int:
        """Returns the most that `blocks_needed` is of any boundary up to that one. It never falls as boundaries grow,
        and `blocks_needed` does where a chunk begins."""
        if self.kind == "prefix":
            return boundary
        if self.kind == "last":
            return min(boundary, 1)
        return min(boundary, -(-(self.tokens - 1) // block_tokens))

    @property
    def span(self) -> str:
        """The tokens that a token attends to, in words: "a window of 4,096 tokens"; "" if they are all before it, or
        are known by a state."""
        what = {"window": "a window", "chunk": "chunks"}.get(self.kind)
        return f"{what} of {self.tokens:,} tokens" if what else ""


PREFIX = Reuse("prefix")
LAST = Reuse("last")


def window(tokens: int) -> Reuse:
    """Returns the reuse rule of a sliding window over the last `tokens` tokens, for a Group. Raises SpecError unless it
    is a number above 0.

        kvcluster.window(4_096).blocks_needed(boundary=1_000, block_tokens=16)       # 256
    """
    return Reuse("window", tokens)


def chunk(tokens: int) -> Reuse:
    """Returns the reuse rule of attention within chunks of `tokens` tokens, as of Llama 4, for a Group: a token attends
    to those of its own chunk up to itself. Raises SpecError unless it is a number above 0.

        kvcluster.chunk(8_192).blocks_needed(boundary=1_000, block_tokens=16)       # 488: tokens 8,192 to 15,999
    """
    return Reuse("chunk", tokens)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table. `layers` are the model's own layer numbers, ascending; `planes` is what each
    of them keeps, and `reuse` states which blocks before a boundary are needed to continue from there.

        k, v = (kvcluster.Plane(name, heads=8, dim=128, dtype="bfloat16") for name in "kv")
        full = kvcluster.Group(layers=range(0, 32, 2), planes=[k, v])
        local = kvcluster.Group(layers=range(1, 32, 2), planes=[k, v], reuse=kvcluster.window(4_096))

    Raises SpecError if they do not fit one another.
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    reuse: Reuse = PREFIX

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", as_tuple(self.layers, int, "layers"))
        object.__setattr__(self, "planes", as_tuple(self.planes, Plane, "planes"))
        if type(self.reuse) is not Reuse:
            raise SpecError(f"reuse must be PREFIX, LAST, window(tokens) or chunk(tokens), not {self.reuse!r}")
        for layer in self.layers:
            check_number(layer, 0, "a layer number")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise SpecError("a group's layers must be distinct, ascending layer numbers, at least one")
        if not self.planes or len({plane.name for plane in self.planes}) != len(self.planes):
            raise SpecError("a group needs at least one plane, and their names must differ")
        if len({plane.heads for plane in self.planes}) != 1:
            raise SpecError("the planes of a group must have the same number of heads; use two groups")

    def __repr__(self) -> str:
        first, second, last = self.layers[0], [*self.layers, 0][1], self.layers[-1]
        by_step = range(first, last + 1, second - first) if len(self.layers) > 1 else ()
        layers = by_step if tuple(by_step) == self.layers else self.layers
        return f"Group(layers={layers!r}, planes={self.planes!r}, reuse={self.reuse!r})"

    @property
    def heads(self) -> int:
        """KV heads of the whole model in this group."""
        return self.planes[0].heads

    def layer_bytes(self, *, block_tokens: int, heads: int) -> int:
        """Bytes of one layer of one block for that many heads, all planes."""
        return sum(plane.nbytes(block_tokens=block_tokens, heads=heads) for plane in self.planes)


class Part(NamedTuple):
    """A rectangle of layers x heads of one group, both ranges half open, layers counted in the group: what one rank of
    an engine holds.

        kvcluster.Part(layer_start=0, layer_stop=2, head_start=0, head_stop=4)       # layers 0 and 1, heads 0 to 3
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.layer_stop - self.layer_start

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.head_stop - self.head_start

    def intersect(self, other: Part) -> Part | None:
        """Returns the rectangle that both contain, or None."""
        both = self
        if self != other:  # most are equal, and calls are many
            both = Part(
                max(self.layer_start, other.layer_start),
                min(self.layer_stop, other.layer_stop),
                max(self.head_start, other.head_start),
                min(self.head_stop, other.head_stop),
            )
        return both if both.layers > 0 and both.heads > 0 else None

    def __str__(self) -> str:
        return f"layers {self.layer_start}:{self.layer_stop}, heads {self.head_start}:{self.head_stop}"


class PageKey(NamedTuple):
    """A page: the bytes of one block for one group and part."""

    hash: BlockHash
    group: int
    part: Part


def cover(whole: Part, parts: Sequence[Part]) -> tuple[list[int], bool]:
    """Takes the parts in order and returns the indices of those that fill something that no earlier one does, up to the
    one that fills the last hole. The second value is False if all parts together do not fill `whole`."""
    held = [part.intersect(whole) for part in parts]
    rows = _edges(whole.layer_start, whole.layer_stop, [(p.layer_start, p.layer_stop) for p in held if p])
    columns = _edges(whole.head_start, whole.head_stop, [(p.head_start, p.head_stop) for p in held if p])
    width = len(columns) - 1
    missing = (1 << width * (len(rows) - 1)) - 1
    first_column = _repeated(width, len(rows) - 1)
    chosen: list[int] = []
    for index, part in enumerate(held):
        if part is None:
            continue
        top, bottom = rows[part.layer_start], rows[part.layer_stop]
        starts = (first_column & (1 << width * (bottom - top)) - 1) << width * top
        cells = (starts << columns[part.head_stop]) - (starts << columns[part.head_start])
        filled = cells & missing
        if filled:
            chosen.append(index)
            missing ^= filled
            if not missing:
                break
    return chosen, not missing


def bits(whole: Part, parts: int) -> int:
    """Returns the maximum number of bits of the grid for `parts` parts: the cost of one part in `cover`."""
    most = 2 * parts + 1
    return min(most, whole.layers) * min(most, whole.heads)


def _edges(start: int, stop: int, ranges: list[tuple[int, int]]) -> dict[int, int]:
    """Returns the coordinates at which a grid is cut, each with the number of its cut."""
    edges = {start, stop, *(edge for pair in ranges for edge in pair)}
    return {edge: number for number, edge in enumerate(sorted(edges))}


def _repeated(width: int, rows: int) -> int:
    """Returns an integer with the lowest bit of each of `rows` rows set."""
    bit, doubled = 1, 1
    while doubled < rows:
        bit |= bit << width * doubled
        doubled *= 2
    return bit & (1 << width * rows) - 1
