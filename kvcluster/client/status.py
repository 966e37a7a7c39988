"""A cluster's status as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcluster.core.messages import ShardInfo, Status, TenantStatus, TierUse
from kvcluster.core.tiers import INGEST


def status_dict(status: Status) -> dict[str, Any]:
    """Returns a value fit for JSON: counters as a mapping, shards as a list of mappings, `hit_rate` of blocks or None.

    `tenants` has what each tenant has beside its quota (`tenant_dict`). `totals` sums the counters of all shards;
    `lost_shards` names those in state "lost"; `differing` has the shards of another release or configuration than the
    coordinator's, each with a description of the difference; `waiting` has a sentence for each shard that the cluster
    lacks, and `orphans` the volumes that belong to no running shard, each with the address of its node. Each shard has
    `restarts`, their number since the coordinator started, `uptime_ns` ago, and `restarted_ns_ago`, when the last one
    was.
    """
    out = asdict(status)
    out["counters"] = dict(status.counters)
    out["policy"] = dict(status.policy)
    out["fallen"] = {namespace.hex(): error / 1e6 for namespace, error in status.fallen}
    out["shards"] = [
        {
            **_without_others(shard.info),
            "counters": dict(shard.info.counters),
            "above": [_use(use) for use in shard.info.others if use.tier < INGEST],
            "below": [_use(use) for use in shard.info.others if use.tier > INGEST],
            "state": shard.state,
            "seen_ns_ago": shard.seen_ns_ago,
            "restarts": shard.restarts,
            "restarted_ns_ago": shard.restarted_ns_ago,
        }
        for shard in status.shards
    ]
    totals: dict[str, int] = {}
    for shard in status.shards:
        for name, value in shard.info.counters:
            totals[name] = totals.get(name, 0) + value
    out["totals"] = totals
    out["lost_shards"] = [shard.info.shard for shard in status.shards if shard.state == "lost"]
    out["differing"] = {
        shard.info.shard: difference
        for shard in status.shards
        if shard.state != "lost" and (difference := _difference(shard.info, status))
    }
    out["tenants"] = [tenant_dict(one) for one in status.tenants]
    out["warnings"] = list(status.warnings)
    out["waiting"] = list(status.waiting)
    out["orphans"] = [{"shard": shard, "node": node} for shard, node in status.orphans]
    asked = out["counters"].get("asked_blocks", 0)
    out["hit_rate"] = out["counters"].get("hit_blocks", 0) / asked if asked else None
    return out


def tenant_dict(tenant: TenantStatus) -> dict[str, Any]:
    """Returns a value fit for JSON: what a tenant has, and what its quota grants it, None for no bound."""
    tiers = {
        use.tier.name.lower(): {
            "used_bytes": use.used_bytes,
            "floor_bytes": use.floor_bytes,
            "limit_bytes": use.limit_bytes,
        }
        for use in tenant.tiers
    }
    calls = tenant.calls_per_1000_s
    return {
        "tenant": tenant.tenant,
        "tiers": tiers,
        "pinned_bytes": tenant.pinned_bytes,
        "most_pinned_bytes": tenant.most_pinned_bytes,
        "sequences": tenant.sequences,
        "most_sequences": tenant.most_sequences,
        "engines": tenant.engines,
        "most_engines": tenant.most_engines,
        "requests_per_second": None if calls is None else calls / 1_000,
        "bytes_per_second": tenant.bytes_per_s,
    }


def other_tiers(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tiers of a shard as in `status_dict`, except RAM: the fastest first."""
    return [*shard["above"], *shard["below"]]


def _without_others(info: ShardInfo) -> dict[str, Any]:
    return {name: value for name, value in asdict(info).items() if name != "others"}


def _use(use: TierUse) -> dict[str, Any]:
    return use._asdict() | {"tier": use.tier.name.lower()}


def _difference(info: ShardInfo, status: Status) -> str:
    """Describes how the process of a shard differs from the coordinator's; "" if it does not. What the coordinator does
    not report is not compared: with an older version of the protocol it reports nothing, and to a tenant no
    configuration."""
    differences = []
    if status.release and info.release != status.release:
        differences.append(f"release {info.release or 'unknown, an older one'}, the coordinator {status.release}")
    if status.config_hash and info.config_hash and info.config_hash != status.config_hash:
        differences.append(f"configuration {info.config_hash}, the coordinator {status.config_hash}")
    return "; ".join(differences)
