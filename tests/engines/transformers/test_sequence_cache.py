"""What `generate(offload=True)` promises: the ids of a run in memory, prefix reuse, and nothing left behind."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.masking_utils import AttentionMaskInterface

import kvcluster
from kvcluster.client import Client
from kvcluster.engines.transformers import SequenceCache, generate, spec_of
from kvcluster.errors import CallerError, LostTokens
from kvcluster.testing import MemoryCluster
from tests.engines.transformers.models import BLOCK, FAMILIES, PAD, batch, connect, logits, model_of, prompt

ROWS = (prompt(33, 1), prompt(21, 2), prompt(60, 3))
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
LOGITS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


def stored_tokens(client: Client, tokens: list[int]) -> int:
    assert client.flush()
    return client.lookup(tokens).tokens


class AtToken(StoppingCriteria):
    """Calls a function when so many columns are there."""

    def __init__(self, columns: int, call: Any) -> None:
        self._columns = columns
        self._call = call

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if input_ids.shape[1] == self._columns:
            self._call()
        return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------- the same ids


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_padded_batch_of_each_family_has_the_ids_of_a_run_in_memory(cluster: MemoryCluster, kind: str) -> None:
    model = model_of(kind)
    ids, mask = batch(*ROWS)
    expected = model.generate(ids, attention_mask=mask, **GREEDY, **LOGITS)
    assert len(set(expected.sequences[0, 60:].tolist())) > 3, "greedy output that repeats itself shows nothing"
    out = generate(connect(cluster, model), model, ids, mask, offload=True, **GREEDY, **LOGITS)
    assert torch.equal(out.sequences, expected.sequences)
    assert (logits(out) - logits(expected)).abs().max() <= 1e-5 * logits(expected).abs().max()


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 3},
        {"prefill_chunk_size": 7},
    ],
)
def test_beams_and_samples_are_those_of_a_run_in_memory_cold_and_warm(
    cluster: MemoryCluster, kind: str, settings: dict[str, Any]
) -> None:
    model = model_of(kind)
    ids, mask = batch(*ROWS)
    settings = {**GREEDY, **settings}
    torch.manual_seed(7)
    expected = model.generate(ids, attention_mask=mask, **settings)
    client = connect(cluster, model)
    for _ in range(2):
        torch.manual_seed(7)
        assert torch.equal(generate(client, model, ids, mask, offload=True, **settings), expected)
        assert client.resident().sequences == 0
        client.flush()


@pytest.mark.parametrize("rows", [[1], [1, 1], [40, 1], [3, 5, 4], [4, 8]])
def test_rows_of_few_tokens_have_the_ids_of_a_run_in_memory(cluster: MemoryCluster, rows: list[int]) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(*[prompt(tokens, seed) for seed, tokens in enumerate(rows)])
    for settings in (GREEDY, {**GREEDY, "num_beams": 2, "eos_token_id": 7}, {**GREEDY, "max_new_tokens": 1}):
        expected = model.generate(ids, attention_mask=mask, **settings)
        for _ in range(2):
            assert torch.equal(generate(client, model, ids, mask, offload=True, **settings), expected)
            client.flush()


def test_padding_is_told_by_the_pad_token_where_no_mask_is_given(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, _ = batch(*ROWS)
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(generate(client, model, ids, offload=True, **GREEDY), expected)


def test_a_model_in_bfloat16_is_within_its_rounding(cluster: MemoryCluster) -> None:
    model = model_of().bfloat16()
    ids, mask = batch(*ROWS)
    settings = {**GREEDY, **LOGITS, "max_new_tokens": 1}
    expected = logits(model.generate(ids, attention_mask=mask, **settings))
    out = logits(generate(connect(cluster, model), model, ids, mask, offload=True, **settings))
    assert out.dtype == expected.dtype and (out - expected).abs().max() <= 0.05 * expected.abs().max()


def test_no_mask_is_made(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3_text")
    client = connect(cluster, model)

    def made(**arguments: Any) -> Any:
        raise AssertionError("a mask was made")

    for name in ("sdpa", "eager"):
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, made)
    assert generate(client, model, *batch(*ROWS), offload=True, **GREEDY).shape == (3, 76)
    with pytest.raises(AssertionError, match="a mask was made"):
        model.generate(*batch(*ROWS)[:1], **GREEDY)


@pytest.mark.parametrize(("codec", "bound"), [("q8", 0.05), ("q4", 0.5)])
def test_encoded_resident_blocks_change_logits_within_a_bound(cluster: MemoryCluster, codec: str, bound: float) -> None:
    model = model_of()
    ids, mask = batch(prompt(200))
    policy = kvcluster.WindowPolicy(tail_tokens=16, migration_tokens=16, codec=codec)
    expected = model.generate(ids, attention_mask=mask, **{**GREEDY, "max_new_tokens": 1}, **LOGITS)
    settings = {**GREEDY, **LOGITS, "max_new_tokens": 1, "prefill_chunk_size": 32}
    out = generate(connect(cluster, model), model, ids, mask, offload=policy, **settings)
    difference = (logits(out) - logits(expected)).abs().max() / logits(expected).abs().max()
    assert 0 < difference < bound


# ------------------------------------------------------------------------------------------- prefix reuse


def test_the_cached_prefix_of_each_row_is_not_computed_again(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(*ROWS)
    computed: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    first = generate(client, model, ids, mask, offload=True, **GREEDY)
    assert sum(computed) == 1 + (60 - 0) + 15  # of them 1 of the probe
    computed.clear()
    assert torch.equal(generate(client, model, ids, mask, offload=True, **GREEDY), first)
    # Rows 0 and 1 have 32 and 20 tokens behind 27 and 39 columns of padding: all columns but the last are there.
    assert sum(computed) == 1 + 1 + 15
    hook.remove()


def test_it_goes_on_from_what_the_other_cache_stored_and_the_other_way_round(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(prompt(33))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(generate(client, model, ids, mask, **GREEDY), expected)
    client.flush()
    with SequenceCache.from_inputs(client, model, ids, mask) as cache:
        assert cache.cached_tokens == [32] and cache.get_seq_length() == 32
    longer, mask = batch(expected[0].tolist() + prompt(30, 9))
    after = model.generate(longer, attention_mask=mask, **GREEDY)
    assert torch.equal(generate(client, model, longer, mask, offload=True, **GREEDY), after)
    assert stored_tokens(client, after[0].tolist()) == (33 + 16 + 30 + 15) // BLOCK * BLOCK
    assert torch.equal(generate(client, model, longer, mask, **GREEDY), after)


def test_another_salt_misses(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(prompt(25))
    generate(client, model, ids, mask, salt=b"ours", offload=True, **GREEDY)
    for salt, tokens in ((b"ours", 24), (b"theirs", 0), (b"", 0)):
        with SequenceCache.from_inputs(client, model, ids, mask, salt=salt) as cache:
            assert cache.cached_tokens == [tokens]


def test_filler_behind_the_end_of_a_row_is_not_stored(cluster: MemoryCluster) -> None:
    model = model_of()
    ids, mask = batch(prompt(33, 1), prompt(33, 2))
    free = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    first, second = free[:, 33:].tolist()
    at = next(at for at in range(4, 12) if first[at] not in first[:at] + second)
    client = connect(cluster, model)
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": first[at]}
    out = generate(client, model, ids, mask, offload=True, **settings)
    assert out[0, 34 + at :].tolist() == [PAD] * (23 - at)
    assert stored_tokens(client, out[0].tolist()) == (34 + at) // BLOCK * BLOCK
    assert stored_tokens(client, out[1].tolist()) == (33 + 23) // BLOCK * BLOCK


# ---------------------------------------------------------------------------- errors, and what they leave behind


def test_a_lost_block_is_a_typed_error_and_the_next_call_goes_on(start: Any) -> None:
    model = model_of(num_hidden_layers=4)
    ids, mask = batch(prompt(900))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    cluster = start(resident_tokens=800, model=model)
    client = connect(cluster, model, block_tokens=16)

    def clear() -> None:
        client.clear()
        cluster.wait_until(lambda: not any([*host.core.pool.ready()] for host in cluster.shards.values()))

    lose = StoppingCriteriaList([AtToken(904, clear)])
    with pytest.raises(LostTokens) as lost:
        generate(client, model, ids, mask, offload=True, stopping_criteria=lose, **GREEDY)
    assert lost.value.position % 16 == 0
    assert client.resident().sequences == client.resident().pages_used == 0
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(client, model, ids, mask, offload=True, **GREEDY), expected)


def test_an_interrupted_call_leaves_nothing_behind(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(*ROWS)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)

    def interrupt() -> None:
        assert client.resident().sequences == 9
        raise KeyboardInterrupt

    for settings in ({"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}):
        stop = StoppingCriteriaList([AtToken(67, interrupt)])
        with pytest.raises(KeyboardInterrupt):
            generate(client, model, ids, mask, offload=True, stopping_criteria=stop, **{**GREEDY, **settings})
        assert client.resident().sequences == client.resident().pages_used == 0
        assert model.config._attn_implementation == "sdpa" and not model._forward_hooks
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)


def test_a_step_that_fails_is_dropped_and_can_be_taken_again(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(*ROWS)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    with SequenceCache.from_inputs(client, model, ids, mask) as cache:
        compute, calls = cache.compute, 0

        def fails_once(layer: int, *others: Any) -> Any:
            nonlocal calls
            calls += layer == 1
            if calls == 2 and layer == 1:
                raise RuntimeError("no memory, say")
            return compute(layer, *others)

        monkeypatch.setattr(cache, "compute", fails_once)
        with pytest.raises(RuntimeError, match="no memory"):
            cache.prefill(model, ids, mask, chunk=20)
        assert cache.get_seq_length() == 20
        cache.prefill(model, ids, mask, chunk=20)
        with cache.attending(model):
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(out, expected)


def test_two_threads_generate_with_one_model_and_any_other_use_is_refused_by_name(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    prompts = [batch(prompt(33, 1)), batch(prompt(40, 2))]
    expected = [model.generate(ids, attention_mask=mask, **GREEDY) for ids, mask in prompts]
    barrier, refused, out = threading.Barrier(2, timeout=60), list[BaseException](), dict[int, Any]()

    class Meet(LogitsProcessor):
        """Has both generations reach their fifth token before either goes on."""

        def __init__(self, columns: int) -> None:
            self._columns = columns

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            if input_ids.shape[1] == self._columns:
                barrier.wait()
            return scores

    def run(number: int) -> None:
        ids, mask = prompts[number]
        meet = LogitsProcessorList([Meet(ids.shape[1] + 5)])
        out[number] = generate(client, model, ids, mask, offload=True, logits_processor=meet, **GREEDY)

    threads = [threading.Thread(target=run, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out[number], expected[number]) for number in range(2))

    def intrude() -> None:
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()

    def plain() -> None:
        try:
            model.generate(prompts[0][0], **GREEDY)
        except CallerError as error:
            refused.append(error)

    stop = StoppingCriteriaList([AtToken(36, intrude)])
    ids, mask = prompts[0]
    assert torch.equal(generate(client, model, ids, mask, offload=True, stopping_criteria=stop, **GREEDY), expected[0])
    assert "another thread" in str(refused[0])
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected[0])


# ------------------------------------------------------------------------------------------- by hand


def test_crop_and_a_second_generation_over_one_cache(cluster: MemoryCluster) -> None:
    model = model_of()
    ids, mask = batch(*ROWS)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    with SequenceCache.from_inputs(connect(cluster, model), model, ids, mask) as cache, cache.attending(model):
        for _ in range(2):
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
            assert torch.equal(out, expected)
            cache.crop(-(cache.get_seq_length() - 41))
            assert cache.get_seq_length() == 41
        cache.batch_select_indices(torch.tensor([2, 0]))
        out = model.generate(ids[[2, 0]], attention_mask=mask[[2, 0]], past_key_values=cache, **GREEDY)
        assert torch.equal(out, expected[[2, 0]])
        with pytest.raises(CallerError, match="negative"):
            cache.crop(3)
        with pytest.raises(CallerError, match="not copied"):
            copy.deepcopy(cache)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_the_mask_must_be_that_of_the_inputs(cluster: MemoryCluster) -> None:
    model = model_of()
    ids, mask = batch(*ROWS)
    with SequenceCache.from_inputs(connect(cluster, model), model, ids, mask) as cache, cache.attending(model):
        with pytest.raises(CallerError, match=r"hides \[0, 0, 0\].*have \[27, 39, 0\]"):
            model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)
        with pytest.raises(CallerError, match="has 3"):
            model(ids[:2], attention_mask=mask[:2], past_key_values=cache)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("bloom", "AttentionInterface"),
        ("codegen", "AttentionInterface"),
        ("xglm", "AttentionInterface"),
        ("jetmoe", "keys that it did not give"),
    ],
)
def test_a_model_that_does_not_attend_through_transformers_is_refused_before_anything_starts(
    cluster: MemoryCluster, kind: str, named: str
) -> None:
    other = {"codegen": {"rotary_dim": 8}, "xglm": {"num_layers": 3, "attention_heads": 4, "d_model": 64}}
    heads = {} if kind == "jetmoe" else {"num_key_value_heads": None}
    model = model_of(kind, **heads, **other.get(kind, {}))
    client = connect(cluster, model)
    with pytest.raises(CallerError, match=named):
        generate(client, model, *batch(prompt(9)), offload=True, use_cache=True, **GREEDY)
    assert client.status()["counters"].get("asked_blocks", 0) == 0 and client.resident().sequences == 0
    assert model.config._attn_implementation != "kvcluster"


def test_what_a_layer_asks_for_beyond_attention_is_refused(cluster: MemoryCluster) -> None:
    model = model_of()
    client = connect(cluster, model)
    layer = model.model.layers[1].self_attn
    layer.is_causal = False
    with pytest.raises(CallerError, match="LlamaAttention asks attention for attention to later tokens"):
        generate(client, model, *batch(prompt(9)), offload=True, **GREEDY)
    layer.is_causal = True
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(CallerError, match="LlamaAttention asks attention for position_bias"):
        generate(client, model, *batch(prompt(9)), offload=True, **GREEDY)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(
    cluster: MemoryCluster, kwargs: dict[str, Any], named: str
) -> None:
    model = model_of()
    client = connect(cluster, model)
    with pytest.raises(CallerError, match=named):
        generate(client, model, *batch(prompt(9)), offload=True, **kwargs)
    assert client.resident().sequences == 0


def test_a_spec_of_other_geometry_is_refused(cluster: MemoryCluster) -> None:
    client = cluster.client(spec_of(model_of(num_hidden_layers=2), block_tokens=BLOCK))
    with pytest.raises(CallerError, match=r"spec has 2 layers .* has 3 layers"):
        generate(client, model_of(), *batch(prompt(9)), offload=True, **GREEDY)
