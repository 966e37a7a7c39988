"""Finds how an attention backend of vLLM orders K and V within a block, by running the kernel that writes them.

vLLM passes a layer's cache as `[blocks, heads, tokens, dim of K + dim of V]`, however its kernels use those bytes. On a
GPU the last dimension is K, then V, of one token. On a CPU it is not: a head of a block is a K half and a V half, and
each kernel orders the halves in its own way. "vec" and "vec16" keep K transposed, which strides can express; "amx" and
the BFMMLA form of "neon" pack both into tiles, which strides cannot express, and a kernel's name does not reveal which
form a processor gets. So a test runs the kernel: it writes known numbers into one block. If the strided views of
`Paged.vllm_cpu` do not read them back, the block's bytes are opaque: they are moved and verified like all others, never
encoded, and shared only among engines whose kernel writes every number to the same place.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from vllm.platforms import current_platform

from kvcluster.core.groups import Plane
from kvcluster.errors import CallerError
from kvcluster.transfers.layouts import Paged

_DIGITS = 3
"""The kernel writes base-256 digits of each position, which every cache dtype holds exactly: three digits distinguish
16 million positions, and a head of a block has at most 2**20."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one group of layers stores a block. `isa` is vLLM's name of the CPU kernel, "" on a GPU. `packing` names the
    byte order of opaque blocks; "" if K and V are strided tensors."""

    isa: str = ""
    packing: str = ""

    def __str__(self) -> str:
        """Returns the format as text for operators."""
        return self.packing or (f"cpu {self.isa}, K transposed" if self.isa else "K and V of a token side by side")

    def planes(self, *, heads: int, block_tokens: int, dims: tuple[int, int], dtype: str) -> tuple[Plane, ...]:
        """Returns the planes of a group whose whole model has `heads` KV heads; `dims` are those of K and of V."""
        k_dim, v_dim = dims
        if self.packing:
            nbytes = block_tokens * (k_dim + v_dim) * getattr(torch, dtype).itemsize
            return (Plane.opaque("kv", nbytes, heads=heads, packing=self.packing),)
        return (Plane("k", heads, k_dim, dtype), Plane("v", heads, v_dim, dtype))

    def views(
        self, cache: torch.Tensor, *, k_dim: int, v_dim: int, heads: int | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Returns one layer's cache as an entry of `Paged.layers`. Raises CallerError if its strides do not fit.

        `cache` is a rank's `[blocks, heads, tokens, k_dim + v_dim]`; `heads` is the number of KV heads of the whole
        model, by default that of the cache.
        """
        if self.packing:
            packed = self._packed(cache)
            return packed[:, 0] if (heads or cache.shape[1]) == 1 else packed
        if self.isa:
            return Paged.vllm_cpu([cache], []).layers[0]
        if cache.stride(3) != 1:
            raise CallerError(f"strides {list(cache.stride())}: K and V of a token are not contiguous")
        if k_dim == v_dim:
            return Paged.vllm([cache], []).layers[0]
        return tuple(half.permute(0, 2, 1, 3) for half in (cache[..., :k_dim], cache[..., k_dim:]))

    def _packed(self, cache: torch.Tensor) -> torch.Tensor:
        blocks, heads, tokens, content = cache.shape
        if cache.stride()[2:] != (content, 1):
            raise CallerError(f"strides {list(cache.stride())}: the tokens of a head are not contiguous")
        size = (blocks, heads, tokens * content)
        return cache.as_strided(size, (*cache.stride()[:2], 1)).view(torch.uint8)


def kv_format(config: Any, spec: Any) -> KVFormat:
    """Returns the format for a VllmConfig and one group's AttentionSpec, on the platform of this process. Raises
    CallerError if the CPU kernel cannot be run."""
    if not current_platform.is_cpu():
        return KVFormat()
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = config.cache_config.cache_dtype
    isa: str = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)
    if isa == "amx":
        # A process must request AMX from Linux before it uses it. vLLM 0.32 leaves that to the first large matrix
        # product: an engine whose first prompt is short, or loaded almost fully, dies of SIGILL in its attention
        # kernel.
        torch.cpu._init_amx()
    dtype = str(spec.dtype).removeprefix("torch.")
    try:
        return KVFormat(isa, _packing(isa, dtype, spec.block_size, spec.head_size))
    except (RuntimeError, AttributeError) as error:  # a torch operation that refuses, or that is missing
        raise CallerError(
            f"kvcluster does not serve this engine: how vLLM's attention kernel {isa!r} orders blocks is not known, "
            f"since it cannot write blocks of {spec.block_size} tokens and heads of {spec.head_size} {dtype} ({error})"
        ) from None


@lru_cache(maxsize=64)
def _packing(isa: str, dtype: str, block_tokens: int, dim: int) -> str:
    """Returns "" if the strided views read back what the kernel writes, otherwise a name for the kernel's byte
    order."""
    keys = torch.arange(block_tokens * dim).view(block_tokens, 1, dim)
    values = keys + block_tokens * dim
    digest, plain = hashlib.sha256(), True
    for digit in range(_DIGITS):
        k, v = (((numbers >> 8 * digit) & 0xFF).to(getattr(torch, dtype)) for numbers in (keys, values))
        cache = block_of_kernel(isa, k, v)
        read_k, read_v = (plane[0] for plane in Paged.vllm_cpu([cache], []).layers[0])
        plain = plain and torch.equal(read_k, k) and torch.equal(read_v, v)
        digest.update(bytes(cache.view(torch.uint8).flatten().tolist()))
    return "" if plain else f"vllm cpu {isa} {dtype} {digest.hexdigest()[:16]}"


def block_of_kernel(isa: str, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns a cache of one block, `[1, heads, tokens, 2 * dim]`, into which vLLM's kernel has written K and V, each
    `[tokens, heads, dim]`. Raises RuntimeError for shapes that the kernel does not support."""
    from vllm import _custom_ops

    current_platform.import_kernels()
    tokens, heads, dim = k.shape
    cache = torch.zeros(1, heads, tokens, 2 * dim, dtype=k.dtype)
    k_half, v_half = cache.view(1, heads, 2 * tokens, dim).chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(k, v, k_half, v_half, torch.arange(tokens), isa)
    return cache
