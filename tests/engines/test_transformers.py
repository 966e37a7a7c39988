"""What the transformers engine promises: exact results, and a refusal by name where these are not possible."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import prometheus_client
import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvcluster.client import Client
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.engines.transformers import PrefixCache, fingerprint, generate, spec_of
from kvcluster.engines.transformers.compat import layers, planes
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster

BLOCK = 4
PAD = 0
DTYPES = [torch.float32, torch.bfloat16]


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Any:
    """A Llama with grouped heads whose greedy output does not settle on one token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "max_position_embeddings": 512,
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": None,
            **settings,
        }
    )
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():  # not the rotary frequencies: loading a model in this dtype leaves them, too
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def prompt(tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 300, (tokens,), generator=generator).tolist()


def batch(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the left, and their mask."""
    columns = max(map(len, rows))
    ids = torch.tensor([[PAD] * (columns - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def run(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any, **settings: Any) -> Any:
    """Returns what `generate` returns with all logits; eight new tokens."""
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        return_dict_in_generate=True,
        output_logits=True,
        **{"max_new_tokens": 8, "do_sample": False, **settings},
    )


def kv(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, `[rows, kv_heads, columns, head_dim]`."""
    return [planes(layer) for layer in layers(cache)]


def own_memory(cache: DynamicCache, columns: int) -> DynamicCache:
    """The leading columns of a cache, in tensors of their own."""
    return DynamicCache([tuple(plane[:, :, :columns].clone() for plane in layer) for layer in kv(cache)])


def logits(out: Any) -> torch.Tensor:
    return torch.stack(out.logits)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as small as these spend more time on waking threads than on computing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(shards=2, ram_bytes="32MiB") as running:
        yield running
        running.wait_until_idle()  # no ticket or lease is left behind
        running.check()


def connect(cluster: MemoryCluster, model: Any, **settings: Any) -> Client:
    return cluster.client(spec_of(model, block_tokens=BLOCK, **settings))


def fill(client: Client, model: Any, *rows: list[int]) -> DynamicCache:
    """Caches the full blocks of each row as one replica would, one by one; returns the last one's KV."""
    cache = None
    for row in rows:
        ids, mask = batch(row)
        cache = PrefixCache.from_inputs(client, model, ids, mask)
        cache.save(run(model, ids, mask, cache, max_new_tokens=1).sequences)
    assert client.flush() and cache is not None
    return cache


# ----------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_bit_for_bit_those_of_going_on_from_kv_in_own_memory(
    cluster: MemoryCluster, dtype: torch.dtype
) -> None:
    model = llama(dtype)
    ids, mask = batch(prompt(30))
    first = fill(connect(cluster, model), model, prompt(30))

    cache = PrefixCache.from_inputs(connect(cluster, model), model, ids, mask)
    assert cache.cached_tokens == [28] and cache.misses == [None]
    for mine, theirs in zip(kv(cache), kv(first), strict=True):
        assert all(torch.equal(m, t[:, :, :28]) for m, t in zip(mine, theirs, strict=True))
    expected = run(model, ids, mask, own_memory(first, 28))
    out = run(model, ids, mask, cache)
    assert torch.equal(logits(out), logits(expected)) and torch.equal(out.sequences, expected.sequences)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_logits_are_within_rounding_of_a_full_prefill(
    cluster: MemoryCluster, dtype: torch.dtype, tolerance: float
) -> None:
    model = llama(dtype)
    client = connect(cluster, model)
    ids, mask = batch(prompt(30))
    fill(client, model, prompt(30))

    full = logits(run(model, ids, mask, None))[0]
    warm = logits(run(model, ids, mask, PrefixCache.from_inputs(client, model, ids, mask)))[0]
    assert (warm - full).abs().max() <= tolerance * full.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padded_batch_goes_on_from_the_shortest_prefix_bit_for_bit(
    cluster: MemoryCluster, dtype: torch.dtype
) -> None:
    model = llama(dtype)
    client = connect(cluster, model)
    rows = [prompt(33, 1), prompt(21, 2), prompt(27, 3)]
    fill(client, model, rows[0][:18], rows[1], rows[2][:25])
    ids, mask = batch(*rows)

    cache = PrefixCache.from_inputs(client, model, ids, mask)
    # Row 0 has four blocks, so that all begin at column 16: row 1, behind 12 of padding, with 4 tokens, row 2 with 10.
    assert cache.cached_tokens == [16, 4, 10]
    assert [miss and miss.reason for miss in cache.misses] == [MissReason.NEVER_SEEN, None, None]
    for keys, values in kv(cache):
        assert not keys[1, :, :12].any() and not values[2, :, :6].any()
    expected = run(model, ids, mask, own_memory(cache, 16))
    warm = run(model, ids, mask, cache)
    assert torch.equal(logits(warm), logits(expected))

    cold = run(model, ids, mask, None)
    scale = logits(cold)[0].abs().max()
    assert (logits(warm)[0] - logits(cold)[0]).abs().max() <= (1e-5 if dtype is torch.float32 else 0.05) * scale


