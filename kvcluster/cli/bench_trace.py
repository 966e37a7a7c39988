"""`kvcluster bench trace`: a published trace of requests, replayed through the real coordinator and shards."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from kvcluster.cli.command_parser import positive
from kvcluster.cli.figures import progress, setting, show, table
from kvcluster.config import size_text
from kvcluster.eviction import POLICIES
from kvcluster.replay import trace_replay


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = kinds.add_parser(
        "trace",
        help="replay a request trace for hit rates by tier and codec",
        description="Replays a trace of requests through the real core without moving pages, and prints the hit rate "
        "by tier and codec. Figures are counts, the same on every machine. Needs only the base install.",
        examples=["kvcluster bench trace conversation_trace.jsonl --capacity 0.2"],
    )
    option = parser.add_argument
    option("file", metavar="FILE", help="trace in Mooncake's format: JSON lines of timestamp and hash_ids")
    tier = "bytes of the {} tier of all shards, as a share of the bytes of all distinct blocks (default {})"
    option("--capacity", type=_share, default=0.10, metavar="SHARE", help=tier.format("ram", 0.1))
    option("--host", type=_share, default=0.05, metavar="SHARE", help=tier.format("host", 0.05))
    option("--shards", type=positive, default=1, metavar="N", help="number of shards (default 1)")
    option("--requests", type=positive, metavar="N", help="replay only the first N requests (default: all)")
    option("--as-tokens", type=positive, default=16, metavar="N", help="tokens per block of the trace (default 16)")
    option(
        "--eviction-policy",
        default="lru",
        metavar="NAME",
        help=f"which blocks go first: {' or '.join(POLICIES)} (default lru)",
    )
    option("--json", action="store_true", help="print the figures as one JSON object")
    parser.set_defaults(run=_run)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 100:
        raise argparse.ArgumentTypeError("must be a share of the bytes of all blocks, above 0 and up to 100, e.g. 0.1")
    return share


def _run(options: argparse.Namespace) -> int:
    figures = trace_replay.measure(
        trace_replay.read(options.file, most=options.requests),
        capacity=options.capacity,
        host=options.host,
        shards=options.shards,
        block_tokens=options.as_tokens,
        eviction_policy=options.eviction_policy,
        progress=progress,
    )
    show({"setting": setting(), **figures}, lines, as_json=options.json)
    return 0


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields what was replayed, and a row for each setting of the tiers."""
    yield (
        f"\n{figures['requests']:,} requests ask for {figures['asked_blocks']:,} blocks, "
        f"{figures['distinct_blocks']:,} distinct; an unbounded cache finds {figures['reused_share']:.1%}"
    )
    yield (
        f"each counts as {figures['block_tokens']} tokens of Llama 3 8B, {figures['page_bytes']:,} bytes raw; "
        f"{figures['shards']} shard(s); eviction policy {figures['eviction_policy']}"
    )
    yield (
        f"RAM tier {size_text(figures['ram_bytes'])}, {figures['capacity']:.1%} of all blocks raw; "
        f"host tier {size_text(figures['host_bytes'])}, {figures['host']:.1%}"
    )
    yield "\nsaved: of the computing that all prompts take, by the estimate that policies see"
    yield "blocks and used bytes: means over the second half of the requests; at the end in brackets"
    columns = {
        "tiers": "{name}",
        "hits": "{hit_rate:.1%}",
        "saved": "{saved_share:.1%}",
        "of host": "{of_host:.1%}",
        "RAM blocks": "{ram_blocks:,.0f} ({ram_blocks_end:,})",
        "host blocks": "{host_blocks:,.0f} ({host_blocks_end:,})",
        "used": "{host_used:.1%}",
        "of raw": "{host_ratio:.2f}",
        "cached": "{cached_blocks:,.0f}",
    }
    of_host = [row["hits_from_host"] / row["hit_blocks"] if row["hit_blocks"] else 0.0 for row in figures["rows"]]
    yield from table([row | {"of_host": of} for row, of in zip(figures["rows"], of_host, strict=True)], columns)
