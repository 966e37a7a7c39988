"""The table "What memory is served" of docs/copies.md: memory of each row is served to the byte, or refused by name
before a byte moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers, Paged
from tests.client.build import (
    BLOCK,
    DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    blank,
    kv,
    noise,
    prompt,
    room,
    same,
    shape_of,
    unwritten,
)

BLOCKS = 3
SHAPE = shape_of(BLOCKS)
DOCUMENT = Path(__file__).parents[2] / "docs/copies.md"


class Given(NamedTuple):
    """Memory as a caller gives it, its values as a dense view, and all that was allocated for it."""

    memory: Any
    values: torch.Tensor
    owner: torch.Tensor


Make = Callable[[torch.Tensor], Given]
"""Makes the memory of a row from a flat tensor of float32 that is large enough."""


class Row(NamedTuple):
    """How memory of one kind is answered as a destination and as a source: the words of the refusal, None if it is
    served."""

    make: Make
    destination: str | None = None
    source: str | None = None


def odd_offset(flat: torch.Tensor) -> Given:
    values = flat[1 : 1 + prod(SHAPE)].view(SHAPE)
    return Given(values, values, flat)


def odd_address(flat: torch.Tensor) -> Given:
    raw = flat.view(torch.uint8).numpy()
    values = torch.frombuffer(raw, dtype=torch.float32, offset=1, count=prod(SHAPE)).view(SHAPE)
    return Given(values, values, flat)


def transposed(flat: torch.Tensor) -> Given:
    order = [5, 3, 0, 4, 1, 2]
    values = flat[: prod(SHAPE)].view([SHAPE[i] for i in order]).permute([order.index(i) for i in range(6)])
    return Given(values, values, flat)


def sliced(flat: torch.Tensor) -> Given:
    values = flat[: 4 * prod(SHAPE)].view(2 * BLOCKS, LAYERS, 2, BLOCK, HEADS, 2 * DIM)[::2, ..., ::2]
    return Given(values, values, flat)


def expanded(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE[1:])].view(1, *SHAPE[1:]).expand(SHAPE)
    return Given(values, values, flat)


def overlapping(flat: torch.Tensor) -> Given:
    row = DIM - 1  # the last value of a row is the first of the next
    strides = [row * prod(SHAPE[1:5]), row * prod(SHAPE[2:5]), row * BLOCK * HEADS, row * HEADS, row, 1]
    values = flat.as_strided(SHAPE, strides)
    return Given(values, values, flat)


def overlapping_layers(flat: torch.Tensor) -> Given:
    """The second layer begins within the first, the third behind both."""
    size = prod(SHAPE) // LAYERS
    layers = [flat[at:][:size].view(BLOCKS, *SHAPE[2:]) for at in (0, size - DIM, 3 * size)]
    return Given(Paged(layers, range(BLOCKS)), torch.stack(layers, 1), flat)


def overlapping_planes(flat: torch.Tensor) -> Given:
    """The last values of each row of K are the first of V."""
    rows = flat[: prod(SHAPE)].view(LAYERS, BLOCKS, BLOCK, HEADS, 2 * DIM)
    planes = [(layer[..., :DIM], layer[..., DIM - 1 : -1]) for layer in rows]
    return Given(Paged(planes, range(BLOCKS)), torch.stack([torch.stack(each, 1) for each in planes], 1), flat)


def same_block(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(Paged(list(values.unbind(1)), [0, 0, 0]), values[:1].expand(SHAPE), flat)


def outside(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(Paged(list(values.unbind(1)), [0, 1, BLOCKS]), values, flat)


def too_few_blocks(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values[1:], values, flat)


def too_few_layers(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values[:, 1:], values, flat)


def of_dtype(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values.view(torch.int32), values, flat)


def of_device(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values.to("meta"), values, flat)


def watched(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values.detach().requires_grad_(), values, flat)


def bare_array(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values.numpy(), values, flat)


def transposed_array(flat: torch.Tensor) -> Given:
    given = transposed(flat)
    return given._replace(memory=given.memory.numpy())


def paged_arrays(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(Paged([layer.numpy() for layer in values.unbind(1)], np.arange(BLOCKS)), values, flat)


def nhd_arrays(flat: torch.Tensor) -> Given:
    caches = flat[: prod(SHAPE)].view(LAYERS, 2, BLOCKS, BLOCK, HEADS, DIM)
    return Given(Paged.nhd(list(caches.numpy()), range(BLOCKS)), caches.permute(2, 0, 1, 3, 4, 5), flat)


def read_only_array(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(read_only(values.numpy()), values, flat)


def reversed_array(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values.numpy()[..., ::-1], values, flat)


def big_endian_array(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(values.numpy().view(">f4"), values, flat)


class Exported:
    """An array of a library that has only DLPack in common with others."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.inner.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