def test_a_row_that_is_wholly_cached_leaves_one_token_to_compute(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(32))
    first = fill(client, model, prompt(32))

    cache = PrefixCache.from_inputs(client, model, ids, mask)
    assert cache.cached_tokens == [31] and cache.get_seq_length() == 31
    assert torch.equal(logits(run(model, ids, mask, cache)), logits(run(model, ids, mask, own_memory(first, 31))))


def test_a_zeroed_block_changes_the_logits(cluster: MemoryCluster) -> None:
    """The control: were loaded KV not used, all tests above would pass."""
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(30))
    fill(client, model, prompt(30))

    good = run(model, ids, mask, PrefixCache.from_inputs(client, model, ids, mask))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    for keys, values in kv(cache):
        keys[:, :, 8:12] = values[:, :, 8:12] = 0
    assert not torch.equal(logits(run(model, ids, mask, cache))[0], logits(good)[0])


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_generate_returns_what_the_model_returns_cold_and_warm(
    cluster: MemoryCluster, settings: dict[str, Any]
) -> None:
    model = llama()
    ids, mask = batch(prompt(33, 1), prompt(21, 2))
    settings = {"max_new_tokens": 9, "do_sample": False, **settings}
    expected = model.generate(ids, attention_mask=mask, **settings)
    assert len(set(expected[0].tolist())) > 12, "greedy output that repeats itself shows nothing"

    client = connect(cluster, model)
    for _ in range(3):
        assert torch.equal(generate(client, model, ids, mask, **settings), expected)
        client.flush()
    told = generate(client, model, ids, mask, return_dict_in_generate=True, **settings)
    assert torch.equal(told.sequences, expected)


def test_prompts_below_one_block_are_computed(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(9, 1), prompt(1, 2))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    for _ in range(2):
        assert torch.equal(generate(client, model, ids, mask, max_new_tokens=9, do_sample=False), expected)
        client.flush()
    assert PrefixCache.from_inputs(client, model, ids, mask).cached_tokens == [8, 0]
    assert PrefixCache.from_inputs(client, model, ids[1:, -1:]).cached_tokens == [0]


def test_sampling_several_sequences_draws_the_same_ones(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(33, 1), prompt(21, 2))
    settings: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(7)
    expected = model.generate(ids, attention_mask=mask, **settings)
    for _ in range(2):
        torch.manual_seed(7)
        assert torch.equal(generate(client, model, ids, mask, **settings), expected)
        client.flush()


