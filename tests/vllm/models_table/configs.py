"""A small configuration of each architecture: the default of its class in transformers or in vLLM, or one written here,
with few layers and all other sizes as they are. Nothing is allocated, so only the number of layers costs time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.transformers_utils import configs as vllm_configs
from vllm.transformers_utils.config import _CONFIG_REGISTRY

from tests.vllm.models_table.written import ADDED, CLASSES, REMOVED, WRITTEN

LAYERS = 8
"""Enough for the patterns of hybrids: one layer of eight has attention in Jamba, one of four no chunks in Llama 4."""

_LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class NoConfigError(Exception):
    """No configuration of an architecture is known here."""


class _Block(dict[str, Any]):
    """A dict whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Written(PreTrainedConfig):
    """A configuration whose fields are written in written.py, as those of checkpoints that bring code of their own."""

    def __init__(self, **fields: Any) -> None:
        if blocks := fields.get("block_configs"):  # DeciLM's are objects
            fields["block_configs"] = [_Block({part: _Block(block[part]) for part in block}) for block in blocks]
        for name, value in fields.items():
            if name.endswith("_config") and isinstance(value, dict) and "model_type" in value:
                fields[name] = CONFIG_MAPPING.get(value["model_type"], Written)(**value)
        if "llm_config" in fields:
            fields["text_config"] = fields["llm_config"]
        super().__init__(**fields)


def config_of(architecture: str) -> tuple[dict[str, Any], str]:
    """Returns the content of a config.json, and where its values come from. Raises NoConfigError."""
    if architecture in WRITTEN:
        fields = WRITTEN[architecture]
        model_type = fields["model_type"]
        if model_type not in CONFIG_MAPPING and model_type not in _CONFIG_REGISTRY:
            # Without an __init__ of its own, transformers would make one that takes the fields as they are.
            fields_of_class = {"model_type": model_type, "__init__": Written.__init__}
            AutoConfig.register(model_type, type("Written", (Written,), fields_of_class))
        return {"torch_dtype": "bfloat16", **fields, "architectures": [architecture]}, "written by hand"
    kind, source = _class_of(architecture)
    made = _shrunk(kind)
    content = made.to_dict() | {"architectures": [architecture], "torch_dtype": "bfloat16"}
    content.pop("dtype", None)
    return _merged(content, ADDED.get(architecture, {})), f"{source}'s {kind.__name__}"


def _merged(content: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with more fields, also in what is nested, and without those that are REMOVED."""
    out = dict(content)
    for name, value in added.items():
        before = out.get(name)
        out[name] = _merged(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return {name: value for name, value in out.items() if value is not REMOVED}


def _class_of(architecture: str) -> tuple[type[PreTrainedConfig], str]:
    if architecture in CLASSES:
        name = CLASSES[architecture]
        if name in _CONFIG_REGISTRY:
            return _CONFIG_REGISTRY[name], "vLLM"
        if name in CONFIG_MAPPING:
            return CONFIG_MAPPING[name], "transformers"
        return getattr(vllm_configs, name), "vLLM"
    model_type = _model_types().get(architecture)
    if model_type is None:
        raise NoConfigError("neither transformers nor vLLM has a configuration class for it")
    if model_type in _CONFIG_REGISTRY:
        return _CONFIG_REGISTRY[model_type], "vLLM"
    return CONFIG_MAPPING[model_type], "transformers"


def _model_types() -> dict[str, str]:
    """Returns the model type of each architecture that transformers names."""
    found: dict[str, str] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES"):
            for model_type, classes in mapping.items():
                for one in [classes] if isinstance(classes, str) else classes:
                    if model_type in CONFIG_MAPPING:
                        found.setdefault(one, model_type)
    return found


def _shrunk(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Returns the default configuration with few layers, also in what it nests."""
    default = kind()
    given: dict[str, Any] = {}
    for part, nested in _nested(default):
        given[part] = _few_layers(nested)
    own = _few_layers(default)
    for name in given:
        own.pop(name, None)
    few = {name: own[name] for name in own if name in _changed(default, own)}
    try:
        return kind(**given, **few)
    except TypeError:  # nested configurations are taken as objects
        return kind(**{name: dict(value) for name, value in given.items()}, **few)


def _nested(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield name, value


def _few_layers(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of a configuration, cut down to few layers; lists with an entry for each layer are cut too."""
    fields = config.to_dict()
    fields.pop("torch_dtype", None)
    fields.pop("per_layer_config", None)  # is made from the others
    for name in _LAYER_NAMES:
        many = fields.get(name)
        if not isinstance(many, int) or many <= LAYERS:
            continue
        fields[name] = LAYERS
        for other, value in fields.items():
            if isinstance(value, (list, str)) and len(value) == many:
                fields[other] = value[:LAYERS]
    for part, nested in _nested(config):
        fields[part] = _few_layers(nested)
    return fields


def _changed(default: PreTrainedConfig, own: dict[str, Any]) -> list[str]:
    before = default.to_dict()
    accepted = inspect.signature(type(default).__init__).parameters
    return [name for name in own if own[name] != before.get(name) and (name in accepted or "kwargs" in accepted)]
