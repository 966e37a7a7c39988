"""KV for a model on a device arrives through buffers: here the device is the CPU, and the buffers are so small that a
prompt needs several."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcluster.client import Client
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.engines.transformers import PrefixCache, cache, staged_load
from kvcluster.engines.transformers.compat import layers, planes
from kvcluster.testing import MemoryCluster
from tests.engines.transformers.models import BLOCK, batch, connect, model_of, prompt


@pytest.fixture(params=[1, 3, 1_000])
def blocks_a_buffer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Has every load go through buffers of so many blocks."""
    monkeypatch.setattr(cache, "is_staged", lambda device, client: True)
    page = model_spec_bytes()
    monkeypatch.setattr(staged_load, "BUFFER_BYTES", request.param * page)
    count: int = request.param
    return count


def model_spec_bytes() -> int:
    config = model_of().config
    dim = config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * BLOCK * config.num_key_value_heads * dim * 4)


def run(model: Any, ids: torch.Tensor, mask: torch.Tensor, over: DynamicCache) -> Any:
    return model.generate(
        ids,
        attention_mask=mask,
        past_key_values=over,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def kv(of: DynamicCache, row: int, first: int, stop: int) -> torch.Tensor:
    return torch.stack([plane[row, :, first:stop].clone() for layer in layers(of) for plane in planes(layer)])


def stored(client: Client, model: Any, *rows: list[int]) -> list[DynamicCache]:
    """Computes and stores each row by itself."""
    caches = []
    for row in rows:
        ids, mask = batch(row)
        computed = PrefixCache.from_inputs(client, model, ids, mask)
        computed.save(run(model, ids, mask, computed).sequences)
        caches.append(computed)
    assert client.flush()
    return caches


def corrupt(cluster: MemoryCluster, block: BlockHash) -> None:
    """Flips a bit of the block's page on the shard that has it."""
    for shard in (ShardId("shard-0"), ShardId("shard-1")):
        with suppress(LookupError):
            cluster.corrupt(shard, block=block)
            return
    raise AssertionError("no shard has the block")


def test_rows_of_a_padded_batch_get_the_stored_kv_bit_for_bit(cluster: MemoryCluster, blocks_a_buffer: int) -> None:
    model = model_of()
    client = connect(cluster, model)
    one, other = prompt(7 * BLOCK + 2, seed=1), prompt(5 * BLOCK + 1, seed=2)
    first, second = stored(client, model, one, other)
    ids, mask = batch(one, other)
    loaded = PrefixCache.from_inputs(client, model, ids, mask)
    assert loaded.cached_tokens[0] >= 6 * BLOCK and loaded.cached_tokens[1] >= 4 * BLOCK
    padding = len(one) - len(other)
    columns = loaded.get_seq_length()
    assert torch.equal(kv(loaded, 0, 0, columns), kv(first, 0, 0, columns))
    assert torch.equal(kv(loaded, 1, padding, columns), kv(second, 0, 0, columns - padding))
    assert not kv(loaded, 1, 0, padding).any()
    again = PrefixCache.from_inputs(client, model, ids, mask)
    assert torch.equal(run(model, ids, mask, loaded).sequences, run(model, ids, mask, again).sequences)


def test_equal_rows_are_loaded_once_and_both_filled(cluster: MemoryCluster, blocks_a_buffer: int) -> None:
    model = model_of()
    client = connect(cluster, model)
    row = prompt(6 * BLOCK + 1)
    (computed,) = stored(client, model, row)
    ids, mask = batch(row, row)
    loaded = PrefixCache.from_inputs(client, model, ids, mask)
    assert loaded.cached_tokens == [6 * BLOCK, 6 * BLOCK]
    for number in range(2):
        assert torch.equal(kv(loaded, number, 0, 6 * BLOCK), kv(computed, 0, 0, 6 * BLOCK))


def test_what_is_lost_on_the_way_ends_the_prefix_and_is_computed(
    cluster: MemoryCluster, blocks_a_buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    client = connect(cluster, model)
    row = prompt(6 * BLOCK + 1)
    (computed,) = stored(client, model, row)
    ids, mask = batch(row)
    expected = run(model, ids, mask, DynamicCache(config=model.config)).sequences
    corrupt(cluster, client.hashes(row)[4])
    loaded = PrefixCache.from_inputs(client, model, ids, mask)
    assert loaded.cached_tokens == [4 * BLOCK] and loaded.misses[0] is not None
    assert torch.equal(kv(loaded, 0, 0, 4 * BLOCK), kv(computed, 0, 0, 4 * BLOCK))
    assert torch.equal(run(model, ids, mask, loaded).sequences, expected)


def test_a_load_by_several_buffers_is_one_lookup(cluster: MemoryCluster, blocks_a_buffer: int) -> None:
    model = model_of()
    client = connect(cluster, model)
    row = prompt(6 * BLOCK + 1)
    stored(client, model, row)
    before = client.status()["counters"]["loads"]
    assert PrefixCache.from_inputs(client, model, *batch(row)).cached_tokens == [6 * BLOCK]
    assert client.status()["counters"]["loads"] == before + 1
