"""The findings of `kvcluster doctor` as a page (text_page.py), from plain values."""

from __future__ import annotations

from typing import Any

from kvcluster.cli.cluster_doctor import CLOCK_MS, duration_text
from kvcluster.cli.text_page import TableCell, TableColumn, TextPage, Tone, counted
from kvcluster.config import size_text
from kvcluster.transport.certificates import DAY_S, WARNED_S

_TO_DO = "what to do: "


def add_diagnosis(page: TextPage, found: dict[str, Any]) -> None:
    """Adds the coordinator, a row for each transport of each shard, and the verdict."""
    _add_coordinator(page, found)
    if found["shards"]:
        page.table(
            [
                *(TableColumn("shard"), TableColumn("transport"), TableColumn("")),
                *(TableColumn("connect", right=True, drop=1), TableColumn("round trip", right=True)),
                TableColumn("why not, and what to do"),
            ],
            [row for shard in found["shards"] for row in _rows(shard)],
        )
        slower = " (it has no native core: bytes move slower)" if found["kernels"] == "python" else ""
        page.say(f"kernels of this process: {found['kernels']}{slower}")
    add_cluster(page, found["cluster"])
    page.say("", label=found["verdict"], tone=Tone.GOOD if found["healthy"] else Tone.BAD)
    if severe := sum(problem["severe"] for problem in found["cluster"]["problems"]):
        page.say("named above", label=f"{counted(severe, 'problem')} of the cluster, ", tone=Tone.BAD)


def _add_coordinator(page: TextPage, found: dict[str, Any]) -> None:
    coordinator = found["coordinator"]
    version = coordinator["protocol_version"]
    said = [
        "answers" if coordinator["reachable"] else "does not answer",
        f"protocol version {version}" if version is not None else "",
        f"credential {coordinator['credential']}" if coordinator["credential"] else "",
        coordinator["state"] or "",
    ]
    page.say(", ".join(filter(None, said)), label=f"{found['address']}  ", tone=Tone.HEAD)
    _add_tls(page, found)
    if coordinator["why"] is not None:
        page.say(coordinator["why"])
        page.say(coordinator["advice"], label=_TO_DO)
    for line in coordinator["apart"]:
        page.say(line, label="never shared: ", tone=Tone.WARNING)


def _add_tls(page: TextPage, found: dict[str, Any]) -> None:
    """Adds what the coordinator and the shards show within TLS, a line for those that show the same."""
    shown = {"coordinator": found["tls"]} | {shard["shard"]: shard["tls"] for shard in found["shards"]}
    lines: dict[tuple[str, Tone], list[str]] = {}
    for who, tls in shown.items():
        if tls is not None:
            lines.setdefault(_tls_text(tls), []).append(who)
    for (text, tone), those in lines.items():
        page.say(f"{text} ({', '.join(those)})", label="TLS: ", tone=tone)
    if lines and not found["openssl"]["fast"]:
        page.say(f"{found['openssl']['release']} here: 3.2 and later encrypt up to four times as fast", label="TLS: ")


def _tls_text(tls: dict[str, Any]) -> tuple[str, Tone]:
    if tls["why"] is not None:
        return tls["why"], Tone.BAD
    days = tls["days_left"]
    text = f"{tls['version']}, {tls['cipher']}, verified as {tls['name']}, {counted(days, 'day')} left"
    if days * DAY_S >= WARNED_S:
        return text, Tone.GOOD
    return f"{text}: replace its certificate, which is then read again (`kvcluster certs renew`)", Tone.WARNING


def _rows(shard: dict[str, Any]) -> list[list[str | TableCell]]:
    if not shard["transports"]:
        return [[shard["shard"], "", TableCell("not tried", Tone.BAD), "", "", shard["why"]]]
    rows: list[list[str | TableCell]] = []
    for path in shard["transports"]:
        rows.append(
            [
                shard["shard"] if not rows else "",
                path["transport"],
                _state(path, shard["chosen"]),
                _time(path["connect_ms"]),
                _time(path["trip_ms"]),
                "" if path["works"] else _why_not(path),
            ]
        )
    return rows


def _why_not(path: dict[str, Any]) -> str:
    """Returns why a path is not used, and what to do; nothing is to be done about a shard that is elsewhere."""
    elsewhere, colon, _ = path["why"].partition(": the shard is on ")
    return str(elsewhere) if colon else f"{path['why']} ({path['advice']})"


def _state(path: dict[str, Any], chosen: str | None) -> TableCell:
    if path["works"]:
        return TableCell("chosen", Tone.GOOD) if path["transport"] == chosen else TableCell("works")
    return TableCell("fails", Tone.BAD) if path["transport"] == "grpc" else TableCell("not used", Tone.WARNING)


def _time(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f} ms"


