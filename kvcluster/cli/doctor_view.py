"""Prints the findings of `kvcluster doctor` as a page, with rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcluster.cli.cluster_doctor import CLOCK_MS, duration_text, gib


def print_diagnosis(found: dict[str, Any]) -> None:
    """Prints the coordinator, a row for each transport of each shard, and the verdict."""
    # Wide enough for a sentence beside the numbers, as in status_view.py.
    console = Console(width=max(Console().width, 130), highlight=False)
    _print_coordinator(console, found)
    if found["shards"]:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("shard", "transport", "", "connect", "round trip", "why not, and what to do"):
            times = column in ("connect", "round trip")
            table.add_column(column, justify="right" if times else "left", no_wrap=not column.startswith("why"))
        for shard in found["shards"]:
            for row in _rows(shard):
                table.add_row(*row)
        console.print(table)
        slower = " (it has no native core: bytes move slower)" if found["kernels"] == "python" else ""
        console.print(f"kernels of this process: {found['kernels']}{slower}", soft_wrap=True)
    print_cluster(console, found["cluster"])
    console.print(f"[{'green' if found['healthy'] else 'red'}]{escape(found['verdict'])}[/]", soft_wrap=True)


def _print_coordinator(console: Console, found: dict[str, Any]) -> None:
    coordinator = found["coordinator"]
    version = coordinator["protocol_version"]
    said = [
        "answers" if coordinator["reachable"] else "does not answer",
        f"protocol version {version}" if version is not None else "",
        f"credential {coordinator['credential']}" if coordinator["credential"] else "",
        coordinator["state"] or "",
    ]
    console.print(f"[bold]{escape(found['address'])}[/bold]  " + ", ".join(filter(None, said)), soft_wrap=True)
    if coordinator["why"] is not None:
        console.print(escape(coordinator["why"]), soft_wrap=True)
        console.print(f"What to do: {escape(coordinator['advice'])}", soft_wrap=True)
    for line in coordinator["apart"]:
        console.print(f"[yellow]never shared[/yellow]: {escape(line)}", soft_wrap=True)


def _rows(shard: dict[str, Any]) -> list[list[str]]:
    if not shard["transports"]:
        return [[shard["shard"], "", "[red]not tried[/red]", "", "", escape(shard["why"])]]
    rows: list[list[str]] = []
    for path in shard["transports"]:
        rows.append(
            [
                shard["shard"] if not rows else "",
                path["transport"],
                _state(path, shard["chosen"]),
                _time(path["connect_ms"]),
                _time(path["trip_ms"]),
                "" if path["works"] else escape(_why_not(path)),
            ]
        )
    return rows


def _why_not(path: dict[str, Any]) -> str:
    """Returns why a path is not used, and what to do; nothing is to be done about a shard that is elsewhere."""
    elsewhere, colon, _ = path["why"].partition(": the shard is on ")
    return elsewhere if colon else f"{path['why']} ({path['advice']})"


def _state(path: dict[str, Any], chosen: str | None) -> str:
    if path["works"]:
        return "[green]chosen[/green]" if path["transport"] == chosen else "works"
    return "[red]fails[/red]" if path["transport"] == "grpc" else "[yellow]not used[/yellow]"


def _time(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f} ms"


# ---------------------------------------------------------------------------------------------- the cluster

_MATRIX = 12
"""The most shards that are shown as a matrix, which gets as wide as they are many; failing pairs are always named."""


def print_cluster(console: Console, cluster: dict[str, Any]) -> None:
    """Prints a row for each process, a matrix of who reaches whom, and the problems."""
    if cluster["why"] is not None:
        console.print(f"[yellow]{escape(cluster['why'])}[/yellow]", soft_wrap=True)
    if not cluster["processes"]:
        return
    console.print(_process_table(cluster["processes"]))
    targets = list(dict.fromkeys(pair["target"] for pair in cluster["pairs"]))
    if 0 < len(targets) <= _MATRIX:
        console.print(_matrix(cluster["pairs"], targets))
    else:
        failing = sum(pair["why"] is not None for pair in cluster["pairs"])
        console.print(f"{len(cluster['pairs']):,} ways from process to process were tried, {failing:,} of them fail")
    for problem in cluster["problems"]:
        colour = "red" if problem["severe"] else "yellow"
        console.print(f"[{colour}]{escape(problem['what'])}[/]", soft_wrap=True)
        console.print(f"  what to do: {escape(problem['advice'])}", soft_wrap=True)


def _process_table(processes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("process", "node", "address", "release", "configuration", "clock", "pools", "of memory", "ports"):
        table.add_column(column, justify="right" if column in ("clock", "pools", "of memory") else "left", no_wrap=True)
    own = processes[0]["config_hash"]
    for row in processes:
        config = row["config_hash"]
        table.add_row(
            row["process"],
            escape(row["node"]),
            escape(row["address"]),
            escape(row["release"]),
            f"[yellow]{config}[/yellow]" if config and own and config != own else config,
            _clock(row),
            "" if not row["pool_bytes"] else gib(row["pool_bytes"]),
            "" if not row["limit_bytes"] else gib(row["limit_bytes"]),
            ", ".join(f"{port['use']} {port['port']}" for port in row["ports"])
            if row["answers"]
            else "[yellow]has not answered[/yellow]",
        )
    return table


def _clock(row: dict[str, Any]) -> str:
    """Returns by how much a clock is ahead of the coordinator's, "±" what is within the error of the measurement."""
    ahead, error = row["clock_ms"], row["clock_error_ms"]
    if ahead is None:
        return ""
    if abs(ahead) <= error:
        return f"±{duration_text(error)}"
    text = f"{'+' if ahead > 0 else '-'}{duration_text(abs(ahead))}"
    return f"[yellow]{text}[/yellow]" if abs(ahead) - error > CLOCK_MS else text


def _matrix(pairs: list[dict[str, Any]], targets: list[str]) -> Table:
    """Returns the round trips from each row to each column, in ms: over grpc, and over what is faster."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("round trip in ms, from", no_wrap=True)
    for target in targets:
        table.add_column(f"to {target}", justify="right", no_wrap=True)
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in pairs:
        cells.setdefault((pair["source"], pair["target"]), []).append(pair)
    for source in dict.fromkeys(pair["source"] for pair in pairs):
        table.add_row(source, *(_cell(cells.get((source, target), [])) for target in targets))
    return table


def _cell(pairs: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{pair['transport']} {pair['trip_ms']:.2f}" if pair["why"] is None else f"[red]{pair['transport']} fails[/red]"
        for pair in sorted(pairs, key=lambda pair: str(pair["transport"]))
    )
