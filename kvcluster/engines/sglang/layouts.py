"""Maps SGLang's pages to pages of the cluster, for each layout of its host pool, and computes each rank's part.

SGLang keeps K and V of a page apart, each as one run of bytes (in `layer_first` one run per layer). So each is a group
of its own here, and its run is one page of the cluster without rearrangement: `[layers, 1, tokens, heads, dim]`, with
the axes that the layout puts there.

    layout              run of K, of V, of the latent       the page's "layers"     its "heads"
    layer_first         one a layer: [tokens, heads, dim]   layers                  heads
    page_first_direct   [layers, tokens, heads, dim]        layers                  heads
    page_first          [tokens, layers, heads, dim]        one                     layers x heads
    page_head           [heads, tokens, layers, dim]        heads                   layers

So nothing is permuted in transfer, and a page can be quantised as any other, since its last axis is always one head of
one token in one layer. A rank holds a range of the model's KV heads, which is a range of an axis above: its part. In
`page_first` that holds only among ranks with equally many heads, so the identity contains that number.

The identity also contains the layout's name: pages of different layouts never match, even if their sizes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import kvcluster.engines.sglang.compat as compat
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.engines.sglang.compat import HostPool, PoolMemory, Rank
from kvcluster.engines.sglang.settings import StorageSettings
from kvcluster.errors import CallerError, SpecError
from kvcluster.transfers.layouts import Buffers, Layers, Paged

_HIDING = "uint8"
"""The dtype in which SGLang stores formats that torch cannot index, such as both formats of fp8."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """The number of KV heads of the whole model, and the range that this rank holds. `among`: text for the identity if
    the range depends on the number of ranks or of heads per rank; otherwise ""."""

    whole: int
    start: int
    stop: int
    among: str = ""


class HostPoolLayout:
    """One engine rank's pages: the spec that names them, the part of each group that this rank holds, and where they
    are in memory. Raises CallerError (SpecError) if the pool has no valid spec."""

    def __init__(self, pool: HostPool, memory: PoolMemory, rank: Rank, settings: StorageSettings, version: str) -> None:
        heads = _heads(pool, rank, settings.kv_heads)
        axes = _axes(pool, heads)
        names = ("latent",) if pool.latent else ("k", "v")
        stop = pool.first_layer + pool.layers - pool.drafts
        identity = {
            "engine": "sglang",
            "engine_version": version,
            "layout": pool.layout,
            "kv_cache_dtype": _dtype(pool, settings),
            "layers": f"{pool.first_layer}:{stop}",
            **({"ranks": heads.among} if heads.among else {}),
            **({"draft_layers": str(pool.drafts), "draft_weights": _drafts(pool, settings)} if pool.drafts else {}),
        }
        for name, text in settings.extra:
            if identity.setdefault(name, text) != text:
                raise CallerError(
                    f'"extra" in --hicache-storage-backend-extra-config gives {name!r}, which kvcluster already sets '
                    f"to {identity[name]!r}; use another name"
                )
        groups = (
            # A layer number belongs to one group, so K and V take alternate numbers.
            Group(tuple(len(names) * n + kind for n in axes.layers), (Plane(name, axes.heads, dim, pool.dtype),))
            for kind, (name, dim) in enumerate(zip(names, pool.dims, strict=True))
        )
        try:
            self.spec = KVSpec(
                model=settings.model,
                weights=settings.weights,
                block_tokens=pool.page_tokens,
                groups=tuple(groups),
                rope=settings.rope,
                extra=tuple(sorted(identity.items())),
            )
        except SpecError as error:
            raise SpecError(
                f"pages of {pool.page_tokens} tokens of this model have no valid spec: {error}. A block is one page of "
                "SGLang, so block_tokens is its --page-size; with --hicache-mem-layout page_first all its layers count "
                "as one"
            ) from None
        self.parts = dict.fromkeys(range(len(names)), axes.part)
        self._kinds = len(names)
        self._memory = memory
        in_layers = pool.layout == "layer_first"
        self._layers = [Layers(of_kind) for of_kind in memory.layers(self._kinds)] if in_layers else None
        self._check(pool)

    @property
    def page_bytes(self) -> list[int]:
        """The bytes of one page, for each group."""
        return [self.spec.page_bytes(group, part) for group, part in self.parts.items()]

    def in_pool(self, indices: object) -> list[Buffers | Paged]:
        """Returns for each group the memory of the pages that SGLang names by slots of the host pool. Nothing is
        copied, except in `layer_first`, whose layers are gathered."""
        if self._layers is not None:
            step, starts = self.spec.block_tokens, self._memory.starts(indices)
            return [Paged(layers, [start // step for start in starts]) for layers in self._layers]
        return [Buffers(runs) for runs in self._memory.runs(indices, self._kinds)]

    def flat(self, pages: Sequence[object], *, writable: bool) -> list[Buffers | Paged]:
        """Returns the same for flat pages, which hold the runs of one page one after another."""
        sizes = self.page_bytes
        views = [compat.flat_page(page, writable=writable) for page in pages]
        for view in views:
            if len(view) != sum(sizes):
                raise CallerError(f"a page of {len(view)} bytes was given; the host pool's pages have {sum(sizes)}")
        starts = [sum(sizes[:group]) for group in self.parts]
        return [Buffers([view[at : at + n] for view in views]) for at, n in zip(starts, sizes, strict=True)]

    def blank(self) -> torch.Tensor:
        """Returns a new tensor for a flat page."""
        return self._memory.blank()

    def _check(self, pool: HostPool) -> None:
        """Raises CallerError unless the sizes that SGLang names for the pool's first page are those of the spec."""
        for one, expected in zip(self.in_pool(self._memory.first_page()), self.page_bytes, strict=True):
            found = len(memoryview(one.pages[0])) if isinstance(one, Buffers) else expected
            if found != expected:
                raise CallerError(
                    f"a run of {pool.layout!r} has {found} bytes; expected {expected}: this release of SGLang has "
                    "another memory layout; start without this storage backend"
                )


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes of a run of bytes as a page of the cluster: the numbers of its "layers", its "heads", and this rank's
    part of both."""

    layers: Sequence[int]
    heads: int
    part: Part


def _axes(pool: HostPool, heads: _Heads) -> _Axes:
    layers = pool.layers
    if pool.layout == "page_first":
        return _Axes([0], layers * heads.whole, Part(0, 1, layers * heads.start, layers * heads.stop))
    if pool.layout == "page_head":
        return _Axes(range(heads.whole), layers, Part(heads.start, heads.stop, 0, layers))
    numbers = range(pool.first_layer, pool.first_layer + layers)
    return _Axes(numbers, heads.whole, Part(0, layers, heads.start, heads.stop))


def _heads(pool: HostPool, rank: Rank, kv_heads: int) -> _Heads:
    """Returns the heads that this rank holds. If a model has fewer KV heads than there are ranks, several ranks hold
    the same head, and the pool does not record which. `kv_heads` determines it; if that is 0, a rank with a single head
    shares only with the same rank of engines with equally many ranks."""
    if pool.latent:
        return _Heads(1, 0, 1)
    mine, first = pool.heads, rank.tp_rank * pool.heads
    beside = f"{mine} a rank" if pool.layout == "page_first" else ""
    if not kv_heads:
        among = f"{rank.tp_size} of 1 head" if mine == 1 < rank.tp_size else beside
        return _Heads(mine * rank.tp_size, first, first + mine, among)
    if mine * rank.tp_size == kv_heads:
        return _Heads(kv_heads, first, first + mine, beside)
    if mine == 1 and rank.tp_size % kv_heads == 0:
        head = rank.tp_rank // (rank.tp_size // kv_heads)
        return _Heads(kv_heads, head, head + 1, beside)
    raise CallerError(
        f'"kv_heads": {kv_heads} in --hicache-storage-backend-extra-config does not fit: each of {rank.tp_size} ranks '
        f"holds {mine}; give the KV heads of the whole model (num_key_value_heads in its config), or omit it"
    )


def _dtype(pool: HostPool, settings: StorageSettings) -> str:
    if pool.dtype != _HIDING:
        return pool.dtype
    if not settings.kv_cache_dtype:
        raise CallerError(
            f"the host pool holds {pool.dtype}, which does not tell the format of its bytes (as with both formats of "
            'fp8): add "kv_cache_dtype" to --hicache-storage-backend-extra-config, with the value of --kv-cache-dtype, '
            'such as "fp8_e4m3"'
        )
    return settings.kv_cache_dtype


def _drafts(pool: HostPool, settings: StorageSettings) -> str:
    if not settings.draft_weights:
        raise CallerError(
            f'{pool.drafts} layers of a draft model are packed into the host pool: add "draft_weights" to '
            "--hicache-storage-backend-extra-config, a fingerprint of its weights (the model's own fingerprint, if "
            "they are part of its checkpoint)"
        )
    return settings.draft_weights
