"""Checks whether this vLLM's connector interface is the one that ours was written for: a row of the table in
docs/vllm.md.

    python -m tests.vllm.compatibility            the vLLM that is imported; its row, or what does not fit, and status 1

It needs neither an engine nor a GPU: the newest release is unpacked on PYTHONPATH (tools/vllm_wheel.sh), and of it only
what the connector imports and the shapes of what it is handed are looked at.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids"),
        *("total_num_scheduled_tokens", "kv_cache_block_copies"),
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": (
        *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    "vllm.v1.outputs:KVConnectorOutput": ("finished_sending", "kv_connector_worker_meta"),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": (
        *("layer_names", "kv_cache_spec", "is_eagle_group", "enable_kv_transfer"),
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "tokens_per_state"),
        *("attention_chunk_size", "non_causal"),
    ),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window",),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": (
        *("state_content_bytes", "cache_dtype_str", "cache_role", "is_index_group_leader", "model_version"),
        *("non_causal_multi_token_decode", "num_head_slots"),
    ),
}
"""What compat.py reads of vLLM's dataclasses."""

REQUEST = (
    *("request_id", "num_prompt_tokens", "num_computed_tokens", "num_in_flight_tokens", "all_token_ids", "max_tokens"),
    *("lora_request", "cache_salt", "mm_features", "prompt_embeds", "pooling_params", "kv_transfer_params"),
    *("resumable", "skip_reading_prefix_cache", "num_preemptions", "kv_hints"),
)
"""Attributes that a request is given when it is made."""

CORE = {"set_weight_version": ["weight_version"], "collective_rpc": ["method", "timeout", "args", "kwargs"]}
"""Methods of the engine's core that weight_versions.py watches, and what they take."""

LATER = ("unregister_kv_caches", "restore_kv_caches")
"""Methods that came with 0.33, and that an earlier release does not call."""


def complaints() -> Iterator[str]:
    """What does not fit."""
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from kvcluster.engines.vllm import KVClusterConnector

    if KVClusterConnector.__abstractmethods__:
        yield f"abstract here: {', '.join(sorted(KVClusterConnector.__abstractmethods__))}"
    for name, ours in vars(KVClusterConnector).items():
        if name.startswith("_") and name != "__init__":
            continue
        theirs = inspect.getattr_static(KVConnectorBase_V1, name, None) or inspect.getattr_static(
            SupportsHMA, name, None
        )
        if theirs is None and name in LATER:
            continue
        if theirs is None:
            yield f"{name} is no method of vLLM's"
        elif callable(getattr(KVClusterConnector, name, None)) and not isinstance(theirs, property):
            mine, expected = (list(inspect.signature(_plain(one)).parameters) for one in (ours, theirs))
            if mine != expected:
                yield f"{name} takes {mine}, where vLLM passes {expected}"
    for where, names in FIELDS.items():
        module, _, kind = where.partition(":")
        has = {field.name for field in dataclasses.fields(getattr(__import__(module, fromlist=[kind]), kind))}
        for name in names:
            if name not in has:
                yield f"{kind} has no {name}"
    if "dst_block_id" not in KVCacheBlockCopy._fields:
        yield "KVCacheBlockCopy has no dst_block_id"
    if not hasattr(KVCacheManager, "evict_blocks"):
        yield "KVCacheManager has no evict_blocks"
    for name in ("max_concurrent_batches", "use_v2_model_runner"):
        if not hasattr(VllmConfig, name):
            yield f"VllmConfig has no {name}"
    for name, expected in CORE.items():
        method = getattr(EngineCore, name, None)
        mine = list(inspect.signature(method).parameters)[1:] if method is not None else None
        if mine != expected:
            yield f"EngineCore.{name} takes {mine}, and {expected} is watched"
    made = inspect.getsource(Request.__init__)
    for name in REQUEST:
        if f"self.{name}" not in made:
            yield f"Request has no {name}"


def _plain(function: object) -> object:
    return function.__func__ if isinstance(function, (classmethod, staticmethod)) else function


def main() -> int:
    """Prints the row; 1 where something does not fit."""
    import vllm

    found = list(complaints())
    for complaint in found:
        print(complaint, file=sys.stderr)
    print(f"| {vllm.__version__} | {'fits' if not found else f'{len(found)} do not fit'} |")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
