"""The status of a cluster and its engines as a page (text_page.py), from plain values. Figures that are 0 are left out;
`--json` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvcluster.cli.text_page import (
    TableCell,
    TableColumn,
    TextPage,
    Tone,
    bar_text,
    counted,
    duration_text,
    nonzero,
    share_text,
)
from kvcluster.client.status import other_tiers
from kvcluster.config import size_text

_APART = 5
"""Number of lines about namespaces that cannot share; `--json` has them all."""

_ENGINES_SHOWN = 5
"""Number of engines that are named; `kvcluster weights` shows them all."""

_WEIGHTS_SHOWN = 24
"""Characters of a fingerprint: enough to tell two apart."""

_TIERS = {
    "gpu": "gpu: pages as engines store them, in a GPU's memory",
    "ram": "ram: pages as engines store them",
    "host": "host: encoded pages, in RAM, too",
    "disk": "disk: encoded pages, in files",
}
"""What the tiers are."""


def add_status(page: TextPage, status: dict[str, Any], address: str) -> None:
    """Adds the totals and warnings of the cluster, and a table with a row per tier of each shard."""
    _add_totals(page, status, address)
    _add_warnings(page, status)
    _add_processes(page, status)
    _add_shards(page, status["shards"], whole=not status["tenant"])
    engines = status.get("engines", ())
    if engines:
        names = [f"{one['name']} ({one['model']})" for one in engines[:_ENGINES_SHOWN]]
        more = f" and {len(engines) - _ENGINES_SHOWN} more" if len(engines) > _ENGINES_SHOWN else ""
        page.say(f"{counted(len(engines), 'engine')}: {', '.join(names)}{more}")


def degradations(status: dict[str, Any]) -> list[str]:
    """Returns a sentence for each way in which the cluster is not as it is configured."""
    found = [f"{shard['shard']}: {shard['trouble']}" for shard in status["shards"] if shard["trouble"]]
    if status["lost_shards"]:
        found.append(f"no reports from {', '.join(status['lost_shards'])}: blocks held only there are misses")
    return [*found, *status["waiting"]]


def serves(status: dict[str, Any]) -> bool:
    """Whether there is a shard that pages can be loaded from or stored to."""
    return any(shard["state"] != "lost" for shard in status["shards"])


# ------------------------------------------------------------------------------------------------ totals


def _add_totals(page: TextPage, status: dict[str, Any], address: str) -> None:
    uptime = duration_text(status["uptime_ns"])
    page.say(f"{status['state']}, up {uptime}; {_content(status)}", label=f"{address}  ", tone=Tone.HEAD)
    if status["tenant"]:
        page.say(f"figures of tenant {status['tenant']} alone; an operator's token shows the whole cluster")
    if blocks := _blocks(status):
        page.say(blocks)
    if status["policy"].get("cache") == "off":
        page.say("nothing is loaded or stored; `kvcluster on` turns it on again", label="off: ", tone=Tone.BAD)
    if not status["tenant"]:
        for line in _pages(status):
            page.say(line)


def _content(status: dict[str, Any]) -> str:
    if not status["blocks"]:
        cached = "nothing is cached"
    else:
        cached = f"{counted(status['blocks'], 'block')} in {counted(status['namespaces'], 'namespace')}"
    open_now = [counted(status["tickets"], "ticket")] if status["tickets"] else []
    if status["sequences"]:
        sequences = counted(status["sequences"], "open sequence")
        open_now.append(f"{sequences} of {counted(status['claimed_blocks'], 'block')}")
    if status["private_blocks"]:
        open_now.append(counted(status["private_blocks"], "private block"))
    return "; ".join([cached, *open_now])


def _blocks(status: dict[str, Any]) -> str:
    counters, rate = status["counters"], status["hit_rate"]
    looked_up = f"hit rate {share_text(rate)} of {counted(counters['asked_blocks'], 'block')} looked up" if rate else ""
    if rate == 0:
        looked_up = f"none of {counted(counters['asked_blocks'], 'block')} looked up was cached"
    stored = nonzero(
        (counters["write_blocks"], "{:,} written"), (counters["duplicate_blocks"], "{:,} were already cached")
    )
    return "; ".join(filter(None, (looked_up, stored)))


def _pages(status: dict[str, Any]) -> Iterator[str]:
    totals = status["totals"]
    checked = nonzero(
        (totals.get("verified", 0), "{:,} re-verified"),
        (totals.get("suspected", 0), "{:,} of them after reader checksum mismatches"),
        (totals.get("corrupt", 0), "{:,} were corrupt"),
    )
    elsewhere = "disk or a GPU" if any(shard["above"] for shard in status["shards"]) else "disk"
    moved = nonzero(
        (totals.get("pulled", 0), "{:,} copied between shards"),
        (totals.get("demoted", 0), "{:,} demoted"),
        (totals.get("promoted", 0), "{:,} promoted"),
        (totals.get("staged", 0), f"{{:,}} read from {elsewhere}"),
        (totals.get("read_on_device", 0), "{:,} read in place on a GPU"),
    )
    if checked or moved:
        yield "pages: " + "; ".join(filter(None, (checked, moved)))
    if any(map(other_tiers, status["shards"])):
        yield "policy: " + ", ".join(f"{name}={value}" for name, value in status["policy"].items() if name != "cache")


# ---------------------------------------------------------------------------------------------- warnings


def _add_warnings(page: TextPage, status: dict[str, Any]) -> None:
    if not serves(status):
        what = "nothing can be loaded or stored; `kvcluster up` starts its shards again"
        page.say(what, label="no shard: ", tone=Tone.BAD)
    for shard in status["shards"]:
        if shard["trouble"]:
            page.say(shard["trouble"], label=f"{shard['shard']} is degraded: ", tone=Tone.WARNING)
    for shard, difference in status["differing"].items():
        page.say(difference, label=f"{shard} differs: ", tone=Tone.WARNING)
    if behind := _behind(status):
        page.say(behind, label="upgrade next: ", tone=Tone.WARNING)
    for namespace, error in status["fallen"].items():
        label = f"q4 loses {error:.3f} of namespace {namespace[:8]}: "
        page.say("its pages are demoted as q8", label=label, tone=Tone.WARNING)
    for line in status.get("apart", [])[:_APART]:
        page.say(line, label="never shared: ", tone=Tone.WARNING)
    if status["lost_shards"]:
        lost = ", ".join(status["lost_shards"])
        page.say("blocks held only there are misses", label=f"no reports from {lost}: ", tone=Tone.BAD)
    for sentence in status["warnings"]:
        page.say(sentence, label="quotas: ", tone=Tone.WARNING)
    for sentence in status["waiting"]:
        page.say(sentence, label="waiting: ", tone=Tone.WARNING)
    for orphan in status["orphans"]:
        volume = f"the volume of {orphan['shard']} on node {orphan['node']}"
        sentence = f"{volume} belongs to no running shard; it is used again when one is missing"
        page.say(sentence, label="orphan: ", tone=Tone.WARNING)


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


def _add_processes(page: TextPage, status: dict[str, Any]) -> None:
    """Adds a line for each release, configuration and node: which processes have these."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    shards = [shard for shard in status["shards"] if shard["state"] != "lost"]
    for name, process in [("coordinator", status), *((shard["shard"], shard) for shard in shards)]:
        alike.setdefault((process["release"], process["config_hash"], process["node"]), []).append(name)
    known = any(release for release, _, _ in alike)
    for (release, config_hash, node), names in alike.items() if known else ():
        config = f", configuration {config_hash}" if config_hash else ""
        where = f" on {node}" if node else ""
        page.say(f"release {release or 'unknown'}{config}{where}: {', '.join(names)}")


