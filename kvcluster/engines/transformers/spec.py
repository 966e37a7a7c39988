"""The KVSpec of a transformers model: what must match for its KV to be reusable.

Layers, heads, dim and dtype come from the config and are checked against one token's real KV, because configs do not
always state them (some models share one KV head through an attribute of their own). `weights` is a digest of the
weights themselves, so that a model trained further under its old name is another model; `rope` is the rotary settings
as text; `extra` holds a digest of every other setting that may change KV, such as a norm's epsilon, and one of the
buffers that the model has computed, such as its rotary frequencies, which lose bits when a model is cast. The attention
implementation is left out: implementations differ only by float rounding, as batch sizes do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcluster.core.groups import Group, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.engines.texts import canonical, settings_digest
from kvcluster.engines.transformers.compat import check_model, layers, planes, text_config
from kvcluster.errors import CallerError

_ROPE = ("rope_parameters", "max_position_embeddings")

# Settings that do not change KV. If one is missing here, replicas that differ in it miss each other's KV.
_IRRELEVANT = """
    architectures attention_dropout bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id
    finetuning_task id2label initializer_range is_decoder is_encoder_decoder label2id output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id task_specific_params
    tie_word_embeddings tokenizer_class torch_dtype transformers_version use_cache
"""


def spec_of(
    model: PreTrainedModel,
    *,
    weights: str | None = None,
    adapter: str = "",
    block_tokens: int = 16,
    name: str | None = None,
) -> KVSpec:
    """Returns the spec under which this model's KV is cached. Runs the model on one token.

    `weights` is a digest or commit that pins the weights; without it they are all read (`fingerprint`, about a second
    per gigabyte). `adapter` is the content hash of the LoRA in use. `name` replaces the class name as `spec.model`; all
    replicas must give the same. Raises CallerError, naming the trait, for models that cannot be cached: layers other
    than full or sliding attention, encoder-decoder models, latent KV, rotary settings that change with the length.
    """
    check_model(model, adapter)
    config = text_config(model)
    settings = {k: v for k, v in config.to_dict().items() if k not in _IRRELEVANT.split() and not k.startswith("_")}
    rope = {key: settings.pop(key) for key in _ROPE if settings.get(key) is not None}
    spec = KVSpec(
        model=name or type(model).__name__,
        weights=fingerprint(model) if weights is None else weights,
        block_tokens=block_tokens,
        groups=groups(model),
        adapter=adapter,
        rope=canonical(rope),
        extra=_extra(model, settings),
    )
    _check_real_kv(model, spec)
    return spec


def _extra(model: PreTrainedModel, settings: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    computed = _computed(model)
    buffers = (("buffers", _digest(b"kvcluster-buffers-v1", computed)),) if computed else ()
    return (*buffers, ("config", settings_digest(settings)))


def groups(model: PreTrainedModel) -> tuple[Group, ...]:
    """Returns the layers and planes according to a model's config: one group of equal layers, with K and V."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        Group(tuple(range(config.num_hidden_layers)), (Plane("k", heads, dim, dtype), Plane("v", heads, dim, dtype))),
    )


def fingerprint(model: PreTrainedModel) -> str:
    """Returns SHA-256 over the names, dtypes, shapes and bytes of all parameters and persistent buffers, sorted by
    name.

    Tied tensors are read once, under their first name. Nothing is cached, because weights change in place. Raises
    CallerError if the weights are not in memory.
    """
    return _digest(b"kvcluster-weights-v1", model.state_dict(keep_vars=True))


def _computed(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the buffers that are computed and not stored with the weights, such as the frequencies of the rotary
    embedding: two copies of a model have others if one was cast and the other was loaded in that dtype."""
    stored = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name not in stored and not buffer.is_meta}


def _digest(kind: bytes, tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(kind)
    first_names: dict[object, str] = {}
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise CallerError(f"{name} is not in memory, so it cannot be fingerprinted; give weights='sha256:...'")
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first = first_names.setdefault(place, name) if tensor.numel() else name
        header = canonical([name, first, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        if first == name:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return "sha256:" + digest.hexdigest()


def check_spec(spec: KVSpec, model: PreTrainedModel) -> None:
    """Raises CallerError if KV of this spec does not fit into the model. Moves nothing, reads no weights."""
    check_model(model, spec.adapter)
    if spec.groups != groups(model):
        raise CallerError(
            f"the client's spec has {_shape(spec.groups)}, but {type(model).__name__} has {_shape(groups(model))}; "
            "connect with spec_of(model)"
        )


def _check_real_kv(model: PreTrainedModel, spec: KVSpec) -> None:
    cache = DynamicCache(config=text_config(model))
    with torch.no_grad():
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True
        )
    check_kv(cache, spec)


def check_kv(cache: DynamicCache, spec: KVSpec) -> None:
    """Raises CallerError if a cache that the model has filled does not hold KV of the spec's shape and dtype."""
    (group,) = spec.groups
    for i, layer in enumerate(layers(cache)):
        if layer.keys is None:
            raise CallerError(
                f"the model keeps other state than K and V in layer {i}: call model.generate without the prefix cache"
            )
        for plane, tensor in zip(group.planes, planes(layer), strict=True):
            _, heads, _, dim = tensor.shape
            found = Plane(plane.name, heads, dim, str(tensor.dtype).removeprefix("torch."))
            if found != plane:
                raise CallerError(f"layer {i} of the model has {_plane(found)}, but the spec has {_plane(plane)}")
    if len(cache.layers) != len(group.layers):
        raise CallerError(f"the model has KV in {len(cache.layers)} layers, but the spec has {len(group.layers)}")


def _shape(kv: tuple[Group, ...]) -> str:
    return "; ".join(f"{len(g.layers)} layers of {' and '.join(map(_plane, g.planes))}" for g in kv)


def _plane(plane: Plane) -> str:
    return f"{plane.name} [{plane.heads} heads x {plane.dim}, {plane.dtype}]"
