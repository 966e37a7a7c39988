"""The questions of workers to the coordinator. Its replies are in wire/answers.py.

These are codecs of the questions (payloads), and of the namespace if a question is about one. Nothing else of the
envelope (core/messages/request.py) is sent: the server sets call and tenant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, NamespaceId, ShardId
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Attach,
    AttachShard,
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


def encode_attach(question: Attach | AttachShard) -> bytes:
    """Encodes the Attach request of both services."""
    spec = common.encode_spec(question.spec)
    return pb.AttachRequest(protocol_version=PROTOCOL_VERSION, spec=spec).SerializeToString()


def decode_attach_spec(data: bytes) -> KVSpec:
    """The inverse. The version is compared before anything else is read."""
    m = common.parse(pb.AttachRequest, data)
    common.check_version(m.protocol_version)
    return common.decode_spec(m.spec)


def decode_attach(data: bytes) -> Attach:
    """Decodes an Attach request to the coordinator."""
    return Attach(decode_attach_spec(data))


def encode_prepare_load(question: PrepareLoad, namespace: NamespaceId) -> bytes:
    """Encodes the question how many of these blocks can be loaded, and from where."""
    return pb.PrepareLoadRequest(
        namespace=namespace,
        holder=question.attempt.holder,
        attempt=question.attempt.counter,
        hashes=b"".join(question.hashes),
        need=common.encode_need(question.need),
        hold=question.hold,
    ).SerializeToString()


def decode_prepare_load(data: bytes) -> tuple[NamespaceId, PrepareLoad]:
    """The inverse."""
    m = common.parse(pb.PrepareLoadRequest, data)
    return common.decode_namespace(m.namespace), PrepareLoad(
        attempt=common.decode_attempt(m.holder, m.attempt),
        hashes=(hashes := common.decode_blocks(m.hashes)),
        need=_decode_need(m.need, len(hashes)),
        hold=m.hold,
    )


def _decode_need(m: common_pb2.Need, blocks: int) -> Need:
    """Decodes a need for `blocks` blocks. Raises LimitError if the lookup is too large."""
    need = common.decode_need(m)
    at_most(blocks * sum(part is not None for part in need.parts), limits.PARTS_PER_LOOKUP, "parts in a lookup")
    return need


def encode_prepare_store(question: PrepareStore, namespace: NamespaceId) -> bytes:
    """Encodes the question which of these blocks are to be written."""
    return pb.PrepareStoreRequest(
        namespace=namespace,
        holder=question.attempt.holder,
        attempt=question.attempt.counter,
        first=question.first,
        parent=question.parent,
        run=question.run,
        hashes=b"".join(question.hashes),
        parts=common.encode_parts(question.parts),
        loss=common.LOSS.encode[question.loss],
        host=question.host,
        tokens=question.tokens,
    ).SerializeToString()


def decode_prepare_store(data: bytes) -> tuple[NamespaceId, PrepareStore]:
    """The inverse."""
    m = common.parse(pb.PrepareStoreRequest, data)
    hashes = common.decode_blocks(m.hashes)
    parts = common.decode_parts(m.parts)
    at_most(m.first + len(hashes), limits.TOKENS_PER_SEQUENCE, "blocks in a chain")
    at_most(len(hashes) * len(parts), limits.PAGES_PER_CALL, "pages in a store")
    return common.decode_namespace(m.namespace), PrepareStore(
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
        raise ProtocolError(f"{len(tokens)} token ids are not a multiple of {blocks} blocks")
    return tuple(tokens)


def encode_ticket_end(question: RenewTicket | EndTicket) -> bytes:
    """Encodes the request of RenewTicket and EndTicket."""
    return pb.TicketRequest(holder=question.attempt.holder, attempt=question.attempt.counter).SerializeToString()


def decode_renew_ticket(data: bytes) -> RenewTicket:
    """Decodes a request to renew a ticket."""
    return RenewTicket(_decode_attempt(data))


def decode_end_ticket(data: bytes) -> EndTicket:
    """Decodes a request to end a ticket."""
    return EndTicket(_decode_attempt(data))


def _decode_attempt(data: bytes) -> Attempt:
    m = common.parse(pb.TicketRequest, data)
    return common.decode_attempt(m.holder, m.attempt)


def encode_explain(question: Explain, namespace: NamespaceId) -> bytes:
    """Encodes the question where each of these blocks is, or why it is missing."""
    return pb.ExplainRequest(
        namespace=namespace, hashes=b"".join(question.hashes), need=common.encode_need(question.need)
    ).SerializeToString()


def decode_explain(data: bytes) -> tuple[NamespaceId, Explain]:
    """The inverse."""
    m = common.parse(pb.ExplainRequest, data)
    hashes = common.decode_blocks(m.hashes)
    return common.decode_namespace(m.namespace), Explain(hashes, _decode_need(m.need, len(hashes)))


def encode_siblings(question: Siblings, namespace: NamespaceId) -> bytes:
    """Encodes the question for the tenant's other namespaces."""
    return pb.SiblingsRequest(namespace=namespace).SerializeToString()


