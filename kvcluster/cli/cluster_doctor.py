"""The cluster's half of `kvcluster doctor`: what every process reports about itself, and which shard reaches which.

The shards try one another when the coordinator orders it (core/doctor_probes.py), for an operator. `judged` turns the
answers into rows and problems, each with what to do about it; it is a function of values.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvcluster.config import size_text
from kvcluster.config.ports import parse_ports
from kvcluster.core.doctor_probes import RUN_NS, SINCE_VERSION
from kvcluster.core.messages import Findings, Probe, Probed, ProcessFacts
from kvcluster.core.placement import name_of, same_namespace
from kvcluster.errors import ConfigError
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline

COORDINATOR = "coordinator"
HERE = "this host"
CLOCK_MS = 1_000.0
"""A clock that differs by more is named: logs of two hosts cannot be compared any more."""

_POLL_S = 0.3
_SAME_MEMORY_SHARE = 0.9
"""The pools of a machine's shards may take so much of its memory (actors/node_memory.py)."""


def probe_cluster(port: GrpcPort, wait_ms: int) -> Probed:
    """Has the shards try one another, and returns what they found. Takes little longer than a run of probes. Raises
    Unavailable, CredentialError, or ProtocolError if the coordinator does not know of probes."""
    give_up = Deadline.after_ms(RUN_NS / 1e6 + wait_ms)
    number = 0
    while True:
        probed = expect(Probed, port.ask(Probe(number), Deadline.after_ms(wait_ms)))
        if not probed.running or not give_up.remaining_s():
            return probed
        number = probed.number
        time.sleep(_POLL_S)


def judged(
    status: Mapping[str, Any], probed: Probed, from_here: Iterable[Mapping[str, Any]], coordinator: str
) -> dict[str, Any]:
    """Returns for JSON: `processes`, a row each; `pairs`, a row for each way in which a shard tried another one, or
    this host as `from_here` has it (doctor.examine); `problems`, each with `what`, `advice` and whether it is `severe`.
    `coordinator`: its address."""
    found = {each.shard: each.findings for each in probed.shards}
    living = [shard for shard in status["shards"] if shard["state"] != "lost"]
    processes = [_row(COORDINATOR, coordinator, status, probed.coordinator, None)]
    for shard in living:
        own = found.get(shard["shard"])
        processes.append(_row(shard["shard"], shard["address"], shard, own.facts if own is not None else None, own))
    pairs = [*_pairs_from_here(from_here), *_pairs(living, found)]
    silent = [s for s in living if s["shard"] not in found]
    problems = [
        *map(_lost, status["lost_shards"]),
        *map(_silent, silent),
        *(_degraded(shard) for shard in living if shard["trouble"]),
        *_failing(pairs, living),
        *_differing(status),
        *_clocks(processes),
        *_memory(living, found),
        *_ports(processes),
    ]
    return {"why": None, "processes": processes, "pairs": pairs, "problems": problems}


# ------------------------------------------------------------------------------------------------ rows


def _row(
    name: str, address: str, process: Mapping[str, Any], facts: ProcessFacts | None, findings: Findings | None
) -> dict[str, Any]:
    known = findings is not None and findings.clock_error_ns > 0
    return {
        "process": name,
        "address": address,
        "node": process["node"],
        "host": process.get("host", ""),
        "release": process["release"],
        "config_hash": process["config_hash"],
        "clock_ms": round(findings.clock_ns / 1e6, 3) if findings is not None and known else None,
        "clock_error_ms": round(findings.clock_error_ns / 1e6, 3) if findings is not None and known else None,
        "pool_bytes": None if facts is None else facts.pool_bytes,
        "limit_bytes": None if facts is None else facts.limit_bytes,
        "ports": [] if facts is None else [port._asdict() for port in facts.ports],
        "answers": facts is not None,
    }


def _pairs(living: Sequence[Mapping[str, Any]], found: Mapping[Any, Findings]) -> list[dict[str, Any]]:
    return [
        {"source": shard["shard"], "target": str(link.shard), "transport": link.transport}
        | {"trip_ms": round(link.trip_ns / 1e6, 3) if not link.why else None, "why": link.why or None}
        for shard in living
        for link in (found[shard["shard"]].links if shard["shard"] in found else ())
    ]


def _pairs_from_here(shards: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"source": HERE, "target": shard["shard"], "transport": path["transport"]}
        | {"trip_ms": path["trip_ms"], "why": None if path["works"] else path["why"]}
        for shard in shards
        for path in shard["transports"]
        if path["works"] or path["transport"] == "grpc"
    ]


# -------------------------------------------------------------------------------------------- problems


def _problem(what: str, advice: str, *, severe: bool) -> dict[str, Any]:
    return {"what": what, "advice": advice, "severe": severe}


def _lost(shard: str) -> dict[str, Any]:
    what = f"{shard} is lost: the coordinator gets no reports from it"
    return _problem(what, "look whether its host runs, and at what `kvcluster status` says it waits for", severe=True)


def _silent(shard: Mapping[str, Any]) -> dict[str, Any]:
    name = shard["shard"]
    if shard["protocol"] < SINCE_VERSION:
        release = shard["release"] or "an older one"
        return _problem(
            f"{name} does not know how to try the others: its release is {release}",
            "upgrade it; until then what it reaches is not known",
            severe=False,
        )
    return _problem(
        f"{name} has reported nothing of what it tried",
        f"run `kvcluster doctor` again, then `kvcluster logs {name}` on its machine",
        severe=True,
    )


