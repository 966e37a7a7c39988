"""What workers ask of the coordinator, and its answers.

`decode_x(data, call, tenant)` is the server's half: `call` is the server's own and `tenant` that of the caller's
credential, so neither is ever read from the wire. Replies share one envelope, since any may be a refusal instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, CallId, ShardId, Tenant
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    BlockFate,
    Decision,
    Done,
    Drain,
    EndTicket,
    Explain,
    Explained,
    GetNamespaces,
    GetStatus,
    LoadGrant,
    Namespaces,
    PinBlocks,
    Pinned,
    Plan,
    PrepareLoad,
    PrepareStore,
    Purge,
    Purged,
    Refused,
    RenewTicket,
    Reply,
    ReportAck,
    SetPolicy,
    ShardAddress,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Status,
    StoreGrant,
    StoreRun,
    UnpinBlocks,
)
from kvcluster.core.reasons import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.wire import common, orders, reports
from kvcluster.wire.common import EnumCodec, Interned, agree, at_most, pick, quantity, reference, text
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import coordinator_pb2 as pb

DECISION: EnumCodec[Decision, pb.Decision] = EnumCodec(Decision, pb.Decision, "DECISION_")

# ------------------------------------------------------------------------------------------ questions


def encode_attach(spec: KVSpec) -> bytes:
    """The request of both services' Attach."""
    return pb.AttachRequest(protocol_version=PROTOCOL_VERSION, spec=common.encode_spec(spec)).SerializeToString()


def decode_attach_spec(data: bytes) -> KVSpec:
    """The inverse. The version is compared before anything else is read."""
    m = common.parse(pb.AttachRequest, data)
    common.check_version(m.protocol_version)
    return common.decode_spec(m.spec)


def decode_attach(data: bytes, call: CallId, tenant: Tenant) -> Attach:
    """A worker names its spec."""
    return Attach(call, tenant, decode_attach_spec(data))


def encode_prepare_load(message: PrepareLoad) -> bytes:
    """How far can these blocks be restored?"""
    return pb.PrepareLoadRequest(
        namespace=message.namespace,
        holder=message.attempt.holder,
        attempt=message.attempt.counter,
        hashes=b"".join(message.hashes),
        need=common.encode_need(message.need),
        hold=message.hold,
    ).SerializeToString()


def decode_prepare_load(data: bytes, call: CallId, tenant: Tenant) -> PrepareLoad:
    """The inverse."""
    m = common.parse(pb.PrepareLoadRequest, data)
    return PrepareLoad(
        call=call,
        tenant=tenant,
        namespace=common.decode_namespace(m.namespace),
        attempt=common.decode_attempt(m.holder, m.attempt),
        hashes=common.decode_blocks(m.hashes),
        need=common.decode_need(m.need),
        hold=m.hold,
    )


def encode_prepare_store(message: PrepareStore) -> bytes:
    """Which of these blocks are worth writing?"""
    return pb.PrepareStoreRequest(
        namespace=message.namespace,
        holder=message.attempt.holder,
        attempt=message.attempt.counter,
        first=message.first,
        parent=message.parent,
        run=message.run,
        hashes=b"".join(message.hashes),
        parts=common.encode_parts(message.parts),
        loss=common.LOSS.encode[message.loss],
        host=message.host,
    ).SerializeToString()


def decode_prepare_store(data: bytes, call: CallId, tenant: Tenant) -> PrepareStore:
    """The inverse."""
    m = common.parse(pb.PrepareStoreRequest, data)
    hashes = common.decode_blocks(m.hashes)
    parts = common.decode_parts(m.parts)
    at_most(m.first + len(hashes), limits.TOKENS_PER_SEQUENCE, "blocks in a chain")
    at_most(len(hashes) * len(parts), limits.PAGES_PER_CALL, "pages in a store")
    return PrepareStore(
        call=call,
        tenant=tenant,
        namespace=common.decode_namespace(m.namespace),
        attempt=common.decode_attempt(m.holder, m.attempt),
        first=m.first,
        parent=common.decode_hash(m.parent),
        run=common.decode_hash(m.run),
        hashes=hashes,
        parts=tuple(parts),
        loss=common.LOSS.decode(m.loss),
        host=text(m.host, "a host"),
    )


