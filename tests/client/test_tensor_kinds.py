"""Tensors whose memory is not what their values say are taken by value or refused, and never by other bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Paged
from tests.client.build import BLOCK, DIM, HEADS, LAYERS, SPEC, kv, prompt, room, same

QUERY = (1, HEADS, DIM)
TOKENS = (BLOCK, HEADS, DIM)


@pytest.fixture(scope="module")
def client() -> Iterator[kvcluster.Client]:
    with MemoryCluster(shards=1, ram_bytes="16MiB") as cluster, cluster.client(SPEC) as made:
        yield made


def negative(shape: tuple[int, ...]) -> Tensor:
    """The imaginary part of a conjugate: a view whose memory has the values with the other sign."""
    made = torch.randn(shape, dtype=torch.complex64).conj().imag
    assert made.is_neg()
    return made


def zeros_unwritten(shape: tuple[int, ...]) -> Tensor:
    made: Tensor = torch._efficientzerotensor(shape)
    return made


def freed(shape: tuple[int, ...]) -> Tensor:
    made = torch.randn(shape)
    made.untyped_storage().resize_(made.untyped_storage().nbytes() // 2)
    return made


def quantised(shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(shape), 0.1, 0, torch.quint8)


def nested(shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([*torch.randn(shape)])


NO_ARRAYS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "sparse": lambda shape: torch.randn(shape).to_sparse(),
    "nested": nested,
    "meta": lambda shape: torch.empty(shape, device="meta"),
    "quantised": quantised,
    "conjugate": lambda shape: torch.randn(shape, dtype=torch.complex64).conj(),
}
WITHOUT_MEMORY = {"zeros_unwritten": zeros_unwritten, "freed": freed}
NEGATIVE: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "imag": negative,
    "view": lambda shape: torch._neg_view(torch.randn(shape)),
    "expanded": lambda shape: negative((*shape[:-1], 1)).expand(shape),
    "grad": lambda shape: torch._neg_view(torch.randn(shape, requires_grad=True)),
}
SAME_BITS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "expanded": lambda shape: torch.randn(shape[-1]).expand(shape),
    "grad": lambda shape: torch.randn(shape, requires_grad=True),
    "real": lambda shape: torch.randn(shape, dtype=torch.complex64).conj().real,
    "negated": lambda shape: negative(shape).resolve_neg(),
    "twice": lambda shape: torch._neg_view(negative(shape)),
}
WHOLE = (2, LAYERS, 2, BLOCK, HEADS, DIM)


def paged(tensor: Tensor) -> Paged:
    return Paged([tensor] * LAYERS, [0, 1])


@pytest.mark.parametrize("kind", [*NO_ARRAYS, *WITHOUT_MEMORY, *NEGATIVE])
@pytest.mark.parametrize("layout", ["bare", "paged"])
def test_what_does_not_lie_in_memory_as_its_values_is_no_source_and_no_destination(
    client: kvcluster.Client, kind: str, layout: str
) -> None:
    tensor = (NO_ARRAYS | WITHOUT_MEMORY | NEGATIVE)[kind](WHOLE if layout == "bare" else WHOLE[:1] + WHOLE[2:])
    memory: Any = tensor if layout == "bare" else paged(tensor)
    client.store(prompt(2), kv(2))
    assert client.flush()
    for move in (client.store, client.load):
        with pytest.raises(CallerError, match=r"tensor|torch"):
            move(prompt(2), memory)
    assert client.lookup(prompt(2)).blocks == 2


@pytest.mark.parametrize("kind", SAME_BITS)
def test_what_lies_in_memory_as_its_values_is_stored(client: kvcluster.Client, kind: str) -> None:
    tokens = prompt(2, seed=50 + list(SAME_BITS).index(kind))
    source = SAME_BITS[kind](WHOLE)
    assert client.store(tokens, source).blocks == 2 and client.flush()
    into = room(2)
    assert client.load(tokens, into) == 2 * BLOCK and same(into, source.detach().contiguous())


@pytest.mark.parametrize("kind", [*NEGATIVE, *SAME_BITS])
def test_a_sequence_takes_values(client: kvcluster.Client, kind: str) -> None:
    make = (NEGATIVE | SAME_BITS)[kind]
    with client.sequence() as one, client.sequence() as other:
        for layer in range(LAYERS):
            given = [make(TOKENS) for _ in "kv"]
            one.append(layer, *given)
            other.append(layer, *(plain(each) for each in given))
        for sequence in (one, other):
            sequence.advance(range(BLOCK))
        written = [make((1, HEADS, DIM)) for _ in "kv"]
        one.write(1, 2, *written)
        other.write(1, 2, *map(plain, written))
        query = make(QUERY)
        for layer in range(LAYERS):
            for mine, theirs in zip(one.read(layer, 0, BLOCK), other.read(layer, 0, BLOCK), strict=True):
                assert torch.equal(mine, theirs)
            assert torch.equal(one.attend(layer, query), other.attend(layer, plain(query)))
            batch = kvcluster.SequenceBatch([one])
            assert torch.equal(batch.attend(layer, query), other.attend(layer, plain(query)))


@pytest.mark.parametrize("kind", [*NO_ARRAYS, *WITHOUT_MEMORY])
def test_what_is_no_array_is_refused_by_sequences(client: kvcluster.Client, kind: str) -> None:
    make = (NO_ARRAYS | WITHOUT_MEMORY)[kind]
    with client.sequence() as sequence:
        with pytest.raises(CallerError):
            sequence.append(0, make(TOKENS), make(TOKENS))
        sequence_of(sequence)
        for attend in (
            lambda: sequence.write(0, 0, make(TOKENS), make(TOKENS)),
            lambda: sequence.attend(0, make(QUERY)),
        ):
            with pytest.raises(CallerError):
                attend()


def sequence_of(sequence: kvcluster.Sequence) -> None:
    for layer in range(LAYERS):
        sequence.append(layer, torch.randn(TOKENS), torch.randn(TOKENS))
    sequence.advance(range(BLOCK))


def plain(tensor: Tensor) -> Tensor:
    """Returns a copy whose memory has the values."""
    return torch.zeros(tensor.shape).copy_(tensor.detach().resolve_neg())
