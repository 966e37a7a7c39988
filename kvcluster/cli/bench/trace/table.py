"""The figures of `kvcluster bench trace` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lines(figures: Mapping[str, Any]) -> list[str]:
    """What was replayed, and a row for each setting of the tiers."""
    distinct, page_bytes = figures["distinct_blocks"], figures["page_bytes"]
    out = [
        f"\n{figures['requests']:,} requests ask for {figures['asked_blocks']:,} blocks, {distinct:,} distinct; "
        f"an unbounded cache finds {figures['reused_share']:.1%}",
        f"each counts as {figures['block_tokens']} tokens of Llama 3 8B, {page_bytes:,} bytes raw; "
        f"{figures['shards']} shard(s); eviction policy {figures['eviction_policy']}",
        f"device tier {figures['device_bytes'] / 2**30:.2f} GiB, {figures['capacity']:.1%} of all blocks raw; "
        f"host tier {figures['host_bytes'] / 2**30:.2f} GiB, {figures['host']:.1%}",
        "",
        "saved: of the computing that all prompts take, by the estimate that policies see (core/block_facts.py)",
        "blocks and used bytes: means over the second half of the requests; at the end in brackets",
        f"{'tiers':<26} {'hits':>6} {'saved':>6} {'of host':>8} {'device blocks':>17} {'host blocks':>17} {'used':>6} "
        f"{'of raw':>6} {'cached':>9}",
    ]
    for row in figures["rows"]:
        from_host = row["hits_from_host"] / row["hit_blocks"] if row["hit_blocks"] else 0.0
        ratio = f"{row['host_ratio']:.2f}" if row["codec"] and row["host_ratio"] is not None else "-"
        used = f"{row['host_used']:.1%}" if row["codec"] else "-"
        below = _blocks(row, "host") if row["codec"] else "-"
        out.append(
            f"{row['name']:<26} {row['hit_rate']:>6.1%} {row['saved_share']:>6.1%} {from_host:>8.1%} "
            f"{_blocks(row, 'device'):>17} {below:>17} {used:>6} {ratio:>6} {row['cached_blocks']:>9,.0f}"
        )
    return out


def _blocks(row: Mapping[str, Any], tier: str) -> str:
    return f"{row[f'{tier}_blocks']:,.0f} ({row[f'{tier}_blocks_end']:,})"
