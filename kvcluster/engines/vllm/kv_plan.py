"""The KV of a whole engine, planned from its settings: which layers are in which group, and at which pipeline rank.

`planned_kv` predicts the KV of an engine that has not been started. An engine knows it from its layers, which exist
only after the weights are loaded. So layers are made up from the model's settings as core/model_config.py understands
them, with heads and sizes from vLLM, and vLLM itself groups them. What the settings do not contain, such as the KV of a
draft model, is known only when the engine starts.

With pipeline ranks vLLM groups the layers of all of them at once and gives each rank the groups without the layers of
the others, so that a group may be empty there; its scheduler gets the groups of the first rank. The whole of a group is
therefore in none of its objects. `group_layers` plans it, in every process alike, and compares it with the layers that
the rank of this process really has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from kvcluster.core.groups import PREFIX, Group, Part
from kvcluster.core.model_config import read_kv
from kvcluster.errors import ConfigError

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs as _plan
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups as _grouped
else:

    def _plan(config: Any, specs: Any, memory: Any) -> Any:
        return get_kv_cache_configs(config, specs, memory, get_global_kv_cache_groups(config, specs))

    def _grouped(config: Any, specs: Any) -> Any:
        return get_global_kv_cache_groups(config, [specs])


_AMPLE = 2**50
"""Bytes of memory for KV: enough for one request of any length. Nothing is allocated."""

_NO_STAGES = "use --tensor-parallel-size"


def planned_kv(config: Any, memory: int = _AMPLE) -> Any:
    """Returns the KVCacheConfig of a VllmConfig's scheduler: groups of layers, and blocks for so many bytes of memory.
    Raises ConfigError, naming the setting, if the model's settings do not determine them."""
    return generate_scheduler_kv_cache_config(planned_stages(config, memory))


def planned_stages(config: Any, memory: int = _AMPLE) -> list[Any]:
    """Returns the KVCacheConfig of the workers of each pipeline rank, each with so many bytes of memory. Raises as
    planned_kv."""
    if config.cache_config.kv_cache_layout is None:  # an engine asks its kernels; for sizes and groups any will do
        config.cache_config.kv_cache_layout = "LBHNC"
    specs, stages = layer_specs(config), range(config.parallel_config.pipeline_parallel_size)
    of_stages = [
        {name: spec for name, spec in specs.items() if extract_layer_index(name) in stage_layers(config, stage)}
        for stage in stages
    ]
    made: list[Any] = _plan(config, of_stages, [memory] * len(of_stages))
    config.cache_config.num_gpu_blocks = made[0].num_blocks
    return made


def layer_specs(config: Any) -> dict[str, Any]:
    """Returns the spec of each layer of the whole model by its name. Raises as planned_kv."""
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
        if group.planes[0].name == "latent" and not model.use_mla:
            raise ConfigError("kv_lora_rank is set, and vLLM computes this model without its latents (MLA)")
        if group.planes[0].name == "latent":
            spec = MLAAttentionSpec(**(shape | {"num_kv_heads": 1}))
        elif group.reuse.kind == "window":
            spec = SlidingWindowSpec(**shape, sliding_window=group.reuse.tokens)
        elif group.reuse.kind == "chunk":
            spec = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.reuse.tokens)
        else:
            spec = FullAttentionSpec(**shape)
        specs |= dict.fromkeys(group.layers, spec)
    return {f"model.layers.{layer}.self_attn.attn": specs[layer] for layer in sorted(specs)}


# ------------------------------------------------------------------------------------------------- pipeline ranks


def pipeline_rank(config: Any) -> int:
    """Returns the pipeline rank of this process: vLLM numbers its workers by tensor rank, and then by pipeline rank. A
    scheduler counts as the first."""
    parallel = config.parallel_config
    return int(parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size)


def stage_layers(config: Any, number: int) -> range:
    """Returns the layers that the pipeline rank of this number computes. Raises ValueError for a
    VLLM_PP_LAYER_PARTITION that does not fit."""
    stages, layers = config.parallel_config.pipeline_parallel_size, config.model_config.get_total_num_hidden_layers()
    return range(*get_pp_indices(layers, number, stages))


