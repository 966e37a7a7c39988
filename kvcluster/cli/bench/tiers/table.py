"""Formats the figures as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Loads, the stages of a load, and stores."""
    out = [
        f"loads of {figures['blocks']} pages of {figures['page_bytes'] >> 20} MiB, medians of {figures['rounds']} turns"
    ]
    out.append("path  codec  tokens/s   of raw")
    for row in figures["loads"]:
        out.append(f"{row['path']:<5} {row['codec']:<5} {row['tokens_per_s']:>9,.0f}   {row['of_raw']:.2f}")
    out += [
        "",
        "what the reader does, alone on one thread, ms for a thousand tokens",
        "codec  KiB a page  verify  decode",
    ]
    for row in figures["stages"]:
        out.append(
            f"{row['codec']:<5}  {row['page_bytes'] >> 10:>10,}  {row['verify_ms']:>6.2f}  {row['decode_ms']:>6.2f}"
        )
    stores = figures["stores"]
    out += ["", "stores of one page, ms     stores    p50    p99"]
    for name, label in (("idle", "while nothing moves"), ("demoting", "while pages are encoded")):
        row = stores[name]
        out.append(f"{label:<24} {row['stores']:>8}  {row['p50_ms']:>5.2f}  {row['p99_ms']:>5.2f}")
    out.append(f"{'of idle':<24} {'':>8}  {stores['p50_of_idle']:>5.2f}  {stores['p99_of_idle']:>5.2f}")
    restart = figures["restart"]
    out += [
        "",
        f"a shard with a disk tier is killed: the prompt is loaded again {restart['back_s']:.1f} s later, of which the "
        f"load took {restart['first_load_s'] * 1e3:.0f} ms",
        "loads from                    tokens/s   of raw",
    ]
    for row in restart["loads"]:
        out.append(f"{row['from']:<28} {row['tokens_per_s']:>9,.0f}   {row['of_raw']:.2f}")
    return out
