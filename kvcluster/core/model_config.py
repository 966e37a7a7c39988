"""The KV of a model as its Hugging Face config.json tells of it: groups of layers and their planes.

Settings are read from the file as it lies there, without the library that made it: what that would fill in, or
call by another name, is unknown here. So this is a list of what is understood. What else bears on KV is refused by
name, since a figure that rests on a guess is worse than none: recurrent and chunked layers, layers that share KV,
windows whose layers are not named. An engine that holds the model itself reads its live settings instead, and
compares them with real KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcluster.core import limits
from kvcluster.core.spec import DTYPE_BYTES, PREFIX, Group, Plane, window
from kvcluster.errors import ConfigError

_OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
"""GPT-2 and its kin."""

_NOT_UNDERSTOOD = """
    attention_chunk_size attn_config attn_layer_indices attn_layer_period block_configs block_types
    cross_attention_layers full_attention_interval global_head_dim hybrid_override_pattern index_topk
    is_encoder_decoder kv_n_heads layers_block_type multi_query multi_query_attention n_head_kv
    new_decoder_architecture num_global_key_value_heads num_key_value_heads_per_layer num_kv_heads
    num_kv_shared_layers state_size use_cla
"""
"""Each says, where it is set, that KV has another shape, other heads or other layers than the plain settings tell."""

_RECURRENT = ("linear_conv_", "linear_key_", "linear_num_", "mamba_", "ssm_")
"""How the settings of layers begin that keep a state in place of KV."""

_EVERY_LAYER_SLIDES = ("mistral", "mixtral", "phi3", "starcoder2")
_UPPER_LAYERS_SLIDE = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose `sliding_window` alone says which layers it is of; elsewhere `layer_types` must."""

_ADD_LAYER_TYPES = "add layer_types to the file, 'full_attention' or 'sliding_attention' for each layer"


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The groups of a model, and in words what its file left out and was taken for granted."""

    groups: tuple[Group, ...]
    assumed: tuple[str, ...]


def read_kv(config: Mapping[str, Any], dtype: str | None = None) -> ModelKV:
    """One group for the layers of each reuse rule. `dtype` is that of the KV, by default that of the model.

    Raises ConfigError, naming the setting, where one is missing, or bears on KV and is not understood.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    strange = _NOT_UNDERSTOOD.split()
    for settings in (config, text):
        for name, value in settings.items():
            if value and (name in strange or name.startswith(_RECURRENT)):
                raise ConfigError(f"{name}={_short(value)} bears on the KV in a way that is not understood here")
    assumed: list[str] = []
    planes = _planes(text, dtype or _dtype(config, text), assumed)
    by_window: dict[int, list[int]] = {}
    layers = _number(text, "num_hidden_layers")
    if layers > limits.SPEC_BYTES:  # before a list is made of them; each takes some bytes of a spec
        raise ConfigError(f"num_hidden_layers={layers} is more than a spec can hold")
    for layer, tokens in enumerate(_windows(text, layers)):
        by_window.setdefault(tokens, []).append(layer)
    groups = [
        Group(tuple(alike), planes, window(tokens) if tokens else PREFIX) for tokens, alike in sorted(by_window.items())
    ]
    return ModelKV(tuple(groups), tuple(assumed))


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
        assumed.append("num_key_value_heads is not given: as many as num_attention_heads")
    if text.get("head_dim") is not None:
        dim = _number(text, "head_dim")
    else:
        dim, rest = divmod(_number(text, "hidden_size"), query_heads)
        if rest or not dim:
            raise ConfigError(f"head_dim is missing, and hidden_size is no multiple of {query_heads} heads")
        assumed.append("head_dim is not given: hidden_size by num_attention_heads")
    v_dim = _number(text, "v_head_dim") if text.get("v_head_dim") is not None else dim
    return (Plane("k", heads, dim, dtype), Plane("v", heads, v_dim, dtype))


def _windows(text: Mapping[str, Any], layers: int) -> Sequence[int]:
    """For each layer the tokens of its window; 0 for one that looks at all."""
    kinds = text.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
            raise ConfigError(f"layer_types is no list with one entry for each of {layers} layers")
        return [_window_of(text, kind) for kind in kinds]
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        if text.get(name):
            raise ConfigError(f"{name}={_short(text[name])} does not say which layers slide: {_ADD_LAYER_TYPES}")
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return [0] * layers
    tokens, model_type = _number(text, "sliding_window"), text.get("model_type")
    if model_type in _EVERY_LAYER_SLIDES:
        return [tokens] * layers
    if model_type in _UPPER_LAYERS_SLIDE:
        if text.get("use_sliding_window") is None:
            return [0] * layers  # off unless it is said to be on
        first = _number(text, "max_window_layers", least=0)
        return [tokens if layer >= first else 0 for layer in range(layers)]
    raise ConfigError(f"sliding_window={tokens} of a {_short(model_type)}, but of which layers? {_ADD_LAYER_TYPES}")


def _window_of(text: Mapping[str, Any], kind: object) -> int:
    if kind == "full_attention":
        return 0
    if kind == "sliding_attention":
        return _number(text, "sliding_window")
    raise ConfigError(f"layer_types names {_short(kind)}, which is not understood here")


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and quantised.get("kv_cache_scheme"):
        raise ConfigError("quantization_config has a kv_cache_scheme, which is not understood here: give --dtype")
    for settings in (text, config):
        for name in ("dtype", "torch_dtype"):
            if isinstance(value := settings.get(name), str):
                return value.removeprefix("torch.")
    raise ConfigError("neither dtype nor torch_dtype says what the KV is made of: give --dtype")


def _number(text: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = text.get(name)
    if value is None and name in _OTHER_NAMES:
        value = text.get(_OTHER_NAMES[name])
    if value is None:
        raise ConfigError(
            f"{name} is missing; the library that made the file may fill it in, but it is not guessed here"
        )
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}={_short(value)} is no number of at least {least}")
    return value


def _short(value: object) -> str:
    return f"{value!r:.60}"