def group_layers(config: Any, kv: Any) -> list[tuple[int, ...]]:
    """Returns for each group of a KVCacheConfig the layers that it has in the whole model, ascending. The KVCacheConfig
    is that of the rank of `config`, or of its scheduler.

    Without pipeline ranks it names all of them. Otherwise they are planned. Raises ConfigError if the settings do not
    determine them, or if the rank has other groups or layers than were planned.
    """
    if config.parallel_config.pipeline_parallel_size == 1:
        return [tuple(_numbers(group.layer_names)) for group in kv.kv_cache_groups]
    planned = _grouped(config, layer_specs(config))
    whole = [tuple(_numbers(group.layer_names)) for group in planned]
    kinds, real = ([_kind(group.kv_cache_spec) for group in groups] for groups in (planned, kv.kv_cache_groups))
    if kinds != real:
        raise ConfigError(f"its groups of layers are {_listed(real)}, where its settings give {_listed(kinds)}")
    stage = pipeline_rank(config)
    computed = stage_layers(config, stage)
    for number, (layers, group) in enumerate(zip(whole, kv.kv_cache_groups, strict=True)):
        expected, own = [layer for layer in layers if layer in computed], _numbers(group.layer_names)
        if own != expected:
            raise ConfigError(
                f"pipeline rank {stage} has layers {_listed(own)} in group {number}, where its settings give "
                f"{_listed(expected)}"
            )
    return whole


def refusals_of_stages(config: Any) -> Iterator[str]:
    """Yields why the layers of an engine's pipeline ranks are not known, or are none: what its settings determine."""
    try:
        layers = _numbers(layer_specs(config))
    except ConfigError as error:
        yield f"it has pipeline ranks, and its settings do not determine its layers: {error}; {_NO_STAGES}"
        return
    for stage in range(config.parallel_config.pipeline_parallel_size):
        if set(layers).isdisjoint(stage_layers(config, stage)):
            yield f"its pipeline rank {stage} computes no layer that keeps KV; {_NO_STAGES}"


def refusals_of_rank(config: Any, kv: Any) -> Iterator[str]:
    """Yields why the groups of a pipeline rank are not those that were planned, if its layers are known at all."""
    if config.parallel_config.pipeline_parallel_size > 1 and not any(refusals_of_stages(config)):
        try:
            group_layers(config, kv)
        except ConfigError as error:
            yield f"it has pipeline ranks, and {error}; {_NO_STAGES}"


def total_heads(config: Any, spec: Any) -> int:
    """Returns the KV heads of the whole model: one latent stands for all of them."""
    return 1 if isinstance(spec, MLAAttentionSpec) else int(config.model_config.get_total_num_kv_heads())


def rank_heads(config: Any, heads: int, *, of: int) -> range:
    """Returns the heads of a group that this tensor rank holds: `heads` of all. With more ranks than heads,
    neighbouring ranks hold the same head."""
    tp = config.parallel_config.tensor_parallel_size
    first = config.parallel_config.rank % tp * of // tp
    return range(first, first + heads)


def parts_of_stages(config: Any, groups: Sequence[Group], heads: Sequence[range]) -> list[tuple[Part | None, ...]]:
    """Returns for each pipeline rank the part of each group that it holds with these heads, None for a group of whose
    layers it computes none."""
    if config.parallel_config.pipeline_parallel_size == 1:
        whole = zip(groups, heads, strict=True)
        return [tuple(Part(0, len(group.layers), own.start, own.stop) for group, own in whole)]
    stages = range(config.parallel_config.pipeline_parallel_size)
    return [_parts(groups, heads, stage_layers(config, stage)) for stage in stages]


def _parts(groups: Sequence[Group], heads: Sequence[range], computed: range) -> tuple[Part | None, ...]:
    parts: list[Part | None] = []
    for group, own in zip(groups, heads, strict=True):
        at = [number for number, layer in enumerate(group.layers) if layer in computed]
        parts.append(Part(at[0], at[-1] + 1, own.start, own.stop) if at else None)
    return tuple(parts)


def largest(groups: Sequence[Group], parts: Sequence[tuple[Part | None, ...]]) -> tuple[Part | None, ...]:
    """Returns the parts of the rank that moves the most bytes of a long prompt: with the most layers that need their
    whole prefix, and of those the one with the most layers."""

    def layers(of_rank: tuple[Part | None, ...]) -> tuple[int, int]:
        held = [(group.reuse, part.layers) for group, part in zip(groups, of_rank, strict=True) if part is not None]
        return sum(count for reuse, count in held if reuse == PREFIX), sum(count for _, count in held)

    return max(parts, key=layers)


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(extract_layer_index(name) for name in names)


def _kind(spec: Any) -> str:
    tokens = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return f"{type(spec).__name__} of {tokens} tokens" if tokens else type(spec).__name__


def _listed(each: Sequence[object]) -> str:
    return ", ".join(map(str, each)) or "none"