class ExportedOfOld(Exported):
    """One of before version 1.0 of DLPack, whose capsule does not say whether it may be written."""

    def __dlpack__(self) -> Any:
        return self.inner.__dlpack__()


class ExportedOnDevice(Exported):
    """One in the memory of a GPU."""

    def __dlpack_device__(self) -> Any:
        return 2, 0


def dlpack(flat: torch.Tensor) -> Given:
    given = transposed(flat)
    return given._replace(memory=Exported(given.memory))


def old_dlpack(flat: torch.Tensor) -> Given:
    given = transposed(flat)
    return given._replace(memory=ExportedOfOld(given.memory))


def read_only_dlpack(flat: torch.Tensor) -> Given:
    given = read_only_array(flat)
    return given._replace(memory=Exported(given.memory))


def device_dlpack(flat: torch.Tensor) -> Given:
    given = transposed(flat)
    return given._replace(memory=ExportedOnDevice(given.memory))


def flat_bytes(flat: torch.Tensor) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(memoryview(values.flatten().numpy()).cast("B"), values, flat)


def read_only_bytes(flat: torch.Tensor) -> Given:
    given = flat_bytes(flat)
    return given._replace(memory=given.memory.toreadonly())


def odd_bytes(flat: torch.Tensor) -> Given:
    given = flat_bytes(flat)
    return given._replace(memory=given.memory[:-1])


def _arrays(flat: torch.Tensor, cut: Callable[[np.ndarray], np.ndarray]) -> Given:
    values = flat[: prod(SHAPE)].view(SHAPE)
    return Given(Buffers([cut(page.numpy()) for page in values.view(BLOCKS, -1).view(torch.uint8)]), values, flat)


def read_only(page: np.ndarray) -> np.ndarray:
    page.flags.writeable = False
    return page


def buffers(flat: torch.Tensor) -> Given:
    return _arrays(flat, lambda page: page)


def read_only_buffers(flat: torch.Tensor) -> Given:
    return _arrays(flat, read_only)


def short_buffers(flat: torch.Tensor) -> Given:
    return _arrays(flat, lambda page: page[:-1])


def strided_buffers(flat: torch.Tensor) -> Given:
    return _arrays(flat, lambda page: page[::-1])


