"""Prints the demo: progress while it works, then one screen of figures. Everything fits 80 columns."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcluster.cli.text_page import share_text
from kvcluster.config import size_text
from kvcluster.release import docs_page

BAR_COLUMNS = 28


class Screen:
    """A screen within a `with` block; a silent one shows nothing."""

    def __init__(self, *, silent: bool) -> None:
        self._console = Console(file=sys.stdout, quiet=silent, highlight=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<46}"),
            BarColumn(16),
            TimeElapsedColumn(),
            console=self._console,
            disable=silent,
        )

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Shows a line with a bar for a step. Yields a function to call with the work done and the total."""
        task = self._progress.add_task(what, total=None)
        yield lambda done, total: self._progress.update(task, completed=done, total=total)
        self._progress.update(task, completed=1, total=1)

    def show(self, figures: dict[str, Any]) -> None:
        """Prints all acts, from the figures that `--json` prints."""
        self._progress.stop()
        acts = (*_sharing(figures), *_safety(figures["other_weights"]), *_tiers(figures["tiers"]))
        for line in (*acts, *_far(figures["far"]), *_gpu(figures["gpu"]), *_end(figures)):
            self._console.print(line)


_BESIDE = {"no_cache": "computes", "first_replica": "computes, then stores", "second_replica": "loads"}


def _sharing(figures: dict[str, Any]) -> Iterator[str]:
    seconds = figures["first_token_seconds"]
    longest = max(seconds.values())
    yield "\n[bold]Act 1: sharing.[/] Time to the first token of a question about the same document"
    for name, value in seconds.items():
        bar = "█" * max(1, round(BAR_COLUMNS * value / longest))
        yield f"  {name.replace('_', ' '):<15} [cyan]{bar:<{BAR_COLUMNS}}[/] {value:6.2f} s  {_BESIDE[name]}"
    yield ""
    yield f"  tokens reused  {figures['tokens_reused']:,} of the second replica's {figures['tokens_asked']:,}"
    yield f"  hit rate       {share_text(figures['hit_rate'])} of all blocks asked for, with the first replica's misses"
    yield f"  bytes moved    {size_text(figures['stored_bytes'])} stored, {size_text(figures['loaded_bytes'])} loaded"
    yield "\n  digest of the generated ids       no cache      with cache"
    for answer in figures["answers"]:
        same = "[green]identical[/]" if answer["identical"] else "[red]DIFFERENT[/]"
        what = f"question {answer['question']}, {answer['replica']}"
        yield f"    {what:<31} {answer['without_cache']}  {answer['with_cache']}  {same}"
    control = figures["control"]
    differs = "[green]differs, as it must[/]" if control["differs"] else "[red]THE SAME[/]"
    what = "the same, a loaded block zeroed"
    yield f"    {what:<31} {control['without_cache']}  {control['with_cache']}  {differs}"
    yield (
        f"  a logit is at most {figures['logit_difference']:.1e} off that of a full prefill "
        f"(they go up to {figures['logit_scale']:.1f})"
    )


def _safety(other: dict[str, Any]) -> Iterator[str]:
    yield "\n[bold]Act 2: safety.[/] One weight of the second replica changes by 0.001"
    yield f"  weights        {other['before'][:19]} is now {other['after'][:19]}"
    yield f"  tokens reused  {other['tokens_reused']:,}"
    yield f"  explain        {escape(other['explanation'])}"
    if not other["refused"]:
        yield "  [red]KV of other weights was taken, or explain did not name them[/]"


def _tiers(tiers: dict[str, Any]) -> Iterator[str]:
    times = tiers["working_set_bytes"] / tiers["ram_bytes"]
    yield f"\n[bold]Act 3: tiers.[/] {tiers['documents']} documents, {times:.1f} times what the RAM tier holds"
    yield f"  KV             {size_text(tiers['working_set_bytes'])}; RAM tier {size_text(tiers['ram_bytes'])}"
    yield (
        f"  went down      {tiers['demoted_pages']:,} pages as {tiers['host_codec']}, into "
        f"{size_text(tiers['host_used_bytes'])} of host memory"
    )
    blocks = ", ".join(f"{count:,} from {tier}" for tier, count in sorted(tiers["blocks"].items()))
    yield f"  read again     {tiers['tokens_reused']:,} of {tiers['tokens_asked']:,} tokens reused: blocks {blocks}"
    yield f"  next token     the same for {tiers['same_next_token']} of {tiers['documents']} documents"
    yield (
        f"  logits         at most {tiers['logit_difference']:.1e} off those of exact KV "
        f"(they go up to {tiers['logit_scale']:.1f})"
    )


def _far(far: dict[str, Any]) -> Iterator[str]:
    given = next((far[name] for name in ("streamed", "shipped") if "digest" in far[name]), None)
    if given is None:
        yield "\n[bold]Act 4: long contexts.[/]"
    else:
        times = given["context_bytes"] / given["resident_bytes"]
        yield f"\n[bold]Act 4: long contexts.[/] {times:.0f} times the memory that the replica has for KV"
        yield f"  KV             {size_text(given['context_bytes'])}; resident {size_text(given['resident_bytes'])}"
    yield from _way(far, "streamed", "loaded_bytes", "of KV loaded")
    yield from _way(far, "shipped", "shipped_bytes", "of queries and results")
    yield from _way(far, "cut_off", "shipped_bytes", "of queries, the rest computed again")


def _way(far: dict[str, Any], name: str, moved: str, what: str) -> Iterator[str]:
    """Yields the line of a way of the fourth act; several for an error, which only a shard that is cut off excuses."""
    way, title = far[name], name if name != "cut_off" else "a shard killed"
    if "digest" in way:
        same = "[green]the same ids[/]" if way["digest"] == far["right"] else "[red]OTHER IDS[/]"
        yield f"  {title:<14} {size_text(way[moved])} {what}; {same}"
        return
    first, *rest = textwrap.wrap(way["error"], 62)
    for line in (f"  {title:<14} {escape(first)}", *(f"{'':17}{escape(each)}" for each in rest)):
        yield line if name == "cut_off" else f"[red]{line}[/]"


def _gpu(gpu: dict[str, Any]) -> Iterator[str]:
    yield "\n[bold]Act 5: a pool on a GPU.[/] The engine's KV lies on the same GPU as a shard's pool"
    card = gpu["device"] if gpu["is_card"] else f"{gpu['device']}, since there is none here: no figure of a GPU"
    same = "[green]the bytes that were stored[/]" if gpu["identical"] else "[red]OTHER BYTES[/]"
    yield f"  GPU            {escape(card)}"
    yield f"  read in place  {gpu['pages']} pages, verified there; {same}"
    yield f"  copies in RAM  {gpu['copies']}"


def _end(figures: dict[str, Any]) -> Iterator[str]:
    yield f"\n{figures['seconds']:.0f} s in all. Prefill on a CPU is slow, so the ratio of these bars flatters: a"
    yield "GPU computes faster, and loads must beat that (`kvcluster bench paths`)."
    yield "Next: `kvcluster up` keeps a cluster running, README.md connects your engine,"
    yield "and this page says how it works:"
    yield docs_page("architecture.md")
