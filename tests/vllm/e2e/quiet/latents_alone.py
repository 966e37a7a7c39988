"""Has vLLM compute the attention of latents (MLA) on a CPU for each token alone, in every process of an engine that has
this folder on its PYTHONPATH: a plugin of vLLM's own kind.

vLLM computes a prompt by one arithmetic (K and V of each head, and where a part of the prompt is cached two sums that
are merged) and an answer by another (on the latents themselves), and matrix products of another shape round
differently. So the last bits of an answer show what was cached of its prompt, with any cache, and nothing could be held
against them. Here every token is computed as vLLM computes one token of an answer, by its own kernel, whatever else is
in the batch. What is written to the cache, and when, stays vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def register() -> None:
    """Called by vLLM when a process of an engine starts."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonMetadataBuilder
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    build, forward = MLACommonMetadataBuilder.build, MLAAttention.forward_impl

    def building(self: Any, common_prefix_len: int, common: Any, *rest: Any, **named: Any) -> Any:
        built = build(self, common_prefix_len, common, *rest, **named)
        built.requests = (common.block_table_tensor, common.seq_lens.tolist(), common.query_start_loc.tolist())
        return built

    def alone(
        self: Any, q: Any, latents: Any, rotary: Any, cache: Any, built: Any, output: Any, *rest: Any, **named: Any
    ) -> Any:
        if built is None:
            return forward(self, q, latents, rotary, cache, built, output, *rest, **named)
        tables, lengths, starts = built.requests
        for number, length in enumerate(lengths):
            for row in range(starts[number], starts[number + 1]):
                seen = length - (starts[number + 1] - row - 1)
                _one(self, q[row : row + 1], cache, tables[number : number + 1], seen, output[row : row + 1])
        return output

    MLACommonMetadataBuilder.build, MLAAttention.forward_impl = building, alone


def _one(
    layer: Any, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seen: int, output: torch.Tensor
) -> None:
    """Computes one token that sees `seen` positions, itself included."""
    plain, rotary = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    absorbed = torch.bmm(plain.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
    decode = SimpleNamespace(block_table=table, seq_lens=torch.tensor([seen]))
    attended, _ = layer.impl.forward_mqa((absorbed, rotary), cache, SimpleNamespace(decode=decode), layer)
    layer._v_up_proj(attended, out=output)
