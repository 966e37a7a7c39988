"""A connector that only looks: it keeps the KV that a clean engine computes, token by token.

It shares no code with the connector under test, so that a page which that stored can be held against it. Of one request
at a time, in one process, without a cache of any kind.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.model_executor.layers.attention.attention import get_attention_context

_LAYER = re.compile(r"\.layers\.(\d+)\.")

captured: dict[int, list[torch.Tensor]] = {}
"""By the model's own layer number, pieces `[tokens, planes, heads, dim]` in the order of the tokens."""


class _Nothing(KVConnectorMetadata):
    pass


class CaptureConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads nothing and stores nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        *_, slots = get_attention_context(layer_name)
        blocks, heads, tokens, content = kv_layer.shape
        by_slot = kv_layer.reshape(blocks, heads, tokens, 2, content // 2).permute(0, 2, 3, 1, 4).flatten(0, 1)
        found = _LAYER.search(layer_name)
        assert found is not None
        captured.setdefault(int(found[1]), []).append(by_slot[slots].clone())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
