"""What workers ask of the coordinator. Its answers are in wire/answers.py.

`decode_x(data, call, tenant)` is the server's half: `call` is the server's own and `tenant` that of the caller's
credential, so neither is ever read from the wire.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, CallId, ShardId, Tenant
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Attach,
    Drain,
    EndTicket,
    Explain,
    GetNamespaces,
    GetStatus,
    Need,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Purge,
    RenewTicket,
    SetPolicy,
    Siblings,
    UnpinBlocks,
)
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.wire import common
from kvcluster.wire.common import agree, at_most, numbers, quantity, text
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import coordinator_pb2 as pb


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
        hashes=(hashes := common.decode_blocks(m.hashes)),
        need=_decode_need(m.need, len(hashes)),
        hold=m.hold,
    )


def _decode_need(m: common_pb2.Need, blocks: int) -> Need:
    """A need of so many blocks."""
    need = common.decode_need(m)
    at_most(blocks * sum(part is not None for part in need.parts), limits.PARTS_PER_LOOKUP, "parts in a lookup")
    return need


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
        tokens=message.tokens,
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
        tokens=_decode_tokens(m.tokens, len(hashes)),
    )


def _decode_tokens(field: Collection[int], blocks: int) -> tuple[int, ...]:
    tokens = numbers(field, limits.TOKENS_PER_SEQUENCE, "token ids")
    if tokens and (not blocks or len(tokens) % blocks):
        raise ProtocolError(f"{len(tokens)} token ids are not those of {blocks} blocks")
    return tuple(tokens)


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
    return Explain(call, tenant, common.decode_namespace(m.namespace), hashes, _decode_need(m.need, len(hashes)))


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
    return SetPolicy(call, decode_policy(m.names, m.values))


def decode_policy(names: Sequence[str], values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Settings, as they are set and as a status tells them."""
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
