"""What kvcluster does not serve of a vLLM engine, by name, each with what to do if anything can be done.

The supported engines are an allow list: a kind of layer, of KV or of parallelism that a later release adds is refused
until it has been reviewed. `Any` stands for vLLM's objects, as in compat.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

import kvcluster.engines.vllm.kv_plan as kv_plan
from kvcluster.engines.vllm.kv_format import fp8_dtype
from kvcluster.engines.vllm.state_format import keeps_state, refusals_of_states

_SERVED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec)
"""Exactly these kinds: a subclass keeps something else."""

_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def refusals(config: Any, kv: Any) -> Iterator[str]:
    """Yields what kvcluster does not serve of an engine, each with what to do if anything can be done."""
    yield from refusals_of_settings(config)
    yield from _refusals_of_groups(config, kv)


def refusals_of_settings(config: Any) -> Iterator[str]:
    """Yields the refusals that a VllmConfig alone determines, before its KV is planned."""
    parallel, cache = config.parallel_config, config.cache_config
    if parallel.pipeline_parallel_size > 1:
        yield from _refusals_of_pipelines(config)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} is {getattr(parallel, name)}; only 1 is served"
    if cache.enable_prefix_caching and cache.prefix_caching_hash_algo not in _CRYPTOGRAPHIC:
        yield (
            f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo}, which is not cryptographic: a collision in "
            f"this engine would spread to all others; use --prefix-caching-hash-algo {_CRYPTOGRAPHIC[0]}"
        )
    if getattr(config.model_config.hf_text_config, "index_topk", None):
        yield "its attention is sparse, and the indexer that chooses its tokens has a cache beside the KV"


def _refusals_of_pipelines(config: Any) -> Iterator[str]:
    """Yields what is not served of pipeline ranks. An executor of vLLM's over Ray returns the outputs of the last of
    them alone, so that a load would never be complete. With speculative decoding only the last of them calls
    `wait_for_save`, and the others would store nothing."""
    backend = config.parallel_config.distributed_executor_backend
    if backend != "mp":
        yield f"it has pipeline ranks and --distributed-executor-backend {backend}; only mp is served with them"
    if config.speculative_config is not None:
        yield "it has pipeline ranks and speculative decoding; leave out --speculative-config"
    yield from kv_plan.refusals_of_stages(config)


def _refusals_of_groups(config: Any, kv: Any) -> Iterator[str]:
    if not kv.kv_cache_groups:
        yield "it keeps no KV"
    yield from kv_plan.refusals_of_rank(config, kv)
    yield from refusals_of_states(config, kv.kv_cache_groups)
    sizes = {group.kv_cache_spec.block_size for group in kv.kv_cache_groups}
    if len(sizes) > 1:
        yield f"its groups of layers have blocks of {', '.join(map(str, sorted(sizes)))} tokens; all must have as many"
    for number, group in enumerate(kv.kv_cache_groups):
        spec = group.kv_cache_spec
        if keeps_state(spec):
            continue
        if type(spec) not in _SERVED:
            kinds = ", ".join(kind.__name__ for kind in _SERVED)
            yield f"group {number} keeps {type(spec).__name__}; served are {kinds}"
            continue
        if isinstance(spec, MLAAttentionSpec):
            yield from _refusals_of_latents(spec, number)
        if group.is_eagle_group or not getattr(group, "enable_kv_transfer", True):
            yield f"group {number} belongs to a draft model; speculate with --speculative-config of method ngram"
        if any(sum(map(str.isdecimal, name.split("."))) != 1 for name in group.layer_names):
            yield f"group {number} has several caches in one layer of the model, such as {group.layer_names[0]}"
        if fp8_dtype(config, spec) is None:
            yield (
                f"group {number} keeps KV as {config.cache_config.cache_dtype} ({spec.kv_quant_mode.name}); served are "
                "--kv-cache-dtype auto, fp8_e4m3 and fp8_e5m2"
            )
        if getattr(spec, "non_causal", False):
            yield f"group {number} attends to what follows, so that KV depends on more than its prefix"
        if getattr(spec, "tokens_per_state", 1) != 1:
            yield f"group {number} keeps {spec.tokens_per_state} tokens a state"
        heads, tp = kv_plan.total_heads(config, spec), config.parallel_config.tensor_parallel_size
        if spec.num_kv_heads * min(tp, heads) != heads and not (tp > heads and spec.num_kv_heads == 1):
            yield f"group {number} has {spec.num_kv_heads} heads a rank, where the model has {heads} for {tp} ranks"


def _refusals_of_latents(spec: Any, number: int) -> Iterator[str]:
    """Yields what is not served of a group that keeps latents (MLA)."""
    if spec.state_content_bytes is not None:
        yield (
            f"group {number} packs a token's latent as {spec.cache_dtype_str}, {spec.state_content_bytes} bytes that "
            "only its kernel can read; leave --kv-cache-dtype at auto"
        )
    if spec.cache_role != SparseCacheRole.SPARSE:
        yield f"group {number} is the cache of an indexer, by which sparse attention chooses tokens"
    if spec.is_index_group_leader:
        yield f"group {number} is read by sparse attention, whose indexer has a cache beside the latents"
    if spec.model_version is not None:
        yield f"group {number} keeps the compressed latents of {spec.model_version}"
    if spec.non_causal_multi_token_decode:
        yield f"group {number} decodes several tokens at once, which see one another"
    if spec.head_size_v or spec.num_head_slots not in (None, 1):
        yield f"group {number} keeps {spec.num_heads} latents of a token, or values beside them"
