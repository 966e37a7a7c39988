"""Tables for people, drawn with rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_status(status: dict[str, Any], address: str) -> None:
    """One line for the cluster, one row a shard."""
    # Wide enough for every column: a terminal that is narrower breaks lines, and what reads a pipe does not care.
    console = Console(width=max(Console().width, 110), highlight=False)
    rate = status["hit_rate"]
    counters = status["counters"]
    console.print(
        f"[bold]{address}[/bold]  {status['state']}, up {_duration(status['uptime_ns'])}; "
        f"{status['blocks']:,} blocks in {status['namespaces']} namespace(s), {status['tickets']} ticket(s)"
    )
    console.print(
        f"hit rate {'-' if rate is None else f'{rate:.0%}'} of {counters['asked_blocks']:,} blocks asked for; "
        f"{counters['write_blocks']:,} written, {counters['duplicate_blocks']:,} were there already"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    numbers = ("used", "of", "pages", "leases", "evicted")
    for column in ("shard", "state", "tier", "used", "of", "", "pages", "leases", "evicted", "address"):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for shard in status["shards"]:
        capacity, used = shard["capacity_bytes"], shard["capacity_bytes"] - shard["free_bytes"]
        table.add_row(
            shard["shard"],
            shard["state"],
            "device",
            size_text(used),
            size_text(capacity),
            _bar(used / capacity if capacity else 0.0),
            f"{shard['pages']:,}",
            f"{shard['leases']:,}",
            f"{shard['counters'].get('evicted', 0):,}",
            shard["address"],
        )
    console.print(table)


def size_text(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _bar(share: float, width: int = 10) -> str:
    filled = round(share * width)
    return "█" * filled + "·" * (width - filled)


def _duration(ns: int) -> str:
    seconds = ns // 1_000_000_000
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7_200 else f"{seconds / 3600:.1f} h"
