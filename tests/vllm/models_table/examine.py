"""Examines one architecture over vLLM's own objects: its model's layers on the meta device, the KV that each says it
keeps, vLLM's groups of them, and what kvcluster refuses of those."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
import vllm.platforms
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker.utils import customize_attention_spec

from kvcluster.core import model_kinds as kinds
from kvcluster.engines.vllm import compat, kv_plan, refusals, registration
from kvcluster.engines.vllm.settings import ConnectorSettings
from tests.vllm.build import format_on_a_gpu
from tests.vllm.models_table.walk import first_line

MAX_TOKENS = 256

UNNAMED = "not refused by name, and no engine of it starts: "

_STATES = {
    "MAMBA1": kinds.MAMBA,
    "MAMBA2": kinds.MAMBA_2,
    "SHORT_CONV": kinds.SHORT_CONVOLUTION,
    "LINEAR": kinds.LINEAR,
    "GDN_ATTN": kinds.DELTA_NET,
}
_LACKING = ("torchvision", "timm", "cutlass", "cuda", "flashinfer")
"""Libraries of images and of kernels for GPUs, which models import, and which building their layers does not need."""


class _EmptyKind(type):
    """Makes every name of a class another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyKind(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Empty(types.ModuleType):
    """A module of an absent library, in which every name is a class without content."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyKind(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds absent libraries after all other finders, so that one that is installed is taken."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".", 1)[0] in _LACKING else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def prepare() -> None:
    """Prepares this process for `examine`: models are inspected in it and not in one of their own, and absent libraries
    of images and sound are empty."""
    sys.meta_path.append(_Absent())
    if not hasattr(triton, "set_allocator"):  # of the stand-in that vLLM has for a CPU
        triton.set_allocator = lambda allocator: None
    compat.kv_format = format_on_a_gpu  # a CPU's kernels take few sizes of heads
    if vllm.platforms.current_platform.is_unspecified():  # a release for GPUs, unpacked where there is none
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
    lazy = registry._LazyRegisteredModel
    lazy.inspect_model_cls = _inspected  # type: ignore[method-assign]


def _inspected(model: Any) -> Any:
    """In place of vLLM's, which starts a process."""
    return registry._ModelInfo.from_model_cls(model.load_model_cls())


def examine(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns what was found of a model with that config.json, which is written into `folder`: `traits` of its KV, its
    `groups` in words, `refused`, the reasons of refusals.py, `token_bytes`, None if it is refused, and `note`, what
    was done in another way than for other models. Raises whatever vLLM raises."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = _engine_config(folder)
    try:
        layers, specs = _layers(config, folder, "meta")
        note = ""
    except Exception as error:
        if refused := list(refusals.refusals_of_settings(config)):
            sparse = getattr(config.model_config.hf_text_config, "index_topk", None)
            traits = [kinds.INDEXER] if sparse else [kinds.OTHER]
            note = f"by its settings; its layers cannot be built here: {first_line(error)}"
            return {"traits": traits, "groups": [], "refused": refused, "token_bytes": None, "note": note}
        if "meta" not in str(error):
            raise
        config = _engine_config(folder)  # a model's layers are named once in a configuration
        layers, specs = _layers(config, folder, "cpu")
        note = "built in memory: it computes with its tensors while it is built"
    kv, failed = _planned(config, specs)
    refused = list(refusals.refusals(config, kv))
    if failed and not refused:
        raise RuntimeError(f"vLLM plans no KV for it here: {failed}")
    refused = refused or list(_misfits(config, kv))
    note = note or (f"layer by layer; vLLM plans no groups of them on a CPU: {failed}" if failed else "")
    return {
        "traits": sorted(set(_traits(config, layers, specs)), key=list(kinds.TRAITS).index),
        "groups": [f"{len(group.layer_names)} {type(group.kv_cache_spec).__name__}" for group in kv.kv_cache_groups],
        "refused": refused,
        "token_bytes": None if refused else sum(_token_bytes(spec) for spec in specs.values()),
        "note": note,
    }


def _planned(config: Any, specs: dict[str, Any]) -> tuple[Any, str]:
    """Returns vLLM's groups of layers, and ""; a group for each layer, and why, if vLLM makes none on a CPU."""
    config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or "LBHNC"
    try:
        made = kv_plan._plan(config, [specs], [kv_plan._AMPLE])[0]
    except Exception as error:
        groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
        return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups), first_line(error)
    config.cache_config.num_gpu_blocks = made.num_blocks
    return generate_scheduler_kv_cache_config([made]), ""


def _misfits(config: Any, kv: Any) -> Iterator[str]:
    """Yields why an engine could not start although nothing is refused by name."""
    try:
        layout = compat.layout(config, kv)
        registration.spec_of(config, layout, ConnectorSettings(), "sha256:1")
    except Exception as error:
        yield f"{UNNAMED}{first_line(error)}"


def _engine_config(folder: Path) -> Any:
    """Returns the configuration of an engine; without a prefix cache where its kind of model allows none on a CPU."""
    try:
        return _arguments(folder, enable_prefix_caching=True).create_engine_config()
    except Exception:
        return _arguments(folder, enable_prefix_caching=False).create_engine_config()


def _arguments(folder: Path, **more: Any) -> EngineArgs:
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=8,
        **more,
    )


