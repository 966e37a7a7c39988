"""Fixed values for the screens of commands: a cluster that is well, one in trouble, and what is asked of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcluster.cli.cluster_doctor import judged
from kvcluster.cli.model_doctor import findings
from kvcluster.cli.pin import pins_dict
from kvcluster.client.status import status_dict, tenant_dict
from kvcluster.core.groups import Group, Plane, window
from kvcluster.core.ids import Epoch, ShardId, Tenant
from kvcluster.core.messages import (
    Findings,
    Link,
    ListeningPort,
    Probed,
    ProcessFacts,
    ShardFindings,
    ShardInfo,
    ShardStatus,
    Status,
    TenantStatus,
    TenantTier,
    Tier,
    TierUse,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.model_kinds import FULL, MAMBA, SINKS, WINDOWS
from kvcluster.core.model_outcome import CONTRACT, REFUSED, UNKNOWN, ModelOutcome
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.transfer import BlockExplanation, Lookup, PinListing, PinnedPrefix

MIB, GIB = 2**20, 2**30
ADDRESS = "10.0.0.9:7070"
SPEC = KVSpec.uniform(
    model="llama-3-8b",
    weights="sha256:4f1c2a9be07d5512",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_tokens=16,
)
_PROCESS: dict[str, Any] = {"node": "node-1", "release": "1.2.0", "config_hash": "c0ffee12", "protocol": 3}
_POLICY = (("host.codec", "q8"), ("host.raw_blocks", "1"), ("promote.loads", "4"), ("cache", "on"))
_COUNTERS = {"asked_blocks": 1_024, "hit_blocks": 758, "write_blocks": 266, "duplicate_blocks": 24}
_FACTS = ProcessFacts(
    5 * GIB, 16 * GIB, (ListeningPort("grpc", 7100, "7100-7163"), ListeningPort("tcp", 7101, "7100-7163"))
)


def _shard(number: int, **about: Any) -> ShardInfo:
    below = (
        TierUse(Tier.HOST, 4 * GIB, 3 * GIB, 1_100),
        TierUse(Tier.DISK, 100 * GIB, 88 * GIB, 12_004),
    )
    counters = (("evicted", 50), ("pulled", 4), ("demoted", 1_400), ("promoted", 12), ("staged", 88))
    own = _PROCESS | {"node": f"node-{number + 1}"}
    where = f"10.0.0.{number + 1}:7100", f"node-{number + 1}@m{number}/1"
    info = ShardInfo(
        ShardId(f"shard-{number}"), Epoch(1), *where, GIB, 300 * MIB, 362, 2, counters, others=below, **own
    )
    return replace(info, **about)


def _status(*shards: ShardStatus, **more: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"policy": _POLICY, **_PROCESS, **more}
    counters = tuple({**_COUNTERS, **about.pop("counters", {})}.items())
    return status_dict(Status(Epoch(1), "serving", 5_400 * 10**9, 2, 26_932, 3, shards, counters, **about))


def well() -> dict[str, Any]:
    """Two shards with three tiers each, and two engines."""
    engines = [{"name": f"host-{number}:4711", "model": SPEC.model, "protocol": 3} for number in (1, 2)]
    status = _status(ShardStatus(_shard(0), "up", 0), ShardStatus(_shard(1), "up", 0))
    return status | {"apart": [], "engines": engines}


def fresh() -> dict[str, Any]:
    """A cluster that has just started: one shard with one tier, nothing stored, every counter 0."""
    info = ShardInfo(ShardId("shard-0"), Epoch(1), "127.0.0.1:7100", "here@m/1", GIB, GIB, 0, 0, (), **_PROCESS)
    nothing = tuple(dict.fromkeys(_COUNTERS, 0).items())
    return status_dict(
        Status(Epoch(1), "serving", 12 * 10**9, 0, 0, 0, (ShardStatus(info, "up", 0),), nothing, (), **_PROCESS)
    )


def in_trouble() -> dict[str, Any]:
    """A shard without its disk tier that runs another release, one that is lost, and one that drains."""
    trouble = (
        "the shard runs without its disk tier: shard.disk_dir: /mnt/nvme/kv/shard-0 cannot be used: Permission denied"
    )
    shards = (
        ShardStatus(
            _shard(0, trouble=trouble, others=(), release="1.1.0", counters=(("corrupt", 3),)), "up", 0, 12, 100 * 10**9
        ),
        ShardStatus(_shard(1), "lost", 0, 1, 3_000 * 10**9),
        ShardStatus(_shard(2, draining=True), "draining", 0),
    )
    waiting = "a shard of group shard waits for a node with kvcluster_shard 1, 20 GiB of memory free"
    status = _status(*shards, waiting=(waiting,), orphans=((ShardId("shard-7"), "node-9"),))
    apart = f"{SPEC.model}: 2 blocks cannot be shared with 80 others; different weights (sha256:2, not sha256:4f1c)"
    return status | {"apart": [apart], "engines": []}


def engines() -> list[dict[str, Any]]:
    """An engine that shares, and one whose weights changed."""
    facts = {"engine": "vllm 0.11.0", "dtype": "bfloat16", "block_tokens": 16, "layout": "NHD", "ranks": 2}
    shared = {"name": "host-1:4711", "model": SPEC.model, "weights": SPEC.weights, "facts": facts, "private": False}
    changed = {"name": "host-2:4711", "weights": "private:1b2c3d4e5f60718293a4b5c6", "private": True}
    return [shared, {**shared, **changed}]


def tenants() -> dict[str, Any]:
    """One at its limit, one with a floor alone, one without a quota, and floors that do not fit."""
    tiers = TenantTier(Tier.RAM, 15 * GIB, 4 * GIB, 16 * GIB), TenantTier(Tier.DISK, 40 * GIB, None, 400 * GIB)
    chat = TenantStatus(
        Tenant("chat"), tiers, GIB, 2 * GIB, 200, 200, 3, 8, calls_per_1000_s=500_000, bytes_per_s=2 * GIB
    )
    search = TenantStatus(Tenant("search"), (TenantTier(Tier.RAM, 300 * MIB, 8 * GIB),), sequences=7)
    trial = TenantStatus(Tenant("trial"), (TenantTier(Tier.RAM, 12 * MIB),))
    warning = (
        f"the floors of the quota file have {12 * GIB} bytes of the ram tier together, and the shards have {12 * GIB}: "
        "each floor is scaled down, so that all have 80%"
    )
    return {"tenants": [tenant_dict(one) for one in (chat, search, trial)], "warnings": [warning]}


def pins() -> dict[str, Any]:
    """A system prompt, two prompts that begin with it, what was left of a third, and more."""
    gib = 2**30

    def pin(name: str, tokens: int, shared: int = 0, first: int = 0, **about: Any) -> PinnedPrefix:
        blocks = tokens // SPEC.block_tokens
        known: dict[str, Any] = {"tenant": "chat", "spec": SPEC, "nbytes": gib * tokens // 8_192, "left_s": 86_000.0}
        known |= about
        return PinnedPrefix(
            (name * 16)[:64], first=first, blocks=blocks, tokens=tokens, shared_blocks=shared, own=(), **known
        )

    tuned = replace(SPEC, adapter="sha256:9e107d9d372bb6826bd81d3542a419d6")
    listed = (
        *(pin("3fa9c1", 10_240, 256), pin("77e0b2", 6_144, 256)),
        pin("c04d5e", 2_048, first=64, left_s=90.0),
        pin("e8f1a6", 512, tenant="search", spec=tuned, left_s=3_000.0),
    )
    return pins_dict(PinListing(listed, 4_096))


def _transport(name: str, why: str | None = None, advice: str | None = None, trip_ms: float = 0.2) -> dict[str, Any]:
    works = why is None
    times = {"connect_ms": 3 * trip_ms if works else None, "trip_ms": trip_ms if works else None}
    return {"transport": name, "works": works, **times, "why": why, "advice": advice}


def _tls(days_left: int = 61, why: str | None = None) -> dict[str, Any]:
    shown = {"version": "TLSv1.3", "cipher": "TLS_AES_256_GCM_SHA384", "days_left": days_left, "names": ["kv.example"]}
    return {"name": "kv.example", "why": why, **shown}


def _diagnosed(
    status: dict[str, Any],
    found: dict[ShardId, Findings],
    shards: list[dict[str, Any]],
    tls: dict[str, Any] | None = None,
) -> dict[str, Any]:
    own = ProcessFacts(0, 16 * GIB, (ListeningPort("workers", 7070, "7070"),))
    rows = tuple(ShardFindings(shard, findings) for shard, findings in found.items())
    coordinator = {"reachable": True, "protocol_version": 3, "credential": "accepted", "state": "serving"}
    return {
        "address": ADDRESS,
        "kernels": "avx2",
        "openssl": {"release": "OpenSSL 3.5.9 29 Sep 2026", "fast": True},
        "coordinator": coordinator | {"apart": status["apart"], "why": None, "advice": None},
        "tls": tls,
        "shards": shards,
        "cluster": judged(status, Probed(7, False, own, rows, ()), shards, ADDRESS),
        "healthy": True,
        "verdict": f"all {len(shards)} shard(s) can be reached: {len(shards)} by tcp",
    }


def _found(target: str, *, clock_ns: int = 300_000, why: str = "") -> Findings:
    links = (Link(ShardId(target), "grpc", 0 if why else 900_000, why), Link(ShardId(target), "tcp", 200_000))
    return Findings(7, _FACTS, clock_ns, 900_000, links)


def diagnosis() -> dict[str, Any]:
    """What the doctor finds of the cluster that is well, for an operator."""
    elsewhere = "another host: the shard is on node-1, and this is here"
    shards = [
        {"shard": name, "chosen": "tcp", "why": None, "tls": _tls()}
        | {"transports": [_transport("shm", elsewhere), _transport("tcp"), _transport("grpc", trip_ms=0.8)]}
        for name in ("shard-0", "shard-1")
    ]
    found = {ShardId("shard-0"): _found("shard-1"), ShardId("shard-1"): _found("shard-0")}
    return _diagnosed(well(), found, shards, _tls())


def bad_diagnosis() -> dict[str, Any]:
    """What it finds of the one in trouble: a link that is cut, a clock that is off, and a transport that fails."""
    refused = _transport("tcp", "Connection refused", "open the ports of server.shard_ports in firewalls")
    transports = [refused, _transport("grpc")]
    shards = [{"shard": "shard-0", "chosen": "grpc", "why": None, "tls": _tls(9), "transports": transports}]
    found = {
        ShardId("shard-0"): _found("shard-2", why="no answer within 2 s"),
        ShardId("shard-2"): _found("shard-0", clock_ns=-3_600 * 10**9),
    }
    expired = "the certificate of kv.example is refused: certificate has expired"
    return _diagnosed(in_trouble(), found, shards, _tls(why=expired)) | {
        "openssl": {"release": "OpenSSL 3.0.19 27 Jan 2026", "fast": False}
    }


def unreachable() -> dict[str, Any]:
    """What it finds where nothing listens."""
    why, advice = f"nothing listens at {ADDRESS}", "check that the coordinator runs there"
    coordinator = {"reachable": False, "protocol_version": None, "credential": None, "state": None, "apart": []}
    cluster = {"why": None, "processes": [], "pairs": [], "problems": []}
    return {
        "address": ADDRESS,
        "coordinator": coordinator | {"why": why, "advice": advice},
        "tls": None,
        "shards": [],
        "cluster": cluster,
        "healthy": False,
        "verdict": f"this machine cannot use the cluster: {why}",
    }


def _model(path: str, outcome: ModelOutcome) -> dict[str, Any]:
    return findings(path, outcome) | {"vllm": "0.32.0"}


def served_model() -> dict[str, Any]:
    """What the doctor finds of a checkpoint with windows, whose dtype its file does not give."""
    planes = Plane("k", 8, 64, "bfloat16"), Plane("v", 8, 64, "bfloat16")
    groups = Group(tuple(range(1, 24, 2)), planes), Group(tuple(range(0, 24, 2)), planes, window(128))
    assumed = ("config.json gives no dtype: bfloat16 is assumed",)
    kinds = FULL, WINDOWS, SINKS
    return _model("/models/gpt-oss", ModelOutcome("GptOssForCausalLM", CONTRACT, "", kinds, groups, assumed))


def refused_model() -> dict[str, Any]:
    """What it finds of a hybrid."""
    why = "a group keeps MambaSpec; served are FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec"
    return _model("/models/jamba", ModelOutcome("JambaForCausalLM", REFUSED, why, (FULL, MAMBA)))


def unknown_model() -> dict[str, Any]:
    """What it finds of an architecture that vLLM does not have."""
    why = "none of its architectures is among those of vLLM that were examined"
    return _model("/models/new", ModelOutcome("NewForCausalLM", UNKNOWN, why))


CERTIFICATE: dict[str, Any] = {
    "file": "/etc/kvcluster/tls/tls.crt",
    "subject": "CN=coordinator shard,O=prod",
    "issuer": "CN=kvcluster CA,O=prod",
    "ca": False,
    "roles": ["kvcluster://prod/coordinator", "kvcluster://prod/shard"],
    "names": ["head.example", "*.shards.example", "10.0.0.5"],
    "valid_from": "2026-05-01T09:55:00+00:00",
    "valid_until": "2026-07-30T10:00:00+00:00",
    "days_left": 61,
    "valid_now": True,
    "sha256": "3fa9c1" * 10 + "77e0",
    "verified": True,
    "why": None,
}


def ended_certificate() -> dict[str, Any]:
    """One of a worker, which is still beside the ca.crt that verified it."""
    worker = {"roles": ["kvcluster://prod/tenant/team-a"], "names": [], "days_left": -1, "valid_now": False}
    return CERTIFICATE | worker | {"verified": False, "why": "it is not valid at this time"}


LOOKUP = Lookup(1_024, 64, None, Miss(MissReason.EVICTED, "3 min ago"), Loss.Q8)
NO_LOOKUP = Lookup(0, 0, None, Miss(MissReason.NAMESPACE, "weights, extra.engine"))


def explained() -> list[BlockExplanation]:
    """Of 1,604 tokens: hits in two tiers, misses of several kinds, and a rest."""
    return [
        *(BlockExplanation(block, True, "ram", "shard-0") for block in range(60)),
        *(BlockExplanation(block, True, "disk", "shard-0, shard-1") for block in range(60, 64)),
        BlockExplanation(64, False, reason=MissReason.EVICTED, detail="3 min ago"),
        *(BlockExplanation(block, False, reason=MissReason.NEVER_SEEN) for block in range(65, 100)),
        BlockExplanation(100, False, reason=MissReason.BELOW_BLOCK, detail="4 tokens fill no block of 16"),
    ]
