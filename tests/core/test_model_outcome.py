"""Whether a checkpoint is served, from its config.json and what is known of architectures: never more than is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcluster.core.groups import LAST, Group, Plane, window
from kvcluster.core.model_kinds import (
    CHUNKED,
    FULL,
    LATENTS,
    MAMBA,
    SEVERAL_WINDOWS,
    SHARED,
    SINKS,
    TRAITS,
    UNLIKE,
    WINDOWS,
)
from kvcluster.core.model_outcome import (
    CONTRACT,
    PROVED,
    REFUSED,
    UNKNOWN,
    ExaminedArchitectures,
    kinds_of,
    model_outcome,
    served_outcome,
)
from kvcluster.errors import ConfigError

KNOWN = ExaminedArchitectures(
    served=(((FULL,), "Llama Odd"), ((FULL, WINDOWS, SINKS), "Oss"), ((LATENTS,), "Deep"), ((FULL, SHARED), "Sharing")),
    refused=(((FULL, MAMBA), "group 0 keeps MambaSpec", "Jamba"),),
    unread="Odd",
    not_examined="New",
)
LLAMA: dict[str, Any] = {
    "architectures": ["Llama"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def outcome_of(**changes: Any) -> Any:
    return model_outcome({**LLAMA, **changes}, KNOWN)


def test_a_model_of_a_proved_kind_is_served_with_its_bytes() -> None:
    found = outcome_of()
    assert (found.outcome, found.kinds, found.token_bytes) == (PROVED, (FULL,), 32 * 2 * 8 * 128 * 2)
    assert found.is_served


def test_what_its_architecture_keeps_beside_what_the_file_tells_is_named_too() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    found = outcome_of(architectures=["Oss"], layer_types=kinds, sliding_window=128)
    assert (found.outcome, found.kinds) == (PROVED, (FULL, WINDOWS, SINKS))
    assert outcome_of(architectures=["Sharing"]).outcome == CONTRACT, "no real engine proves that kind"


def test_layers_that_attend_in_chunks_are_told_from_the_file() -> None:
    kinds = ["chunked_attention", "full_attention"] * 16
    found = outcome_of(layer_types=kinds, attention_chunk_size=8192)
    assert (found.outcome, found.kinds) == (PROVED, (FULL, CHUNKED))


def test_a_refused_architecture_is_refused_whatever_its_settings_say() -> None:
    found = outcome_of(architectures=["Jamba"])
    assert (found.outcome, found.why, found.token_bytes) == (REFUSED, "group 0 keeps MambaSpec", None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["Nowhere"]}, "none of its architectures"),
        ({"architectures": ["New"]}, "could not be examined"),
        ({"architectures": ["Odd"]}, "does not describe"),
        (LATENT, "reads as latents"),
        ({"architectures": ["Deep"]}, "reads as full attention"),
        ({"index_topk": 2048}, "index_topk"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"sliding_window": 4096, "model_type": "llama"}, "does not say which layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"head_dim": 2**80}, "dim"),
        ({"text_config": {"num_hidden_layers": 2}}, "is missing"),
    ],
)
def test_what_is_not_known_is_called_unknown_with_the_reason(changes: dict[str, Any], why: str) -> None:
    found = outcome_of(**changes)
    assert found.outcome == UNKNOWN
    assert why in found.why
    assert not found.groups


def test_the_first_architecture_that_is_known_counts_as_in_vllm() -> None:
    assert outcome_of(architectures=["Nowhere", "Jamba", "Llama"]).outcome == REFUSED


@pytest.mark.parametrize("names", [None, [], "Llama", [1], {"Llama": 1}])
def test_a_file_without_architectures_is_an_error(names: Any) -> None:
    with pytest.raises(ConfigError, match="names no architectures"):
        outcome_of(architectures=names)


def test_without_a_dtype_it_is_said_that_one_is_assumed() -> None:
    found = model_outcome({name: value for name, value in LLAMA.items() if name != "torch_dtype"}, KNOWN)
    assert found.outcome == PROVED
    assert any("bfloat16 is assumed" in text for text in found.assumed)


def test_kinds_follow_from_groups() -> None:
    k, v = (Plane(name, 8, 128, "bfloat16") for name in "kv")
    full = Group((0,), (k, v))
    assert kinds_of([full]) == (FULL,)
    assert kinds_of([full, replace(full, reuse=window(8))]) == (FULL, WINDOWS)
    assert kinds_of([replace(full, reuse=window(n)) for n in (8, 16)]) == (WINDOWS, SEVERAL_WINDOWS)
    assert kinds_of([Group((0,), (k, replace(v, dim=64)))]) == (FULL, UNLIKE)
    assert kinds_of([Group((0,), (Plane("latent", 1, 576, "bfloat16"),))]) == (LATENTS,)


@pytest.mark.parametrize("planes", [(Plane.opaque("state", 64),), (Plane("k", 1, 8, "float32"),)])
def test_groups_of_another_kind_are_refused(planes: tuple[Plane, ...]) -> None:
    with pytest.raises(ConfigError):
        kinds_of([Group((0,), planes)])
    with pytest.raises(ConfigError, match="rule 'last'"):
        kinds_of([Group((0,), planes, LAST)])


@pytest.mark.parametrize("kind", TRAITS)
def test_only_kinds_with_a_check_are_proved(kind: str) -> None:
    assert served_outcome([FULL, kind]) == (PROVED if TRAITS[kind].proved_by else CONTRACT)