def _layers(config: Any, folder: Path, device: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Builds the model. Returns the layers that have a cache, and the specs of those that keep KV."""
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device(device):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        return layers, dict(_specs(config, layers))


def _specs(config: Any, layers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what GPUModelRunner.get_kv_cache_spec collects."""
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        if spec := layer.get_kv_cache_spec(config):
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            yield name, spec


def _token_bytes(spec: Any) -> int:
    if isinstance(spec, MambaSpec):  # a state is of all tokens
        return 0
    return int(spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize)


def _traits(config: Any, layers: Mapping[str, Any], specs: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is true of the KV, each a name of model_kinds.TRAITS."""
    if not specs:
        yield kinds.NONE
    if getattr(config.model_config.hf_text_config, "index_topk", None):
        yield kinds.INDEXER
    for name, spec in specs.items():
        yield from _of_spec(spec)
        if getattr(getattr(layers[name], "impl", None), "sinks", None) is not None:
            yield kinds.SINKS
    if any(getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers.values()):
        yield kinds.SHARED
    yield from _of_all(list(specs.values()))


def _of_spec(spec: Any) -> Iterator[str]:
    """Yields the traits of one layer."""
    if isinstance(spec, MambaSpec):
        yield _STATES.get(spec.mamba_type.name, kinds.OTHER)
    elif isinstance(spec, SlidingWindowMLASpec):
        yield kinds.LATENT_WINDOWS
    elif isinstance(spec, MLAAttentionSpec):
        yield kinds.COMPRESSED if spec.model_version is not None else kinds.LATENTS
        if spec.cache_role != SparseCacheRole.SPARSE or spec.is_index_group_leader:
            yield kinds.INDEXER
    elif isinstance(spec, SlidingWindowSpec):
        yield kinds.WINDOWS
    elif isinstance(spec, ChunkedLocalAttentionSpec) or getattr(spec, "attention_chunk_size", None):
        yield kinds.CHUNKED
    elif isinstance(spec, CrossAttentionSpec):
        yield kinds.CROSS
    elif getattr(spec, "non_causal", False):
        yield kinds.BIDIRECTIONAL
    elif isinstance(spec, SinkFullAttentionSpec):
        yield kinds.STATIC_SINKS
    elif type(spec) is FullAttentionSpec:
        yield kinds.FULL
    else:
        yield kinds.OTHER


def _of_all(specs: Sequence[Any]) -> Iterator[str]:
    """Yields the traits that layers have together."""
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if len({spec.sliding_window for spec in attention if isinstance(spec, SlidingWindowSpec)}) > 1:
        yield kinds.SEVERAL_WINDOWS
    if len({(spec.num_kv_heads, spec.head_size, spec.head_size_v) for spec in attention}) > 1:
        yield kinds.SEVERAL_SHAPES
    if any(spec.head_size_v not in (spec.head_size, 0) for spec in attention):
        yield kinds.UNLIKE


def release() -> str:
    """Returns vLLM's release."""
    return compat.release().split("+", maxsplit=1)[0]


def transformers_release() -> str:
    """Returns the release of transformers."""
    return str(transformers.__version__)
