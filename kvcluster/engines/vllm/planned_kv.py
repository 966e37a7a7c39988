"""The KV that an engine will keep, before it is started, as far as its configuration tells.

An engine learns this from its layers, which exist only after the weights are loaded. Here layers are made up from the
model's settings as core/model_config.py understands them, with heads and sizes from vLLM, and vLLM itself groups them.
What the settings do not tell, such as the KV of a draft model, is known only when the engine starts.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

from kvcluster.core.model_config import read_kv

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs as _plan
else:

    def _plan(config: Any, specs: Any, memory: Any) -> Any:
        return get_kv_cache_configs(config, specs, memory, get_global_kv_cache_groups(config, specs))


_AMPLE = 2**50
"""Bytes of memory for KV: enough for one request of any length. Nothing is allocated."""


def planned_kv(config: Any, memory: int = _AMPLE) -> Any:
    """Returns a KVCacheConfig for a VllmConfig: groups of layers, and blocks for so many bytes of memory. Raises
    ConfigError, naming the setting, if the model's settings do not tell."""
    if config.cache_config.kv_cache_layout is None:  # an engine asks its kernels; for sizes and groups any will do
        config.cache_config.kv_cache_layout = "LBHNC"
    made = _plan(config, [layer_specs(config)], [memory])[0]
    config.cache_config.num_gpu_blocks = made.num_blocks
    return generate_scheduler_kv_cache_config([made])


def layer_specs(config: Any) -> dict[str, Any]:
    """Returns the spec of each layer by its name. Raises as planned_kv."""
    model, cache = config.model_config, config.cache_config
    # The dtype of read_kv does not matter: vLLM's own is taken.
    groups = read_kv(model.hf_text_config.to_dict(), "float32").groups
    shape = {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
        "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
    }
    specs: dict[int, Any] = {}
    for group in groups:
        if group.planes[0].name == "latent":
            spec = MLAAttentionSpec(**(shape | {"num_kv_heads": 1}))
        elif group.reuse.kind == "window":
            spec = SlidingWindowSpec(**shape, sliding_window=group.reuse.tokens)
        else:
            spec = FullAttentionSpec(**shape)
        specs |= dict.fromkeys(group.layers, spec)
    return {f"model.layers.{layer}.self_attn.attn": specs[layer] for layer in sorted(specs)}
