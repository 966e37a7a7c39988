"""Measures speed and error of the codecs. Rates count raw bytes; memcpy of the same bytes takes turns, on one
thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvcluster.cli.bench.codec import quanto
from kvcluster.cli.bench.codec.coded import restored
from kvcluster.cli.bench.codec.synthetic import Attention, attention, output
from kvcluster.cli.bench.transfer.party import warm_memory
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.spec import Group, Plane
from kvcluster.pages import codec, native

LOSSY = (Codec.Q8, Codec.Q4)
_LAYERS, _HEADS, _TOKENS = 32, 8, 16
_BLOCK_TOKENS = (16, 32, 64)
_SPOILED_BYTES = 256 * 2**20
"""Bytes read before each turn, so that no measured bytes are in a CPU cache."""


def measure(*, rounds: int, dims: Sequence[int], moved_bytes: int, seeds: int, prefix_tokens: int) -> dict[str, Any]:
    """Returns all figures: speeds over `moved_bytes` per turn, errors over `seeds` synthetic sequences, and logits
    after a prefix of `prefix_tokens`.

    There are no logits if transformers is missing, or older than its engine supports.
    """
    torch.set_num_threads(1)
    return {
        "implementation": codec.implementation(),
        "kernels": native.name(),
        "rounds": rounds,
        "seeds": seeds,
        "speed": [row for dim in dims for row in _speed(dim, rounds, moved_bytes)],
        "errors": [row for dim in dims for row in _errors(dim, seeds)],
        "logits": _logits(prefix_tokens),
    }


# ------------------------------------------------------------------------------------------------------ speed


def _speed(dim: int, rounds: int, moved_bytes: int) -> list[dict[str, Any]]:
    group = _group(dim)
    raw_layer = group.layer_bytes(block_tokens=_TOKENS, heads=_HEADS)
    layers = max(1, moved_bytes // raw_layer // _LAYERS) * _LAYERS
    source, into = warm_memory(layers * raw_layer), warm_memory(layers * raw_layer)
    spoiler = torch.zeros(_SPOILED_BYTES // 4)
    _fill(source, dim)

    def page(memory: memoryview, at: int, layer: int = raw_layer) -> memoryview:
        return memory[at * layer : (at + _LAYERS) * layer]

    def copy(at: int) -> None:
        page(into, at)[:] = page(source, at)

    def coding(which: Codec) -> dict[str, Callable[[int], None]]:
        coder = codec.coder(which, group, block_tokens=_TOKENS, heads=_HEADS)
        coded_layer = layer_bytes(which, group, block_tokens=_TOKENS, heads=_HEADS)
        coded = warm_memory(layers * coded_layer)

        def encode(at: int) -> None:
            assert coder.encode(page(source, at), page(coded, at, coded_layer), _LAYERS)

        def decode(at: int) -> None:
            coder.decode(page(coded, at, coded_layer), page(into, at), _LAYERS)

        return {"encode": encode, "decode": decode}

    runs: dict[tuple[str, str], Callable[[int], None]] = {("memcpy", "copy"): copy}
    for each in LOSSY:
        runs |= {(each.name.lower(), operation): run for operation, run in coding(each).items()}
    times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):  # the first warms up, and encodes what is decoded
        for name, run in runs.items():
            spoiler.sum()
            began = time.perf_counter()
            for at in range(0, layers, _LAYERS):
                run(at)
            if turn:
                times[name].append(time.perf_counter() - began)
    rates = {name: layers * raw_layer / statistics.median(took) / 1e9 for name, took in times.items()}
    floor = rates["memcpy", "copy"]
    return [
        {"dim": dim, "codec": name, "operation": operation, "gb_per_s": rate, "of_memcpy": rate / floor}
        for (name, operation), rate in rates.items()
    ]


def _fill(source: memoryview, dim: int) -> None:
    """Fills the memory with keys and values, plane by plane."""
    given = attention(0, heads=_HEADS, dim=dim)
    layers = _planes(given, _TOKENS).view(torch.uint8).flatten()
    target = torch.frombuffer(source, dtype=torch.uint8)
    for at in range(0, len(target), len(layers)):
        piece = target[at : at + len(layers)]
        piece.copy_(layers[: len(piece)])


def _planes(given: Attention, tokens: int) -> torch.Tensor:
    """bfloat16 `[blocks, planes, tokens, heads, dim]`."""
    shape = (-1, tokens, *given.k.shape[1:])
    return torch.stack([given.k.view(shape), given.v.view(shape)], dim=1)


def _group(dim: int) -> Group:
    return Group(tuple(range(_LAYERS)), (Plane("k", _HEADS, dim, "bfloat16"), Plane("v", _HEADS, dim, "bfloat16")))


# ------------------------------------------------------------------------------------------------------ errors


def _errors(dim: int, seeds: int) -> list[dict[str, Any]]:
    """Returns for each codec and block size the worst error over the seeds: the norm of the difference divided by the
    norm of the exact values."""
    group = _group(dim)
    rows = []
    for each in LOSSY:
        for tokens in _BLOCK_TOKENS:
            raw = group.layer_bytes(block_tokens=tokens, heads=_HEADS)
            ratio = raw / layer_bytes(each, group, block_tokens=tokens, heads=_HEADS)
            worst = _worst(dim, seeds, partial(_through, each, tokens))
            rows.append({"dim": dim, "codec": each.name.lower(), "block_tokens": tokens, "ratio": ratio, **worst})
    if quanto.installed():
        worst = _worst(dim, seeds, quanto.through)
        rows.append({"dim": dim, "codec": "quanto", "block_tokens": None, "ratio": quanto.RATIO, **worst})
    return rows


def _worst(dim: int, seeds: int, through: Callable[[Attention], Attention]) -> dict[str, float]:
    worst = dict.fromkeys(("k", "v", "output"), 0.0)
    for seed in range(seeds):
        exact = attention(seed, dim=dim)
        lossy = through(exact)
        pairs = {"k": (lossy.k, exact.k), "v": (lossy.v, exact.v), "output": (output(lossy), output(exact))}
        for name, (came, meant) in pairs.items():
            worst[name] = max(worst[name], _error(came, meant))
    return worst


def _through(which: Codec, tokens: int, given: Attention) -> Attention:
    """Returns the attention inputs after encoding and decoding K and V."""
    k, v = restored(which, _group(given.k.shape[-1]), _planes(given, tokens)).unbind(1)
    return Attention(k.reshape(given.k.shape), v.reshape(given.v.shape), given.q)


def _error(came: torch.Tensor, meant: torch.Tensor) -> float:
    return float((came.float() - meant.float()).norm() / meant.float().norm())


# ------------------------------------------------------------------------------------------------------ logits


def _logits(prefix_tokens: int) -> list[dict[str, Any]]:
    try:
        from kvcluster.cli.bench.codec import logits
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        return []
    return logits.measure(prefix_tokens=prefix_tokens)