def decode_siblings(data: bytes) -> tuple[NamespaceId, Siblings]:
    """The inverse."""
    return common.decode_namespace(common.parse(pb.SiblingsRequest, data).namespace), Siblings()


def encode_get_namespaces(question: GetNamespaces) -> bytes:
    """Encodes the question for the tenant's namespaces."""
    return pb.GetNamespacesRequest().SerializeToString()


def decode_get_namespaces(data: bytes) -> GetNamespaces:
    """The inverse."""
    common.parse(pb.GetNamespacesRequest, data)
    return GetNamespaces()


def encode_pin_blocks(question: PinBlocks, namespace: NamespaceId) -> bytes:
    """Encodes a request to protect these blocks from eviction for a time."""
    return pb.PinBlocksRequest(
        namespace=namespace,
        hashes=b"".join(question.hashes),
        ttl_ns=question.ttl_ns,
        replicas=question.replicas,
    ).SerializeToString()


def decode_pin_blocks(data: bytes) -> tuple[NamespaceId, PinBlocks]:
    """The inverse."""
    m = common.parse(pb.PinBlocksRequest, data)
    if not m.replicas:
        raise ProtocolError("a pinned block must have at least one replica")
    return common.decode_namespace(m.namespace), PinBlocks(
        hashes=common.decode_blocks(m.hashes),
        ttl_ns=quantity(m.ttl_ns, "nanoseconds"),
        replicas=at_most(m.replicas, limits.REPLICAS, "replicas of a block"),
    )


def encode_unpin_blocks(question: UnpinBlocks, namespace: NamespaceId) -> bytes:
    """Encodes a request to let these blocks be evicted again."""
    return pb.UnpinBlocksRequest(namespace=namespace, hashes=b"".join(question.hashes)).SerializeToString()


def decode_unpin_blocks(data: bytes) -> tuple[NamespaceId, UnpinBlocks]:
    """The inverse."""
    m = common.parse(pb.UnpinBlocksRequest, data)
    return common.decode_namespace(m.namespace), UnpinBlocks(common.decode_blocks(m.hashes))


def encode_purge(question: Purge) -> bytes:
    """Encodes a request to purge every block of the namespaces that have these values."""
    m = pb.PurgeRequest(model=question.model, weights=question.weights, adapter=question.adapter)
    return m.SerializeToString()


def decode_purge(data: bytes) -> Purge:
    """The inverse."""
    m = common.parse(pb.PurgeRequest, data)
    model = m.model if m.HasField("model") else None
    weights = m.weights if m.HasField("weights") else None
    adapter = m.adapter if m.HasField("adapter") else None
    # Values longer than a whole spec match none, and a tombstone would carry them to every shard.
    named = sum(len(value.encode()) for value in (model, weights, adapter) if value is not None)
    at_most(named, limits.SPEC_BYTES, "bytes of model, weights and adapter")
    return Purge(model, weights, adapter)


def encode_drain(question: Drain) -> bytes:
    """Encodes a request to drain this shard."""
    return pb.DrainRequest(shard=question.shard).SerializeToString()


def decode_drain(data: bytes) -> Drain:
    """The inverse."""
    return Drain(ShardId(text(common.parse(pb.DrainRequest, data).shard, "a shard's name")))


def encode_set_policy(question: SetPolicy) -> bytes:
    """Encodes new settings of the tiers."""
    names, values = zip(*question.settings, strict=True) if question.settings else ((), ())
    return pb.SetPolicyRequest(names=names, values=values).SerializeToString()


def decode_set_policy(data: bytes) -> SetPolicy:
    """The inverse."""
    m = common.parse(pb.SetPolicyRequest, data)
    return SetPolicy(decode_policy(m.names, m.values))


def decode_policy(names: Sequence[str], values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Decodes settings of the tiers, of SetPolicy and of a status."""
    at_most(agree("settings", names, values), limits.POLICIES, "settings of a policy")
    known = [text(name, "a policy's name") for name in names]
    return tuple(zip(known, [text(value, "a policy's value") for value in values], strict=True))


def encode_get_status(question: GetStatus) -> bytes:
    """Encodes a status request."""
    return pb.GetStatusRequest().SerializeToString()


def decode_get_status(data: bytes) -> GetStatus:
    """The inverse."""
    common.parse(pb.GetStatusRequest, data)
    return GetStatus()
