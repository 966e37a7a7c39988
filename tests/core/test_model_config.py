"""What a config.json says of KV, in the forms in which models come; what it does not say is never guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import PREFIX, Group, Plane, chunk, window
from kvcluster.core.model_config import read_kv
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError, SpecError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
PHI3 = {**LLAMA, "model_type": "phi3", "sliding_window": 2047}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "dtype": "float32"}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def token_bytes(groups: tuple[Group, ...]) -> float:
    return KVSpec(model="m", weights="sha256:1", block_tokens=16, groups=groups).token_bytes


def kv(heads: int, dim: int, dtype: str = "bfloat16") -> tuple[Plane, ...]:
    return (Plane("k", heads, dim, dtype), Plane("v", heads, dim, dtype))


def test_grouped_heads_take_their_own_number() -> None:
    read = read_kv(LLAMA)
    assert read.groups == (Group(tuple(range(32)), kv(8, 128)),)
    assert token_bytes(read.groups) == 128 * 1024
    assert read.assumed == ("head_dim is not given: hidden_size / num_attention_heads is assumed",)


def test_a_head_dim_that_is_given_is_taken_as_it_is() -> None:
    read = read_kv({**LLAMA, "head_dim": 256})
    assert read.groups[0].planes == kv(8, 256)
    assert read.assumed == ()


def test_without_kv_heads_every_query_head_has_its_own_and_it_is_said() -> None:
    read = read_kv(without(LLAMA, "num_key_value_heads"))
    assert read.groups[0].planes == kv(32, 128)
    assert "num_key_value_heads is not given: num_attention_heads is assumed" in read.assumed


def test_null_stands_for_a_setting_that_is_not_given() -> None:
    assert read_kv({**LLAMA, "head_dim": None, "sliding_window": None}) == read_kv(LLAMA)


def test_gpt2_calls_its_settings_by_other_names() -> None:
    assert read_kv(GPT2).groups == (Group(tuple(range(12)), kv(12, 64, "float32")),)


def test_values_may_have_heads_of_another_size() -> None:
    planes = read_kv({**LLAMA, "head_dim": 192, "v_head_dim": 128}).groups[0].planes
    assert [plane.dim for plane in planes] == [192, 128]


def test_latent_attention_keeps_one_latent_for_all_heads() -> None:
    read = read_kv(DEEPSEEK)
    assert read.groups == (Group(tuple(range(61)), (Plane("latent", 1, 576, "bfloat16"),)),)
    assert token_bytes(read.groups) == 61 * 576 * 2


def test_the_dtype_of_the_cache_may_be_another_than_that_of_the_model() -> None:
    assert token_bytes(read_kv(LLAMA, "float8_e4m3fn").groups) == 64 * 1024
    assert read_kv({**LLAMA, "dtype": "torch.float16"}).groups[0].planes == kv(8, 128, "float16")


def test_the_text_of_a_multimodal_model_is_what_counts() -> None:
    nested = {"torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 99}}
    assert read_kv({**nested, "text_config": without(LLAMA, "torch_dtype")}) == read_kv(LLAMA)


def test_layers_that_slide_are_a_group_of_their_own() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    groups = read_kv({**LLAMA, "num_hidden_layers": 6, "layer_types": types, "sliding_window": 1024}).groups
    assert groups == (Group((2, 5), kv(8, 128), PREFIX), Group((0, 1, 3, 4), kv(8, 128), window(1024)))


def test_layers_that_attend_in_chunks_are_a_group_of_their_own() -> None:
    types = ["chunked_attention", "full_attention", "sliding_attention"] * 2
    sizes = {"sliding_window": 1024, "attention_chunk_size": 8192}
    groups = read_kv({**LLAMA, "num_hidden_layers": 6, "layer_types": types, **sizes}).groups
    by_layers = {(1, 4): PREFIX, (2, 5): window(1024), (0, 3): chunk(8192)}
    assert groups == tuple(Group(layers, kv(8, 128), reuse) for layers, reuse in by_layers.items())
    with pytest.raises(ConfigError, match="attention_chunk_size does not say which layers attend in chunks"):
        read_kv({**LLAMA, "attention_chunk_size": 8192})


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3", "starcoder2"])
def test_where_every_layer_of_a_model_type_slides_the_window_alone_says_it(model_type: str) -> None:
    assert read_kv({**PHI3, "model_type": model_type}).groups == (Group(tuple(range(32)), kv(8, 128), window(2047)),)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"use_sliding_window": False}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
        ({"use_sliding_window": True, "max_window_layers": 3}, [0, 1, 2]),
        ({"use_sliding_window": True, "max_window_layers": 0}, []),
    ],
)
def test_qwen_slides_in_its_upper_layers_and_only_where_it_is_told_to(
    model_type: str, settings: dict[str, Any], layers: list[int]
) -> None:
    config = {**LLAMA, "model_type": model_type, "num_hidden_layers": 4, "sliding_window": 4096, **settings}
    full = [layer for group in read_kv(config).groups if group.reuse == PREFIX for layer in group.layers]
    assert full == layers


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers is missing"),
        (without(LLAMA, "num_attention_heads"), "num_attention_heads is missing"),
        (without(LLAMA, "hidden_size"), "hidden_size is missing"),
        (without(LLAMA, "torch_dtype"), "give --dtype"),
        ({**LLAMA, "hidden_size": 4095}, "no multiple of 32 heads"),
        ({**LLAMA, "torch_dtype": "int4"}, "dtype 'int4' is not one of"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers='32'"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers=True"),
        ({**LLAMA, "num_hidden_layers": 10**12}, "layers that a spec can hold at most"),
        ({**LLAMA, "num_key_value_heads": [8, 4]}, "num_key_value_heads=[8, 4]"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({**DEEPSEEK, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ({**DEEPSEEK, "index_topk": 2048}, "index_topk=2048"),
        ({**LLAMA, "model_type": "gemma2", "sliding_window": 4096}, "sliding_window=4096 of a 'gemma2'"),
        ({**LLAMA, "sliding_window_pattern": 6}, "sliding_window_pattern=6"),
        ({**PHI3, "sliding_window": 0}, "sliding_window=0"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types must be a list with one entry for each of the 32"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "layer_types has 'linear_attention'"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({**LLAMA, "mamba_d_state": 16}, "mamba_d_state=16"),
        ({"text_config": {**LLAMA, "num_kv_shared_layers": 15}}, "num_kv_shared_layers=15"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
        ({}, "give --dtype"),
    ],
)
def test_what_is_missing_or_not_understood_is_named_and_never_guessed(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_kv(config)
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["linear_conv_x", "linear_key_x", "linear_num_x", "mamba_x", "ssm_x"])
def test_a_setting_of_layers_that_keep_a_state_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_kv({**LLAMA, name: 1})


def test_a_setting_that_is_off_is_no_reason_to_refuse() -> None:
    off = {"is_encoder_decoder": False, "num_kv_shared_layers": 0, "mamba_d_state": None, "multi_query": False}
    assert read_kv({**LLAMA, **off}) == read_kv(LLAMA)


_VALUES = st.none() | st.booleans() | st.integers(-2, 2**40) | st.text(max_size=5) | st.lists(st.integers(), max_size=3)


@given(
    st.dictionaries(st.sampled_from([*LLAMA, *DEEPSEEK, "layer_types", "text_config", "sliding_window"]), _VALUES),
    st.sampled_from([LLAMA, DEEPSEEK, PHI3, GPT2]),
)
def test_whatever_a_file_says_it_is_read_or_refused(changes: dict[str, Any], config: dict[str, Any]) -> None:
    try:
        groups = read_kv({**config, **changes}).groups
    except (ConfigError, SpecError):
        return
    assert token_bytes_or_refused(groups)


def token_bytes_or_refused(groups: tuple[Group, ...]) -> bool:
    """A spec that is too large is refused by name, too."""
    try:
        return token_bytes(groups) > 0
    except SpecError:
        return True
