"""KVSpec: the description of KV that identifies a namespace, and the geometry derived from it.

Blocks are interchangeable only if all of this is equal: model, weights, adapter, block size, rotary settings,
groups of layers and their planes, and the tenant. The digest of all that is the root of every block hash
(hashing.py), so KV of another model or tenant is not refused: it is never found.

A *group* is a set of layers with one block table; a *plane* is one tensor kind of a group (K, V, a
latent); a *part* is the rectangle of layers and heads of a group that one rank holds. Layers of a part
are counted within the group, from zero. This module knows sizes and identity, never an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId, Tenant
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

_MUTABLE_WEIGHTS = frozenset({"main", "master", "latest", "head", "default", "dev", "prod", "stable", "current"})
MAX_BLOCK_TOKENS = 4_096
_MAX_NUMBER = 2**63
_CANONICAL_VERSION = b"kvcluster-spec-v2"


def _check_number(value: object, least: int, what: str) -> None:
    if type(value) is not int or not least <= value < _MAX_NUMBER:
        raise SpecError(f"{what} must be an integer of at least {least} and below 2**63, not {value!r}")


def _check_text(value: object) -> None:
    try:
        if not isinstance(value, str):
            raise SpecError(f"model, weights, adapter, rope, extra and packing are text, not {value!r}")
        value.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{value!r} cannot be encoded as UTF-8") from None


def dtype_name(dtype: object) -> str:
    """Returns the name of a dtype that is given by its name, or as torch, numpy or JAX have it: `torch.float16`,
    `numpy.float16` and `numpy.dtype("float16")` are "float16". Something else is returned as text."""
    if isinstance(dtype, type):
        return dtype.__name__
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return str(name or dtype).removeprefix("torch.")


PRIVATE_WEIGHTS = "private:"
"""The prefix of the weights of an engine that shares its KV with no other engine; a random id follows it."""


def check_weights(weights: str) -> None:
    """Raises SpecError if `weights` is a name that can change its meaning, such as "main"."""
    if not weights or weights.strip().lower() in _MUTABLE_WEIGHTS:
        raise SpecError(
            f"weights={weights!r} does not pin the weights: give a digest or commit, such as 'sha256:...'; "
            "under a name that can move, stale KV would be used as if it were current"
        )


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
        if not self.name:
            raise SpecError("a plane needs a name, such as 'k'")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"plane {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        _check_number(self.heads, 1, f"plane {self.name!r}: heads")
        _check_number(self.dim, 1, f"plane {self.name!r}: dim")
        _check_text(self.packing)
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

    `prefix`: every one. `window`: those that hold the last `tokens` - 1 tokens. `last`: only the last. There are the
    constants PREFIX and LAST, and `window(tokens)`.

        kvcluster.Group(layers=range(8), planes=[kvcluster.Plane.opaque("state", 4_096)], reuse=kvcluster.LAST)
    """

    kind: str
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("prefix", "window", "last"):
            raise SpecError(f"reuse {self.kind!r} is not one of prefix, window, last")
        _check_number(self.tokens, 0, "the tokens of a window")
        if (self.tokens > 0) != (self.kind == "window"):
            raise SpecError("reuse 'window' needs its number of tokens; the others take none")

    def blocks_needed(self, boundary: int, block_tokens: int) -> int:
        """Returns the number of blocks immediately before block number `boundary` that are needed."""
        if self.kind == "prefix":
            return boundary
        if self.kind == "last":
            return min(boundary, 1)
        return min(boundary, -(-(self.tokens - 1) // block_tokens))


PREFIX = Reuse("prefix")
LAST = Reuse("last")


def window(tokens: int) -> Reuse:
    """Returns the reuse rule of a sliding window over the last `tokens` tokens, for a Group. Raises SpecError unless it
    is a number above 0.

        kvcluster.window(4_096).blocks_needed(boundary=1_000, block_tokens=16)       # 256
    """
    return Reuse("window", tokens)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table. `layers` are the model's own layer numbers, ascending; `planes` is what each
    of them keeps, and `reuse` says which blocks before a boundary are needed to continue from there.

        k, v = (kvcluster.Plane(name, heads=8, dim=128, dtype="bfloat16") for name in "kv")
        full = kvcluster.Group(layers=range(0, 32, 2), planes=[k, v])
        local = kvcluster.Group(layers=range(1, 32, 2), planes=[k, v], reuse=kvcluster.window(4_096))

    Raises SpecError if they do not fit one another.
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    reuse: Reuse = PREFIX

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "planes", tuple(self.planes))
        for layer in self.layers:
            _check_number(layer, 0, "a layer number")
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


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Everything that must match for KV to be reusable. Immutable; compare by value. `KVSpec.uniform` makes the plain
    case, of layers that are all alike:

        spec = kvcluster.KVSpec.uniform(model="llama-3-8b", weights="sha256:9f1c...", num_layers=32, num_kv_heads=8,
                                        head_dim=128, dtype="bfloat16", block_tokens=16)
        spec.block_bytes                                     # 2 MiB of KV in a block of 16 tokens

    `weights` is a fingerprint of the exact weights (a digest or a commit), required because stale KV
    after a weight update is the worst failure that users of other caches report; mutable names such as
    "main" are refused. `adapter` is the content hash of a LoRA, or "". `rope` is any text that pins the
    rotary settings. `extra` is sorted pairs of anything else that must match. `private` marks the namespace of the
    private pages of sequences (docs/adr/0047), whose ids are random; no prefix lookup is made there. Raises SpecError,
    which names the field, for a spec that cannot be right.
    """

    model: str
    weights: str
    block_tokens: int
    groups: tuple[Group, ...]
    adapter: str = ""
    rope: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    private: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "extra", tuple((key, value) for key, value in self.extra))
        for text in (
            self.model,
            self.weights,
            self.adapter,
            self.rope,
            *(text for pair in self.extra for text in pair),
        ):
            _check_text(text)
        if not self.model:
            raise SpecError("model must be named")
        check_weights(self.weights)
        _check_number(self.block_tokens, 1, "block_tokens")
        if type(self.private) is not bool:
            raise SpecError(f"private must be true or false, not {self.private!r}")
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise SpecError(f"block_tokens must be at most {MAX_BLOCK_TOKENS}, not {self.block_tokens}")
        if not self.groups:
            raise SpecError("a spec needs at least one group of layers")
        everything = [layer for group in self.groups for layer in group.layers]
        if len(everything) != len(set(everything)):
            raise SpecError("a layer belongs to one group only")
        if list(self.extra) != sorted(set(self.extra)):
            raise SpecError("extra must be sorted pairs without repeats")
        for group in self.groups:
            if group.layer_bytes(block_tokens=self.block_tokens, heads=group.heads) > limits.LAYER_BYTES:
                raise SpecError(
                    f"one layer of a block would take more than {limits.LAYER_BYTES >> 20} MiB; lower block_tokens"
                )
        # The private spec of every valid one is valid.
        if len(self.canonical()) > limits.SPEC_BYTES + (len(_PRIVATE) if self.private else 0):
            raise SpecError(f"the spec takes more than {limits.SPEC_BYTES >> 10} KiB; shorten `extra` or `rope`")

    @classmethod
    def uniform(
        cls,
        *,
        model: str,
        weights: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: object,
        block_tokens: int = 16,
        adapter: str = "",
        rope: str = "",
        extra: Mapping[str, str] | None = None,
    ) -> KVSpec:
        """Returns the spec of the plain case: every layer holds K and V of one shape, and every block of a prefix is
        needed. `dtype` is a name, such as "bfloat16", or the dtype of torch, numpy or JAX of that name; `num_kv_heads`
        and `head_dim` are those of the whole model. The others are as in KVSpec. Raises SpecError."""
        _check_number(num_layers, 1, "num_layers")
        name = dtype_name(dtype)
        planes = (Plane("k", num_kv_heads, head_dim, name), Plane("v", num_kv_heads, head_dim, name))
        return cls(
            model=model,
            weights=weights,
            block_tokens=block_tokens,
            groups=(Group(tuple(range(num_layers)), planes),),
            adapter=adapter,
            rope=rope,
            extra=tuple(sorted((extra or {}).items())),
        )

    def whole(self, group: int) -> Part:
        """The part that covers all of a group."""
        return Part(0, len(self.groups[group].layers), 0, self.groups[group].heads)

    def whole_parts(self) -> tuple[Part, ...]:
        """The part that covers all of each group."""
        return tuple(self.whole(group) for group in range(len(self.groups)))

    def check_part(self, group: int, part: Part) -> None:
        """Raises SpecError if `part` does not lie within `group`."""
        if not 0 <= group < len(self.groups):
            raise SpecError(f"group {group} does not exist; the spec has {len(self.groups)}")
        whole = self.whole(group)
        if whole.intersect(part) != part:
            raise SpecError(f"part ({part}) does not lie within group {group} ({whole})")

    def layer_bytes(self, group: int, part: Part) -> int:
        """Bytes of one layer of a page of that part."""
        return self.groups[group].layer_bytes(block_tokens=self.block_tokens, heads=part.heads)

    def page_bytes(self, group: int, part: Part) -> int:
        """Bytes of a raw page: [layers, planes, block_tokens, heads, dim] of that part."""
        return part.layers * self.layer_bytes(group, part)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole raw block: of all pages of all groups."""
        return sum(self.page_bytes(i, self.whole(i)) for i in range(len(self.groups)))

    @property
    def token_bytes(self) -> float:
        """Bytes of KV per token, over all groups; the break-even calculation uses it."""
        return self.block_bytes / self.block_tokens

    def canonical(self) -> bytes:
        """Returns bytes that are equal exactly if the specs are: length-framed fields in declared order."""
        out = [_CANONICAL_VERSION]
        out += [_text(self.model), _text(self.weights), _text(self.adapter), _text(self.rope)]
        out += [_number(self.block_tokens), _number(len(self.groups))]
        for group in self.groups:
            out += [_text(group.reuse.kind), _number(group.reuse.tokens), _number(len(group.layers))]
            out += [_number(layer) for layer in group.layers]
            out += [_number(len(group.planes))]
            for plane in group.planes:
                out += [_text(plane.name), _number(plane.heads), _number(plane.dim)]
                out += [_text(plane.dtype), _text(plane.packing)]
        out += [_number(len(self.extra))]
        for key, value in self.extra:
            out += [_text(key), _text(value)]
        if self.private:
            out.append(_PRIVATE)
        return b"".join(out)

    def namespace(self, tenant: Tenant) -> NamespaceId:
        """The digest of this spec for one tenant: SHA-256 over the canonical bytes and the tenant."""
        return _namespace(self, tenant)


@lru_cache(maxsize=1_024)  # called for each attach and each spec in a report, with few distinct specs
def _namespace(spec: KVSpec, tenant: Tenant) -> NamespaceId:
    return NamespaceId(hashlib.sha256(spec.canonical() + _text(tenant)).digest())


def differing_fields(one: KVSpec, other: KVSpec) -> tuple[str, ...]:
    """Returns the names of the differences between two specs, for people: `weights`, `dtype`, `extra.engine`...

    `extra.KEY` is one pair of `extra`; `packing` is the order in which an attention kernel packs KV, also if only one
    of the two packs it; `dtype` is the planes' number format; `layout` is any other difference of groups.
    """
    names = [
        field.name
        for field in fields(KVSpec)
        if field.name not in ("groups", "extra") and getattr(one, field.name) != getattr(other, field.name)
    ]
    names += [f"extra.{key}" for key in sorted({key for key, _ in set(one.extra) ^ set(other.extra)})]
    if one.groups != other.groups:
        names += _differing_groups(one.groups, other.groups)
    return tuple(names)


def _differing_groups(one: Sequence[Group], other: Sequence[Group]) -> list[str]:
    if _packings(one) != _packings(other):  # then names and sizes of planes follow from it
        alike = [(g.layers, g.reuse, g.heads) for g in one] == [(g.layers, g.reuse, g.heads) for g in other]
        return ["packing"] if alike else ["packing", "layout"]
    return ["dtype" if _without_dtypes(one) == _without_dtypes(other) else "layout"]


def _packings(groups: Sequence[Group]) -> list[str]:
    return sorted({plane.packing for group in groups for plane in group.planes})


def _without_dtypes(groups: Sequence[Group]) -> list[object]:
    return [(g.layers, g.reuse, [(p.name, p.heads, p.dim, p.packing) for p in g.planes]) for g in groups]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _number(len(encoded)) + encoded


_PRIVATE = _text("private")
