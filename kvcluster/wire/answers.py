"""The coordinator's replies. They share one envelope, since each may be a refusal instead."""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.ids import SequenceId
from kvcluster.core.messages import (
    Attached,
    BlockFate,
    BlocksPinned,
    Decision,
    EngineInfo,
    Engines,
    Explained,
    LoadGrant,
    Namespaces,
    PinList,
    PinnedRun,
    Probed,
    Purged,
    Registered,
    ShardFindings,
    ShardStatus,
    SiblingSpecs,
    Status,
    StoreGrant,
    StoreRun,
    TablesSynced,
    TenantStatus,
    TenantTier,
    Tier,
)
from kvcluster.core.spec import KVSpec
from kvcluster.wire.checks import at_most, must
from kvcluster.wire.common import (
    ADDRESS,
    DEPTHS,
    DONE,
    EPOCH,
    HASHES,
    MAYBE_ADDRESSES,
    MESSAGE_BLOCKS,
    MISS,
    MISSES,
    NAMESPACE,
    NS,
    REFUSED,
    SEQUENCES,
    SHARD,
    SPEC,
    TENANT,
    TIER,
    pairs,
)
from kvcluster.wire.fields import (
    PLAIN,
    Columns,
    EnumField,
    Interned,
    Maybe,
    OneOf,
    Ragged,
    Rows,
    Struct,
    amount,
    amounts,
    each,
    words,
)
from kvcluster.wire.plans import COUNTS, MAYBE_PLANS, RUNS, check_cover
from kvcluster.wire.reports import (
    ACK,
    CONFIG_HASH,
    COUNTERS,
    FACTS,
    FINDINGS,
    INFO,
    ISSUED_CREDENTIAL,
    NODE,
    PROTOCOL,
    RELEASE,
    codec_errors,
)
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import coordinator_pb2 as pb

SHARDS = 65_536
"""Limit of the shards of one cluster: no cluster has nearly as many processes."""

DECISION: EnumField[Decision] = EnumField(Decision, pb.Decision, "DECISION_")
POLICY = Rows(pairs("a policy's name", "a policy's value"), limits.POLICIES, "settings")


def _check_stores(reply: StoreGrant) -> None:
    fits = all((run.decision is Decision.WRITE) == (run.shard is not None) for run in reply.runs)
    must(fits, "a run must name a shard if it is to be written, and only then")


def _check_fates(reply: Explained) -> None:
    either = all((fate.plan is None) != (fate.miss is None) for fate in reply.fates)
    must(either, "a block must have either a plan or a miss")


def _check_engine(info: EngineInfo) -> None:
    must(info.engine, "an engine must have an id")
    texts = (info.engine, info.name, info.model, info.weights, *(text for fact in info.facts for text in fact))
    at_most(sum(len(text.encode()) for text in texts), limits.ENGINE_BYTES, "bytes of an engine's texts")


ENGINE = Struct(
    pb.Engine,
    EngineInfo,
    _check_engine,
    engine=words("an engine"),
    name=words("a name"),
    model=words("a model"),
    weights=words("weights"),
    facts=Rows(pairs("a fact", "a fact"), limits.ENGINE_FACTS, "facts"),
    private=PLAIN,
    withdrawn=amount("withdrawals"),
    ready=PLAIN,
    protocol=PROTOCOL,
)
_ATTACHED = Struct(
    pb.Attached,
    Attached,
    lambda reply: must(reply.run_blocks, "a run must have at least one block"),
    namespace=NAMESPACE,
    epoch=EPOCH,
    ticket_ttl_ns=NS,
    run_blocks=PLAIN,
    shards=Rows(each(ADDRESS), SHARDS, "shards"),
    wants_tokens=PLAIN,
    read_only=PLAIN,
)
_LOAD_GRANT = Struct(
    pb.LoadGrant,
    LoadGrant,
    lambda reply: check_cover(reply.runs, reply.blocks),
    blocks=PLAIN,
    runs=RUNS,
    hold_ns=NS,
    miss=Maybe(MISS),
)
_STORE_RUNS = Columns(
    pb.StoreRuns, StoreRun, count=COUNTS, decision=DECISION.column, shard=MAYBE_ADDRESSES, miss=MISSES
)
_FATES = Columns(pb.BlockFates, BlockFate, count=COUNTS, plan=MAYBE_PLANS, miss=MISSES)
_NAMESPACES: Columns[tuple[KVSpec, int]] = Columns(pb.SpecBlocks, None, spec=each(SPEC), blocks=amounts("blocks"))
_ENGINES: Columns[tuple[EngineInfo, int]] = Columns(
    pb.EngineList, None, engine=each(ENGINE), seen_ns_ago=amounts("nanoseconds")
)
_SHARD_STATUS = Struct(
    pb.ShardStatus,
    ShardStatus,
    info=INFO,
    state=words("a state"),
    seen_ns_ago=NS,
    restarts=amount("restarts"),
    restarted_ns_ago=NS,
)
_TENANT_TIER = Struct(
    pb.TenantTier,
    TenantTier,
    tier=TIER,
    used_bytes=amount("bytes"),
    floor_bytes=Maybe(amount("bytes")),
    limit_bytes=Maybe(amount("bytes")),
)
_TENANT_STATUS = Struct(
    pb.TenantStatus,
    TenantStatus,
    tenant=TENANT,
    tiers=Rows(each(_TENANT_TIER), len(Tier), "tiers of a tenant"),
    pinned_bytes=amount("bytes"),
    most_pinned_bytes=Maybe(amount("bytes")),
    sequences=amount("sequences"),
    most_sequences=Maybe(amount("sequences")),
    engines=amount("engines"),
    most_engines=Maybe(amount("engines")),
    calls_per_1000_s=Maybe(amount("calls")),
    bytes_per_s=Maybe(amount("bytes")),
)
_STATUS = Struct(
    pb.Status,
    Status,
    epoch=EPOCH,
    state=words("a state"),
    uptime_ns=NS,
    namespaces=amount("namespaces"),
    blocks=amount("blocks"),
    tickets=amount("tickets"),
    shards=Rows(each(_SHARD_STATUS), SHARDS, "shards"),
    counters=COUNTERS,
    policy=POLICY,
    fallen=codec_errors(limits.NAMESPACES),
    sequences=amount("sequences"),
    claimed_blocks=amount("claimed blocks"),
    private_blocks=amount("private blocks"),
    tenant=TENANT,
    node=NODE,
    release=RELEASE,
    config_hash=CONFIG_HASH,
    protocol=PROTOCOL,
    waiting=Rows(each(words("a reason for waiting")), limits.SCHEDULE_LINES, "shards that wait"),
    orphans=Rows(Columns(pb.Orphans, None, shard=each(SHARD), node=each(NODE)), limits.SCHEDULE_LINES, "orphans"),
    tenants=Rows(each(_TENANT_STATUS), limits.LISTED_TENANTS, "tenants"),
    warnings=Rows(each(words("a warning")), limits.SCHEDULE_LINES, "warnings"),
)
_SHARD_FINDINGS = Struct(pb.ShardFindings, ShardFindings, shard=SHARD, findings=FINDINGS)
_CHANGED: Rows[SequenceId] = Rows(SEQUENCES, limits.SEQUENCES_PER_HOLDER, "sequences in a message")

