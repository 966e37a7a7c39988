"""The KV of a model as described by its Hugging Face config.json: groups of layers and their planes.

Settings are read from the file as it is, without the library that wrote it, so the library's defaults and aliases are
unknown here. Only settings listed here are understood. Any other setting that affects KV is refused by name, because a
guessed figure is worse than none: recurrent layers, layers that share KV, windows and chunks whose layers are not
named. An engine that holds the model itself reads its live settings instead, and compares them with real KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcluster.core import limits
from kvcluster.core.groups import DTYPE_BYTES, PREFIX, Group, Plane, Reuse, chunk, window
from kvcluster.errors import ConfigError

_OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""The names of these settings in GPT-2 and related models."""

_NOT_UNDERSTOOD = """
    attn_config attn_layer_indices attn_layer_period block_configs block_types
    cross_attention_layers full_attention_interval global_head_dim hybrid_override_pattern index_topk
    is_encoder_decoder kv_n_heads layers_block_type multi_query multi_query_attention n_head_kv
    new_decoder_architecture num_global_key_value_heads num_key_value_heads_per_layer num_kv_heads
    num_kv_shared_layers state_size use_cla
"""
"""Each of these settings, if set, means that the KV has another shape, other heads or other layers than the settings
read here describe."""

_RECURRENT = ("linear_conv_", "linear_key_", "linear_num_", "mamba_", "ssm_")
"""Prefixes of the settings of layers that keep a state instead of KV."""

_EVERY_LAYER_SLIDES = ("mistral", "mixtral", "phi3", "starcoder2")
_UPPER_LAYERS_SLIDE = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types for which `sliding_window` alone determines which layers slide; for others `layer_types` must."""

_ADD_LAYER_TYPES = (
    "add layer_types to the file, 'full_attention', 'sliding_attention' or 'chunked_attention' for each layer"
)


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The groups of a model, and in words the defaults that were assumed for settings missing in its file."""

    groups: tuple[Group, ...]
    assumed: tuple[str, ...]


def read_kv(config: Mapping[str, Any], dtype: str | None = None) -> ModelKV:
    """Returns one group of layers for each reuse rule. `dtype` is that of the KV, by default that of the model.

    Raises ConfigError that names the setting if one is missing, or affects KV and is not understood.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    strange = _NOT_UNDERSTOOD.split()
    for settings in (config, text):
        for name, value in settings.items():
            if value and (name in strange or name.startswith(_RECURRENT)):
                raise ConfigError(f"{name}={_short(value)} affects the KV in a way that is not supported")
    assumed: list[str] = []
    planes = _planes(text, dtype or _dtype(config, text), assumed)
    by_reuse: dict[Reuse, list[int]] = {}
    layers = _number(text, "num_hidden_layers")
    if layers > limits.SPEC_BYTES:  # checked before a list of them is built; each takes some bytes of a spec
        raise ConfigError(
            f"num_hidden_layers={layers} exceeds the {limits.SPEC_BYTES} layers that a spec can hold at most"
        )
    for layer, reuse in enumerate(_reuses(text, layers)):
        by_reuse.setdefault(reuse, []).append(layer)
    in_order = sorted(by_reuse, key=lambda reuse: (reuse.tokens, reuse.kind))
    return ModelKV(tuple(Group(tuple(by_reuse[reuse]), planes, reuse) for reuse in in_order), tuple(assumed))


def _planes(text: Mapping[str, Any], dtype: str, assumed: list[str]) -> tuple[Plane, ...]:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if text.get("kv_lora_rank"):  # MLA: one latent, and the rotary part of K, for all heads
        return (Plane("latent", 1, _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim"), dtype),)
    query_heads = _number(text, "num_attention_heads")
    if text.get("num_key_value_heads") is not None:
        heads = _number(text, "num_key_value_heads")
    else:
        heads = query_heads
        assumed.append("num_key_value_heads is not given: num_attention_heads is assumed")
    if text.get("head_dim") is not None:
        dim = _number(text, "head_dim")
    else:
        dim, rest = divmod(_number(text, "hidden_size"), query_heads)
        if rest or not dim:
            raise ConfigError(f"head_dim is missing, and hidden_size is no multiple of {query_heads} heads")
        assumed.append("head_dim is not given: hidden_size / num_attention_heads is assumed")
    v_dim = _number(text, "v_head_dim") if text.get("v_head_dim") is not None else dim
    return (Plane("k", heads, dim, dtype), Plane("v", heads, v_dim, dtype))


def _reuses(text: Mapping[str, Any], layers: int) -> Sequence[Reuse]:
    """Returns the reuse rule of each layer."""
    kinds = text.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
            raise ConfigError(f"layer_types must be a list with one entry for each of the {layers} layers")
        return [_reuse_of(text, kind) for kind in kinds]
    if text.get("attention_chunk_size"):
        raise ConfigError(f"attention_chunk_size does not say which layers attend in chunks: {_ADD_LAYER_TYPES}")
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if text.get(name):
            raise ConfigError(
                f"{name}={_short(text[name])} does not say which layers use a sliding window: {_ADD_LAYER_TYPES}"
            )
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return [PREFIX] * layers
    tokens, model_type = _number(text, "sliding_window"), text.get("model_type")
    if model_type in _EVERY_LAYER_SLIDES:
        return [window(tokens)] * layers
    if model_type in _UPPER_LAYERS_SLIDE:
        if text.get("use_sliding_window") is None:
            return [PREFIX] * layers  # the default is off
        first = _number(text, "max_window_layers", least=0)
        return [window(tokens) if layer >= first else PREFIX for layer in range(layers)]
    raise ConfigError(
        f"sliding_window={tokens} of a {_short(model_type)} does not say which layers use a sliding window: "
        f"{_ADD_LAYER_TYPES}"
    )


def _reuse_of(text: Mapping[str, Any], kind: object) -> Reuse:
    if kind == "full_attention":
        return PREFIX
    if kind == "sliding_attention":
        return window(_number(text, "sliding_window"))
    if kind == "chunked_attention":
        return chunk(_number(text, "attention_chunk_size"))
    raise ConfigError(
        f"layer_types has {_short(kind)}; only full_attention, sliding_attention and chunked_attention are supported"
    )


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and quantised.get("kv_cache_scheme"):
        raise ConfigError("quantization_config has a kv_cache_scheme, which is not supported: give --dtype")
    for settings in (text, config):
        for name in ("dtype", "torch_dtype"):
            if isinstance(value := settings.get(name), str):
                return value.removeprefix("torch.")
    raise ConfigError("neither dtype nor torch_dtype gives the dtype of the KV: give --dtype")


def _number(text: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = text.get(name)
    if value is None and name in _OTHER_NAMES:
        value = text.get(_OTHER_NAMES[name])
    if value is None:
        raise ConfigError(
            f"{name} is missing, and no default is assumed, although the library that wrote the file may have one: "
            "add it to the file"
        )
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}={_short(value)} must be an integer of at least {least}")
    return value


def _short(value: object) -> str:
    return f"{value!r:.60}"
