"""The demo's third act: a working set three times as large as the RAM tier, which a host tier keeps encoded.

One replica reads many documents, and then all of them again. Blocks that do not fit into the RAM tier are cached in
the host tier in half of the bytes; the act also shows how that affects the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import kvcluster
from kvcluster.cli.child_process import ChildProcess
from kvcluster.cli.demo.screen import Screen
from kvcluster.cli.demo.signals import Signals
from kvcluster.cli.waiting import wait_until

DOCUMENTS, TOKENS = 24, 256
TIMES = 3
"""The working set, in sizes of the RAM tier."""

Figures = dict[str, Any]


def conduct(reader: ChildProcess, screen: Screen, signals: Signals) -> Figures:
    """Runs the act with a replica that has loaded its model, on a separate cluster."""
    per_token: int = reader.ask("kv_bytes")["token_bytes"]
    working_set = DOCUMENTS * TOKENS * per_token
    ram = working_set // TIMES
    with ExitStack() as house:
        with screen.step("start a cluster with a host tier"), signals.put_off():
            cluster = house.enter_context(
                kvcluster.local(ram_bytes=ram, host_bytes=2 * ram, config={"coordinator": _PROMPTLY})
            )
        reader.ask("connect", address=cluster.address)
        with screen.step(f"read {DOCUMENTS} documents: KV is stored") as progress:
            computed = _read(reader, progress)
            _settled(reader)
        with screen.step("read them again: KV is loaded") as progress:
            loaded = _read(reader, progress)
        status = reader.ask("status")
    return assess(computed, loaded, status, working_set)


_PROMPTLY = {"hold_ms": 0}
"""Blocks may be demoted at once after a load: an engine would take longer to load them again."""


def _read(reader: ChildProcess, progress: Callable[[int, int], None]) -> list[Figures]:
    """Reads every document, one after the other."""
    out = []
    for number in range(DOCUMENTS):
        out.append(reader.ask("read", number=number, tokens=TOKENS))
        progress(number + 1, DOCUMENTS)
    return out


def assess(computed: list[Figures], loaded: list[Figures], status: Figures, working_set: int) -> Figures:
    """Returns what was loaded from which tier, and how the output changed. `ok`: over three quarters of the working set
    were loaded, some of it from the host tier."""
    (shard,) = status["shards"]
    (host,) = shard["below"]
    lay: Counter[str] = Counter()
    for answer in loaded:
        lay.update(answer["blocks"])
    asked = sum(lay.values())
    same = sum(one["next"] == other["next"] for one, other in zip(computed, loaded, strict=True))
    return {
        "documents": len(loaded),
        "working_set_bytes": working_set,
        "ram_bytes": shard["capacity_bytes"],
        "host_bytes": host["capacity_bytes"],
        "host_used_bytes": host["capacity_bytes"] - host["free_bytes"],
        "host_codec": status["policy"]["host.codec"],
        "demoted_pages": status["totals"]["demoted"],
        "blocks": dict(lay),
        "tokens_reused": sum(answer["cached_tokens"] for answer in loaded),
        "tokens_asked": len(loaded) * TOKENS,
        "same_next_token": same,
        "logit_difference": max(logit_difference(*pair) for pair in zip(computed, loaded, strict=True)),
        "logit_scale": max(abs(logit) for answer in computed for logit in answer["logits"]),
        "ok": lay["host"] > 0 and lay["ram"] + lay["host"] > asked * 3 // 4,
    }


def _settled(reader: ChildProcess) -> None:
    """Waits until no more pages are demoted. Raises KVClusterError if that takes too long."""
    seen = [-1]

    def unchanged() -> bool:
        seen.append(reader.ask("status")["totals"]["demoted"])
        return bool(seen[-1] == seen[-2])

    wait_until(unchanged, "no more pages are demoted", poll_s=1.0)


def logit_difference(one: Figures, other: Figures) -> float:
    """Returns the largest difference of a logit of two answers."""
    return max(abs(float(a) - float(b)) for a, b in zip(one["logits"], other["logits"], strict=True))
