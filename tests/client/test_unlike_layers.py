"""Memory whose layers, planes and groups have strides of their own: every executor and path stores and loads the same
bytes, and writes nothing beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance.world import ONE, WatchedHost
from kvcluster.transfers.layouts import Paged
from tests.client.build import prompt
from tests.client.test_zero_copy import Desk
from tests.fuzz.memories import BYTES, Cell, Drawn, Page, drawn
from tests.integrity.executors import EXECUTORS, executed_by
from tests.integrity.flips import SERVERS

CONFIG = ClientConfig(deadline_ms=60_000)
BLOCKS = 3


class Shard:
    """One shard behind every transport, and clients of any spec that reach it over one of them."""

    def __init__(self, cluster: MemoryCluster, stack: ExitStack) -> None:
        (host,) = cluster.shards.values()
        self._cluster, self._stack = cluster, stack
        self._served: dict[str, Any] = {}
        for name, serve in SERVERS.items():
            self._served[name] = serve(WatchedHost(host))
            stack.callback(self._served[name].close)

    def client(self, transport: str, spec: KVSpec) -> Client:
        served = self._served[transport]
        client = Client(self._cluster.port(ONE), lambda address: served.open(ONE), spec, config=CONFIG)
        self._stack.callback(client.close)
        return client


@pytest.fixture(scope="module")
def shard() -> Iterator[Shard]:
    with ExitStack() as stack:
        yield Shard(stack.enter_context(MemoryCluster(ram_bytes="64MiB")), stack)


def drawn_spec(rng: Random) -> KVSpec:
    """A spec of up to three groups, whose layers are long enough for the native core."""
    groups, first = [], 0
    tokens = rng.choice([4, 8, 16])
    for _ in range(rng.randint(1, 3)):
        layers, heads, dim = rng.randint(2, 4), rng.choice([2, 4]), rng.choice([16, 32, 40, 64])
        dtype = rng.choice(["float16", "bfloat16", "float32"])
        planes = tuple(Plane(name, heads, dim, dtype) for name in "kv")
        if rng.random() < 0.25:
            planes = (planes[0], Plane.opaque("packed", 24, heads=heads), Plane("scale", heads, 2, "float32"))
        groups.append(Group(tuple(range(first, first + layers)), planes))
        first += layers
    return KVSpec(model="m", weights=f"sha256:{rng.getrandbits(60)}", block_tokens=tokens, groups=tuple(groups))


def cells(spec: KVSpec) -> list[Cell]:
    return [Cell(group, spec.whole(at), spec.block_tokens, BLOCKS) for at, group in enumerate(spec.groups)]


def noise(rng: Random, cell: Cell) -> Page:
    """One block's bytes."""
    part = cell.part
    shapes = [
        (part.layers, cell.tokens(plane), part.heads, plane.dim * BYTES[plane.dtype]) for plane in cell.group.planes
    ]
    return [np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape) for shape in shapes]


def argument(memories: list[Drawn]) -> Any:
    return [each.memory for each in memories] if len(memories) > 1 else memories[0].memory


def filled(rng: Random, spec: KVSpec) -> tuple[list[Drawn], list[list[Page]]]:
    """Memory to store from, and what is in it: by group and block."""
    memories = [drawn(rng, cell) for cell in cells(spec)]
    pages = [[noise(rng, cell) for _ in range(BLOCKS)] for cell in cells(spec)]
    for memory, blocks in zip(memories, pages, strict=True):
        for block, page in enumerate(blocks):
            memory.write(block, page)
    return memories, pages


def check(memory: Drawn, pages: list[Page], what: str) -> None:
    for block, page in enumerate(pages):
        for came, right in zip(memory.read(block), page, strict=True):
            assert np.array_equal(came, right), f"{what}: wrong KV in block {block} of {memory.kind}"
        memory.wipe(block)
    assert memory.untouched(), f"{what}: written beside the blocks of {memory.kind}"


