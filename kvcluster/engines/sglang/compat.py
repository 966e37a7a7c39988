"""All use of SGLang's own objects, which may differ between releases. Written against release 0.5.23.

A *host pool* is SGLang's memory for pages of KV, `[2, ...]` for K and V or one latent tensor, in one of several layouts
(layouts.py). The pool reports where a page is (`get_page_buffer_meta`: addresses and sizes); this module turns those
into slices of one view of the pool's memory, so that an address outside it cannot be written. A pool of a class that is
not listed here may order its bytes differently, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvcluster.errors import CallerError


def _storage_base() -> Any:
    """Returns the base class that SGLang requires of a storage backend; `object` if SGLang is not installed."""
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "sglang":
            raise  # SGLang is installed, but one of its own dependencies is missing
        return object
    return HiCacheStorage


HiCacheStorage: Any = _storage_base()

_KINDS = {
    "MHATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "AsymmetricMHATokenToKVPoolHost": ("page_first", "page_first_direct"),
    "MLATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct"),
}
"""Classes of host pools, and for each the layouts that are supported. The class must match exactly: derived classes add
bytes of their own (scales, indexers)."""


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place among the engine's ranks, which determines what its pool holds."""

    tp_rank: int
    tp_size: int
    writer: bool


@dataclass(frozen=True, slots=True)
class HostPool:
    """The shape of a host pool. `dims` has one entry for each tensor kind: K and V, or one latent, whose `heads` are 1.
    The last `drafts` of the `layers` belong to a draft model; the others are the model's own, from `first_layer` on."""

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
def supported_release() -> Iterator[None]:
    """Wraps the first access to SGLang's objects: raises CallerError for an attribute that they lack, which means that
    the release is not supported."""
    try:
        yield
    except AttributeError as error:
        raise CallerError(
            f"this release of SGLang is not supported: {error}. kvcluster was written for 0.5.23; use that release, or "
            "start without this storage backend"
        ) from error


def version() -> str:
    """Returns SGLang's version. Raises CallerError if SGLang does not know its version."""
    from sglang.version import __version__

    if not __version__ or __version__.startswith("0.0.0"):
        raise CallerError(
            f"this SGLang reports the version {__version__!r}, so KV of another version could be taken for its own: "
            "install it as a package (pip install -e of a checkout with its tags is enough)"
        )
    return str(__version__)


def serves_media() -> bool:
    """Returns whether this engine's model takes images, sound or video."""
    from sglang.srt.runtime_context import process_model_config

    model = process_model_config()
    return bool(model.is_multimodal or model.is_audio_model)


def extra_config(storage_config: Any) -> Mapping[str, object]:
    """Returns the parsed --hicache-storage-backend-extra-config."""
    return storage_config.extra_config or {}


def model_name(storage_config: Any) -> str:
    """Returns the name under which SGLang serves the model; "" if it has none."""
    return storage_config.model_name or ""


def rank(storage_config: Any) -> Rank:
    """Returns this process's rank. Raises CallerError if ranks divide the KV in a way that is not supported."""
    for option, size in (
        ("decode context parallelism (--dcp-size)", storage_config.dcp_size),
        ("attention context parallelism (--attn-cp-size)", storage_config.attn_cp_size),
    ):
        if size > 1:
            raise CallerError(
                f"{option} of {size} divides a page's tokens among ranks, which kvcluster does not support: "
                "start without it, or without this storage backend"
            )
    return Rank(storage_config.tp_rank, storage_config.tp_size, bool(storage_config.is_storage_writer))


