"""Layouts: how the caller's memory is laid out, in the terms that engines use; and the checks of the arguments of a
call.

A layout only describes where blocks lie: transfers/bound_memory.py binds it to a spec, and checks it. Wherever it has a
tensor, it takes an array of another library as well: a numpy array, or one with DLPack.

The arguments of a call are checked before the client asks or moves anything. Every check raises CallerError (SpecError,
LimitError), which names what was given and what to give instead. A wrong argument is wrong with or without a cluster,
so no check here asks one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from kvcluster.core import hashing, limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, TENANT_NAME, BlockHash, Tenant
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LimitError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer


MAX_SECONDS = 10 * 365 * 86_400
"""Longer than any time that makes sense, and it fits the wire in nanoseconds."""


def check_connect(spec: object, token: object, reads: object) -> Tenant | None:
    """Checks what a client is made from. Returns the tenant whose KV it reads, None for its own."""
    if not isinstance(spec, KVSpec):
        raise CallerError(f"spec is {kind_of(spec)}; expected a KVSpec, such as kvcluster.KVSpec.uniform(model=...)")
    if token is not None and not isinstance(token, str):
        raise CallerError(f"token is {kind_of(token)}; expected the credential as text, or None")
    if reads is not None and (not isinstance(reads, str) or not TENANT_NAME.fullmatch(reads)):
        raise CallerError(f"reads={reads!r} is not the name of a tenant, such as 'public'; None for this token's own")
    return Tenant(reads) if reads is not None else None


def check_open(closed: bool) -> None:
    """Refuses a call of a closed client."""
    if closed:
        raise CallerError("this client is closed; connect again")


def check_hashes(hashes: Sequence[BlockHash]) -> None:
    """Checks a chain of block hashes. Raises LimitError if it exceeds limits.BLOCKS_PER_PROMPT."""
    given: object = hashes
    if not isinstance(given, (list, tuple)):
        raise CallerError(f"block hashes are a list, not {kind_of(given)}; make them with client.hashes(...)")
    if len(hashes) > limits.BLOCKS_PER_PROMPT:
        raise LimitError(
            f"a prompt of {len(hashes)} blocks exceeds the limit of {limits.BLOCKS_PER_PROMPT}: give its leading "
            f"{limits.BLOCKS_PER_PROMPT} blocks alone, or use a spec of larger block_tokens"
        )
    if any(type(block) is not bytes or len(block) != HASH_BYTES for block in hashes):
        raise CallerError("block hashes are 32 bytes each; make them with client.hashes(...) or hashing.foreign")


def check_first(first: int, hashes: Sequence[BlockHash]) -> None:
    """Checks the index in its chain at which a load or store begins."""
    if type(first) is not int or not 0 <= first <= len(hashes):
        raise CallerError(f"first={first!r} does not lie within the {len(hashes)} hashes")


def check_tokens_of(token_ids: Sequence[int], blocks: int, block_tokens: int) -> None:
    """Checks that there are no token ids, or exactly those of `blocks` full blocks."""
    hashing.token_bytes(token_ids)
    if len(token_ids) and len(token_ids) != blocks * block_tokens:
        raise CallerError(f"{len(token_ids)} token ids are not those of {blocks} blocks of {block_tokens} tokens")


def check_loss(loss: Loss) -> Loss:
    """Checks that `loss` is a Loss, and returns it."""
    given: object = loss
    if not isinstance(given, Loss):
        names = ", ".join(f"Loss.{one.name}" for one in Loss)
        raise CallerError(f"{loss!r} is no loss; pass one of {names} of kvcluster.Loss")
    return loss


def pin_terms(ttl_s: float, replicas: int) -> tuple[int, int]:
    """Checks the terms of a pin. Returns its time in nanoseconds and the number of shards."""
    if not _is_number(ttl_s) or not 0 < ttl_s <= MAX_SECONDS:
        raise CallerError(f"ttl_s={ttl_s!r} is not a number of seconds above 0 and up to {MAX_SECONDS}")
    if type(replicas) is not int or not 1 <= replicas <= limits.REPLICAS:
        raise CallerError(f"replicas={replicas!r} is not a number of shards from 1 to {limits.REPLICAS}")
    return int(ttl_s * 1e9), replicas


def check_tokens(name: str, tokens: int) -> int:
    """Returns a number of tokens. Raises CallerError if no sequence can have that many."""
    if type(tokens) is not int or not 1 <= tokens <= limits.TOKENS_PER_SEQUENCE:
        raise CallerError(f"{name} is {tokens!r}; expected 1 to {limits.TOKENS_PER_SEQUENCE}")
    return tokens


def check_deadline_ms(deadline_ms: float) -> float:
    """Returns the deadline of a call, 0.0 for a negative one: such a call ends at once, with a miss. Raises CallerError
    if it is no number, or longer than MAX_SECONDS."""
    if not _is_number(deadline_ms) or not deadline_ms <= MAX_SECONDS * 1e3:
        raise CallerError(f"deadline_ms={deadline_ms!r} is not a number of milliseconds; every call ends in time")
    return max(0.0, deadline_ms)


def check_filters(**filters: str | None) -> None:
    """Checks that a purge names at least one field, and each as text."""
    if all(value is None for value in filters.values()):
        raise CallerError(
            f"purge names nothing: give one of {', '.join(filters)}, or call clear() to remove everything"
        )
    for name, value in filters.items():
        if value is not None and not isinstance(value, str):
            raise CallerError(f"{name} is {kind_of(value)}; expected the text that the spec has")


def parts_of(spec: KVSpec, part: Part | Mapping[int, Part] | None) -> tuple[Part | None, ...]:
    """Returns the part that a worker holds of each group of the spec; None for groups left out."""
    if part is None:
        return spec.whole_parts()
    by_group = part if isinstance(part, Mapping) else dict.fromkeys(range(len(spec.groups)), part)
    for of_group in by_group.values():
        given: object = of_group
        if not isinstance(given, tuple) or len(given) != len(Part._fields):
            raise CallerError(f"part is {kind_of(given)}; expected a Part, or a mapping from groups to Parts")
    if not by_group:
        raise CallerError("part names no group; leave it out to hold everything")
    for group, of_group in by_group.items():
        spec.check_part(group, Part(*of_group))
    return tuple(Part(*by_group[group]) if group in by_group else None for group in range(len(spec.groups)))


def parts_given(source: object, parts: tuple[Part | None, ...]) -> tuple[Part | None, ...]:
    """Returns these parts without those of groups for which the source of a store is None, as long as it has a group
    that is to be stored."""
    if not isinstance(source, (list, tuple)) or len(source) != len(parts):
        return parts
    given = tuple(None if of_group is None else part for of_group, part in zip(source, parts, strict=True))
    return given if any(part is not None for part in given) else parts


def kind_of(value: object) -> str:
    """Returns the type of a wrong argument, for a message."""
    return "None" if value is None else f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """One tensor `[blocks, layers, planes, block_tokens, heads, dim]`, of any strides: 2 planes for K and V.

        client.store(token_ids, kvcluster.Dense(kv))         # as client.store(token_ids, kv)

    For a group of one opaque plane it is uint8 `[blocks, layers, nbytes]`, or `[blocks, layers, heads, nbytes]` if
    the plane has several heads. A bare tensor is treated as Dense.
    """

    tensor: Tensor

    def __repr__(self) -> str:
        return f"Dense({_of_shape(self.tensor)})"


class Layers:
    """The layers of a paged cache that many calls use, as `Paged.layers`: checked against the spec by the first call
    and not again, which for 32 layers takes half a millisecond.

        cache = kvcluster.Layers(list(kv.unbind(1)))         # once
        client.store(token_ids, kvcluster.Paged(cache, block_ids=range(4)))

    The tensors stay where they are as long as this object is used: none of them is resized, or given other memory.
    """

    __slots__ = ("_bound", "_tensors")

    def __init__(self, layers: Sequence[Tensor | tuple[Tensor, ...]]) -> None:
        """`layers` as in Paged."""
        self._tensors = tuple(layers) if isinstance(layers, list) else layers
        self._bound: dict[object, Any] = {}

    def __repr__(self) -> str:
        return f"Layers({_of_layers(self._tensors)})"

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, ...]]:
        return iter(self._tensors)

    def __getitem__(self, layer: int) -> Tensor | tuple[Tensor, ...]:
        return self._tensors[layer]

    def bound(self, kind: object, bind: Callable[[Sequence[Tensor | tuple[Tensor, ...]]], Any]) -> Any:
        """Returns what `bind` returned for these layers when it was first called for this `kind` of use."""
        if kind not in self._bound:
            self._bound[kind] = bind(self._tensors)
        return self._bound[kind]


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """A paged cache: block i of a call lies at index `block_ids[i]` of every layer's tensor.

        caches = list(kv.unbind(1))                          # one a layer: [blocks, planes, block_tokens, heads, dim]
        client.store(token_ids, kvcluster.Paged(caches, block_ids=range(4)))

    `layers` holds for each layer of the part, in order, a tensor viewed as `[num_blocks, planes, block_tokens,
    heads, dim]`, of any strides; or a tuple of tensors, one per plane, each `[num_blocks, block_tokens, heads,
    dim]`, which is the only way if planes differ in dim, dtype or strides. An opaque plane is uint8
    `[num_blocks, nbytes]`, or `[num_blocks, heads, nbytes]` if it has several heads. Views are enough: the cache is
    never copied as a whole. For `begin_load`, blocks of a destination that its group does not need to continue after
    the ticket's last block, such as those before a window, may have any id, -1 or one that others have: they are not
    touched. For `load`, which may end after any block, and for a store, every block has an id of its own.
    """

    layers: Sequence[Tensor | tuple[Tensor, ...]] | Layers
    block_ids: Sequence[int] | Tensor

    def __repr__(self) -> str:
        return f"Paged({_of_layers(self.layers)}, {len(self.block_ids)} block ids)"

    @classmethod
    def nhd(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's NHD caches, one per layer: `[2, num_blocks, block_tokens, heads, dim]`."""
        return cls([_permuted(cache, 1, 0, 2, 3, 4) for cache in caches], block_ids)

    @classmethod
    def hnd(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's HND caches, one per layer: `[2, num_blocks, heads, block_tokens, dim]`."""
        return cls([_permuted(cache, 1, 0, 3, 2, 4) for cache in caches], block_ids)

    @classmethod
    def vllm(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's caches on a GPU, one per layer: `[num_blocks, heads, block_tokens, 2 * dim]` of any strides. The
        last dimension is K, then V, of one token and head."""
        layers = []
        for cache in caches:
            dim = _half_of_last(cache)
            layers.append(cache.view(*cache.shape[:3], 2, dim).permute(0, 3, 2, 1, 4))
        return cls(layers, block_ids)

    @classmethod
    def vllm_cpu(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's caches on a CPU whose attention kernel is "vec" or "vec16", one per layer: `[num_blocks, heads,
        block_tokens, 2 * dim]`, contiguous within a head.

        The bytes are in another order than the shape suggests: a head of a block is K as `[dim, block_tokens]`, then V
        as `[block_tokens, dim]`. Other kernels pack K and V in orders of their own: their planes are opaque.
        """
        layers = []
        for cache in caches:
            dim = _half_of_last(cache)
            blocks, heads, tokens, _ = cache.shape
            if cache.stride(3) != 1 or cache.stride(2) != 2 * dim:
                raise CallerError(
                    f"a layer's cache has strides {list(cache.stride())}; expected the {tokens} tokens of a head to be "
                    "contiguous, as vLLM allocates them on a CPU"
                )
            k, v = cache.as_strided((blocks, heads, 2, tokens * dim), (*cache.stride()[:2], tokens * dim, 1)).unbind(2)
            k = k.view(blocks, heads, dim, tokens).permute(0, 3, 1, 2)
            v = v.view(blocks, heads, tokens, dim).permute(0, 2, 1, 3)
            layers.append((k, v))
        return cls(layers, block_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """One contiguous buffer of bytes per block, which holds the page of the whole part, in page layout: `[layers,
    planes, block_tokens, heads, dim]`. Needs no torch.

        pages = [bytearray(spec.block_bytes) for _ in range(4)]
        client.load(token_ids, kvcluster.Buffers(pages))
    """

    pages: Sequence[Buffer]

    def __repr__(self) -> str:
        return f"Buffers({len(self.pages)} pages)"


Memory = Union["Tensor", Dense, Paged, Buffers]


def _half_of_last(cache: Tensor) -> int:
    """Returns the dimension of K and of V in a layer's cache whose last dimension is both, of one token and head."""
    both: int = _with_dims(4, cache).shape[3]
    if both % 2:
        raise CallerError(f"a layer's cache ends in a dimension of {both}; expected K and V of equal dimensions")
    return both // 2


def _permuted(cache: Tensor, *dims: int) -> Tensor:
    """Returns a tensor's dimensions in this order; a numpy array's by its own name for that, so that it stays one."""
    cache = _with_dims(len(dims), cache)
    if not hasattr(cache, "permute") and not hasattr(cache, "transpose"):
        raise CallerError(f"a layer's cache is {kind_of(cache)}; expected a torch tensor or a numpy array")
    permuted: Tensor = cache.permute(*dims) if hasattr(cache, "permute") else cache.transpose(*dims)
    return permuted


def _with_dims(dims: int, cache: Tensor) -> Tensor:
    shape = getattr(cache, "shape", None)
    if shape is None or len(shape) != dims:
        given = kind_of(cache) if shape is None else f"of shape {list(shape)}"
        raise CallerError(f"a layer's cache is {given}; expected a tensor of {dims} dimensions in the layout named")
    return cache


def _of_layers(layers: object) -> str:
    if isinstance(layers, Layers):
        return repr(layers)
    first = layers[0] if isinstance(layers, (list, tuple)) and layers else None
    each = ", ".join(map(_of_shape, first)) if isinstance(first, (list, tuple)) else _of_shape(first)
    return f"{len(layers) if isinstance(layers, (list, tuple)) else kind_of(layers)} layers of {each}"


def _of_shape(array: object) -> str:
    """Returns an array's shape and dtype, for a repr: never its values."""
    shape = getattr(array, "shape", None)
    if shape is None:
        return kind_of(array)
    return f"{list(shape)} {str(getattr(array, 'dtype', '')).removeprefix('torch.')}".rstrip()
