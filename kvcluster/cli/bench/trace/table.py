"""The figures of `kvcluster bench trace` as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcluster.cli.bench.report import table
from kvcluster.config import size_text


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
    yield "\nsaved: of the computing that all prompts take, by the estimate that policies see (core/block_facts.py)"
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
