"""Keeps the K and V that a clean engine's model computes, token by token, as they are given to the attention kernel.

It shares no code with the connector under test and does not look at the cache, so that a page that was stored can be
held against it however the kernel orders bytes. Of one request at a time, in one process, without a cache of any kind.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

_LAYER = re.compile(r"\.layers\.(\d+)\.")

captured: dict[int, list[torch.Tensor]] = {}
"""By the model's own layer number, pieces `[tokens, planes, heads, dim]` in the order of the tokens."""


def begin() -> None:
    """From now on all layers of this process are captured."""
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def capture(
        self: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        found = _LAYER.search(layer.layer_name)
        assert found is not None
        kept = (slots >= 0).nonzero()[:, 0]
        captured.setdefault(int(found[1]), []).append(torch.stack([key[kept], value[kept]], 1))
        update(self, layer, key, value, kv_cache, slots)

    CPUAttentionBackendImpl.do_kv_cache_update = capture
