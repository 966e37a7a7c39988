"""The coordinator's replies. They share one envelope, since each may be a refusal instead."""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core import limits
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Attached,
    BlockFate,
    BlocksPinned,
    Decision,
    Done,
    Engines,
    Explained,
    LoadGrant,
    Namespaces,
    Plan,
    Purged,
    Refused,
    Registered,
    Reply,
    ReportAck,
    ShardAddress,
    ShardStatus,
    SiblingSpecs,
    Status,
    StoreGrant,
    StoreRun,
)
from kvcluster.core.miss import Miss
from kvcluster.errors import ProtocolError
from kvcluster.wire import common, coordinator, engines, orders, reports
from kvcluster.wire.common import EnumCodec, Interned, agree, at_most, pick, quantity, reference, text
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import coordinator_pb2 as pb

DECISION: EnumCodec[Decision, pb.Decision] = EnumCodec(Decision, pb.Decision, "DECISION_")


def encode_reply(reply: Reply) -> bytes:
    """Encodes any reply of the coordinator."""
    match reply:
        case Refused():
            m = pb.CoordinatorReply(refused=common.encode_refusal(reply))
        case Done():
            m = pb.CoordinatorReply(done=common_pb2.Done(ok=reply.ok))
        case Attached():
            m = pb.CoordinatorReply(attached=_encode_attached(reply))
        case LoadGrant():
            m = pb.CoordinatorReply(load_grant=_encode_load_grant(reply))
        case StoreGrant():
            m = pb.CoordinatorReply(store_grant=_encode_store_grant(reply))
        case Explained():
            m = pb.CoordinatorReply(explained=_encode_explained(reply))
        case SiblingSpecs():
            specs = pb.SiblingSpecs(specs=[common.encode_spec(spec) for spec in reply.specs])
            m = pb.CoordinatorReply(sibling_specs=specs)
        case Namespaces():
            m = pb.CoordinatorReply(namespaces=_encode_namespaces(reply))
        case Registered():
            m = pb.CoordinatorReply(registered=pb.Registered(ttl_ns=reply.ttl_ns, weights=reply.weights))
        case Engines():
            m = pb.CoordinatorReply(engines=engines.encode_engines(reply))
        case BlocksPinned():
            m = pb.CoordinatorReply(pinned=pb.Pinned(blocks=reply.blocks))
        case Purged():
            m = pb.CoordinatorReply(purged=pb.Purged(blocks=reply.blocks))
        case Status():
            m = pb.CoordinatorReply(status=_encode_status(reply))
        case ReportAck():
            m = pb.CoordinatorReply(report_ack=orders.encode_ack(reply))
        case _:
            raise AssertionError(f"{type(reply).__name__} is not a reply of a coordinator")
    return m.SerializeToString()


def decode_reply(data: bytes) -> Reply:
    """The inverse."""
    m = common.parse(pb.CoordinatorReply, data)
    decode = _REPLIES.get(m.WhichOneof("reply"))
    if decode is None:
        raise ProtocolError("the coordinator's answer is empty, or of a kind that is not known here: upgrade this side")
    return decode(m)


_REPLIES: dict[str | None, Callable[[pb.CoordinatorReply], Reply]] = {
    "refused": lambda m: common.decode_refusal(m.refused),
    "done": lambda m: Done(m.done.ok),
    "attached": lambda m: _decode_attached(m.attached),
    "load_grant": lambda m: _decode_load_grant(m.load_grant),
    "store_grant": lambda m: _decode_store_grant(m.store_grant),
    "explained": lambda m: _decode_explained(m.explained),
    "sibling_specs": lambda m: _decode_sibling_specs(m.sibling_specs),
    "namespaces": lambda m: _decode_namespaces(m.namespaces),
    "registered": lambda m: engines.decode_registered(m.registered),
    "engines": lambda m: engines.decode_engines(m.engines),
    "pinned": lambda m: BlocksPinned(at_most(m.pinned.blocks, limits.BLOCKS_PER_CALL, "pinned blocks")),
    "purged": lambda m: Purged(quantity(m.purged.blocks, "purged blocks")),
    "status": lambda m: _decode_status(m.status),
    "report_ack": lambda m: orders.decode_ack(m.report_ack),
}


def _encode_attached(reply: Attached) -> pb.Attached:
    return pb.Attached(
        protocol_version=PROTOCOL_VERSION,
        namespace=reply.namespace,
        epoch=reply.epoch,
        ticket_ttl_ns=reply.ticket_ttl_ns,
        run_blocks=reply.run_blocks,
        shards=[common.encode_address(shard) for shard in reply.shards],
        wants_tokens=reply.wants_tokens,
    )


def _decode_attached(m: pb.Attached) -> Attached:
    common.check_version(m.protocol_version)
    if not m.run_blocks:
        raise ProtocolError("a run must have at least one block")
    return Attached(
        namespace=common.decode_namespace(m.namespace),
        epoch=common.epoch(m.epoch),
        ticket_ttl_ns=quantity(m.ticket_ttl_ns, "nanoseconds"),
        run_blocks=m.run_blocks,
        shards=tuple([common.decode_address(shard) for shard in m.shards]),
        wants_tokens=m.wants_tokens,
    )


def _encode_load_grant(reply: LoadGrant) -> pb.LoadGrant:
    return pb.LoadGrant(
        blocks=reply.blocks,
        runs=common.encode_runs(reply.runs),
        hold_ns=reply.hold_ns,
        miss=common.encode_miss(reply.miss),
    )