def test_padding_is_told_by_the_pad_token_where_no_mask_is_given(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, _ = batch(prompt(33, 1), prompt(21, 2))
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    for _ in range(2):
        assert torch.equal(generate(client, model, ids, max_new_tokens=9, do_sample=False), expected)
        client.flush()
    assert PrefixCache.from_inputs(client, model, ids[1:]).cached_tokens == [20]


# ------------------------------------------------------------------------------------------- what is stored


def stored_tokens(client: Client, tokens: list[int]) -> int:
    assert client.flush()
    return client.lookup(tokens).tokens


def test_the_last_token_has_no_kv_and_is_not_stored(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache, max_new_tokens=7)
    stored = cache.save(out.sequences)
    # 32 tokens, of which 31 have KV.
    assert (stored.blocks, stored.deduplicated, stored.pending, stored.miss) == (7, 0, 0, None)
    assert stored.nbytes == 7 * BLOCK * client.spec.token_bytes
    assert stored_tokens(client, out.sequences[0].tolist()) == 28


def test_saving_again_stores_only_what_is_new(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(24))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache, max_new_tokens=8)
    assert cache.save(out.sequences).blocks == 7
    assert cache.save(out.sequences) == cache.save(out.sequences)
    assert cache.save(out.sequences).blocks + cache.save(out.sequences).deduplicated == 0
    more, mask = batch(out.sequences[0].tolist() + prompt(9, 5))
    out = run(model, more, mask, cache, max_new_tokens=1)
    assert cache.save(out.sequences).blocks == 3


def test_loaded_blocks_are_not_stored_again(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    fill(client, model, prompt(24))
    ids, mask = batch(prompt(24) + prompt(9, 5))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    stored = cache.save(run(model, ids, mask, cache, max_new_tokens=1).sequences)
    assert (stored.blocks, stored.deduplicated) == (2, 0)


def test_rows_of_one_prompt_store_it_once(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25, 1), prompt(18, 2), prompt(25, 1))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    cache.batch_repeat_interleave(2)
    torch.manual_seed(3)
    out = run(model, ids, mask, cache, do_sample=True, num_return_sequences=2, max_new_tokens=12)
    continuations = {tuple(row) for row in out.sequences.tolist()}
    assert len(continuations) == 6, "rows that sample alike show nothing"
    stored = cache.save(out.sequences)
    blocks = {tuple(row[:end]) for row in out.sequences[:, :36].tolist() if row[0] != PAD for end in range(4, 37, 4)}
    blocks |= {tuple(row[7:end]) for row in out.sequences[:, :36].tolist() if row[0] == PAD for end in range(11, 37, 4)}
    assert (stored.blocks, stored.deduplicated) == (len(blocks), 0)


def test_rows_that_generate_repeats_unasked_are_told_by_the_tensors(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25, 1), prompt(18, 2))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache, do_sample=True, num_return_sequences=3)
    cache.save(out.sequences)
    assert stored_tokens(client, out.sequences[5].tolist()[7:]) == 24


def test_after_beams_only_the_prompts_are_stored(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25, 1), prompt(18, 2))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache, num_beams=3, max_new_tokens=12)
    stored = cache.save(out.sequences)
    assert (stored.blocks, stored.deduplicated) == (6 + 4, 0)
    assert stored_tokens(client, out.sequences[0].tolist()) == 24
    assert stored_tokens(client, out.sequences[1].tolist()[7:]) == 16


def test_crop_forgets_what_it_cuts_off(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache, max_new_tokens=12)
    cache.crop(-14)  # 22 columns are left
    assert cache.save(out.sequences).blocks == 5
    again = run(model, ids, mask, cache, max_new_tokens=12)
    assert torch.equal(again.sequences, out.sequences)
    assert cache.save(again.sequences).blocks == 4


def test_crop_to_the_prompt_ends_the_doubt_that_beams_left(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(24))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    run(model, ids, mask, cache, num_beams=2, max_new_tokens=6)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(24 - cache.get_seq_length() - 1)
    out = run(model, ids, mask, cache, max_new_tokens=9)
    assert torch.equal(out.sequences, model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False))
    assert cache.save(out.sequences).blocks == 8


