"""All use of vLLM's internals, for the releases in the compatibility table of docs/vllm.md.

Every function here reads vLLM's objects and returns values of our own; no other module of the connector reads those
objects (kv_plan.py, refusals.py and examine.py do, when or before an engine starts), so a change in a release changes
only this module. `Any` lives here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from huggingface_hub import snapshot_download
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

import kvcluster
import kvcluster.engines.vllm.kv_plan as kv_plan
import kvcluster.engines.vllm.refusals as refusals
from kvcluster.core.groups import LAST, PREFIX, Group, Part, Reuse, chunk, window
from kvcluster.engines.vllm.kv_format import KVFormat, attention_backend, kv_format, latent_backends
from kvcluster.engines.vllm.state_format import keeps_state, state_format, state_plane, state_views
from kvcluster.errors import CallerError

NULL_BLOCK = 0
"""The number in a block table for a block that the engine no longer keeps, or never had."""

_IRRELEVANT = """
    architectures bos_token_id dtype eos_token_id id2label label2id output_attentions output_hidden_states pad_token_id
    return_dict tie_word_embeddings torch_dtype transformers_version use_cache
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV of one engine: the `groups` of the whole model, and for each group the part that one rank holds, None if
    it computes none of the group's layers, and the byte order of its blocks (`formats`). `layers` are the engine's
    names of the layers of these parts, in the order of `groups[i].layers`; `largest` are the parts of the rank that
    moves the most bytes, for which the others wait. `dims` are the dimensions of K and of V of one head, that of the
    latent (MLA) and 0, or the bytes of a state and 0.
    `kernels` names what computes KV on a GPU, as (name, value), since the bits depend on it; it is empty on a CPU,
    whose kernels stand in `formats`. `zeroes_blocks`: the engine writes new blocks before it passes the step to its
    workers' connectors."""

    block_tokens: int
    groups: tuple[Group, ...]
    parts: tuple[Part | None, ...]
    largest: tuple[Part | None, ...]
    layers: tuple[tuple[str, ...], ...]
    dims: tuple[tuple[int, int], ...]
    formats: tuple[KVFormat, ...]
    kernels: tuple[tuple[str, str], ...] = ()
    zeroes_blocks: bool = False

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """The groups that keep KV of tokens."""
        return tuple(number for number, group in enumerate(self.groups) if group.reuse != LAST)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """The groups that keep recurrent state."""
        return tuple(number for number, group in enumerate(self.groups) if group.reuse == LAST)

    @property
    def may_fail_in_part(self) -> bool:
        """Whether the engine can continue from a load of which only the first blocks arrived. With several block tables
        it cannot: it rolls back the whole request, and only if the load is not within a forward pass."""
        return len(self.groups) == 1 and self.groups[0].reuse == PREFIX


def layout(config: Any, kv: Any) -> Layout:
    """Returns the layout for a VllmConfig and a KVCacheConfig. Raises CallerError, naming the trait, if the engine is
    not supported."""
    for trait in refusals.refusals(config, kv):
        raise CallerError(f"kvcluster does not serve this engine: {trait}")
    groups, dims, formats, heads = [], [], [], []
    for of_engine, layers in zip(kv.kv_cache_groups, kv_plan.group_layers(config, kv), strict=True):
        spec = of_engine.kv_cache_spec
        if keeps_state(spec):
            ranks = config.parallel_config.tensor_parallel_size
            of_state = state_format(config, spec)
            groups.append(Group(layers, (state_plane(spec, of_state, ranks),), LAST))
            dims.append((spec.state_content_size_bytes, 0))
            formats.append(of_state)
            heads.append(kv_plan.rank_heads(config, 1, of=ranks))
            continue
        total = kv_plan.total_heads(config, spec)
        v_dim = spec.head_size_v if spec.head_size_v is not None else spec.head_size
        dtype = str(spec.dtype).removeprefix("torch.")
        of_kernel, of_head = kv_format(config, spec), (spec.head_size, v_dim)
        planes = of_kernel.planes(heads=total, block_tokens=spec.block_size, dims=of_head, dtype=dtype)
        groups.append(Group(layers, planes, _reuse(spec)))
        dims.append(of_head)
        formats.append(of_kernel)
        heads.append(kv_plan.rank_heads(config, spec.num_kv_heads, of=total))
    names = (sorted(of_engine.layer_names, key=extract_layer_index) for of_engine in kv.kv_cache_groups)
    parts = kv_plan.parts_of_stages(config, groups, heads)
    block_tokens = kv.kv_cache_groups[0].kv_cache_spec.block_size
    return Layout(
        block_tokens,
        groups=tuple(groups),
        parts=parts[kv_plan.pipeline_rank(config)],
        largest=kv_plan.largest(groups, parts),
        layers=tuple(tuple(of_group) for of_group in names),
        dims=tuple(dims),
        formats=tuple(formats),
        kernels=_kernels(config, groups, dims) if device() != "cpu" else (),
        zeroes_blocks=kv.needs_kv_cache_zeroing,
    )


