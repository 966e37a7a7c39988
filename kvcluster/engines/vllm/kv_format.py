"""Finds how an attention backend of vLLM orders K and V within a block, by running the kernel that writes them.

vLLM passes a layer's cache as `[blocks, heads, tokens, dim of K + dim of V]`, however its kernels use those bytes. On a
GPU the last dimension is K, then V, of one token. On a CPU it is not: a head of a block is a K half and a V half, and
each kernel orders the halves in its own way. "vec" and "vec16" keep K transposed, which strides can express; "amx" and
the BFMMLA form of "neon" pack both into tiles, which strides cannot express, and a kernel's name does not reveal which
form a processor gets. So a test runs the kernel: it writes known numbers into one block. If the strided views of
`Paged.vllm_cpu` do not read them back, the block's bytes are opaque: they are moved and verified like all others, never
encoded, and shared only among engines whose kernel writes every number to the same place.

MLA keeps one latent of a token for all heads, `[blocks, 1, tokens, latent dim]`, which every kernel that is served
stores as it is. On a CPU a test runs the kernel that writes latents too, and an engine whose kernel packs them is
refused.

KV in fp8 is stored as the engine's kernel rounds it, one byte a number, and never encoded again. Its scales are those
of the checkpoint, or 1, so the fingerprint of the weights identifies them; schemes whose scales lie beside the numbers
are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

from kvcluster.core.groups import Plane
from kvcluster.errors import CallerError
from kvcluster.transfers.layouts import Paged

_POSITION_BITS = 24
"""A test writes the position of each number, in digits: 16 million, and a head of a block has at most 2**20."""

_DIGIT_BITS = {"float8_e4m3fn": 4, "float8_e5m2": 3}
"""The bits of a digit: of whole numbers that a cache holds exactly; all others hold those of 8."""

_FP8 = {
    "auto": "float8_e4m3fn",  # of a checkpoint that asks for fp8
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""The dtype of a plane by the --kv-cache-dtype of its engine, where KV is in fp8 with scales of layers or of heads."""


def fp8_dtype(config: Any, spec: Any) -> str | None:
    """Returns the dtype of a group's planes whose KV is in fp8; "" if its KV is not quantised, None if it is in another
    way."""
    if spec.kv_quant_mode == KVQuantMode.NONE:
        return ""
    if spec.kv_quant_mode != KVQuantMode.FP8_PER_TENSOR or current_platform.is_fp8_fnuz():
        return None
    return _FP8.get(config.cache_config.cache_dtype)


def _digits(positions: torch.Tensor, bits: int) -> Iterator[torch.Tensor]:
    for shift in range(0, _POSITION_BITS, bits):
        yield (positions >> shift) & (1 << bits) - 1


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one group of layers stores a block. `isa` is vLLM's name of the CPU kernel, "" on a GPU. `packing` names the
    byte order of opaque blocks; "" if K and V are strided tensors. `latent`: there is one latent in place of K and
    V. `fp8` is the dtype of KV in fp8, "" of other KV, which has the engine's own."""

    isa: str = ""
    packing: str = ""
    latent: bool = False
    fp8: str = ""

    def __str__(self) -> str:
        """Returns the format as text for operators."""
        values = f", {self.fp8}" if self.fp8 else ""
        if self.latent:
            return (f"cpu {self.isa}, one latent of a token" if self.isa else "one latent of a token") + values
        plain = f"cpu {self.isa}, K transposed" if self.isa else "K and V of a token side by side"
        return self.packing or plain + values

    def planes(self, *, heads: int, block_tokens: int, dims: tuple[int, int], dtype: str) -> tuple[Plane, ...]:
        """Returns the planes of a group whose whole model has `heads` KV heads; `dims` are those of K and of V, or of
        the latent and 0. `dtype` is that of the engine's tensors."""
        k_dim, v_dim = dims
        dtype = self.fp8 or dtype
        if self.latent:
            assert heads == 1 and v_dim == 0
            return (Plane("latent", 1, k_dim, dtype),)
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
        if self.fp8:
            cache = cache.view(getattr(torch, self.fp8))
        if self.packing:
            packed = self._packed(cache)
            return packed[:, 0] if (heads or cache.shape[1]) == 1 else packed
        if self.isa and not self.latent:
            return Paged.vllm_cpu([cache], []).layers[0]
        if cache.stride(3) != 1:
            raise CallerError(f"strides {list(cache.stride())}: the KV of a token is not contiguous")
        if self.latent:
            return (cache.permute(0, 2, 1, 3),)
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
    fp8 = fp8_dtype(config, spec) or ""
    if isinstance(spec, MLAAttentionSpec):
        return _latent_format(config, spec) if current_platform.is_cpu() else KVFormat(latent=True, fp8=fp8)
    if not current_platform.is_cpu():
        return KVFormat(fp8=fp8)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = config.cache_config.cache_dtype
    isa: str = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)
    if isa == "amx":
        # A process must request AMX from Linux before it uses it. vLLM 0.32 leaves that to the first large matrix
        # product: an engine whose first prompt is short, or loaded almost fully, dies of SIGILL in its attention
        # kernel.
        torch.cpu._init_amx()
    dtype = str(config.model_config.dtype if fp8 else spec.dtype).removeprefix("torch.")
    try:
        return KVFormat(isa, _packing(isa, dtype, spec.block_size, spec.head_size, fp8), fp8=fp8)
    except (RuntimeError, AttributeError) as error:  # a torch operation that refuses, or that is missing
        raise CallerError(
            f"kvcluster does not serve this engine: how vLLM's attention kernel {isa!r} orders blocks is not known, "
            f"since it cannot write blocks of {spec.block_size} tokens and heads of {spec.head_size} {fp8 or dtype} "
            f"({error})"
        ) from None


