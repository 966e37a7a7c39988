"""Prints the findings of `kvcluster doctor` as a page, with rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


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
                "" if path["works"] else escape(f"{path['why']} ({path['advice']})"),
            ]
        )
    return rows


def _state(path: dict[str, Any], chosen: str | None) -> str:
    if path["works"]:
        return "[green]chosen[/green]" if path["transport"] == chosen else "works"
    return "[red]fails[/red]" if path["transport"] == "grpc" else "[yellow]not used[/yellow]"


def _time(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f} ms"
