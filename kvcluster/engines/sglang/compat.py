"""What this engine knows of SGLang's own objects. All that may differ between releases stands here, read from 0.5.23.

A *host pool* is SGLang's memory for pages of KV, `[2, ...]` for K and V or one latent tensor, in one of several
layouts (layouts.py). It says where a page lies (`get_page_buffer_meta`: addresses and sizes); here these become
slices of one view of the pool's memory, so that an address outside it cannot be written. A pool of a class that is not
named here may lay its bytes otherwise, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvcluster.errors import CallerError


def _storage_base() -> Any:
    """The class that SGLang wants a storage to be of; where there is no SGLang, nothing more than an object."""
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sglang":
            raise  # SGLang is there, and lacks something itself
        return object
    return HiCacheStorage


HiCacheStorage: Any = _storage_base()

_KINDS = {
    "MHATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "AsymmetricMHATokenToKVPoolHost": ("page_first", "page_first_direct"),
    "MLATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct"),
}
"""Classes of host pools, and the layouts whose bytes are understood. Classes derived from these add bytes of their own
(scales, indexers), so that the class itself is meant."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of an engine's processes this is, as far as it tells what its pool holds."""

    tp_rank: int
    tp_size: int
    writer: bool


@dataclass(frozen=True, slots=True)
class HostPool:
    """The facts of a host pool. `dims` has one entry for each tensor kind: K and V, or one latent, whose `heads` are 1.
    `drafts` of the `layers` are a draft model's, behind those of the model itself, which begin with `first_layer`."""

    latent: bool
    layout: str
    page_tokens: int
    dtype: str
    first_layer: int
    layers: int
    drafts: int
    heads: int
    dims: tuple[int, ...]


@contextmanager
def reading() -> Iterator[None]:
    """Where SGLang's objects are first looked at: what they lack tells of a release that is not this one. Raises
    CallerError then."""
    try:
        yield
    except AttributeError as error:
        raise CallerError(
            f"this release of SGLang is not understood: {error}. kvcluster was written for 0.5.23; use that, or start "
            "without this storage backend"
        ) from error


def version() -> str:
    """SGLang's own. Raises CallerError where it does not know it."""
    from sglang.version import __version__

    if not __version__ or __version__.startswith("0.0.0"):
        raise CallerError(
            f"this SGLang calls itself {__version__!r}, so that KV of another could be taken for its own: "
            "install it as a package (pip install -e of a checkout with its tags will do)"
        )
    return str(__version__)


def extra_config(storage_config: Any) -> Mapping[str, object]:
    """What --hicache-storage-backend-extra-config says."""
    return storage_config.extra_config or {}


def model_name(storage_config: Any) -> str:
    """What SGLang serves the model as; empty where it has no name."""
    return storage_config.model_name or ""


def rank(storage_config: Any) -> Rank:
    """Raises CallerError where ranks divide the KV in a way that is not understood."""
    for option, size in (
        ("decode context parallelism (--dcp-size)", storage_config.dcp_size),
        ("attention context parallelism (--attn-cp-size)", storage_config.attn_cp_size),
    ):
        if size > 1:
            raise CallerError(
                f"{option} of {size} divides a page's tokens among ranks, which kvcluster does not know how to name: "
                "start without it, or without this storage backend"
            )
    return Rank(storage_config.tp_rank, storage_config.tp_size, bool(storage_config.is_storage_writer))


def describe(pool: Any) -> HostPool:
    """The facts of a host pool. Raises CallerError naming what is not understood of it."""
    name = type(pool).__name__
    layouts = _KINDS.get(name)
    if layouts is None:
        raise CallerError(
            f"the host pool is a {name}, whose pages kvcluster does not understand (it knows {', '.join(_KINDS)}): "
            "start this model without this storage backend"
        )
    if pool.layout not in layouts:
        raise CallerError(
            f"a {name} in layout {pool.layout!r} is not understood: give --hicache-mem-layout {' or '.join(layouts)}"
        )
    memory = pool.kv_buffer
    if memory is None or pool.shared_allocation_domain is not None or pool.stores_page_envelope:
        raise CallerError(
            f"the {name} has no memory of its own for KV, so that there is nothing to store: "
            "start without what shares host pools (such as --enable-unified-memory), or without this storage backend"
        )
    latent = name.startswith("MLA")
    if latent and pool._layer_shard_enabled:
        raise CallerError(
            "each rank's pool holds some of the layers only (layer sharding), which kvcluster does not know how to "
            "name: start without it, or without this storage backend"
        )
    if not latent and (order := _device_order(pool)) != "nhd":
        raise CallerError(
            f"the GPU's pool is laid out as {order!r}, and the host pool after it: start without what chooses that "
            "(SGLANG_USE_HND_KVCACHE, SGLANG_AITER_KV_CACHE_LAYOUT), or without this storage backend"
        )
    return HostPool(
        latent=latent,
        layout=pool.layout,
        page_tokens=pool.page_size,
        dtype=str(pool.dtype).removeprefix("torch."),
        first_layer=pool.start_layer,
        layers=pool.layer_num,
        drafts=pool.layer_num - pool.target_layer_num,
        heads=1 if latent else pool.head_num,
        dims=(pool.kv_cache_dim,) if latent else (pool.head_dim, pool.v_head_dim),
    )