def _decode_load_grant(m: pb.LoadGrant) -> LoadGrant:
    return LoadGrant(
        blocks=m.blocks,
        runs=common.decode_runs(m.runs, blocks=m.blocks),
        hold_ns=quantity(m.hold_ns, "nanoseconds"),
        miss=common.decode_miss(m.miss) if m.HasField("miss") else None,
    )


def _encode_store_grant(reply: StoreGrant) -> pb.StoreGrant:
    shards: Interned[ShardAddress] = Interned()
    misses: Interned[Miss] = Interned()
    runs = reply.runs
    return pb.StoreGrant(
        counts=[run.count for run in runs],
        decisions=[DECISION.encode[run.decision] for run in runs],
        shard_of=[reference(shards, run.shard) for run in runs],
        miss_of=[reference(misses, run.miss) for run in runs],
        shards=[common.encode_address(shard) for shard in shards],
        misses=common.encode_misses(misses),
    )


def _decode_store_grant(m: pb.StoreGrant) -> StoreGrant:
    counts = common.decode_counts(m.counts)
    agree("runs", counts, m.decisions, m.shard_of, m.miss_of)
    decisions = DECISION.decode_all(m.decisions)
    shards = pick([None, *map(common.decode_address, m.shards)], m.shard_of, "a shard")
    misses = common.decode_misses(m.misses, m.miss_of)
    for decision, shard in zip(decisions, shards, strict=True):
        if (decision is Decision.WRITE) != (shard is not None):
            raise ProtocolError("a run must name a shard if it is to be written, and only then")
    return StoreGrant(tuple(map(StoreRun, counts, decisions, shards, misses)))


def _encode_explained(reply: Explained) -> pb.Explained:
    plans: Interned[Plan] = Interned()
    misses: Interned[Miss] = Interned()
    return pb.Explained(
        counts=[fate.count for fate in reply.fates],
        plan_of=[reference(plans, fate.plan) for fate in reply.fates],
        miss_of=[reference(misses, fate.miss) for fate in reply.fates],
        plans=common.encode_plans(plans),
        misses=common.encode_misses(misses),
    )


def _decode_explained(m: pb.Explained) -> Explained:
    counts = common.decode_counts(m.counts)
    agree("fates", counts, m.plan_of, m.miss_of)
    plans = pick([None, *common.decode_plans(m.plans)], m.plan_of, "a plan")
    misses = common.decode_misses(m.misses, m.miss_of)
    for plan, miss in zip(plans, misses, strict=True):
        if (plan is None) == (miss is None):
            raise ProtocolError("a block must have either a plan or a miss")
    return Explained(tuple(map(BlockFate, counts, plans, misses)))


def _encode_namespaces(reply: Namespaces) -> pb.Namespaces:
    specs = [common.encode_spec(spec) for spec, _ in reply.known]
    return pb.Namespaces(specs=specs, blocks=[blocks for _, blocks in reply.known])


def _decode_namespaces(m: pb.Namespaces) -> Namespaces:
    at_most(agree("namespaces", m.specs, m.blocks), limits.LISTED_NAMESPACES, "namespaces")
    specs = [common.decode_spec(spec) for spec in m.specs]
    return Namespaces(tuple(zip(specs, [quantity(blocks, "blocks") for blocks in m.blocks], strict=True)))


def _decode_sibling_specs(m: pb.SiblingSpecs) -> SiblingSpecs:
    at_most(len(m.specs), limits.EXPLAINED_NAMESPACES, "sibling specs")
    return SiblingSpecs(tuple([common.decode_spec(spec) for spec in m.specs]))


def _encode_status(reply: Status) -> pb.Status:
    return pb.Status(
        epoch=reply.epoch,
        state=reply.state,
        uptime_ns=reply.uptime_ns,
        namespaces=reply.namespaces,
        blocks=reply.blocks,
        tickets=reply.tickets,
        shards=[
            pb.ShardStatus(info=reports.encode_info(s.info), state=s.state, seen_ns_ago=s.seen_ns_ago)
            for s in reply.shards
        ],
        counters=reports.encode_counters(reply.counters),
        policy_names=[name for name, _ in reply.policy],
        policy_values=[value for _, value in reply.policy],
        fallen_namespaces=b"".join([namespace for namespace, _ in reply.fallen]),
        fallen_errors=[error for _, error in reply.fallen],
    )


def _decode_status(m: pb.Status) -> Status:
    return Status(
        epoch=common.epoch(m.epoch),
        state=text(m.state, "a state"),
        uptime_ns=quantity(m.uptime_ns, "nanoseconds"),
        namespaces=quantity(m.namespaces, "namespaces"),
        blocks=quantity(m.blocks, "blocks"),
        tickets=quantity(m.tickets, "tickets"),
        shards=tuple(
            [
                ShardStatus(
                    reports.decode_info(s.info), text(s.state, "a state"), quantity(s.seen_ns_ago, "nanoseconds")
                )
                for s in m.shards
            ]
        ),
        counters=reports.decode_counters(m.counters),
        policy=coordinator.decode_policy(m.policy_names, m.policy_values),
        fallen=reports.decode_errors(m.fallen_namespaces, m.fallen_errors, limits.NAMESPACES),
    )
