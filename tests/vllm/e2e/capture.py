"""Keeps the K and V, or the latent, that a clean engine's model computes, token by token, as they are given to the
attention kernel.

It shares no code with the connector under test and does not look at the cache, so that a page that was stored can be
held against it however the kernel orders bytes. Of one request at a time, in one process, without a cache of any kind.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

_LAYER = re.compile(r"\.layers\.(\d+)\.")

_captured: dict[int, list[torch.Tensor]] = {}
"""By the model's own layer number, pieces `[tokens, planes, heads, dim]` in the order of the tokens."""

_as_stored: dict[int, dict[str, Any]] = {}
"""By the model's own layer number, what else the kernel is told that stores K and V: their dtype and scales."""

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def begin() -> None:
    """From now on all layers of this process are captured."""
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def capture(
        self: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        found = _LAYER.search(layer.layer_name)
        assert found is not None
        kept = (slots >= 0).nonzero()[:, 0]
        _captured.setdefault(int(found[1]), []).append(torch.stack([key[kept], value[kept]], 1))
        scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        _as_stored[int(found[1])] = {"kv_cache_dtype": self.kv_cache_dtype} | scales
        update(self, layer, key, value, kv_cache, slots)

    CPUAttentionBackendImpl.do_kv_cache_update = capture
    _begin_latents()


def _begin_latents() -> None:
    update = MLAAttention.update_kv_cache

    def capture(
        self: Any, latents: torch.Tensor, rotary: torch.Tensor, kv_cache: torch.Tensor, slots: Any, *rest: Any
    ) -> None:
        if slots is not None:  # there are none where vLLM finds out how much memory a step takes
            found = _LAYER.search(self.layer_name)
            assert found is not None
            kept = (slots >= 0).nonzero()[:, 0]
            both = torch.cat([latents, rotary[:, 0]], dim=1)
            _captured.setdefault(int(found[1]), []).append(both[kept][:, None, None])
        update(self, latents, rotary, kv_cache, slots, *rest)

    MLAAttention.update_kv_cache = capture


def take(block: int) -> dict[str, dict[int, torch.Tensor]]:
    """What one request has brought since the last time, by the model's own layer number: `tokens` as `[tokens, planes,
    heads, dim]`, and `blocks`, the bytes that this processor's kernel makes of each full one of K and V, `[blocks,
    heads, nbytes]`. KV in fp8 is as the kernel rounds it, which is not as torch does, and of full blocks alone.
    """
    tokens = {layer: torch.cat(pieces) for layer, pieces in _captured.items()}
    _captured.clear()
    blocks = {layer: _packed(kv, block, _as_stored[layer]) for layer, kv in tokens.items() if kv.shape[1] == 2}
    for layer, packed in blocks.items():
        dtype = _FP8.get(_as_stored[layer]["kv_cache_dtype"])
        if dtype is not None:
            tokens[layer] = _unpacked(packed.view(dtype), block)
    return {"tokens": tokens, "blocks": blocks}


def _packed(kv: torch.Tensor, block: int, how: dict[str, Any]) -> torch.Tensor:
    full, (_, _, heads, dim) = len(kv) // block, kv.shape
    scheme = how["kv_cache_dtype"]
    cache = torch.zeros(full, heads, block, 2 * dim, dtype=torch.uint8 if scheme in _FP8 else kv.dtype)
    halves = cache.view(full, heads, 2 * block, dim).chunk(2, dim=2)
    key, value = kv[: full * block].unbind(1)
    isa = _get_attn_isa(kv.dtype, block, dim, scheme)
    _custom_ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(full * block), isa, **how)
    return cache.view(torch.uint8).view(full, heads, -1)


def _unpacked(blocks: torch.Tensor, block: int) -> torch.Tensor:
    """`[blocks, heads, numbers]` as `[tokens, planes, heads, dim]`: a head of a block is K transposed, then V."""
    k, v = blocks.view(torch.uint8).chunk(2, dim=2)
    full, heads, numbers = k.shape
    k = k.view(full, heads, numbers // block, block).permute(0, 3, 1, 2)
    v = v.view(full, heads, block, numbers // block).permute(0, 2, 1, 3)
    both = torch.stack([half.reshape(full * block, heads, -1) for half in (k, v)], dim=1)
    return both.contiguous().view(blocks.dtype)
