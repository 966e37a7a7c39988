"""All use of vLLM's internals, for the releases in the compatibility table of docs/vllm.md.

Every function here reads vLLM's objects and returns values of our own; no other module of the connector reads those
objects (registration.py and examine.py do, before an engine starts), so a change in a release changes only this module.
The supported engines are an allow list: a kind of layer, of KV or of parallelism that a later release adds is refused
by name until it has been reviewed. `Any` lives here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from huggingface_hub import snapshot_download
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

import kvcluster
from kvcluster.core.groups import LAST, PREFIX, Group, Part, window
from kvcluster.engines.vllm.kv_format import KVFormat, attention_backend, fp8_dtype, kv_format, latent_backends
from kvcluster.engines.vllm.state_format import (
    keeps_state,
    refusals_of_states,
    state_format,
    state_plane,
    state_views,
)
from kvcluster.errors import CallerError

NULL_BLOCK = 0
"""The number in a block table for a block that the engine no longer keeps, or never had."""

_SERVED = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
"""Exactly these kinds: a subclass keeps something else."""

_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")

_IRRELEVANT = """
    architectures bos_token_id dtype eos_token_id id2label label2id output_attentions output_hidden_states pad_token_id
    return_dict tie_word_embeddings torch_dtype transformers_version use_cache
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV of one engine: the `groups` of the whole model, and for each group the part that one rank holds and the
    byte order of its blocks (`formats`). `layers` are the engine's names of a group's layers, in the order of
    `groups[i].layers`; `dims` are the dimensions of K and of V of one head, that of the latent (MLA) and 0, or the
    bytes of a state and 0.
    `kernels` names what computes KV on a GPU, as (name, value), since the bits depend on it; it is empty on a CPU,
    whose kernels stand in `formats`. `zeroes_blocks`: the engine writes new blocks before it passes the step to its
    workers' connectors."""

    block_tokens: int
    groups: tuple[Group, ...]
    parts: tuple[Part, ...]
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
    for trait in refusals(config, kv):
        raise CallerError(f"kvcluster does not serve this engine: {trait}")
    tp = config.parallel_config.tensor_parallel_size
    rank = config.parallel_config.rank % tp
    groups, parts, names, dims, formats = [], [], [], [], []
    for of_engine in kv.kv_cache_groups:
        spec = of_engine.kv_cache_spec
        layers = sorted(of_engine.layer_names, key=extract_layer_index)
        names.append(tuple(layers))
        numbers = tuple(extract_layer_index(name) for name in layers)
        if keeps_state(spec):
            of_state = state_format(config, spec)
            groups.append(Group(numbers, (state_plane(spec, of_state, tp),), LAST))
            parts.append(Part(0, len(layers), rank, rank + 1))
            dims.append((spec.state_content_size_bytes, 0))
            formats.append(of_state)
            continue
        heads = _total_heads(config, spec)
        v_dim = spec.head_size_v if spec.head_size_v is not None else spec.head_size
        dtype = str(spec.dtype).removeprefix("torch.")
        of_kernel, of_head = kv_format(config, spec), (spec.head_size, v_dim)
        planes = of_kernel.planes(heads=heads, block_tokens=spec.block_size, dims=of_head, dtype=dtype)
        slides = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        group = Group(numbers, planes, window(slides) if slides else PREFIX)
        first = rank * heads // tp  # with more ranks than heads, neighbouring ranks hold the same head
        groups.append(group)
        parts.append(Part(0, len(layers), first, first + spec.num_kv_heads))
        dims.append(of_head)
        formats.append(of_kernel)
    block_tokens = kv.kv_cache_groups[0].kv_cache_spec.block_size
    kernels = _kernels(config, groups, dims) if device() != "cpu" else ()
    of_groups = tuple(groups), tuple(parts), tuple(names), tuple(dims), tuple(formats)
    return Layout(block_tokens, *of_groups, kernels, zeroes_blocks=kv.needs_kv_cache_zeroing)


def _total_heads(config: Any, spec: Any) -> int:
    """Returns the KV heads of the whole model: one latent stands for all of them."""
    return 1 if isinstance(spec, MLAAttentionSpec) else int(config.model_config.get_total_num_kv_heads())


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


def refusals(config: Any, kv: Any) -> Iterator[str]:
    """Yields what kvcluster does not serve of an engine, each with what to do if anything can be done."""
    yield from refusals_of_settings(config)
    yield from _refusals_of_groups(config, kv)


def refusals_of_settings(config: Any) -> Iterator[str]:
    """Yields the refusals that a VllmConfig alone determines, before its KV is planned."""
    parallel, cache = config.parallel_config, config.cache_config
    if parallel.pipeline_parallel_size > 1:
        yield "it uses pipeline ranks; use --tensor-parallel-size"
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


def _refusals_of_groups(config: Any, kv: Any) -> Iterator[str]:
    if not kv.kv_cache_groups:
        yield "it keeps no KV"
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
        if fp8_dtype(config, spec) is None:
            yield (
                f"group {number} keeps KV as {config.cache_config.cache_dtype} ({spec.kv_quant_mode.name}); served are "
                "--kv-cache-dtype auto, fp8_e4m3 and fp8_e5m2"
            )
        if getattr(spec, "attention_chunk_size", None) or getattr(spec, "non_causal", False):
            yield f"group {number} attends in chunks or to what follows, so that KV depends on more than its prefix"
        if getattr(spec, "tokens_per_state", 1) != 1:
            yield f"group {number} keeps {spec.tokens_per_state} tokens a state"
        heads, tp = _total_heads(config, spec), config.parallel_config.tensor_parallel_size
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
    return (
        ("engine", f"vllm {vllm.__version__}"),
        ("kvcluster", kvcluster.__version__),
        ("hash", "sha256 over token ids, not seeded"),
        ("own hash", cache.prefix_caching_hash_algo if cache.enable_prefix_caching else "none"),
        ("block", f"{layout.block_tokens} tokens"),
        ("groups", ", ".join(_named(group) for group in layout.groups)),
        ("dtype", str(config.model_config.dtype).removeprefix("torch.")),
        ("kv format", ", ".join(dict.fromkeys(map(str, layout.formats)))),
        ("ranks", str(parallel.tensor_parallel_size)),
        *layout.kernels,
    )


def _named(group: Group) -> str:
    if group.reuse == LAST:
        return f"{len(group.layers)} layers of recurrent state"
    slides = f" with a window of {group.reuse.tokens}" if group.reuse.kind == "window" else ""
    return f"{len(group.layers)} layers{slides}"