TWICE = "uses some memory twice"
ROWS: dict[str, Row] = {
    "storage offset that is no multiple of 64": Row(odd_offset),
    "address that is no multiple of the dtype": Row(odd_address),
    "transposed": Row(transposed),
    "sliced with steps": Row(sliced),
    "expanded (stride 0)": Row(expanded, TWICE),
    "overlapping rows": Row(overlapping, TWICE),
    "overlapping layers": Row(overlapping_layers, TWICE),
    "overlapping keys and values": Row(overlapping_planes, TWICE),
    "block id given twice": Row(same_block, "occurs twice"),
    "block id outside the cache": Row(outside, "block_ids go from 0 to 3", "block_ids go from 0 to 3"),
    "too few blocks": Row(too_few_blocks, "has 2 blocks; expected at least 3", "has 2 blocks; expected 3"),
    "too few layers": Row(too_few_layers, "expected .blocks, layers 3", "expected .blocks, layers 3"),
    "another dtype": Row(of_dtype, "is torch.int32; expected torch.float32", "is torch.int32"),
    "another device": Row(of_device, "on meta; expected one on cpu or cuda", "on meta"),
    "requires grad": Row(watched, "requires grad"),
    "numpy array": Row(bare_array),
    "numpy array, transposed": Row(transposed_array),
    "numpy arrays, one a layer": Row(paged_arrays),
    "numpy arrays in vLLM's NHD layout": Row(nhd_arrays),
    "numpy array that is read-only": Row(read_only_array, "the destination is read-only"),
    "numpy array that is reversed": Row(reversed_array, "strides of .* not reversed", "strides of .* not reversed"),
    "numpy array in big-endian byte order": Row(big_endian_array, "big-endian byte order", "big-endian byte order"),
    "array with DLPack": Row(dlpack),
    "array with DLPack of before 1.0": Row(old_dlpack),
    "array with DLPack that is read-only": Row(read_only_dlpack, "the destination is read-only"),
    "array with DLPack on a device": Row(device_dlpack, "lies on a device", "lies on a device"),
    "bytes of all blocks": Row(flat_bytes),
    "bytes that are read-only": Row(read_only_bytes, "is read-only"),
    "bytes that are no whole pages": Row(odd_bytes, "expected a multiple of", "expected a multiple of"),
    "writable buffers": Row(buffers),
    "read-only buffers": Row(read_only_buffers, "is read-only"),
    "buffer that is too small": Row(short_buffers, f"expected the {PAGE_BYTES} of", f"expected the {PAGE_BYTES} of"),
    "buffer that is not contiguous": Row(strided_buffers, "expected a contiguous", "expected a contiguous"),
}

FLAT = [4 * prod(SHAPE) + 2]
PROMPTS = count(1)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with MemoryCluster() as cluster:
        client = cluster.client(SPEC)
        client.store(prompt(BLOCKS), kv(BLOCKS))
        assert client.flush()
        yield client


@pytest.mark.parametrize("name", ROWS)
def test_a_destination_gets_its_bytes_and_no_others_or_is_refused_by_name(client: Client, name: str) -> None:
    row, owner = ROWS[name], blank(FLAT)
    given = row.make(owner)
    if row.destination is None:
        assert client.load(prompt(BLOCKS), given.memory) == BLOCKS * BLOCK
        assert same(given.values, kv(BLOCKS))
        given.values.copy_(blank(SHAPE))
    else:
        with pytest.raises(CallerError, match=row.destination):
            client.load(prompt(BLOCKS), given.memory)
    assert unwritten(owner), "nothing was written beside the blocks, or before the refusal"


@pytest.mark.parametrize("name", ROWS)
def test_a_source_is_stored_as_it_is_or_refused_by_name(client: Client, name: str) -> None:
    row, owner, tokens = ROWS[name], noise(FLAT), prompt(BLOCKS, next(PROMPTS))
    given = row.make(owner)
    right, before = given.values.clone(), owner.clone()
    if row.source is None:
        assert client.store(tokens, given.memory).blocks == BLOCKS
        assert client.flush()
        assert client.load(tokens, into := room(BLOCKS)) == BLOCKS * BLOCK
        assert same(into, right)
    else:
        with pytest.raises(CallerError, match=row.source):
            client.store(tokens, given.memory)
        assert client.lookup(tokens).blocks == 0
    assert same(owner, before), "a source is never written"


def test_the_document_has_these_rows_and_says_what_becomes_of_them() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split("## What memory is served")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (served|refused: .+) \| (served|refused: .+) \|$", section, re.MULTILINE)
    answers = [(name, *("served" if words is None else "refused" for words in row[1:])) for name, row in ROWS.items()]
    assert [(name, *(said.split(":")[0] for said in both)) for name, *both in rows] == answers
