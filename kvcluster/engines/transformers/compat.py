"""Use of transformers' internals: the models and the ways to generate that this engine supports. What computes
attention over sequences is in attention_interface.py and stepped_cache.py.

Layer types and arguments of `generate` are allow lists: one that a later release adds is refused by name until it has
been reviewed. Rope types and generation modes that cannot work are listed by name. `Any` lives here: a config holds
whatever its model needs.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs

from kvcluster.errors import CallerError

# These change a token's frequencies when the text grows longer, so its KV does not depend on its prefix alone.
_MOVING_ROPES = ("dynamic", "longrope")

_ATTENTION = ("full_attention", "sliding_attention")

# With each of these, `generate` does not fill the cache prompt first and then token by token, or does not use it.
_OTHER_GENERATION = (
    "assistant_early_exit",
    "assistant_model",
    "cache_implementation",
    "constraints",
    "custom_generate",
    "dola_layers",
    "force_words_ids",
    "low_memory",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "token_healing",
    "use_mtp",
)

_ALIKE = 0.8
"""How much a misspelt name has in common with the one that was meant, as difflib counts it; inputs of models, such as
`token_type_ids` and `pad_token_id`, have less."""

_PLAIN_KWARGS = frozenset({"logits_to_keep", "tokenizer"})


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Returns the part of a model's config that describes its decoder."""
    return model.config.get_text_config(decoder=True)


def windows(model: PreTrainedModel) -> list[int | None]:
    """Returns for each layer of a model that has passed `check_model` how many of the last tokens a token sees; None:
    all."""
    return [kwargs.get("sliding_window") for kwargs in get_layer_types_and_kwargs(text_config(model))[1]]


def check_full_attention(model: PreTrainedModel) -> None:
    """Raises CallerError, naming the layer, if a layer of a model that has passed `check_model` drops KV."""
    for layer, window in enumerate(windows(model)):
        if window is not None:
            raise CallerError(
                f"{type(model).__name__} cannot use the prefix cache: layer {layer} is sliding_attention, whose KV "
                "transformers drops behind the window; generate(..., offload=True) keeps it"
            )


def layers(cache: DynamicCache) -> list[DynamicLayer]:
    """Returns the layers of a cache whose model has passed `check_model`."""
    return cast(list[DynamicLayer], cache.layers)