@pytest.mark.parametrize("indices", [torch.tensor([2, 0]), torch.tensor([True, False, True])])
def test_selected_rows_keep_their_prompts(cluster: MemoryCluster, indices: torch.Tensor) -> None:
    model = llama()
    client = connect(cluster, model)
    rows = [prompt(25, 1), prompt(25, 2), prompt(25, 3)]
    ids, mask = batch(*rows)
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.batch_select_indices(indices)
    with pytest.raises(CallerError, match="do not begin"):
        cache.save(ids)
    assert cache.save(ids[indices]).blocks == 12
    assert [stored_tokens(client, row) for row in rows] == [24, 0, 24]


def test_filler_behind_the_end_of_a_row_is_not_stored(cluster: MemoryCluster) -> None:
    model = llama()
    ids, mask = batch(prompt(25, 1), prompt(25, 2))
    free = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    first, second = free[:, 25:].tolist()
    at = next(i for i in range(4, 16) if first[i] not in first[:i] + second)
    eos = first[at]
    client = connect(cluster, model)
    out = generate(client, model, ids, mask, max_new_tokens=20, do_sample=False, eos_token_id=torch.tensor([eos]))
    assert out[0, 26 + at :].tolist() == [PAD] * (19 - at)
    assert stored_tokens(client, out[0].tolist()) == (26 + at) // BLOCK * BLOCK
    assert stored_tokens(client, out[1].tolist()) == 44


def test_a_copy_of_the_cache_goes_its_own_way(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    fill(client, model, prompt(25))
    ids, mask = batch(prompt(25))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    twin = copy.deepcopy(cache)
    out = run(model, ids, mask, twin)
    assert cache.get_seq_length() == 24 and twin.get_seq_length() == 32
    assert twin.save(out.sequences).blocks == 2


# --------------------------------------------------------------------------------- sharing, and the lack of it


def test_a_prefix_that_rows_share_is_moved_once(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    client = connect(cluster, model)
    shared = prompt(24)
    first = fill(client, model, shared)
    ids, mask = batch(shared + prompt(9, 2), shared + prompt(3, 3), shared + prompt(5, 4))
    begin_load = Mock(wraps=client.begin_load)
    monkeypatch.setattr(client, "begin_load", begin_load)
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    assert begin_load.call_count == 1 and cache.cached_tokens == [24, 18, 20]
    assert torch.equal(kv(cache)[2][1][2, :, 4:], kv(first)[2][1][0, :, :20])


def test_another_salt_misses(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25))
    generate(client, model, ids, mask, salt=b"ours", max_new_tokens=2)
    client.flush()
    assert PrefixCache.from_inputs(client, model, ids, mask, salt=b"ours").cached_tokens == [24]
    assert PrefixCache.from_inputs(client, model, ids, mask, salt=b"theirs").cached_tokens == [0]
    assert PrefixCache.from_inputs(client, model, ids, mask).cached_tokens == [0]


def test_a_lost_shard_costs_time_but_never_the_answer() -> None:
    model = llama()
    ids, mask = batch(prompt(25, 1), prompt(18, 2))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    with MemoryCluster(shards=1, ram_bytes="32MiB") as cluster:
        client = connect(cluster, model)
        generate(client, model, ids, mask, max_new_tokens=9, do_sample=False)
        client.flush()
        cluster.stop_shard(next(iter(cluster.shards)))
        cache = PrefixCache.from_inputs(client, model, ids, mask)
        assert cache.cached_tokens == [0, 0] and all(miss is not None for miss in cache.misses)
        out = run(model, ids, mask, cache, max_new_tokens=9)
        stored = cache.save(out.sequences)
        assert torch.equal(out.sequences, expected)
        assert stored.blocks == stored.nbytes == 0


def test_a_cluster_that_is_gone_is_a_miss() -> None:
    model = llama()
    ids, mask = batch(prompt(25))
    with MemoryCluster(shards=1, ram_bytes="32MiB") as cluster:
        client = connect(cluster, model)
        cluster.stop_coordinator()
        cache = PrefixCache.from_inputs(client, model, ids, mask)
        assert cache.misses[0] is not None and cache.misses[0].reason is MissReason.COORDINATOR_LOST
        stored = cache.save(run(model, ids, mask, cache).sequences)
        assert stored.blocks == 0 and stored.miss == cache.misses[0]


# ----------------------------------------------------------------------------------------------- identity


def test_the_spec_of_saved_weights_is_that_of_the_model(tmp_path: Path) -> None:
    model = llama(torch.bfloat16, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert spec_of(again) == spec_of(model)


def test_one_changed_weight_is_another_fingerprint() -> None:
    model = llama()
    before = fingerprint(model)
    assert fingerprint(llama()) == before
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[5, 7] += 1e-6
    assert fingerprint(model) != before


def test_a_tied_weight_is_not_an_equal_one() -> None:
    tied = llama(tie_word_embeddings=True)
    untied = copy.deepcopy(tied)
    untied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    assert fingerprint(tied) != fingerprint(untied)


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"seed": 1}, ("weights",)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("rope", "extra.buffers")),
        ({"rms_norm_eps": 1e-3}, ("extra.config",)),
        ({"initializer_range": 0.2}, ()),
    ],
)
def test_what_changes_kv_changes_the_spec(other: dict[str, Any], fields: tuple[str, ...]) -> None:
    assert differing_fields(spec_of(llama()), spec_of(llama(**other))) == fields


