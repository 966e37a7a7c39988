"""The demo's third act: a working set of three times the device tier, which a host tier keeps encoded.

One replica reads many documents, and then all of them again. What has no room in the device tier is there all the same,
in half of the bytes; and what that does to the output is shown beside it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import kvcluster
from kvcluster.cli.demo.replica import EngineReplica
from kvcluster.cli.demo.screen import Screen
from kvcluster.cli.demo.signals import Signals
from kvcluster.errors import KVClusterError

DOCUMENTS, TOKENS = 24, 256
TIMES = 3
"""The working set, in device tiers."""

_SETTLE_S = 30.0

Figures = dict[str, Any]


def conduct(reader: EngineReplica, screen: Screen, signals: Signals) -> Figures:
    """Plays the act with a replica that has its model, on a cluster of its own."""
    per_token: int = reader.ask("kv_bytes")["token_bytes"]
    working_set = DOCUMENTS * TOKENS * per_token
    device = working_set // TIMES
    with ExitStack() as house:
        with screen.step("start a cluster with a host tier"), signals.put_off():
            cluster = house.enter_context(
                kvcluster.local(device_bytes=device, host_bytes=2 * device, config={"coordinator": _PROMPTLY})
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
"""What was loaded a moment ago may go down at once: an engine would take longer to come back to it."""


def _read(reader: EngineReplica, progress: Callable[[int, int], None]) -> list[Figures]:
    """Every document, one after the other."""
    out = []
    for number in range(DOCUMENTS):
        out.append(reader.ask("read", number=number, tokens=TOKENS))
        progress(number + 1, DOCUMENTS)
    return out


def assess(computed: list[Figures], loaded: list[Figures], status: Figures, working_set: int) -> Figures:
    """What came back, from where, and what that did to the output. `ok`: most of three device tiers came back."""
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
        "device_bytes": shard["capacity_bytes"],
        "host_bytes": host["capacity_bytes"],
        "host_used_bytes": host["capacity_bytes"] - host["free_bytes"],
        "host_codec": status["policy"]["host.codec"],
        "demoted_pages": status["totals"]["demoted"],
        "blocks": dict(lay),
        "tokens_reused": sum(answer["cached_tokens"] for answer in loaded),
        "tokens_asked": len(loaded) * TOKENS,
        "same_next_token": same,
        "logit_difference": max(_difference(*pair) for pair in zip(computed, loaded, strict=True)),
        "logit_scale": max(abs(logit) for answer in computed for logit in answer["logits"]),
        "ok": lay["host"] > 0 and lay["device"] + lay["host"] > asked * 3 // 4,
    }


def _settled(reader: EngineReplica) -> None:
    """Waits until nothing moves any more."""
    give_up, before = time.monotonic() + _SETTLE_S, -1
    while (now := reader.ask("status")["totals"]["demoted"]) != before:
        if time.monotonic() > give_up:
            raise KVClusterError(f"pages still go down after {_SETTLE_S:.0f} s")
        before = now
        time.sleep(1.0)


def _difference(one: Figures, other: Figures) -> float:
    return max(abs(float(a) - float(b)) for a, b in zip(one["logits"], other["logits"], strict=True))