def planes(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of a filled layer, each `[rows, kv_heads, columns, head_dim]`."""
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def check_model(model: PreTrainedModel, adapter: str) -> None:
    """Raises CallerError, naming the trait, if the model's KV is not plain KV that depends on the prefix alone."""
    for trait in _traits(model, text_config(model), adapter):
        raise CallerError(f"{type(model).__name__} cannot use kvcluster: {trait}")


def _traits(model: PreTrainedModel, config: Any, adapter: str) -> Iterator[str]:
    if model.config.is_encoder_decoder:
        yield "it is an encoder-decoder model; only decoder-only models are supported"
    if not model.can_generate() or not getattr(config, "is_causal", True):
        yield "it is no causal language model; load it with AutoModelForCausalLM"
    if any(module.training for module in model.modules()):
        yield "it is in training mode, where dropout changes KV; call model.eval()"
    device = model.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        yield "autocast is on, so its KV is not of model.dtype; load the model in the dtype that you want"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1 or (getattr(model, "tp_size", None) or 1) > 1:
        yield "it is spread over several devices; only a model on one device is supported"
    if getattr(model, "peft_config", None) and not adapter:
        yield "it has an adapter, which changes KV; give its content hash as adapter= to spec_of"
    if getattr(config, "kv_lora_rank", None):
        yield "it keeps latent KV (MLA), which is not supported yet"
    if not getattr(config, "num_attention_heads", None):
        yield "it has no attention heads, so no KV"
    for i, kind in enumerate(get_layer_types_and_kwargs(config)[0]):
        if kind not in _ATTENTION:
            yield f"layer {i} is {kind}; only full and sliding attention are supported"
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if rope in _MOVING_ROPES:
            yield f"rope type {rope!r} changes a token's KV as the text grows; use a fixed one such as yarn"


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for nested in parameters.values():
            yield from _rope_types(nested)


def check_inputs(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Raises CallerError if a token id stands for an image, video or sound, whose content no block hash covers."""
    for key, token in vars(model.config).items():
        medium = next((m for m in ("image", "video", "audio") if m in key), None)
        named = key.endswith(("_token_id", "_token_index"))
        if medium and named and isinstance(token, int) and bool((input_ids == token).any()):
            raise CallerError(
                f"input_ids holds token {token} ({key}): its content is not in the token ids, so two different "
                f"{medium}s would share KV; call model.generate without the prefix cache"
            )


def prepared_inputs(
    model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, mask: torch.Tensor | None, first: int, stop: int
) -> dict[str, Any]:
    """Returns the arguments with which `generate` has the model compute the columns from `first` up to `stop`, with no
    more logits than it must."""
    mask = torch.ones_like(input_ids) if mask is None else mask
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    run: Any = model
    given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    if not bool((mask == 1).all()):
        given["attention_mask"] = mask[:, :stop]
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = positions[:, first:stop]
    if run._supports_logits_to_keep():
        given["logits_to_keep"] = 1
    inputs: dict[str, Any] = run.prepare_inputs_for_generation(input_ids[:, first:stop], **given)
    return inputs


_MAX_LENGTH = 20
"""Tokens of a prompt and what is generated, unless an option allows more."""


class Generation:
    """Reads arguments as `generate` does: keywords first, then the generation_config passed to it, then the model's
    own.

    Raises CallerError, naming the argument, for one that this engine does not support.
    """

    def __init__(self, model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
        self._sources = [c for c in (kwargs.get("generation_config"), model.generation_config) if c is not None]
        self._kwargs = kwargs
        known = {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), *_PLAIN_KWARGS}
        known -= {"inputs", "kwargs"}
        for name in kwargs:
            if kwargs[name] is not None and name not in known:
                raise CallerError(_why_unknown(name, known, inspect.signature(model.forward).parameters))
        for name in _OTHER_GENERATION:
            if self.option(name):
                raise CallerError(
                    f"generate() cannot take {name}={self.option(name)!r:.40} with the prefix cache: it supports "
                    "greedy search, sampling, beam search and beam sampling over its own cache"
                )
        if (self.option("num_beam_groups") or 1) > 1:
            raise CallerError("generate() cannot take num_beam_groups with the prefix cache; use plain beams")
        if self.option("use_cache") is False:
            raise CallerError("generate() cannot take use_cache=False with the prefix cache")

    def option(self, name: str) -> Any:
        if name in self._kwargs:
            return self._kwargs[name]
        return next((v for c in self._sources if (v := getattr(c, name, None)) is not None), None)

    def most_tokens(self, prompt: int) -> int:
        """Returns how many tokens at most `generate` computes behind a prompt of so many."""
        new = self.option("max_new_tokens")
        return int(new) if new is not None else max(0, int(self.option("max_length") or _MAX_LENGTH) - prompt)

    @property
    def repeats(self) -> int:
        """The number of rows that `generate` makes of each row of its input."""
        return max(self.option("num_beams") or 1, self.option("num_return_sequences") or 1)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a row; `generate` pads behind them."""
        return _ids(self.option("eos_token_id"))

    def attention_mask(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the mask that `generate` infers if none is given: padding is the pad token, unless that is also an
        end token."""
        pad = self.option("pad_token_id")
        if pad is None or pad in self.eos_token_ids or not bool((input_ids == pad).any()):
            return torch.ones_like(input_ids)
        return input_ids.ne(pad).to(input_ids.dtype)


def _why_unknown(name: str, known: Collection[str], inputs: Collection[str]) -> str:
    """Returns why `generate` cannot take this argument, of which neither it nor a GenerationConfig knows. `inputs` are
    the names of what the model itself takes."""
    if name not in inputs:
        close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        if close:
            return f"generate() has no argument {name}: did you mean {close[0]}?"
    return (
        f"generate() cannot take {name} with the prefix cache: it is no argument of generate(), and KV that depends on "
        "more than token ids cannot be cached; leave it out, or call model.generate without the prefix cache"
    )


def _ids(token_ids: Any) -> tuple[int, ...]:
    if isinstance(token_ids, torch.Tensor):
        token_ids = token_ids.tolist()
    return () if token_ids is None else (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