def _reuse(spec: Any) -> Reuse:
    """Returns which blocks a group's engine keeps before a boundary. Where vLLM keeps all blocks of layers that slide
    or attend in chunks (`--disable-hybrid-kv-cache-manager`), their spec is that of full attention."""
    if isinstance(spec, SlidingWindowSpec):
        return window(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return chunk(spec.attention_chunk_size)
    return PREFIX


def _kernels(config: Any, groups: Sequence[Group], dims: Sequence[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
    """Asks vLLM, and NVIDIA's management library, but neither torch nor CUDA. vLLM keeps its current config for the
    process, so this is for the thread that starts the engine."""
    names: list[str] = []
    prefills: list[str] = []
    for group, (k_dim, v_dim) in zip(groups, dims, strict=True):
        if group.reuse == LAST:  # whose packing names its kernels
            continue
        if not v_dim:
            backend, prefill = latent_backends(config, k_dim)
            prefills.append(prefill.get_name())
        else:
            backend = attention_backend(config, k_dim, has_sliding_window=group.reuse.kind == "window")
        names.append(backend.get_name())
    capability = current_platform.get_device_capability()
    kind = device() if capability is None else f"{device()} {capability.as_version_str()}"
    attention = ("device", kind), ("attention", ", ".join(dict.fromkeys(names)))
    return (*attention, ("prefill", ", ".join(dict.fromkeys(prefills)))) if prefills else attention


def views(kv_caches: Mapping[str, torch.Tensor], layout: Layout, number: int) -> list[Any]:
    """Returns the KV of group `number` in the form of `Paged.layers`, from the engine's tensors `[blocks, heads,
    tokens, dim of K + dim of V]`, one per layer; of latents, `[blocks, 1, tokens, dim]`. Raises CallerError for tensors
    of another shape or with unknown strides."""
    k_dim, v_dim = layout.dims[number]
    group, out = layout.groups[number], list[Any]()
    for name in layout.layers[number]:
        cache = kv_caches[name]
        if group.reuse == LAST:
            out.append(state_views(name, cache, group.planes[0]))
            continue
        if cache.ndim != 4 or cache.shape[0] == 0 or cache.shape[2:] != (layout.block_tokens, k_dim + v_dim):
            raise _unknown(name, cache, layout, number)
        try:
            out.append(layout.formats[number].views(cache, k_dim=k_dim, v_dim=v_dim, heads=group.heads))
        except CallerError:
            raise _unknown(name, cache, layout, number) from None
    return out


def _unknown(name: str, cache: torch.Tensor, layout: Layout, number: int) -> CallerError:
    return CallerError(
        f"kvcluster does not know the layout of {name}: {list(cache.shape)} with strides {list(cache.stride())}; "
        f"expected [blocks, heads, {layout.block_tokens}, {sum(layout.dims[number])}]. Does the attention backend "
        "split blocks? Then give --block-size its own size"
    )


def extra_keys(request: Any, block_tokens: int, first: int, stop: int, engine: bytes) -> dict[int, bytes]:
    """Returns by block number what blocks `first` to `stop` depend on besides their tokens: images, audio, embeddings.
    The adapter and the salt are in our hashes in another way.

    The engine names such input by a text that may be a `uuid` of the caller's, a hash of that `uuid`, or a count of one
    process, and nothing in the request distinguishes these from a hash of the content. The engine's own caches go by
    the same name, so a hash of the content would not identify the computed KV either. So each key contains `engine`,
    random bytes of this one engine: no other engine, and not this one after a restart, finds these blocks or any block
    behind them.
    """
    if not request.mm_features and getattr(request, "prompt_embeds", None) is None:
        return {}
    found: dict[int, bytes] = {}
    for block in range(first, stop):
        start, end = block * block_tokens, (block + 1) * block_tokens
        keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        rest = [key for key in keys or () if key[0] not in ("lora", "cache_salt")]
        if rest:
            found[block] = engine + repr((rest, *_embeds_traits(request, start, end))).encode()
    return found


def _embeds_traits(request: Any, start: int, end: int) -> tuple[object, ...]:
    """Returns what the engine's name for embeddings leaves out: their dtype, and which positions are tokens instead."""
    embeds, is_token = getattr(request, "prompt_embeds", None), getattr(request, "prompt_is_token_ids", None)
    return () if embeds is None else (str(embeds.dtype), None if is_token is None else list(is_token[start:end]))


def shared_tokens(request: Any) -> int:
    """Returns how many leading tokens of a request depend on tokens, adapter and salt alone: blocks within them are
    shared with other engines."""
    if getattr(request, "prompt_embeds", None) is not None:
        return 0
    first = min((feature.mm_position.offset for feature in request.mm_features), default=request.num_tokens)
    return int(first)


def is_private(request: Any) -> bool:
    """Whether a request's KV is not cached: it depends on more than its hashes cover, or no request continues from
    it."""
    lora = request.lora_request
    unusual = lora is not None and any(getattr(lora, name, False) for name in ("load_inplace", "is_3d_lora_weight"))
    return unusual or request.pooling_params is not None or getattr(request, "resumable", False)


def has_media(request: Any) -> bool:
    """Whether the request has images or audio, whose encoder outputs the engine caches by their names."""
    return bool(request.mm_features)


def reads_cache(request: Any) -> bool:
    """Whether the request may continue from cached KV. It may not if it wants the logprobs of its prompt."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def adapter(request: Any) -> tuple[int, str]:
    """Returns the number under which the engine loaded the request's LoRA, and its path; (0, "") if it uses none."""
    lora = request.lora_request
    return (0, "") if lora is None else (int(lora.lora_int_id), str(lora.lora_path))


def salt(request: Any) -> bytes:
    """Returns the salt that the caller gave to isolate the request's KV."""
    return as_bytes(request.cache_salt or "")


def as_bytes(text: str) -> bytes:
    """Encodes a text of the engine's, which may contain any code point, also lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def transfer_params(request: Any) -> dict[str, Any]:
    """Returns the request's `kv_transfer_params`; {} if there are none."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def kv_hints(request: Any) -> Any:
    """Returns the hints of an orchestrator that the request carries; None if there are none."""
    return getattr(request, "kv_hints", None)


def roles(config: Any) -> tuple[bool, bool]:
    """Returns whether this engine stores, and whether it loads."""
    role = config.kv_transfer_config.kv_role
    return role in ("kv_producer", "kv_both"), role in ("kv_consumer", "kv_both")


def loads_within(config: Any) -> bool:
    """Whether KV may be loaded within a forward pass. The engine has to recompute what a step computed over KV that did
    not arrive. It does not if the next step was scheduled by then, nor with its second model runner: both continue from
    results that should have been rolled back (https://github.com/vllm-project/vllm/issues/49250). On a GPU the model's
    thread would have to wait between layers, which a full CUDA graph cannot."""
    return device() == "cpu" and config.max_concurrent_batches == 1 and not config.use_v2_model_runner


def preemptions(request: Any) -> int:
    """Returns how often the request has been preempted so far."""
    return int(request.num_preemptions)


def prefix_cache_is_unused(cache_manager: Any) -> bool:
    """Whether the engine's own prefix cache holds nothing that a request could continue from: it is disabled, or no
    block is in use. While one is in use, vLLM cannot reset the cache."""
    pool = cache_manager.block_pool
    in_use = pool.num_gpu_blocks - pool.get_num_free_blocks()
    return not cache_manager.enable_caching or in_use <= 1  # the null block always is


def empty_prefix_cache(cache_manager: Any, ended: Collection[str]) -> bool:
    """Empties the engine's own prefix cache, so that no request continues from what is in it. Returns False, and
    changes nothing, while a request has blocks, other than those `ended`, whose blocks are only kept for stores."""
    if not cache_manager.enable_caching:
        return True
    managers = cache_manager.coordinator.single_type_managers
    if any(blocks and name not in ended for of_group in managers for name, blocks in of_group.req_to_blocks.items()):
        return False
    cache_manager.evict_blocks(set(range(cache_manager.block_pool.num_gpu_blocks)))
    return True


def has_few_blocks(cache_manager: Any) -> bool:
    """Whether less than an eighth of the engine's blocks is free: not in use by any request."""
    pool = cache_manager.block_pool
    return bool(pool.get_num_free_blocks() < pool.num_gpu_blocks // 8)


def forget(cache_manager: Any, blocks: set[int]) -> None:
    """Evicts these blocks from the engine's own prefix cache, so that no later request gets them."""
    cache_manager.evict_blocks(blocks)


def validated_tokens(request: Any) -> int:
    """Returns the number of tokens whose KV was computed by steps whose outcome is known."""
    return int(request.num_computed_tokens) - int(getattr(request, "num_in_flight_tokens", 0))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a step. `new_blocks` are its whole block table if `replaces` is set, otherwise the blocks to
    append (None for none). Its first `computed` tokens have KV before the step, and the step computes `tokens` more."""

    request: str
    new_blocks: tuple[tuple[int, ...], ...] | None
    replaces: bool
    computed: int
    tokens: int


def scheduled(output: Any) -> Iterator[Scheduled]:
    """Yields the requests of a SchedulerOutput."""
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, _ids(new.block_ids), True, new.num_computed_tokens, tokens[new.req_id])
    cached = output.scheduled_cached_reqs
    for i, request in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        yield Scheduled(
            request,
            None if blocks is None else _ids(blocks),
            request in cached.resumed_req_ids,
            cached.num_computed_tokens[i],
            tokens[request],
        )


def _ids(blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(of_group) for of_group in blocks)


def copied_into(output: Any) -> tuple[int, ...]:
    """Returns the blocks into which a step copies others before it computes."""
    return tuple(copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ())


def boundary_states(output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """Returns by request the states that a step has, once it has run, in blocks of their own, each as (group, block,
    tokens before the boundary). The engine keeps the block as it is until it lists it as written anew."""
    state = getattr(output, "kv_connector_block_state", None)
    return {} if state is None else state.boundary_state_offloads


def scheduled_tokens(output: Any) -> int:
    """Returns how many tokens a step computes, of all its requests."""
    return int(output.total_num_scheduled_tokens)


def preempted(output: Any) -> tuple[str, ...]:
    """Returns the requests that were preempted since the last step."""
    return tuple(output.preempted_req_ids or ())


def checkpoint(config: Any) -> str:
    """Returns the path of the model's weights. Raises CallerError if they are dummy weights or cannot be located."""
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    if load_format == "dummy":
        raise CallerError("load_format is dummy: random weights have no fingerprint; give weights='sha256:...'")
    model = config.model_config
    if os.path.exists(model.model):
        return str(model.model)
    try:
        return str(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:  # the hub's library may raise any exception
        raise CallerError(
            f"cannot locate the checkpoint of {model.model} ({error}); give weights='sha256:...'"
        ) from None


def settings_of_model(config: Any) -> dict[str, Any]:
    """Returns what affects KV besides the checkpoint's files and the layout: the model's settings with all
    overrides."""
    model = config.model_config
    text = model.hf_text_config.to_dict()
    plain = {key: value for key, value in text.items() if not key.startswith("_") and key not in _IRRELEVANT.split()}
    multimodal = getattr(model, "multimodal_config", None)
    return {
        "config": plain,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "mm_processor_kwargs": getattr(multimodal, "mm_processor_kwargs", None),
    }


def version() -> str:
    """Returns the engine's version as "major.minor"."""
    return ".".join(vllm.__version__.split(".")[:2])


def release() -> str:
    """Returns the engine's whole version."""
    return str(vllm.__version__)


def device() -> str:
    """Returns the kind of device that holds the engine's KV, as torch names it: "cpu", "cuda"."""
    return str(current_platform.device_type)


def facts(config: Any, layout: Layout) -> tuple[tuple[str, str], ...]:
    """Returns facts about an engine for operators, as (name, value). Most of them are in the namespace as well; "own
    hash" is the algorithm of the engine's own block hashes, which the cluster does not use."""
    cache, parallel = config.cache_config, config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return (
        ("engine", f"vllm {vllm.__version__}"),
        ("kvcluster", kvcluster.__version__),
        ("hash", "sha256 over token ids, not seeded"),
        ("own hash", cache.prefix_caching_hash_algo if cache.enable_prefix_caching else "none"),
        ("block", f"{layout.block_tokens} tokens"),
        ("groups", ", ".join(_named(group) for group in layout.groups)),
        ("dtype", str(config.model_config.dtype).removeprefix("torch.")),
        ("kv format", ", ".join(dict.fromkeys(map(str, layout.formats)))),
        ("ranks", f"{ranks(config)}: {pipeline} pipeline of {tensor} tensor parallel" if pipeline > 1 else str(tensor)),
        *layout.kernels,
    )


def ranks(config: Any) -> int:
    """Returns how many workers the engine has, each with a part of its KV."""
    return int(config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size)


def _named(group: Group) -> str:
    if group.reuse == LAST:
        return f"{len(group.layers)} layers of recurrent state"
    keeps = {"window": "with a window", "chunk": "in chunks"}.get(group.reuse.kind)
    return f"{len(group.layers)} layers" + (f" {keeps} of {group.reuse.tokens}" if keeps else "")