def test_a_model_that_was_cast_shares_with_none_that_was_loaded_in_its_dtype() -> None:
    """Casting rounds the rotary frequencies, too, which are no weights; loading computes them in float32."""
    cast, loaded = llama().bfloat16(), llama(torch.bfloat16)
    assert fingerprint(cast) == fingerprint(loaded)
    assert differing_fields(spec_of(cast), spec_of(loaded)) == ("extra.buffers",)
    assert spec_of(llama().bfloat16()) == spec_of(cast)


def test_dtype_and_adapter_are_in_the_spec() -> None:
    one, half = spec_of(llama(), weights="w1"), spec_of(llama(torch.bfloat16), weights="w1")
    assert differing_fields(one, half) == ("dtype",)
    assert differing_fields(one, spec_of(llama(), weights="w1", adapter="lora")) == ("adapter",)


def test_a_spec_of_other_geometry_is_refused_before_anything_moves(cluster: MemoryCluster) -> None:
    model = llama()
    spec = KVSpec.uniform(
        model="m", weights="w", num_layers=3, num_kv_heads=4, head_dim=16, dtype="float32", block_tokens=BLOCK
    )
    client = cluster.client(spec)
    with pytest.raises(CallerError, match=r"k \[4 heads x 16, float32\].* has .*k \[2 heads x 16, float32\]"):
        generate(client, model, *batch(prompt(25)))
    assert client.status()["counters"].get("asked_blocks", 0) == 0


def test_a_hand_made_spec_of_the_right_geometry_serves(cluster: MemoryCluster) -> None:
    model = llama()
    spec = KVSpec.uniform(
        model="m", weights="w", num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=BLOCK
    )
    fill(cluster.client(spec), model, prompt(25))
    cache = PrefixCache.from_inputs(cluster.client(spec), model, *batch(prompt(25)))
    assert cache.cached_tokens == [24]


# ----------------------------------------------------------------------------------------------- refusals


