"""`kvcluster bench paths`: loads, stores and lookups of a running cluster by every path; and `bench trace`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcluster.cli import bench_trace
from kvcluster.cli.breakeven import config_of
from kvcluster.cli.command_parser import positive
from kvcluster.cli.coordinator_args import SelectedCluster, selected
from kvcluster.cli.figures import setting, show, table
from kvcluster.cli.measured_paths import MeasuredPath, add_measuring_args, block_count, measured_paths, spec_of
from kvcluster.config import size_text
from kvcluster.core.breakeven import Breakeven
from kvcluster.core.groups import Group
from kvcluster.core.model_config import read_kv
from kvcluster.core.spec import KVSpec

_DESCRIPTION = """
Measures loads, stores and lookups of a running cluster from this machine, by each path to its shards: whole calls into
paged caches, as an engine makes them, beside plain copies of the same blocks in memory. Random blocks are stored under
a model name of their own, and purged; they may evict cold blocks of others meanwhile. It needs torch, and no engine.

exit status: 0; 1 if no path could be measured.
"""

_LLAMA = 32, 8, 128
"""Layers, KV heads and channels of a head: Llama 3 8B in bfloat16, 2 MiB a block of 16 tokens."""


def add(commands: Any) -> None:
    """Adds the commands."""
    bench = commands.add_parser(
        "bench",
        help="measure the paths to a running cluster, or replay a trace",
        description="Measures what a running cluster does from here, or what one would find of a trace of requests. "
        "What this project claims is measured by the benchmarks of its repository.",
        listed={"kinds": ("paths", "trace")},
        examples=["kvcluster bench paths", "kvcluster bench trace conversation_trace.jsonl"],
    )
    kinds = bench.add_subparsers(dest="kind", metavar="KIND")
    paths = kinds.add_parser(
        "paths",
        help="measure loads, stores and lookups by every path",
        description=_DESCRIPTION,
        examples=["kvcluster bench paths", "kvcluster bench paths --model ./llama/config.json --address 10.0.0.5:7070"],
    )
    paths.add_argument(
        "--model",
        metavar="CONFIG",
        help="the model's Hugging Face config.json, or the folder it lies in, for the sizes of blocks (default: those "
        "of Llama 3 8B)",
    )
    paths.add_argument("--block-tokens", type=positive, default=16, metavar="N", help="tokens per block (default 16)")
    paths.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens of the largest call (default 1,024, or fewer if they exceed 256 MiB)",
    )
    add_measuring_args(paths)
    paths.set_defaults(run=_run)
    bench_trace.add(kinds)


def _run(options: argparse.Namespace) -> int:
    spec = spec_of(_groups(options.model), options.block_tokens)
    blocks = block_count(spec, options.tokens)
    measured = measure(selected(options), spec, blocks, options.rounds)
    show({"setting": setting(), **measured}, lines, as_json=options.json)
    return 0 if any(path["why"] is None for path in measured["paths"]) else 1


def _groups(model: str | None) -> tuple[Group, ...]:
    if model is not None:
        return read_kv(config_of(Path(model)), None).groups
    layers, heads, dim = _LLAMA
    return KVSpec.uniform(
        model="m", weights="w", num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_tokens=16
    ).groups


# ----------------------------------------------------------------------------------------- measurement


def measure(cluster: SelectedCluster, spec: KVSpec, blocks: int, rounds: int) -> dict[str, Any]:
    """Returns the figures of every path, or why it has none. Raises KVClusterError if the cluster cannot be used."""
    with measured_paths(cluster, spec, blocks) as paths:
        for _ in range(rounds):
            for path in paths:
                path.take_turn(("copy", "load", "store", "lookup"))
    lookups = [path.median_ns("lookup", path.large) for path in paths if path.why is None]
    return {
        "block_bytes": spec.block_bytes,
        "lookup_ms": statistics.median(lookups) / 1e6 if lookups else None,
        "paths": [_figures(path, spec) for path in paths],
    }


def _figures(path: MeasuredPath, spec: KVSpec) -> dict[str, Any]:
    if path.why is not None:
        return {"path": path.name, "why": path.why}
    moved = Breakeven(spec, spec.whole_parts(), 1)
    loaded, stored = moved.nbytes(path.large * spec.block_tokens), path.large * spec.block_bytes
    figures: dict[str, Any] = {"path": path.name, "why": None, "measured_bytes": stored}
    for call, nbytes in (("load", loaded), ("store", stored)):
        large_ns = path.median_ns(call, path.large)
        figures |= {
            f"{call}_bytes_per_s": nbytes * 1e9 / large_ns,
            f"{call}_of_copy": path.median_ns("copy", path.large) / large_ns,
            f"{call}_block_ms": path.median_ns(call, 1) / 1e6,
        }
    return figures


# ----------------------------------------------------------------------------------------------- output


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the figures as lines of text."""
    lookup_ms = figures["lookup_ms"]
    looked_up = "" if lookup_ms is None else f"; a lookup of all of them takes {lookup_ms:.2f} ms"
    yield f"blocks of {size_text(figures['block_bytes'])}{looked_up}\n"
    names = [f"{call}_{what}" for call in ("load", "store") for what in ("bytes_per_s", "of_copy", "block_ms")]
    nothing = dict.fromkeys((*names, "load_gb_per_s", "store_gb_per_s", "measured"))
    rows = [
        {**nothing, **path}
        if path["why"] is not None
        else {
            **path,
            "measured": size_text(path["measured_bytes"]),
            "load_gb_per_s": path["load_bytes_per_s"] / 1e9,
            "store_gb_per_s": path["store_bytes_per_s"] / 1e9,
        }
        for path in figures["paths"]
    ]
    columns = {
        "path": "{path}",
        "calls of": "{measured}",
        "load GB/s": "{load_gb_per_s:.3f}",
        "of a copy": "{load_of_copy:.2f}",
        "one block ms": "{load_block_ms:.2f}",
        "store GB/s": "{store_gb_per_s:.3f}",
        "of a copy ": "{store_of_copy:.2f}",
        "one block ms ": "{store_block_ms:.2f}",
        "why not": "{why}",
    }
    if all(row["why"] is None for row in rows):
        del columns["why not"]
    yield from table(rows, columns)
