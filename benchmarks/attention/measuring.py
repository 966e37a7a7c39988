"""Measures one layer of a decode step, and of a prefill, over contexts of several lengths, on `kvcluster.local()`.

Each is a whole call as its user makes it: the token's KV is appended, and it attends. They take turns, each after the
CPU caches were filled with other data. The floor is the time in which the raw KV is read once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import kvcluster
from benchmarks.attention import baselines
from benchmarks.attention.baselines import DTYPES
from benchmarks.attention.contexts import Context, ModelLayer, borrowed, filled, model
from benchmarks.rounds import interleaved, sweep_caches
from kvcluster.cli.figures import progress
from kvcluster.client import Client
from kvcluster.memory import native

FLOOR = "reading the raw KV"
CODECS = ("raw", "q8", "q4")


def measure(*, rounds: int, tokens: Sequence[int], name: str, threads: int, forks: int, prefill: int) -> dict[str, Any]:
    """Returns the figures: for each number of tokens a row for each way, with its median time, and the floor's by it;
    for the shortest of at least `prefill` tokens, prefill of so many."""
    torch.set_num_threads(1)
    of = model(name)
    nbytes = 4 * sum(tokens) * of.token_bytes + 2**28
    config = {"client": {"resident_bytes": 2 * nbytes}}
    with kvcluster.local(shards=1, ram_bytes=nbytes, config=config) as cluster:
        contexts = [_decode(cluster, of, count, rounds, threads, forks) for count in tokens]
        with cluster.client(of.spec) as client:
            long = next((count for count in tokens if count >= prefill), None)
            rows = _prefill(client, of, long, prefill, rounds) if long and of.planes == 2 else []
    return {
        "model": name,
        "kernels": native.name(),
        "rounds": rounds,
        "threads": threads,
        "forks": forks,
        "contexts": contexts,
        "prefill": {"context": long, "tokens": prefill, "rows": rows},
    }


def _decode(cluster: Any, of: ModelLayer, tokens: int, rounds: int, threads: int, forks: int) -> dict[str, Any]:
    progress(f"{tokens:,} tokens")
    nbytes, values = tokens * of.token_bytes, of.values(tokens)
    with cluster.client(of.spec) as client, cluster.client(of.spec) as other:
        contexts = {codec: filled(client, of, codec, values) for codec in CODECS}
        raw = contexts["raw"]
        if not raw.sequence.flush(deadline_ms=60_000):
            raise kvcluster.errors.KVClusterError("the context could not be stored: raise the memory of the shard")
        lent = borrowed(other, of, tokens)
        runs: dict[str, baselines.Step] = {FLOOR: baselines.read(nbytes)}
        runs |= {f"sequence, {codec}": context.decode for codec, context in contexts.items()}
        runs["sequence, borrowed"] = lent.decode
        runs[f"sequence, raw, {threads} threads"] = lambda: raw.decode(threads)
        runs[f"sequence, raw, {forks} forks"] = _forked(raw, forks)
        if of.planes == 2:
            runs |= {f"torch flash, {dtype}": baselines.flash(of, values, getattr(torch, dtype)) for dtype in DTYPES}
            runs["torch flash, pages gathered"] = baselines.gathered(of, values)
        runs |= _transformers(of, values)
        seconds = interleaved(runs, rounds, before=lambda _: sweep_caches())
    return {"tokens": tokens, "raw_bytes": nbytes, "rows": _rows(seconds, FLOOR, nbytes)}


def _forked(context: Context, forks: int) -> baselines.Step:
    of = context.model
    batch = kvcluster.SequenceBatch([context.sequence.fork() for _ in range(forks)])

    def step() -> None:
        batch.append(0, *of.values(forks))
        batch.attend(0, of.query(forks), latent_values=of.latent_values)
        batch.advance([1] * forks)

    return step


def _transformers(of: ModelLayer, values: list[torch.Tensor]) -> dict[str, baselines.Step]:
    """Returns nothing without transformers."""
    try:
        from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer
    except ImportError:
        return {}
    layers = {"transformers DynamicCache": DynamicLayer(), "transformers QuantizedCache, fp8": Fp8QuantizedLayer()}
    return {name: baselines.cached(of, values, layer) for name, layer in layers.items()}


def _prefill(client: Client, of: ModelLayer, context: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    progress(f"prefill of {tokens:,} tokens")
    values = of.values(context)
    query = of.query(tokens)
    runs: dict[str, baselines.Step] = {
        f"torch flash, {dtype}": baselines.flash_prefill(of, values, tokens, getattr(torch, dtype)) for dtype in DTYPES
    }
    with filled(client, of, "raw", values).sequence as sequence:
        runs["sequence, raw"] = lambda: sequence.attend(0, query)
        seconds = interleaved(runs, max(3, rounds // 3), before=lambda _: sweep_caches())
    return _rows(seconds, "torch flash, float32", 0)


def _rows(seconds: Mapping[str, Sequence[float]], beside: str, nbytes: int) -> list[dict[str, Any]]:
    """`of_floor`: the floor's time by the row's own, the median of the rounds."""
    return [
        {
            "way": way,
            "ms": statistics.median(took) * 1e3,
            "of_floor": statistics.median(least / own for least, own in zip(seconds[beside], took, strict=True)),
            "gb_per_s": nbytes / statistics.median(took) / 1e9,
        }
        for way, took in seconds.items()
    ]
