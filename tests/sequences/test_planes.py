"""Sequences whose planes have different dims: K of 24 channels and V of 16, as in multi-head latent models unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, partial
from kvcluster.core.codecs import Codec
from kvcluster.errors import CallerError
from kvcluster.memory.codec_torch import TorchCoder
from tests.client.conftest import Start
from tests.client.test_zero_copy import Desk

LAYERS, HEADS, BLOCK, DIMS = 2, 2, 8, (64, 32)
PLANES = tuple(kvcluster.Plane(name, HEADS, dim, "bfloat16") for name, dim in zip("kv", DIMS, strict=True))
SPEC = kvcluster.KVSpec("m", "sha256:1", BLOCK, (kvcluster.Group((0, 1), PLANES),))
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
LAYOUT = PageLayout(SPEC.groups[0], BLOCK, LAYERS, HEADS)
TOKENS = 60


def made(tokens: int, seed: int = 0) -> list[Tensor]:
    """Values of each plane: `[layers, tokens, heads, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYERS, tokens, HEADS, dim, generator=generator).bfloat16() for dim in DIMS]


def grown(client: kvcluster.Client, values: list[Tensor], **how: object) -> kvcluster.Sequence:
    sequence = client.sequence(**how)  # type: ignore[arg-type]
    for first in range(0, values[0].shape[1], 5):
        step = range(first, min(first + 5, values[0].shape[1]))
        for layer in range(LAYERS):
            sequence.append(layer, *(plane[layer, step.start : step.stop] for plane in values))
        sequence.advance(list(step))
    return sequence


def pages_of(values: list[Tensor]) -> list[Tensor]:
    """The pages of these tokens, one after the other, each as bytes."""
    blocks = -(-values[0].shape[1] // BLOCK)
    padded = [torch.nn.functional.pad(plane, (0, 0, 0, 0, 0, blocks * BLOCK - plane.shape[1])) for plane in values]
    return [
        torch.cat([plane[layer, at : at + BLOCK].flatten() for layer in range(LAYERS) for plane in padded])
        .view(torch.uint8)
        .clone()
        for at in range(0, blocks * BLOCK, BLOCK)
    ]


def check(sequence: kvcluster.Sequence, values: list[Tensor], **how: object) -> None:
    """It attends over these tokens with the bits of the same pages elsewhere."""
    pages, tokens = PageAddresses.from_buffers(LAYOUT, pages_of(values)), values[0].shape[1]
    query = torch.randn(3, 2 * HEADS, DIMS[0], generator=torch.Generator().manual_seed(5))
    row = QueryRow(range(tokens - 3, tokens), [PageSpan(pages, 0, tokens)])
    for layer in range(LAYERS):
        out = sequence.attend(layer, query, **how)  # type: ignore[arg-type]
        assert out.shape == (3, 2 * HEADS, DIMS[1])
        assert torch.equal(out, partial(query, [row], LAYOUT, layer).out)


def holds(sequence: kvcluster.Sequence, values: list[Tensor]) -> None:
    for layer in range(LAYERS):
        for found, plane in zip(sequence.read(layer, 0, sequence.length), values, strict=True):
            assert torch.equal(found, plane[layer])


@pytest.fixture
def desk(start: Start) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(start(shards=2, ram_bytes="4MiB"), stack)


def test_they_are_kept_shared_overwritten_and_cut(desk: Desk) -> None:
    values, other = made(TOKENS), made(TOKENS, 1)
    with desk.connect(SPEC) as client, grown(client, values) as one, one.fork() as fork:
        holds(one, values)
        check(one, values)
        for layer in range(LAYERS):
            fork.write(layer, 3, *(plane[layer, 3:20] for plane in other))
        mixed = [torch.cat([a[:, :3], b[:, 3:20], a[:, 20:]], 1) for a, b in zip(values, other, strict=True)]
        holds(fork, mixed)
        holds(one, values)
        fork.truncate(21)
        check(fork, [plane[:, :21] for plane in mixed])
        table = one.block_table
        for plane, mine in zip(one.resident_planes, values, strict=True):
            assert torch.equal(plane[int(table[2]), 1], mine[1, 2 * BLOCK : 3 * BLOCK])
        with pytest.raises(CallerError, match="resident_planes"):
            _ = one.resident_pages
        with pytest.raises(CallerError, match=rf"expected \[tokens, {HEADS}, {DIMS[1]}\]"):
            one.append(0, values[0][0], values[0][0])


@pytest.mark.parametrize(("pages", "tokens"), [(64, TOKENS), (80, 800)], ids=["roomy", "streamed"])
def test_another_worker_has_them_borrowed_loaded_and_shipped(desk: Desk, pages: int, tokens: int) -> None:
    values = made(tokens)
    with desk.connect(SPEC) as client, grown(client, values) as one:
        assert one.flush()
        full = [plane[:, : tokens // BLOCK * BLOCK] for plane in values]
        for takes in (("tcp", "grpc"), kvcluster.ClientConfig().transports):
            with (
                desk.connect(SPEC, takes=takes, resident_bytes=pages * PAGE) as other,
                other.sequence(list(range(tokens)), prefetch=False) as found,
            ):
                assert found.length == tokens // BLOCK * BLOCK
                check(found, full, planner=kvcluster.ShipAbsent())
                check(found, full)
                if tokens == TOKENS:
                    holds(found, full)


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_they_are_encoded_in_the_resident_set(desk: Desk, codec: str) -> None:
    policy = kvcluster.WindowPolicy(tail_tokens=BLOCK, migration_tokens=BLOCK, codec=codec)
    values = made(TOKENS)
    with desk.connect(SPEC) as client, grown(client, values, policy=policy) as one:
        encoded = one.statistics().encoded // BLOCK
        assert encoded == 6
        coder = TorchCoder(Codec[codec.upper()], SPEC.groups[0], block_tokens=BLOCK, heads=HEADS)
        pages = pages_of(values)
        for page in pages[:encoded]:
            coded = memoryview(bytearray(PAGE))
            assert coder.encode(memoryview(page.numpy()), coded, LAYERS)
            coder.decode(coded, memoryview(page.numpy()), LAYERS)
        decoded, first = [plane.clone() for plane in values], 0
        for layer in range(LAYERS):
            for plane, dim in zip(decoded, DIMS, strict=True):
                size = BLOCK * HEADS * dim
                rows = [page.view(torch.bfloat16)[first : first + size].view(BLOCK, HEADS, dim) for page in pages]
                plane[layer] = torch.cat(rows)[:TOKENS]
                first += size
        holds(one, decoded)
        check(one, decoded)


def test_planes_of_different_dtypes_are_refused(desk: Desk) -> None:
    planes = (PLANES[0], replace(PLANES[1], dtype="float16"))
    spec = replace(SPEC, groups=(kvcluster.Group((0, 1), planes),))
    with desk.connect(spec) as client, pytest.raises(CallerError, match="one dtype"):
        client.sequence()