def _device_order(pool: Any) -> str:
    """How tokens and heads lie in the GPU's pool, whose rows the host pool copies as they are."""
    orders = {str(info.buffers.layout.value) for info in pool._buffer_infos}
    return ", ".join(sorted(orders))


class PoolMemory:
    """A host pool's memory as slices of bytes. They keep it alive."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        tensors = pool.kv_buffer if isinstance(pool.kv_buffer, (tuple, list)) else (pool.kv_buffer,)
        for tensor in tensors:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise CallerError(
                    f"the host pool lies on {tensor.device} with strides {tensor.stride()}: kvcluster moves pages of "
                    "contiguous CPU memory only; start without this storage backend"
                )
        self._views = [(tensor.data_ptr(), _bytes(tensor)) for tensor in tensors]

    @property
    def page_num(self) -> int:
        """How many pages it has room for."""
        return int(self._pool.size) // int(self._pool.page_size)

    def starts(self, indices: Any) -> list[int]:
        """The first slot of each page, of the slots that SGLang names a run of pages by. Raises CallerError where they
        are no whole pages."""
        step = int(self._pool.page_size)
        slots: list[int] = indices.tolist()
        if len(slots) % step or any(start % step for start in slots[::step]):
            raise CallerError(f"{len(slots)} slots of the host pool do not make whole pages of {step} tokens")
        return slots[::step]

    def first_page(self) -> torch.Tensor:
        """The slots of the pool's first page."""
        return torch.arange(int(self._pool.page_size))

    def runs(self, indices: Any, kinds: int) -> list[list[memoryview]]:
        """For each tensor kind the bytes of every page, in which it lies as one run. `indices` as in `starts`."""
        pages = len(self.starts(indices))
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        if len(addresses) != pages * kinds or len(sizes) != pages * kinds:
            raise CallerError(
                f"SGLang names {len(addresses)} runs of bytes for {pages} pages, where {kinds} a page were expected: "
                "this release lays them out otherwise; start without this storage backend"
            )
        found = [self._slice(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [found[kind::kinds] for kind in range(kinds)]

    def layers(self, kinds: int) -> list[list[torch.Tensor]]:
        """Of a pool that is `layer_first`, for each tensor kind every layer, `[pages, 1, page_tokens, heads, dim]`."""
        buffer = self._pool.kv_buffer
        by_kind = buffer.unsqueeze(0) if kinds == 1 else buffer
        step = int(self._pool.page_size)
        return [
            [layer.unflatten(0, (self.page_num, 1, step)) for layer in kind.unbind(0)] for kind in by_kind.unbind(0)
        ]

    def blank(self) -> torch.Tensor:
        """Room for one page, flat, as SGLang would bring it."""
        page = self._pool.get_dummy_flat_data_page()
        assert isinstance(page, torch.Tensor)
        return page

    def _slice(self, address: int, nbytes: int) -> memoryview:
        for start, view in self._views:
            if start <= address and address + nbytes <= start + len(view):
                return view[address - start : address - start + nbytes]
        raise CallerError(f"{nbytes} bytes at {address:#x} do not lie within the host pool; are these slots of it?")


def flat_page(page: object, *, writable: bool) -> memoryview:
    """The bytes of a flat page that SGLang hands over or wants filled. Raises CallerError where they cannot be had; a
    page to be filled must be contiguous, since bytes written to a copy would be lost."""
    if not isinstance(page, torch.Tensor) or page.device.type != "cpu":
        raise CallerError(
            f"a page is a {type(page).__name__}; expected a torch tensor in CPU memory, as the host pool's "
            "get_data_page and get_dummy_flat_data_page make them"
        )
    if writable and not page.is_contiguous():
        raise CallerError("a page to be filled is not contiguous; give one as get_dummy_flat_data_page makes it")
    return _bytes(page.detach().contiguous())


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def prefix_keys(extra_info: Any) -> Sequence[str] | None:
    """The hashes before a call's own, from the first page of the sequence; None where SGLang does not tell them."""
    keys = None if extra_info is None else extra_info.prefix_keys
    return None if keys is None else list(keys)