@pytest.mark.parametrize(("executor", "transport"), list(product(EXECUTORS, SERVERS)))
def test_every_executor_moves_the_same_bytes_whatever_the_strides_of_each_layer(
    shard: Shard, executor: str, transport: str, nightly: bool
) -> None:
    """It stores, and loads what it stored as the others would have: the right bytes are known without them."""
    for seed in range(200 if nightly else 12):
        rng = Random(f"{executor}/{transport}/{seed}")
        spec = drawn_spec(rng)
        tokens = prompt(BLOCKS, seed, block_tokens=spec.block_tokens)
        source, pages = filled(rng, spec)
        into = [drawn(rng, cell) for cell in cells(spec)]
        client = shard.client(transport, spec)
        other = shard.client("memory", spec)
        with executed_by(executor):
            assert client.store(tokens, argument(source)).blocks == BLOCKS and client.flush()
            assert client.load(tokens, argument(into)) == len(tokens)
        for group, (memory, right) in enumerate(zip(into, pages, strict=True)):
            check(memory, right, f"seed {seed}, group {group}, loaded from {source[group].kind}")
        again = [drawn(rng, cell) for cell in cells(spec)]
        with executed_by("python"):
            assert other.load(tokens, argument(again)) == len(tokens)
        for group, (memory, right) in enumerate(zip(again, pages, strict=True)):
            check(memory, right, f"seed {seed}, group {group}, stored from {source[group].kind}")


def test_what_is_stored_from_any_strides_is_borrowed_as_pages() -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(MemoryCluster(ram_bytes="64MiB"))
        desk = Desk(cluster, stack)
        for seed in range(12):
            rng = Random(f"borrowed/{seed}")
            spec = drawn_spec(rng)
            tokens = prompt(BLOCKS, seed, block_tokens=spec.block_tokens)
            source, pages = filled(rng, spec)
            client = desk.connect(spec)
            assert client.store(tokens, argument(source)).blocks == BLOCKS and client.flush()
            with client.prepare_load(client.hashes(tokens)) as ticket, client.borrow(ticket) as blocks:
                for group, block in product(range(len(spec.groups)), range(BLOCKS)):
                    page = pages[group][block]
                    layers = range(spec.whole(group).layers)
                    right = b"".join(plane[layer].tobytes() for layer in layers for plane in page)
                    assert blocks.page(block, group) == right, f"seed {seed}: {source[group].kind}"
                assert blocks.valid()


# ------------------------------------------------------------------------------------ as it was found


def padded() -> list[np.ndarray]:
    """The buffers of a dense layer and of a padded one behind it."""
    return [np.full((2, 2, 16, 2, dim), 7.0, np.float16) for dim in (128, 256)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_padded_layer_behind_a_dense_one_is_loaded_and_stored(executor: str) -> None:
    spec = KVSpec.uniform(
        model="m", weights="w", num_layers=2, num_kv_heads=2, head_dim=128, dtype="float16", block_tokens=16
    )
    values = np.arange(2 * 2 * 2 * 16 * 2 * 128).astype(np.float16).reshape(2, 2, 2, 16, 2, 128)
    tokens = list(range(32))
    with MemoryCluster() as cluster, executed_by(executor):
        client = cluster.client(spec)
        client.store(tokens, torch.from_numpy(values))
        assert client.flush()
        dense, wide = padded()
        assert client.load(tokens, Paged([dense, wide[..., :128]], range(2))) == 32
        assert np.array_equal(dense, values[:, 0]) and np.array_equal(wide[..., :128], values[:, 1])
        assert (wide[..., 128:] == 7.0).all(), "written beside the layer"
        other = list(range(1, 33))
        client.store(other, Paged([dense, wide[..., :128]], range(2)))
        assert client.flush()
        assert client.load(other, again := np.zeros_like(values)) == 32
        assert np.array_equal(again, values)


def test_heads_first_behind_tokens_first() -> None:
    """The first layer NHD, the second HND: runs of all heads, and runs of one."""
    part = Part(0, 2, 0, 4)
    group = Group((0, 1), (Plane("k", 4, 64, "float16"), Plane("v", 4, 64, "float16")))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=8, groups=(group,))
    values = np.arange(2 * 2 * 2 * 8 * 4 * 64).astype(np.uint16).view(np.float16).reshape(2, 2, 2, 8, 4, 64)
    assert spec.whole(0) == part
    tokens = list(range(16))
    with MemoryCluster() as cluster:
        client = cluster.client(spec)
        client.store(tokens, torch.from_numpy(values))
        assert client.flush()
        first, second = np.zeros((2, 2, 8, 4, 64), np.float16), np.zeros((2, 2, 4, 8, 64), np.float16)
        assert client.load(tokens, Paged([first, second.transpose(0, 1, 3, 2, 4)], range(2))) == 16
    assert np.array_equal(first.view(np.uint16), values[:, 0].view(np.uint16))
    assert np.array_equal(second.transpose(0, 1, 3, 2, 4).view(np.uint16), values[:, 1].view(np.uint16))