# ---------------------------------------------------------------------------------------------- the cluster

_LISTED = 24
"""The most ways from process to process that are listed where they do not fit as a matrix. Those that fail are always
named."""


def add_cluster(page: TextPage, cluster: dict[str, Any]) -> None:
    """Adds a row for each process, a matrix of who reaches whom, and the problems."""
    if cluster["why"] is not None:
        page.say("", label=cluster["why"], tone=Tone.WARNING)
    if not cluster["processes"]:
        return
    _add_processes(page, cluster["processes"])
    if cluster["pairs"]:
        _add_trips(page, cluster["pairs"])
    for problem in cluster["problems"]:
        page.say("", label=problem["what"], tone=Tone.BAD if problem["severe"] else Tone.WARNING)
        page.say(problem["advice"], label=_TO_DO, indent="  ")


def _add_processes(page: TextPage, processes: list[dict[str, Any]]) -> None:
    """Adds a row for each process. A release or configuration that all have stands in a line of its own instead."""
    own = processes[0]
    alike = {name: all(row[name] == own[name] for row in processes) for name in ("release", "config_hash")}
    names = {"release": "release", "config_hash": "configuration"}
    said = [f"{names[name]} {own[name]}" for name in names if alike[name] and own[name]]
    if said:
        page.say(f"all processes: {', '.join(said)}")
    columns = [
        *(TableColumn("process"), TableColumn("node", drop=2), TableColumn("address")),
        *(TableColumn("release"), TableColumn("configuration"), TableColumn("clock", right=True)),
        *(TableColumn("pools", right=True, drop=3), TableColumn("of memory", right=True, drop=1), TableColumn("ports")),
    ]
    rows: list[list[str | TableCell]] = []
    for row in processes:
        other = row["config_hash"] != own["config_hash"]
        rows.append(
            [
                *(row["process"], row["node"], row["address"]),
                "" if alike["release"] else row["release"],
                "" if alike["config_hash"] else TableCell(row["config_hash"], Tone.WARNING if other else None),
                _clock(row),
                "" if not row["pool_bytes"] else size_text(row["pool_bytes"]),
                "" if not row["limit_bytes"] else size_text(row["limit_bytes"]),
                ", ".join(f"{port['use']} {port['port']}" for port in row["ports"])
                if row["answers"]
                else TableCell("has not answered", Tone.WARNING),
            ]
        )
    page.table(columns, rows)


def _clock(row: dict[str, Any]) -> str | TableCell:
    """Returns by how much a clock is ahead of the coordinator's, "±" what is within the error of the measurement."""
    ahead, error = row["clock_ms"], row["clock_error_ms"]
    if ahead is None:
        return ""
    if abs(ahead) <= error:
        return f"±{duration_text(error)}"
    text = f"{'+' if ahead > 0 else '-'}{duration_text(abs(ahead))}"
    return TableCell(text, Tone.WARNING) if abs(ahead) - error > CLOCK_MS else text


def _add_trips(page: TextPage, pairs: list[dict[str, Any]]) -> None:
    """Adds the round trips in ms, over grpc and over what is faster: from each row to each column if that fits, as a
    list if it is short, and in a sentence otherwise."""
    ways: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in pairs:
        ways.setdefault((pair["source"], pair["target"]), []).append(pair)
    sources, targets = (list(dict.fromkeys(pair[end] for pair in pairs)) for end in ("source", "target"))
    columns = [TableColumn("round trip in ms, from"), *(TableColumn(f"to {target}", right=True) for target in targets)]
    matrix: list[list[str | TableCell]] = [
        [source, *(_cell(ways.get((source, to), [])) for to in targets)] for source in sources
    ]
    if page.fits(columns, matrix):
        page.table(columns, matrix)
    elif len(ways) <= _LISTED:
        listed: list[list[str | TableCell]] = [
            [source, target, _cell(tried)] for (source, target), tried in ways.items()
        ]
        page.table([TableColumn("from"), TableColumn("to"), TableColumn("round trip in ms")], listed)
    else:
        failing = sum(pair["why"] is not None for pair in pairs)
        trips = sorted(pair["trip_ms"] for pair in pairs if pair["why"] is None)
        took = f"; round trips took {trips[0]:.2f} to {trips[-1]:.2f} ms" if trips else ""
        page.say(f"{len(pairs):,} ways from process to process were tried, {failing:,} of them fail{took}")


def _cell(pairs: list[dict[str, Any]]) -> TableCell:
    text = ", ".join(
        f"{pair['transport']} {pair['trip_ms']:.2f}" if pair["why"] is None else f"{pair['transport']} fails"
        for pair in sorted(pairs, key=lambda pair: str(pair["transport"]))
    )
    return TableCell(text, Tone.BAD if any(pair["why"] is not None for pair in pairs) else None)
