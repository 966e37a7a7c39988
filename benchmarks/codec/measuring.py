"""Measures speed and error of the codecs. Rates count raw bytes; memcpy of the same bytes takes turns, on one
thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.codec.coded import CodedPages, round_trip
from benchmarks.codec.synthetic import Attention, attention, output
from benchmarks.rounds import interleaved, medians, sweep_caches
from benchmarks.transfer.worker import warm_memory
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Plane
from kvcluster.memory import codec, native

LOSSY = (Codec.Q8, Codec.Q4)
_LAYERS, _HEADS, _TOKENS = 32, 8, 16
_BLOCK_TOKENS = (16, 32, 64)


def measure(*, rounds: int, dims: Sequence[int], moved_bytes: int, seeds: int, prefix_tokens: int) -> dict[str, Any]:
    """Returns all figures: speeds over `moved_bytes` per round, errors over `seeds` synthetic sequences, and logits
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
    page_bytes = _LAYERS * group.layer_bytes(block_tokens=_TOKENS, heads=_HEADS)
    nbytes = max(1, moved_bytes // page_bytes) * page_bytes
    source, into = warm_memory(nbytes), warm_memory(nbytes)
    torch.frombuffer(source, dtype=torch.bfloat16).normal_()  # speed does not depend on the content

    def copy() -> None:
        for at in range(0, nbytes, page_bytes):
            into[at : at + page_bytes] = source[at : at + page_bytes]

    runs: dict[tuple[str, str], Callable[[], None]] = {("memcpy", "copy"): copy}
    for each in LOSSY:
        coded = CodedPages(each, group, _TOKENS, source)
        runs[each.name.lower(), "encode"] = coded.encode
        runs[each.name.lower(), "decode"] = partial(coded.decode, into)
    seconds = medians(interleaved(runs, rounds, before=lambda _: sweep_caches()))
    floor = seconds["memcpy", "copy"]
    return [
        {"dim": dim, "codec": name, "operation": operation, "gb_per_s": nbytes / took / 1e9, "of_memcpy": floor / took}
        for (name, operation), took in seconds.items()
    ]


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
            sizes = {"block_tokens": tokens, "heads": _HEADS}
            ratio = group.layer_bytes(**sizes) / layer_bytes(each, group, **sizes)
            worst = _worst(dim, seeds, partial(_through, each, tokens))
            rows.append({"dim": dim, "codec": each.name.lower(), "block_tokens": tokens, "ratio": ratio, **worst})
    try:
        from benchmarks.codec import quanto
    except ModuleNotFoundError:
        return rows
    worst = _worst(dim, seeds, quanto.through)
    return [*rows, {"dim": dim, "codec": "quanto", "block_tokens": None, "ratio": quanto.RATIO, **worst}]


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
    k, v = round_trip(which, _group(given.k.shape[-1]), _planes(given, tokens)).unbind(1)
    return Attention(k.reshape(given.k.shape), v.reshape(given.v.shape), given.q)


def _error(came: torch.Tensor, meant: torch.Tensor) -> float:
    return float((came.float() - meant.float()).norm() / meant.float().norm())


# ------------------------------------------------------------------------------------------------------ logits


def _logits(prefix_tokens: int) -> list[dict[str, Any]]:
    try:
        from benchmarks.codec import logits
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        return []
    return logits.measure(prefix_tokens=prefix_tokens)