def _degraded(shard: Mapping[str, Any]) -> dict[str, Any]:
    what = f"{shard['shard']} is degraded: {shard['trouble']}"
    return _problem(
        what,
        "mend what it names; a shard without one of its tiers is then restarted, and until then pages go to the others",
        severe=True,
    )


def _failing(pairs: Sequence[Mapping[str, Any]], living: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Names each two processes of which one does not reach the other, once for each transport."""
    by_name = {shard["shard"]: shard for shard in living}
    why = {(p["source"], p["target"], p["transport"]): p["why"] for p in pairs if p["why"] and p["target"] in by_name}
    problems = []
    for (source, target, transport), reason in why.items():
        both_ways = (target, source, transport) in why
        if both_ways and source > target:
            continue
        start, end = by_name.get(source), by_name[target]
        between = f"{_place(source, start)} and {_place(target, end)} do not reach each other"
        one_way = f"{_place(source, start)} does not reach {_place(target, end)}"
        what = f"{between if both_ways else one_way} over {transport}: {reason}"
        there = f"TCP port {_port(end, transport)} from {_host(start)} to {_host(end)}"
        if both_ways:
            there += f", and port {_port(start or end, transport)} from {_host(end)} to {_host(start)}"
        problems.append(_problem(what, f"open in the firewalls between them {there}, with the answers", severe=True))
    return problems


def _port(shard: Mapping[str, Any], transport: str) -> str:
    return str(shard["address"]).rpartition(":")[2] if transport == "grpc" else "(any of server.shard_ports)"


def _place(name: str, shard: Mapping[str, Any] | None) -> str:
    return name if shard is None else f"{name} ({shard['address']})"


def _host(shard: Mapping[str, Any] | None) -> str:
    return HERE if shard is None else str(shard["address"]).rpartition(":")[0]


def _differing(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    advice = "restart it; if it differs still, its host has another file or another release"
    return [
        _problem(f"{shard} differs: {difference}", advice, severe=False)
        for shard, difference in status["differing"].items()
    ]


def _clocks(processes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Names each machine whose clock differs, once; the coordinator's alone, if all others agree with one another."""
    measured = [row for row in processes if row["clock_ms"] is not None]
    off = [row for row in measured if abs(row["clock_ms"]) - row["clock_error_ms"] > CLOCK_MS]
    between_ms = max((r["clock_ms"] for r in off), default=0.0) - min((r["clock_ms"] for r in off), default=0.0)
    if 1 < len(off) == len(measured) and between_ms <= CLOCK_MS:
        return [_clock_problem(processes[0], -off[0]["clock_ms"], "that of every shard")]
    hosts = {row["host"]: row for row in reversed(off)}
    return [_clock_problem(row, row["clock_ms"], "the coordinator's") for row in reversed(hosts.values())]


def _clock_problem(row: Mapping[str, Any], ahead_ms: float, other: str) -> dict[str, Any]:
    direction = "ahead of" if ahead_ms > 0 else "behind"
    whose = f"{row['node'] or 'unknown'} ({row['process']}, {row['address']})"
    what = f"the clock of {whose} is {duration_text(abs(ahead_ms))} {direction} {other}"
    advice = "set it, and let NTP keep it: nothing in the cluster goes by it, but its logs cannot be compared"
    return _problem(what, advice, severe=False)


def _memory(living: Sequence[Mapping[str, Any]], found: Mapping[Any, Findings]) -> list[dict[str, Any]]:
    """Names the machines, or containers, whose shards' pools are too large for them together."""
    machines: list[list[Mapping[str, Any]]] = []
    for shard in living:
        if shard["shard"] in found:
            there = next((m for m in machines if same_namespace(m[0]["host"], shard["host"])), None)
            machines.append([shard]) if there is None else there.append(shard)
    problems = []
    for shards in machines:
        limit = min(found[s["shard"]].facts.limit_bytes for s in shards)
        pools = sum(found[s["shard"]].facts.pool_bytes for s in shards)
        if limit and pools > _SAME_MEMORY_SHARE * limit:
            names = ", ".join(s["shard"] for s in shards)
            share = f"{size_text(pools, 4)} of {size_text(limit, 4)} of memory"
            what = f"the pools of {names} on {name_of(shards[0]['host'])} take {share}"
            advice = "lower shard.ram_bytes or host_bytes: a machine that runs out of memory kills a process"
            problems.append(_problem(what, advice, severe=False))
    return problems


def _ports(processes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        _problem(
            f"{row['process']} listens on port {port['port']} for {port['use']}, outside {port['allowed']}",
            "restart it, so that firewalls that follow `kvcluster doctor --ports` let others reach it",
            severe=False,
        )
        for row in processes
        for port in row["ports"]
        if not _within(port["port"], port["allowed"])
    ]


def _within(port: int, allowed: str) -> bool:
    try:
        ports = parse_ports(allowed or "0", "ports")
    except ConfigError:
        return True  # a newer release words it otherwise
    return ports == range(1) or port in ports


def duration_text(ms: float) -> str:
    """3_600_000 -> "60.0 min"."""
    if ms < 1_000:
        return f"{ms:.1f} ms"
    return f"{ms / 1e3:.1f} s" if ms < 120_000 else f"{ms / 60e3:.1f} min"
