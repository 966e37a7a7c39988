"""The demo's fourth act: a context 16 times as large as the memory that a replica has for it.

The document's KV lies on two shards. The replica answers a question about it, once by streaming the KV through its
memory for each token, and once by sending its queries to the shards. Then one shard is killed: the answer is the same,
computed again, or there is none and an error says what is lost.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from kvcluster.cli.child_process import ChildProcess
from kvcluster.cli.demo.screen import Screen

TIMES = 16
"""The context, in resident sets."""

Figures = dict[str, Any]


def conduct(replica: ChildProcess, screen: Screen, cluster: Any, question: str, right: str) -> Figures:
    """Runs the act with a replica that has stored the document. `right` is the digest of the ids that all KV in memory
    gives. Kills a shard of the cluster."""
    asked = {"question": question, "address": cluster.address, "times": TIMES}
    with screen.step(f"1/{TIMES} of the memory: KV is streamed") as progress:
        streamed = replica.ask("answer_far", progress, ship=False, **asked)
    with screen.step(f"1/{TIMES} of the memory: queries are shipped") as progress:
        shipped = replica.ask("answer_far", progress, ship=True, **asked)
    with screen.step("the control: one shard killed") as progress:
        os.kill(cluster.pids()[-1], signal.SIGKILL)
        cut_off = replica.ask("answer_far", progress, ship=True, **asked)
    return assess(streamed, shipped, cut_off, right)


def assess(streamed: Figures, shipped: Figures, cut_off: Figures, right: str) -> Figures:
    """Returns what each way moved. `ok`: the ids are those of all KV in memory, queries moved less than KV, and without
    a shard there is no other answer."""
    ways = {"streamed": streamed, "shipped": shipped}
    identical = all(way.get("digest") == right for way in ways.values())
    less = shipped.get("shipped_bytes", 0) > 0 and _moved(shipped) < _moved(streamed)
    return {
        **ways,
        "cut_off": cut_off,
        "right": right,
        "ok": identical and less and cut_off.get("digest", right) == right,
    }


def _moved(way: Figures) -> int:
    return int(way.get("loaded_bytes", 0) + way.get("shipped_bytes", 0))
