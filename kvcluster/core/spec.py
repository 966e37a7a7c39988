"""KVSpec: the description of KV that identifies a namespace, and the geometry derived from it.

Blocks are interchangeable only if all of this is equal: model, weights, adapter, block size, rotary settings,
groups of layers and their planes, and the tenant. The digest of all that is the root of every block hash
(hashing.py), so KV of another model or tenant is not refused: it is never found.

Groups, planes and parts are those of groups.py. This module knows sizes and identity, never an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from kvcluster.core import limits
from kvcluster.core.groups import MAX_LAYERS, Group, Part, Plane, as_tuple, check_number, check_text, dtype_name
from kvcluster.core.ids import NamespaceId, Tenant
from kvcluster.errors import SpecError

_MUTABLE_WEIGHTS = frozenset({"main", "master", "latest", "head", "default", "dev", "prod", "stable", "current"})
_BRANCHES = ("refs/heads/", "refs/remotes/", "heads/", "remotes/", "origin/")
MAX_BLOCK_TOKENS = 4_096
_CANONICAL_VERSION = b"kvcluster-spec-v2"

PRIVATE_WEIGHTS = "private:"
"""The prefix of the weights of an engine that shares its KV with no other engine; a random id follows it."""


RUN_WEIGHTS = "run:"
"""The prefix of the weights of a training run: "run:NAME/VERSION/DIGEST" is one version of them."""


def run_of(weights: str) -> str:
    """Returns "run:NAME" for a version of a training run's weights, "" for any other weights."""
    run, _, version = weights.partition("/") if weights.startswith(RUN_WEIGHTS) else ("", "", "")
    return run if version else ""


def check_weights(weights: str) -> None:
    """Raises SpecError if `weights` is a name that can change its meaning, such as "main" or any branch."""
    name = weights.strip().lower()
    if not name or name in _MUTABLE_WEIGHTS or name.startswith(_BRANCHES):
        raise SpecError(
            f"weights={weights!r} does not pin the weights: give a digest or commit, such as 'sha256:...'; "
            "under a name that can move, stale KV would be used as if it were current"
        )


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
        object.__setattr__(self, "groups", as_tuple(self.groups, Group, "groups"))
        object.__setattr__(self, "extra", _pairs(self.extra))
        for name in ("model", "weights", "adapter", "rope"):
            check_text(getattr(self, name), name)
        if not self.model:
            raise SpecError("model must be named")
        check_weights(self.weights)
        check_number(self.block_tokens, 1, "block_tokens")
        if type(self.private) is not bool:
            raise SpecError(f"private must be true or false, not {self.private!r}")
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise SpecError(f"block_tokens must be at most {MAX_BLOCK_TOKENS}, not {self.block_tokens}")
        if not self.groups:
            raise SpecError("a spec needs at least one group of layers")
        everything = [layer for group in self.groups for layer in group.layers]
        if len(everything) != len(set(everything)):
            raise SpecError("a layer belongs to one group only")
        keys = [key for key, _ in self.extra]
        if keys != sorted(set(keys)):
            raise SpecError("extra must be sorted pairs without repeats of a key")
        for group in self.groups:
            if group.layer_bytes(block_tokens=self.block_tokens, heads=group.heads) > limits.LAYER_BYTES:
                raise SpecError(
                    f"one layer of a block would take more than {limits.LAYER_BYTES >> 20} MiB; lower block_tokens"
                )
        # The private spec of every valid one is valid.
        if len(self.canonical()) > limits.SPEC_BYTES + (len(_PRIVATE) if self.private else 0):
            raise SpecError(self._too_long())

    def _too_long(self) -> str:
        """Returns what makes a spec exceed limits.SPEC_BYTES: its longest value, or its groups."""
        extra = "".join(text for pair in self.extra for text in pair)
        texts = {
            "model": self.model,
            "weights": self.weights,
            "adapter": self.adapter,
            "rope": self.rope,
            "extra": extra,
        }
        name, nbytes = max(((name, len(text.encode())) for name, text in texts.items()), key=lambda each: each[1])
        most = f"the spec takes more than {limits.SPEC_BYTES >> 10} KiB"
        if 2 * nbytes < limits.SPEC_BYTES:
            return f"{most}: its {len(self.groups)} groups of layers take most of that; merge those that are alike"
        return f"{most}: `{name}` is too long, with {nbytes:,} bytes; shorten it"

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
        numbers = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for what, number in numbers.items():
            check_number(number, 1, what)
        if num_layers > MAX_LAYERS:
            raise SpecError(f"num_layers must be at most {MAX_LAYERS}, not {num_layers}")
        if extra is not None and not isinstance(extra, Mapping):
            raise SpecError(f"extra must be a mapping from text to text, or None, not {extra!r}")
        name = dtype_name(dtype)
        planes = (Plane("k", num_kv_heads, head_dim, name), Plane("v", num_kv_heads, head_dim, name))
        return cls(
            model=model,
            weights=weights,
            block_tokens=block_tokens,
            groups=(Group(tuple(range(num_layers)), planes),),
            adapter=adapter,
            rope=rope,
            extra=tuple(sorted(_pairs(tuple((extra or {}).items())))),
        )

    def whole(self, group: int) -> Part:
        """The part that covers all of a group."""
        return Part(0, len(self.groups[group].layers), 0, self.groups[group].heads)

    def whole_parts(self) -> tuple[Part, ...]:
        """The part that covers all of each group."""
        return tuple(self.whole(group) for group in range(len(self.groups)))

    def check_part(self, group: int, part: Part) -> None:
        """Raises SpecError if `part` does not lie within `group`."""
        if type(group) is not int or not 0 <= group < len(self.groups):
            raise SpecError(f"group {group!r} does not exist; the spec has {len(self.groups)}")
        given: object = part
        if not isinstance(given, Part) or any(type(bound) is not int for bound in given):
            raise SpecError(f"part must be a Part of four integers, not {part!r}")
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


def _pairs(extra: object) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of `extra`. Raises SpecError if they are something else."""
    if not isinstance(extra, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in extra
    ):
        raise SpecError(f"extra must be pairs of texts, such as (('engine', 'vllm'),), not {extra!r}")
    for text in (text for pair in extra for text in pair):
        check_text(text, "extra:")
    return tuple((key, value) for key, value in extra)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _number(len(encoded)) + encoded


_PRIVATE = _text("private")