# ------------------------------------------------------------------------------------------------ tables


def _add_shards(page: TextPage, shards: Sequence[dict[str, Any]], *, whole: bool) -> None:
    if not shards:
        return
    columns = [
        *(TableColumn("shard"), TableColumn("state"), TableColumn("tier"), TableColumn("used", right=True)),
        *(TableColumn("size", right=True), TableColumn("", drop=1), TableColumn("pages", right=True)),
        TableColumn("address", drop=2),
    ]
    page.table(columns, [row for shard in shards for row in _rows(shard, whole)])
    for shard in shards:
        said = [*(_activity(shard) if whole and shard["state"] != "lost" else ()), *_restarts(shard)]
        if said:
            page.say("; ".join(said), label=f"{shard['shard']}: ")
    if not whole:
        return
    held = {"ram", *(use["tier"] for shard in shards for use in other_tiers(shard))}
    page.say("; ".join(text for tier, text in _TIERS.items() if tier in held))


def _activity(shard: dict[str, Any]) -> Iterator[str]:
    if shard["leases"]:
        yield counted(shard["leases"], "lease")
    counters = shard["counters"]
    pages = nonzero(
        (counters.get("evicted", 0), "{:,} evicted"),
        (counters.get("pulled", 0), "{:,} copied from other shards"),
        (counters.get("corrupt", 0), "{:,} corrupt"),
    )
    if pages:
        yield f"pages: {pages}"


def _restarts(shard: dict[str, Any]) -> Iterator[str]:
    count, ago = shard["restarts"], duration_text(shard["restarted_ns_ago"])
    if count:
        yield f"restarted {ago} ago" if count == 1 else f"restarted {count:,} times, the last time {ago} ago"


def _rows(shard: dict[str, Any], whole: bool) -> Iterator[list[str | TableCell]]:
    """Yields a row for each tier of a shard. The row of a lost shard shows only its name, state and address, and so do
    all if not `whole`."""
    state = shard["state"]
    tone = {"lost": Tone.BAD, "up": None}.get(state, Tone.WARNING)
    if state == "lost" or not whole:
        yield [shard["shard"], TableCell(state, tone), *[""] * 5, shard["address"]]
        return
    yield [shard["shard"], TableCell(state, tone), *_use({"tier": "ram", **shard}), shard["address"]]
    for other in other_tiers(shard):
        yield ["", "", *_use(other), ""]


def _use(tier: dict[str, Any]) -> list[str | TableCell]:
    """Returns a tier's name, its used and total bytes, the used share as a bar, and its number of pages."""
    capacity, used = tier["capacity_bytes"], tier["capacity_bytes"] - tier["free_bytes"]
    share = bar_text(used / capacity if capacity else 0.0)
    pages = f"{tier['pages']:,}" if tier["pages"] else ""
    return [tier["tier"], size_text(used) if used else "", size_text(capacity), share, pages]


def add_engines(page: TextPage, engines: Sequence[dict[str, Any]]) -> None:
    """Adds a row for each engine: its name, its model and weights; and a line for each with its facts."""
    page.table([TableColumn(name) for name in ("engine", "model", "weights", "")], map(_engine_row, engines))
    for engine in engines:
        if engine["facts"]:
            facts = "; ".join(f"{name} {value}" for name, value in engine["facts"].items())
            page.say(facts, label=f"{engine['name']}: ")


def _engine_row(engine: dict[str, Any]) -> list[str | TableCell]:
    weights = engine["weights"]
    return [
        engine["name"],
        engine["model"],
        weights if len(weights) <= _WEIGHTS_SHOWN else f"{weights[:_WEIGHTS_SHOWN]}...",
        TableCell("private", Tone.WARNING) if engine["private"] else "shared",
    ]
