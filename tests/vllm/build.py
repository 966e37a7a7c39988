"""Builders for tests of the connector: engine configurations as vLLM makes them, and KV caches as it allocates them.

Nothing here is a stand-in for anything of vLLM's: a folder with a config.json is all that a VllmConfig asks for, and
the groups of layers, their memory and its layout come out of the functions that an engine calls.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

from kvcluster.core.spec import KVSpec
from kvcluster.engines.vllm import compat, kv_plan, settings
from kvcluster.engines.vllm.kv_format import KVFormat, fp8_dtype
from kvcluster.engines.vllm.kv_plan import planned_kv, planned_stages

BLOCK = 4
WINDOW = 16
"""Of the layers that have one: four blocks."""

WEIGHTS = "sha256:1"
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "bos_token_id": 255,
    "eos_token_id": 255,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2} | _SIZES
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 8,
} | _SIZES
MLA = (
    {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2}
    | _SIZES
    | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"q_lora_rank": None, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0}
)
CONV = (
    {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 6}
    | _SIZES
    | {"layer_types": ["conv", "conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_bias": False}
    | {"conv_dim": 32, "block_dim": 32, "block_ff_dim": 64, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0}
    | {"block_auto_adjust_ff_dim": False}
)
LATENT = 16
"""Dimensions of its latent, of which four are rotary."""

CHUNK = 12
"""Of the layers that attend in chunks: three blocks, so that boundaries begin, end and divide chunks."""

LLAMA4 = (
    {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": 4}
    | _SIZES
    | {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]}
    | {"attention_chunk_size": CHUNK, "moe_layers": [], "interleave_moe_layer_step": 0, "num_local_experts": 1}
    | {"intermediate_size_mlp": 64}
)

MODELS = {"llama": LLAMA, "gemma": GEMMA, "mla": MLA, "llama4": LLAMA4, "conv": CONV}


def model_folder(path: Path, content: dict[str, Any]) -> Path:
    """A checkpoint as far as an engine reads it before it loads weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """What --kv-transfer-config says, with a cluster to which no client connects unless the test starts one."""
    return {
        "kv_connector": "KVClusterConnector",
        "kv_connector_module_path": "kvcluster.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "cluster:1", "weights": WEIGHTS, **extra},
    }


def engine_config(
    model: Path, extra: dict[str, Any] | None = None, *, role: str = "kv_both", **arguments: Any
) -> VllmConfig:
    """As an engine makes it, with `extra` as the connector's settings. Two ranks want tensor_parallel_size=2, or
    pipeline_parallel_size=2."""
    if arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1) > 1:
        arguments["distributed_executor_backend"] = "mp"
    below: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "kv_transfer_config": transfer(role, **extra or {}),
    }
    given = EngineArgs(model=str(model), **(below | arguments))
    config = given.create_engine_config()
    if config.model_config.use_mla:  # a CPU switches off what its kernels for latents cannot do, and a GPU does not
        config.cache_config.block_size = given.block_size
        config.cache_config.enable_prefix_caching = given.enable_prefix_caching is not False
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = given.max_num_batched_tokens
    config.cache_config.kv_cache_layout = "LBHNC"  # what the attention backend of a CPU asks for
    return config


def format_on_a_gpu(config: VllmConfig, spec: KVCacheSpec) -> KVFormat:
    """What compat.kv_format finds on a GPU: toys' heads are too small for a CPU's kernels."""
    return KVFormat(latent=isinstance(spec, MLAAttentionSpec), fp8=fp8_dtype(config, spec) or "")


def kv_config(config: VllmConfig, blocks: int = 160) -> KVCacheConfig:
    """The groups of layers and so many blocks of them, for each tensor parallel rank alike, and of pipeline ranks as
    the scheduler gets them. The engine's core notes the number."""
    config.cache_config.num_gpu_blocks_override = blocks
    with _known_layers(config):
        return planned_kv(config, 2**30)


def hybrid_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer of CONV, as vLLM's layers make them once its weights are loaded."""
    cache, model = config.cache_config, config.model_config
    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    kv = FullAttentionSpec(block_size=cache.block_size, num_kv_heads=heads, head_size=dim, dtype=model.dtype)
    cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    state = MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=cls.get_mamba_state_shape_from_config(config),
        dtypes=cls.get_mamba_state_dtype_from_config(config),
        page_size_padded=kv.page_size_bytes,
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
    )
    kinds = enumerate(model.hf_text_config.layer_types)
    return {
        f"model.layers.{number}.{'short_conv' if kind == 'conv' else 'self_attn.attn'}": state if kind == "conv" else kv
        for number, kind in kinds
    }


def kv_of_stages(config: VllmConfig, blocks: int = 160) -> list[KVCacheConfig]:
    """The same as the workers of each pipeline rank get it."""
    config.cache_config.num_gpu_blocks_override = blocks
    with _known_layers(config):
        return planned_stages(config, 2**30)


def _known_layers(config: VllmConfig) -> AbstractContextManager[Any]:
    """Within it the layers of a hybrid are planned, which its settings do not tell."""
    if config.model_config.is_hybrid:
        return patch.object(kv_plan, "layer_specs", hybrid_specs)
    return nullcontext()


def kv_caches(config: VllmConfig, kv: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Memory for it, a tensor a layer: groups lie over one another, as a block belongs to one group at a time."""
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return allocate_kv_cache(kv, torch.device("cpu"), layout)


def layout_of(config: VllmConfig, blocks: int = 160) -> compat.Layout:
    return compat.layout(config, kv_config(config, blocks))


def settings_of(config: VllmConfig) -> settings.ConnectorSettings:
    return settings.parse_settings(config.kv_transfer_config.kv_connector_extra_config)


def spec_of(layout: compat.Layout, *, weights: str = WEIGHTS, model: str = "tiny") -> KVSpec:
    """Of an engine with this layout, where a test does not care what else there is in a spec."""
    return KVSpec(model=model, weights=weights, block_tokens=layout.block_tokens, groups=layout.groups)


def request_of(name: str, tokens: list[int], *, max_tokens: int = 1, block: int = BLOCK, **more: Any) -> Request:
    """As the engine's core makes it, with hashes for the engine's own prefix cache."""
    hasher = get_hash_fn_by_name("sha256")
    init_none_hash(hasher)
    sampling = more.pop("sampling_params", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block, hasher),
        **more,
    )
