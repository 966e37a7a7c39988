"""A PrefixCache whose tensors lie in the memory of a device: the twin's, which no CPU touches. The model computes on
the CPU, so its KV is copied there, as work of the engine that is late."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcluster.device.devices import DEVICES
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import DeviceStaging
from kvcluster.engines.transformers import PrefixCache, cache
from kvcluster.engines.transformers.compat import layers, planes
from kvcluster.testing import MemoryCluster
from tests.device.tensors import Engine
from tests.engines.transformers.models import BLOCK, batch, connect, model_of, prompt

TOKENS = 7 * BLOCK + 2


@pytest.fixture(params=range(3))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    twin = Twin(Machine(Random(request.param)), nbytes=1 << 22, pinnable=1 << 22)
    DEVICES.add(DeviceStaging(twin, slot_bytes=8_192, slots=2))
    yield Engine(twin, torch.float32)
    DEVICES.remove(twin)


def computed(client: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[PrefixCache, torch.Tensor]:
    """A cache with the KV of a prompt and some tokens, on the CPU."""
    made = PrefixCache.from_inputs(client, model, ids, mask)
    return made, model.generate(ids, attention_mask=mask, past_key_values=made, max_new_tokens=6, do_sample=False)


def kv(of: PrefixCache, columns: int) -> list[torch.Tensor]:
    return [plane[:, :, :columns].clone() for layer in layers(of) for plane in planes(layer)]


def test_it_is_loaded_where_the_model_reads_it(
    cluster: MemoryCluster, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(prompt(TOKENS))
    own, out = computed(client, model, ids, mask)
    own.save(out)
    assert client.flush()
    wholes: list[torch.Tensor] = []

    def new_plane(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        wholes.append(engine.tensor(*shape))
        return wholes[-1]

    monkeypatch.setattr(cache, "new_plane", new_plane)
    loaded = PrefixCache.from_inputs(client, model, ids, mask)
    assert loaded.cached_tokens == [7 * BLOCK]
    for mine, expected in zip(wholes, kv(own, 7 * BLOCK), strict=True):
        assert torch.equal(engine.read(mine)[:, :, : 7 * BLOCK], expected)


def test_it_is_stored_from_there_behind_what_the_model_has_enqueued(cluster: MemoryCluster, engine: Engine) -> None:
    model = model_of()
    client = connect(cluster, model)
    ids, mask = batch(prompt(TOKENS), prompt(5 * BLOCK, seed=2))  # the second has padding before it
    own, out = computed(client, model, ids, mask)
    expected = kv(own, own.get_seq_length())
    for layer in layers(own):
        there = []
        for plane in planes(layer):
            there.append(engine.tensor(*plane.shape))
            engine.write(there[-1], plane)
        layer.keys, layer.values = there
    stored = own.save(out)
    assert stored.miss is None
    assert client.flush()
    for row, tokens in enumerate((TOKENS, 5 * BLOCK)):
        alone, alone_mask = batch(out[row, TOKENS - tokens :].tolist())
        loaded = PrefixCache.from_inputs(client, model, alone, alone_mask)
        found = loaded.cached_tokens[0]
        assert found == (tokens + 5) // BLOCK * BLOCK
        at = TOKENS - tokens
        for mine, whole in zip(kv(loaded, found), expected, strict=True):
            assert torch.equal(mine[0], whole[row, :, at : at + found])


def test_host_memory_is_between_where_the_client_does_not_take_the_tensors() -> None:
    def staged(device: str, *, takes: bool) -> bool:
        client = SimpleNamespace(takes_device_tensors=takes)
        return cache.is_staged(torch.device(device), client)  # type: ignore[arg-type]

    assert [staged(device, takes=True) for device in ("cpu", "cuda", "xpu")] == [False, False, True]
    assert [staged(device, takes=False) for device in ("cpu", "cuda", "xpu")] == [False, True, True]
