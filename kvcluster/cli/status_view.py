"""Prints the status and the engines as tables, with rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_APART = 5
"""Number of lines about namespaces that cannot share; `--json` has them all."""

_ENGINES_SHOWN = 5
"""Number of engines that are named; `kvcluster weights` shows them all."""

_WEIGHTS_SHOWN = 24
"""Characters of a fingerprint: enough to tell two apart."""

_COUNTERS = ("evicted", "pulled", "corrupt")


def print_status(status: dict[str, Any], address: str) -> None:
    """Prints the totals and warnings of the cluster, and a table with a row per tier of each shard."""
    # Wide enough for every column: a narrower terminal breaks lines, and a reader of a pipe does not care.
    console = Console(width=max(Console().width, 130), highlight=False)
    _print_totals(console, status, address)
    _print_warnings(console, status)
    _print_processes(console, status)
    console.print(_shard_table(status["shards"], whole=not status["tenant"]))
    engines = status.get("engines", ())
    if engines:
        names = [f"{one['name']} ({one['model']})" for one in engines[:_ENGINES_SHOWN]]
        more = f" and {len(engines) - _ENGINES_SHOWN} more" if len(engines) > _ENGINES_SHOWN else ""
        console.print(f"{len(engines)} engine(s): {escape(', '.join(names))}{more}", soft_wrap=True)


def _sequences(status: dict[str, Any]) -> str:
    """Formats the open sequences and private blocks; "" if there are none."""
    if not status["sequences"] and not status["private_blocks"]:
        return ""
    return (
        f"; {status['sequences']:,} open sequence(s) of {status['claimed_blocks']:,} blocks, "
        f"{status['private_blocks']:,} private blocks"
    )


def _print_totals(console: Console, status: dict[str, Any], address: str) -> None:
    rate = status["hit_rate"]
    counters, totals = status["counters"], status["totals"]
    console.print(
        f"[bold]{address}[/bold]  {status['state']}, up {_duration(status['uptime_ns'])}; "
        f"{status['blocks']:,} blocks in {status['namespaces']} namespace(s), {status['tickets']} ticket(s)"
        f"{_sequences(status)}"
    )
    if status["tenant"]:
        console.print(
            f"figures of tenant {escape(status['tenant'])} alone; an operator's token shows the whole cluster"
        )
    console.print(
        f"hit rate {'-' if rate is None else f'{rate:.0%}'} of {counters['asked_blocks']:,} blocks asked for; "
        f"{counters['write_blocks']:,} written, {counters['duplicate_blocks']:,} were already cached"
    )
    if status["policy"].get("cache") == "off":
        console.print("[red]off[/red]: nothing is loaded or stored; `kvcluster on` turns it on again")
    if status["tenant"]:
        return
    console.print(
        f"{totals.get('verified', 0):,} pages re-verified, {totals.get('suspected', 0):,} after reader checksum "
        f"mismatches; {totals.get('corrupt', 0):,} were corrupt; {totals.get('pulled', 0):,} copied between shards"
    )
    if any(shard["below"] for shard in status["shards"]):
        policy = ", ".join(f"{name}={value}" for name, value in status["policy"].items() if name != "cache")
        console.print(
            f"{totals.get('demoted', 0):,} pages were demoted and {totals.get('promoted', 0):,} promoted, "
            f"{totals.get('staged', 0):,} were read from disk; {policy}"
        )


def _print_warnings(console: Console, status: dict[str, Any]) -> None:
    for shard in status["shards"]:
        if shard["trouble"]:
            console.print(f"[yellow]{shard['shard']}[/yellow]: {shard['trouble']}")
    for shard, difference in status["differing"].items():
        console.print(f"[yellow]{escape(shard)} differs[/yellow]: {escape(difference)}", soft_wrap=True)
    if behind := _behind(status):
        console.print(f"[yellow]upgrade next[/yellow]: {escape(behind)}", soft_wrap=True)
    for namespace, error in status["fallen"].items():
        console.print(
            f"[yellow]q4 loses {error:.3f} of namespace {namespace[:8]}[/yellow]: its pages are demoted as q8"
        )
    for line in status.get("apart", [])[:_APART]:
        console.print(f"[yellow]never shared[/yellow]: {escape(line)}", soft_wrap=True)
    if status["lost_shards"]:
        lost = ", ".join(status["lost_shards"])
        console.print(f"[red]no reports from {lost}[/red]: blocks held only there are misses")
    for sentence in status["waiting"]:
        console.print(f"[yellow]waiting[/yellow]: {escape(sentence)}", soft_wrap=True)
    for orphan in status["orphans"]:
        volume = f"the volume of {escape(orphan['shard'])} on node {escape(orphan['node'])}"
        sentence = f"{volume} belongs to no running shard; it is used again when one is missing"
        console.print(f"[yellow]orphan[/yellow]: {sentence}", soft_wrap=True)


def _behind(status: dict[str, Any]) -> str:
    """Describes which processes, engines included, speak an older version of the protocol than another one; "" if none
    does."""
    spoken = {"coordinator": status["protocol"]}
    spoken |= {shard["shard"]: shard["protocol"] for shard in status["shards"] if shard["state"] != "lost"}
    spoken |= {engine["name"]: engine["protocol"] for engine in status.get("engines", ())}
    newest = max(spoken.values())
    older = [name for name, version in spoken.items() if version < newest]
    if not older:
        return ""
    return (
        f"{', '.join(older)} speak no version {newest} of the protocol, as others do; a release of version "
        f"{newest + 1} will refuse them"
    )


def _print_processes(console: Console, status: dict[str, Any]) -> None:
    """Prints a line for each release, configuration and node: which processes have these."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    shards = [shard for shard in status["shards"] if shard["state"] != "lost"]
    for name, process in [("coordinator", status), *((shard["shard"], shard) for shard in shards)]:
        alike.setdefault((process["release"], process["config_hash"], process["node"]), []).append(name)
    known = any(release for release, _, _ in alike)
    for (release, config_hash, node), names in alike.items() if known else ():
        config = f", configuration {config_hash}" if config_hash else ""
        where = f" on {node}" if node else ""
        running = f"release {release or 'unknown'}{config}{where}: {', '.join(names)}"
        console.print(escape(running), soft_wrap=True)


