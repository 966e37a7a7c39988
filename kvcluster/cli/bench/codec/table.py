"""The figures of `kvcluster bench codec` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def lines(figures: Mapping[str, Any]) -> list[str]:
    """What was measured, and of what."""
    out = [f"encoded and decoded by {figures['implementation']} ({figures['kernels']}), one thread"]
    out += ["", f"speed: GB/s of raw bfloat16 bytes, medians of {figures['rounds']} turns, cold caches"]
    out.append(" dim  codec   operation   GB/s  of memcpy")
    for row in figures["speed"]:
        name, operation = row["codec"], row["operation"]
        out.append(f"{row['dim']:>4}  {name:<6}  {operation:<9} {row['gb_per_s']:>6.2f} {row['of_memcpy']:>10.2f}")
    by = f"synthetic keys with outliers, the worst of {figures['seeds']} seed(s)"
    out += ["", f"error: norm of the difference by that of the exact; {by}"]
    out.append(" dim  codec  block tokens  ratio  keys    values  attention output")
    for row in figures["errors"]:
        out.append(
            f"{row['dim']:>4}  {row['codec']:<6} {row['block_tokens'] or '-':>12}  {row['ratio']:>5.2f}"
            f"  {row['k']:<6.4f}  {row['v']:<6.4f}  {row['output']:.4f}"
        )
    return [*out, "", *_logits(figures["logits"])]


def coding_text(row: Mapping[str, Any]) -> str:
    """How the KV was encoded before the logits of this row were taken."""
    return f"{row['codec']}, first block raw" if row["raw_blocks"] else str(row["codec"])


def _logits(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["logits: left out, transformers is missing or too old: pip install 'kvcluster[transformers]'"]
    of = f"{rows[0]['tokens']} positions that follow {rows[0]['prefix_tokens']} tokens of encoded KV"
    out = [f"logits of the demo's model, whose weights are random, at {of}"]
    out.append(" codec                 error   KL, nats  same most likely token")
    for row in rows:
        out.append(f" {coding_text(row):<20}  {row['error']:.4f}  {row['kl_nats']:<8.4f}  {row['same_token']:.1%}")
    return out