_PINNED_RUNS: Columns[PinnedRun] = Columns(
    pb.PinnedRuns,
    PinnedRun,
    tenant=Interned(common_pb2.TextTable, each(TENANT), "a tenant"),
    spec=Interned(pb.SpecTable, each(SPEC), "a spec"),
    before=HASHES,
    first=DEPTHS,
    blocks=Ragged(pb.HashLists, MESSAGE_BLOCKS, limits.BLOCKS_PER_CALL, "block hashes in a message"),
    block_bytes=amounts("bytes of a block"),
    left_ns=amounts("nanoseconds"),
)

REPLY = OneOf(
    pb.CoordinatorReply,
    "the coordinator's answer",
    refused=REFUSED,
    done=DONE,
    attached=_ATTACHED,
    load_grant=_LOAD_GRANT,
    store_grant=Struct(
        pb.StoreGrant, StoreGrant, _check_stores, runs=Rows(_STORE_RUNS, limits.BLOCKS_PER_CALL, "runs in a message")
    ),
    explained=Struct(
        pb.Explained, Explained, _check_fates, fates=Rows(_FATES, limits.BLOCKS_PER_CALL, "fates in a message")
    ),
    sibling_specs=Struct(
        pb.SiblingSpecs, SiblingSpecs, specs=Rows(each(SPEC), limits.EXPLAINED_NAMESPACES, "sibling specs")
    ),
    pinned=Struct(pb.Pinned, BlocksPinned, blocks=amount("pinned blocks", limits.BLOCKS_PER_CALL)),
    status=_STATUS,
    report_ack=ACK,
    purged=Struct(pb.Purged, Purged, blocks=amount("purged blocks")),
    namespaces=Struct(pb.Namespaces, Namespaces, known=Rows(_NAMESPACES, limits.LISTED_NAMESPACES, "namespaces")),
    registered=Struct(pb.Registered, Registered, ttl_ns=NS, weights=words("weights")),
    engines=Struct(pb.Engines, Engines, known=Rows(_ENGINES, limits.LISTED_ENGINES, "engines")),
    tables_synced=Struct(
        pb.TablesSynced, TablesSynced, ttl_ns=NS, epoch=EPOCH, reopen=_CHANGED, refused=_CHANGED, forgotten=PLAIN
    ),
    probed=Struct(
        pb.Probed,
        Probed,
        number=amount("number of a probe"),
        running=PLAIN,
        coordinator=FACTS,
        shards=Rows(each(_SHARD_FINDINGS), limits.PROBED_SHARDS, "shards in a probe"),
        silent=Rows(each(SHARD), limits.PROBED_SHARDS, "shards in a probe"),
    ),
    pins=Struct(
        pb.Pins,
        PinList,
        lambda reply: must(all(run.blocks for run in reply.runs), "a run of pinned blocks must have at least one"),
        runs=Rows(_PINNED_RUNS, limits.BLOCKS_PER_CALL, "runs of pinned blocks in a message"),
        next=amount("pinned blocks"),
        more=amount("pinned blocks"),
    ),
    issued_credential=ISSUED_CREDENTIAL,
)
"""Any reply of the coordinator."""