def _shard_table(shards: Sequence[dict[str, Any]], *, whole: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    numbers = ("used", "of", "pages", "leases", "evicted", "pulled", "corrupt")
    for column in ("shard", "state", "tier", "used", "of", "", *numbers[2:], "address"):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for shard in shards:
        for row in _rows(shard, whole):
            table.add_row(*row)
    return table


def print_engines(engines: Sequence[dict[str, Any]]) -> None:
    """Prints a row for each engine: its name, its model and weights, and its facts."""
    console = Console(width=max(Console().width, 130), highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("engine", "model", "weights", "", "facts"):
        table.add_column(column, no_wrap=column != "facts")
    for engine in engines:
        weights, facts = engine["weights"], engine["facts"]
        table.add_row(
            escape(engine["name"]),
            escape(engine["model"]),
            escape(weights if len(weights) <= _WEIGHTS_SHOWN else f"{weights[:_WEIGHTS_SHOWN]}..."),
            "[yellow]private[/yellow]" if engine["private"] else "shared",
            escape("; ".join(f"{name} {value}" for name, value in facts.items())),
        )
    console.print(table)


def _rows(shard: dict[str, Any], whole: bool) -> Iterator[list[str]]:
    """Yields a row for each tier of a shard. The row of a lost shard shows only its name, state and address, and so do
    all if not `whole`."""
    if shard["state"] == "lost" or not whole:
        state = "[red]lost[/red]" if shard["state"] == "lost" else shard["state"]
        yield [shard["shard"], state, *["-"] * 3, "", *["-"] * 5, shard["address"]]
        return
    state, counters = shard["state"], shard["counters"]
    yield [
        shard["shard"],
        f"[yellow]{state}[/yellow]" if state == "draining" else state,
        *_use({"tier": "device", **shard}),
        f"{shard['leases']:,}",
        *(f"{counters.get(name, 0):,}" for name in _COUNTERS),
        shard["address"],
    ]
    for below in shard["below"]:
        yield ["", "", *_use(below), "", *[""] * len(_COUNTERS), ""]


def _use(tier: dict[str, Any]) -> list[str]:
    """Returns a tier's name, its used and total bytes, the used share as a bar, and its number of pages."""
    capacity, used = tier["capacity_bytes"], tier["capacity_bytes"] - tier["free_bytes"]
    share = _bar(used / capacity if capacity else 0.0)
    return [tier["tier"], size_text(used), size_text(capacity), share, f"{tier['pages']:,}"]


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