def describe(pool: Any) -> HostPool:
    """Returns the shape of a host pool. Raises CallerError, naming the trait, if it is not supported."""
    name = type(pool).__name__
    layouts = _KINDS.get(name)
    if layouts is None:
        raise CallerError(
            f"the host pool is a {name}, whose pages kvcluster does not support (it supports {', '.join(_KINDS)}): "
            "start this model without this storage backend"
        )
    if pool.layout not in layouts:
        raise CallerError(
            f"a {name} in layout {pool.layout!r} is not supported: give --hicache-mem-layout {' or '.join(layouts)}"
        )
    memory = pool.kv_buffer
    if memory is None or pool.shared_allocation_domain is not None or pool.stores_page_envelope:
        raise CallerError(
            f"the {name} has no memory of its own for KV, so there is nothing to store: start without the option "
            "that shares host pools (such as --enable-unified-memory), or without this storage backend"
        )
    latent = name.startswith("MLA")
    if latent and pool._layer_shard_enabled:
        raise CallerError(
            "each rank's pool holds only some of the layers (layer sharding), which kvcluster does not support: "
            "start without it, or without this storage backend"
        )
    if not latent and (order := _device_order(pool)) != "nhd":
        raise CallerError(
            f"the GPU's pool has the layout {order!r}, and the host pool copies it: start without the setting that "
            "selects it (SGLANG_USE_HND_KVCACHE, SGLANG_AITER_KV_CACHE_LAYOUT), or without this storage backend"
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
    """Returns the order of tokens and heads in the GPU's pool, whose rows the host pool copies unchanged."""
    orders = {str(info.buffers.layout.value) for info in pool._buffer_infos}
    return ", ".join(sorted(orders))


class PoolMemory:
    """A host pool's memory as slices of bytes, which keep the memory alive."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        tensors = pool.kv_buffer if isinstance(pool.kv_buffer, (tuple, list)) else (pool.kv_buffer,)
        for tensor in tensors:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise CallerError(
                    f"the host pool is on {tensor.device} with strides {tensor.stride()}: kvcluster moves only pages "
                    "in contiguous CPU memory; start without this storage backend"
                )
        self._views = [(tensor.data_ptr(), _bytes(tensor)) for tensor in tensors]

    @property
    def page_num(self) -> int:
        """The pool's capacity in pages."""
        return int(self._pool.size) // int(self._pool.page_size)

    def starts(self, indices: Any) -> list[int]:
        """Returns the first slot of each page, from the slots by which SGLang names pages. Raises CallerError if they
        do not form whole pages."""
        step = int(self._pool.page_size)
        slots: list[int] = indices.tolist()
        if len(slots) % step or any(start % step for start in slots[::step]):
            raise CallerError(f"{len(slots)} slots of the host pool do not form whole pages of {step} tokens")
        return slots[::step]

    def first_page(self) -> torch.Tensor:
        """Returns the slots of the pool's first page."""
        return torch.arange(int(self._pool.page_size))

    def runs(self, indices: Any, kinds: int) -> list[list[memoryview]]:
        """Returns for each tensor kind the bytes of every page, one contiguous run each. `indices` as in `starts`."""
        pages = len(self.starts(indices))
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        if len(addresses) != pages * kinds or len(sizes) != pages * kinds:
            raise CallerError(
                f"SGLang names {len(addresses)} runs of bytes for {pages} pages; expected {kinds} per page. This "
                "release has another memory layout; start without this storage backend"
            )
        found = [self._slice(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [found[kind::kinds] for kind in range(kinds)]

    def layers(self, kinds: int) -> list[list[torch.Tensor]]:
        """Returns for each tensor kind the layers of a `layer_first` pool, `[pages, 1, page_tokens, heads, dim]`."""
        buffer = self._pool.kv_buffer
        by_kind = buffer.unsqueeze(0) if kinds == 1 else buffer
        step = int(self._pool.page_size)
        return [
            [layer.unflatten(0, (self.page_num, 1, step)) for layer in kind.unbind(0)] for kind in by_kind.unbind(0)
        ]

    def blank(self) -> torch.Tensor:
        """Returns a new flat tensor for one page, of the kind that SGLang passes."""
        page = self._pool.get_dummy_flat_data_page()
        assert isinstance(page, torch.Tensor)
        return page

    def _slice(self, address: int, nbytes: int) -> memoryview:
        for start, view in self._views:
            if start <= address and address + nbytes <= start + len(view):
                return view[address - start : address - start + nbytes]
        raise CallerError(f"{nbytes} bytes at {address:#x} are outside the host pool; give slots of this pool")


def flat_page(page: object, *, writable: bool) -> memoryview:
    """Returns the bytes of a flat page that SGLang passes, to be stored or filled. Raises CallerError if it is not a
    CPU tensor, or is to be filled and is not contiguous, since bytes written to a copy would be lost."""
    if not isinstance(page, torch.Tensor) or page.device.type != "cpu":
        raise CallerError(
            f"a page is a {type(page).__name__}; expected a torch tensor in CPU memory, as the host pool's "
            "get_data_page and get_dummy_flat_data_page make them"
        )
    if writable and not page.is_contiguous():
        raise CallerError("a page to fill is not contiguous; give one as get_dummy_flat_data_page makes it")
    return _bytes(page.detach().contiguous())


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


def prefix_keys(extra_info: Any) -> Sequence[str] | None:
    """Returns the hashes of the sequence's pages before the call's own; None if SGLang does not pass them."""
    keys = None if extra_info is None else extra_info.prefix_keys
    return None if keys is None else list(keys)
