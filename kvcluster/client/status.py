"""A cluster's status as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcluster.core.messages import Status


def status_dict(status: Status) -> dict[str, Any]:
    """Fit for JSON: counters as a mapping, shards as a list of mappings, `hit_rate` of blocks or None."""
    out = asdict(status)
    out["counters"] = dict(status.counters)
    out["shards"] = [
        {
            **asdict(shard.info),
            "counters": dict(shard.info.counters),
            "state": shard.state,
            "seen_ns_ago": shard.seen_ns_ago,
        }
        for shard in status.shards
    ]
    asked = out["counters"].get("asked_blocks", 0)
    out["hit_rate"] = out["counters"].get("hit_blocks", 0) / asked if asked else None
    return out