def tiny(kind: str, **settings: Any) -> Any:
    """A model of that type, without the weights."""
    common = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    config = transformers.AutoConfig.for_model(kind, **{**common, "num_hidden_layers": 2, **settings})
    with torch.device("meta"):
        auto: Any = (
            transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        )
        return auto.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("llama4_text", {}, "chunked_attention"),
        ("mamba", {}, "linear_attention"),
        ("rwkv", {}, "keeps other state than K and V in layer 0"),
        ("rwkv", {"num_attention_heads": None}, "no attention heads"),
        ("jamba", {"num_key_value_heads": 2}, "linear_attention"),
        ("deepseek_v3", {"num_key_value_heads": 4, "n_routed_experts": 8, "first_k_dense_replace": 2}, "MLA"),
        ("t5", {"d_model": 64, "d_ff": 64, "num_heads": 4, "num_layers": 2}, "encoder-decoder"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    ],
)
def test_what_has_no_plain_kv_is_refused_by_name(kind: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(CallerError, match=named):
        spec_of(tiny(kind, **settings), weights="w1")


def test_a_cache_that_drops_kv_behind_a_window_is_refused_by_name(cluster: MemoryCluster) -> None:
    model = tiny("mistral", sliding_window=16, num_key_value_heads=2)
    client = cluster.client(spec_of(model, weights="w1", block_tokens=BLOCK))
    with pytest.raises(CallerError, match=r"layer 0 is sliding_attention.*offload=True"):
        PrefixCache.from_inputs(client, model, *batch(prompt(9)))


def test_a_config_that_hides_its_real_kv_is_refused() -> None:
    with pytest.raises(CallerError, match=r"has k \[1 heads x 16, float32\], but the spec has k \[4 heads"):
        spec_of(tiny("falcon", multi_query=True, new_decoder_architecture=False), weights="w1")


def test_weights_that_are_not_in_memory_need_a_name() -> None:
    model = tiny("llama")
    with pytest.raises(CallerError, match="not in memory"):
        spec_of(model)
    assert spec_of(model, weights="w1").groups[0].heads == 4


def test_a_model_in_a_state_that_changes_kv_is_refused() -> None:
    with pytest.raises(CallerError, match="training mode"):
        spec_of(llama().train())
    model = llama()
    model.model.layers[1].train()
    with pytest.raises(CallerError, match="training mode"):
        spec_of(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CallerError, match="autocast"):
        spec_of(llama())
    model = llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(CallerError, match="several devices"):
        spec_of(model)
    model = llama()
    model.config.is_causal = False
    with pytest.raises(CallerError, match="no causal language model"):
        spec_of(model)
    model = llama()
    model.peft_config = {"default": object()}
    with pytest.raises(CallerError, match="adapter"):
        spec_of(model)
    assert spec_of(model, adapter="sha256:1").adapter == "sha256:1"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"pixel_values": torch.zeros(1)},
        {"inputs_embeds": torch.zeros(1, 5, 64)},
        {"position_ids": torch.zeros(1, 5)},
        {"past_key_values": DynamicCache()},
        {"cache_implementation": "static"},
        {"cache_implementation": "quantized"},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": object()},
        {"penalty_alpha": 0.6},
        {"num_beam_groups": 2},
        {"use_cache": False},
        {"custom_generate": "maker/loop"},
    ],
)
def test_generate_refuses_by_name_what_it_does_not_understand(cluster: MemoryCluster, kwargs: dict[str, Any]) -> None:
    model = llama()
    client = connect(cluster, model)
    with pytest.raises(CallerError, match=next(iter(kwargs))):
        generate(client, model, *batch(prompt(5)), **kwargs)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("max_new_token", "max_new_tokens"), ("temprature", "temperature"), ("do_samples", "do_sample")],
)
def test_a_misspelt_argument_is_named_with_the_one_that_was_meant(
    cluster: MemoryCluster, misspelt: str, meant: str
) -> None:
    model = llama()
    with pytest.raises(CallerError, match=rf"no argument {misspelt}: did you mean {meant}\?"):
        generate(connect(cluster, model), model, *batch(prompt(5)), **{misspelt: 4})


def test_an_input_of_the_model_is_no_misspelling(cluster: MemoryCluster) -> None:
    model = llama()
    for name in ("position_ids", "token_type_ids", "decoder_input_ids"):
        with pytest.raises(CallerError, match=f"cannot take {name} .* more than token ids cannot be cached"):
            generate(connect(cluster, model), model, *batch(prompt(5)), **{name: torch.zeros(1, 5)})