def encode_ticket_end(message: RenewTicket | EndTicket) -> bytes:
    """The request of both that name a ticket."""
    return pb.TicketRequest(holder=message.attempt.holder, attempt=message.attempt.counter).SerializeToString()


def decode_renew_ticket(data: bytes, call: CallId, tenant: Tenant) -> RenewTicket:
    """A ticket is still wanted."""
    return RenewTicket(call, _decode_attempt(data))


def decode_end_ticket(data: bytes, call: CallId, tenant: Tenant) -> EndTicket:
    """A ticket is no longer wanted."""
    return EndTicket(call, _decode_attempt(data))


def _decode_attempt(data: bytes) -> Attempt:
    m = common.parse(pb.TicketRequest, data)
    return common.decode_attempt(m.holder, m.attempt)


def encode_explain(message: Explain) -> bytes:
    """Where is each of these blocks, or why is it not?"""
    return pb.ExplainRequest(
        namespace=message.namespace, hashes=b"".join(message.hashes), need=common.encode_need(message.need)
    ).SerializeToString()


def decode_explain(data: bytes, call: CallId, tenant: Tenant) -> Explain:
    """The inverse."""
    m = common.parse(pb.ExplainRequest, data)
    hashes = common.decode_blocks(m.hashes)
    return Explain(call, tenant, common.decode_namespace(m.namespace), hashes, common.decode_need(m.need))


def encode_siblings(message: Siblings) -> bytes:
    """Which other namespaces has this tenant?"""
    return pb.SiblingsRequest(namespace=message.namespace).SerializeToString()


def decode_siblings(data: bytes, call: CallId, tenant: Tenant) -> Siblings:
    """The inverse."""
    return Siblings(call, tenant, common.decode_namespace(common.parse(pb.SiblingsRequest, data).namespace))


def encode_get_namespaces(message: GetNamespaces) -> bytes:
    """Which namespaces has this tenant?"""
    return pb.GetNamespacesRequest().SerializeToString()


def decode_get_namespaces(data: bytes, call: CallId, tenant: Tenant) -> GetNamespaces:
    """The inverse."""
    common.parse(pb.GetNamespacesRequest, data)
    return GetNamespaces(call, tenant)


def encode_pin_blocks(message: PinBlocks) -> bytes:
    """Spare these blocks for a while."""
    return pb.PinBlocksRequest(
        namespace=message.namespace,
        hashes=b"".join(message.hashes),
        ttl_ns=message.ttl_ns,
        replicas=message.replicas,
    ).SerializeToString()


def decode_pin_blocks(data: bytes, call: CallId, tenant: Tenant) -> PinBlocks:
    """The inverse."""
    m = common.parse(pb.PinBlocksRequest, data)
    if not m.replicas:
        raise ProtocolError("a pinned block lies on one shard at least")
    return PinBlocks(
        call=call,
        tenant=tenant,
        namespace=common.decode_namespace(m.namespace),
        hashes=common.decode_blocks(m.hashes),
        ttl_ns=quantity(m.ttl_ns, "nanoseconds"),
        replicas=at_most(m.replicas, limits.REPLICAS, "replicas of a block"),
    )


def encode_unpin_blocks(message: UnpinBlocks) -> bytes:
    """Let these blocks be evicted again."""
    return pb.UnpinBlocksRequest(namespace=message.namespace, hashes=b"".join(message.hashes)).SerializeToString()


def decode_unpin_blocks(data: bytes, call: CallId, tenant: Tenant) -> UnpinBlocks:
    """The inverse."""
    m = common.parse(pb.UnpinBlocksRequest, data)
    return UnpinBlocks(call, tenant, common.decode_namespace(m.namespace), common.decode_blocks(m.hashes))