def attention_backend(config: Any, head_size: int, **traits: bool) -> Any:
    """Returns the class of vLLM's attention backend for heads of that size; `traits` as of get_attn_backend. vLLM keeps
    its current config for the process, so this is for the thread that starts the engine."""
    with set_current_vllm_config(config):
        return get_attn_backend(
            head_size,
            config.model_config.dtype,
            config.cache_config.cache_dtype,
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
            **traits,
        )


def latent_backends(config: Any, head_size: int) -> tuple[Any, Any]:
    """Returns the classes of vLLM's attention backend for MLA and of its backend for prefills, which both affect the
    bits of KV. For the same thread as `attention_backend`."""
    decode = attention_backend(config, head_size, use_mla=True)
    with set_current_vllm_config(config):
        return decode, get_mla_prefill_backend(config)


def _latent_format(config: Any, spec: Any) -> KVFormat:
    decode, prefill = latent_backends(config, spec.head_size)
    isa = f"{decode.get_name()}/{prefill.get_name()}".lower()
    if isa.startswith("amx"):
        torch.cpu._init_amx()  # as above
    values = int(config.model_config.hf_text_config.kv_lora_rank)
    latents = torch.arange(spec.block_size * spec.head_size).view(spec.block_size, spec.head_size)
    try:
        plain = all(
            torch.equal(latents_of_kernel(decode, digits, values)[0, 0], digits)
            for digits in (part.to(spec.dtype) for part in _digits(latents, 8))
        )
        why = "it packs them"
    except (RuntimeError, AttributeError) as error:  # a torch operation that refuses, or that is missing
        plain, why = False, str(error)
    if not plain:
        raise CallerError(
            f"kvcluster does not serve this engine: how vLLM's attention kernel {isa!r} orders latents of "
            f"{spec.head_size} {spec.dtype} is not known ({why})"
        )
    return KVFormat(isa, latent=True)


def latents_of_kernel(backend: Any, latents: torch.Tensor, values: int) -> torch.Tensor:
    """Returns a cache of one block, `[1, 1, tokens, dim]`, into which a CPU backend for MLA has written `latents`,
    `[tokens, dim]`, whose first `values` dimensions are not rotary. Raises RuntimeError for shapes that the kernel does
    not support."""
    current_platform.import_kernels()
    tokens, dim = latents.shape
    cache = torch.zeros(1, 1, tokens, dim, dtype=latents.dtype)
    write = backend.get_impl_cls().do_kv_cache_update
    plain, rotary = latents[:, :values], latents[:, None, values:]
    write(None, plain, rotary, cache[:, 0], torch.arange(tokens), "auto", torch.ones(()))
    return cache


@lru_cache(maxsize=64)
def _packing(isa: str, dtype: str, block_tokens: int, dim: int, fp8: str = "") -> str:
    """Returns "" if the strided views read back what the kernel writes, otherwise a name for the kernel's byte order.
    The kernel is given numbers of that dtype, which it writes in `fp8` if that is not ""."""
    keys = torch.arange(block_tokens * dim).view(block_tokens, 1, dim)
    values = keys + block_tokens * dim
    digest, plain, bits = hashlib.sha256(), True, _DIGIT_BITS.get(fp8, 8)
    for both in zip(_digits(keys, bits), _digits(values, bits), strict=True):
        k, v = (part.to(getattr(torch, dtype)) for part in both)
        cache = block_of_kernel(isa, k, v, fp8)
        read_k, read_v = (plane[0].to(k.dtype) for plane in Paged.vllm_cpu([cache], []).layers[0])
        plain = plain and torch.equal(read_k, k) and torch.equal(read_v, v)
        digest.update(bytes(cache.view(torch.uint8).flatten().tolist()))
    return "" if plain else f"vllm cpu {isa} {fp8 or dtype} {digest.hexdigest()[:16]}"


def block_of_kernel(isa: str, k: torch.Tensor, v: torch.Tensor, fp8: str = "") -> torch.Tensor:
    """Returns a cache of one block, `[1, heads, tokens, 2 * dim]`, into which vLLM's kernel has written K and V, each
    `[tokens, heads, dim]`, in their dtype or in `fp8` with the scale 1. Raises RuntimeError for what the kernel does
    not support."""
    from vllm import _custom_ops

    current_platform.import_kernels()
    tokens, heads, dim = k.shape
    cache = torch.zeros(1, heads, tokens, 2 * dim, dtype=torch.uint8 if fp8 else k.dtype)
    k_half, v_half = cache.view(1, heads, 2 * tokens, dim).chunk(2, dim=2)
    as_engine_says = next((name for name, dtype in _FP8.items() if name != "auto" and dtype == fp8), "auto")
    _custom_ops.cpu_attn_reshape_and_cache(
        k, v, k_half, v_half, torch.arange(tokens), isa, kv_cache_dtype=as_engine_says
    )
    return cache.view(getattr(torch, fp8)) if fp8 else cache