def test_a_generation_config_is_read_like_keywords(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    config = transformers.GenerationConfig(prompt_lookup_num_tokens=3)
    with pytest.raises(CallerError, match="prompt_lookup_num_tokens"):
        generate(client, model, *batch(prompt(5)), generation_config=config)
    fill(client, model, prompt(25))
    model.generation_config.num_return_sequences = 2
    model.generation_config.do_sample = True
    assert generate(client, model, *batch(prompt(25)), max_new_tokens=2).shape == (2, 27)


def test_assisted_decoding_over_loaded_kv_is_refused(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    fill(client, model, prompt(25))
    ids, mask = batch(prompt(25))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    with pytest.raises(CallerError, match="assisted decoding"):
        run(model, ids, mask, cache, prompt_lookup_num_tokens=2)


def test_assisted_decoding_over_an_empty_cache_is_followed(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(12) * 2)
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache, prompt_lookup_num_tokens=2)
    assert cache.save(out.sequences).blocks == 7
    assert stored_tokens(client, out.sequences[0].tolist()) == 28 and cache.get_seq_length() == 31
    full = DynamicCache(config=model.config)
    model(out.sequences[:, :28], past_key_values=full)
    for mine, theirs in zip(kv(cache), kv(full), strict=True):
        assert all(torch.allclose(m[:, :, :28], t, atol=1e-4) for m, t in zip(mine, theirs, strict=True))


def test_rows_that_are_not_those_of_the_prompts_are_refused(cluster: MemoryCluster) -> None:
    model = llama()
    rows = [prompt(9, 1), prompt(9, 2), prompt(9, 3)]
    cache = PrefixCache.from_inputs(connect(cluster, model), model, *batch(*rows[:2]))
    model(batch(*rows)[0], past_key_values=cache)
    with pytest.raises(CallerError, match="has 3 rows, but was made for 2"):
        cache.save(batch(*rows)[0])


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], "padding on the right"),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], "holes"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "at least one 1"),
        ([[2, 1, 1, 1], [1, 1, 1, 1]], "must be 0 and 1"),
        ([[1, 1, 1]], r"attention_mask has shape \[1, 3\]; expected that of input_ids"),
    ],
)
def test_masks_that_are_no_left_padding_are_refused(cluster: MemoryCluster, mask: list[list[int]], named: str) -> None:
    model = llama()
    client = connect(cluster, model)
    with pytest.raises(CallerError, match=named):
        PrefixCache.from_inputs(client, model, torch.ones((2, 4), dtype=torch.long), torch.tensor(mask))


@pytest.mark.parametrize("ids", [torch.zeros(4), torch.zeros((1, 4)), torch.zeros((0, 4), dtype=torch.long), [[1, 2]]])
def test_inputs_that_are_no_token_ids_are_refused(cluster: MemoryCluster, ids: Any) -> None:
    model = llama()
    with pytest.raises(CallerError, match="input_ids must be integers"):
        PrefixCache.from_inputs(connect(cluster, model), model, ids)


def test_a_token_that_stands_for_an_image_is_refused(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    model.config.image_token_id = 299
    with pytest.raises(CallerError, match="image_token_id"):
        PrefixCache.from_inputs(client, model, torch.tensor([[5, 299, 6]]))


def test_sequences_of_other_prompts_are_refused(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25))
    cache = PrefixCache.from_inputs(client, model, ids, mask)
    out = run(model, ids, mask, cache)
    with pytest.raises(CallerError, match="do not begin"):
        cache.save(torch.tensor([prompt(33, 9)]))
    with pytest.raises(CallerError, match=r"\[rows, columns\]"):
        cache.save(out.sequences[0])
    run(model, *batch(prompt(25)), PrefixCache.from_inputs(client, model, ids, mask), num_beams=2)
    assert stored_tokens(client, prompt(25)) == 0


def test_what_loads_for_a_model_shows_the_metrics_of_its_worker(cluster: MemoryCluster) -> None:
    model = llama()
    client = connect(cluster, model)
    fill(client, model, prompt(9))
    ids, mask = batch(prompt(9))
    PrefixCache.from_inputs(client, model, ids, mask)
    closed = prometheus_client.REGISTRY.get_sample_value("kvcluster_worker_breakers", {"state": "closed"})
    assert closed is not None
    assert closed >= 1