def encode_purge(message: Purge) -> bytes:
    """Forget every block of the namespaces that have these values."""
    return pb.PurgeRequest(model=message.model, weights=message.weights, adapter=message.adapter).SerializeToString()


def decode_purge(data: bytes, call: CallId, tenant: Tenant) -> Purge:
    """The inverse."""
    m = common.parse(pb.PurgeRequest, data)
    model = m.model if m.HasField("model") else None
    weights = m.weights if m.HasField("weights") else None
    adapter = m.adapter if m.HasField("adapter") else None
    # What is longer than a whole spec is in none, and a tombstone would carry it to every shard.
    named = sum(len(value.encode()) for value in (model, weights, adapter) if value is not None)
    at_most(named, limits.SPEC_BYTES, "bytes of model, weights and adapter")
    return Purge(call, tenant, model, weights, adapter)


def encode_drain(message: Drain) -> bytes:
    """Empty this shard and let it go."""
    return pb.DrainRequest(shard=message.shard).SerializeToString()


def decode_drain(data: bytes, call: CallId, tenant: Tenant) -> Drain:
    """The inverse."""
    return Drain(call, ShardId(text(common.parse(pb.DrainRequest, data).shard, "a shard's name")))


def encode_set_policy(message: SetPolicy) -> bytes:
    """Other settings of the tiers."""
    names, values = zip(*message.settings, strict=True) if message.settings else ((), ())
    return pb.SetPolicyRequest(names=names, values=values).SerializeToString()


def decode_set_policy(data: bytes, call: CallId, tenant: Tenant) -> SetPolicy:
    """The inverse."""
    m = common.parse(pb.SetPolicyRequest, data)
    return SetPolicy(call, _decode_policy(m.names, m.values))


def _decode_policy(names: Sequence[str], values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    at_most(agree("settings", names, values), limits.POLICIES, "settings of a policy")
    known = [text(name, "a policy's name") for name in names]
    return tuple(zip(known, [text(value, "a policy's value") for value in values], strict=True))


def encode_get_status(message: GetStatus) -> bytes:
    """What is there?"""
    return pb.GetStatusRequest().SerializeToString()


def decode_get_status(data: bytes, call: CallId, tenant: Tenant) -> GetStatus:
    """The inverse."""
    common.parse(pb.GetStatusRequest, data)
    return GetStatus(call)


# -------------------------------------------------------------------------------------------- replies


def encode_reply(reply: Reply) -> bytes:
    """Any answer of the coordinator."""
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
        case Pinned():
            m = pb.CoordinatorReply(pinned=pb.Pinned(blocks=reply.blocks))
        case Purged():
            m = pb.CoordinatorReply(purged=pb.Purged(blocks=reply.blocks))
        case Status():
            m = pb.CoordinatorReply(status=_encode_status(reply))
        case ReportAck():
            m = pb.CoordinatorReply(report_ack=orders.encode_ack(reply))
        case _:
            raise AssertionError(f"{type(reply).__name__} is no answer of a coordinator")
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
    "pinned": lambda m: Pinned(at_most(m.pinned.blocks, limits.BLOCKS_PER_CALL, "pinned blocks")),
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
    )


def _decode_attached(m: pb.Attached) -> Attached:
    common.check_version(m.protocol_version)
    if not m.run_blocks:
        raise ProtocolError("a run has at least one block")
    return Attached(
        namespace=common.decode_namespace(m.namespace),
        epoch=common.epoch(m.epoch),
        ticket_ttl_ns=quantity(m.ticket_ttl_ns, "nanoseconds"),
        run_blocks=m.run_blocks,
        shards=tuple([common.decode_address(shard) for shard in m.shards]),
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
            raise ProtocolError("a shard is named for what is to be written, and for nothing else")
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
            raise ProtocolError("a block has either a plan or a reason why there is none")
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
        policy=_decode_policy(m.policy_names, m.policy_values),
        fallen=reports.decode_errors(m.fallen_namespaces, m.fallen_errors, limits.NAMESPACES),
    )
