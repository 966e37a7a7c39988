"""Questions of workers to a shard and its replies, and the first and last messages of a stream of pages.

frames.py frames those messages; pages/ knows the bytes of pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcluster.core import limits
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    AttachedShard,
    AttachShard,
    Done,
    Flush,
    GetOffers,
    Offer,
    Offers,
    PageWant,
    ReadRequest,
    Refused,
    Reply,
    Suspect,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss
from kvcluster.errors import ProtocolError
from kvcluster.wire import common, pages
from kvcluster.wire.common import EnumCodec, Interned, agree, numbers, quantity
from kvcluster.wire.coordinator import decode_attach_spec
from kvcluster.wire.v1 import common_pb2
from kvcluster.wire.v1 import shard_pb2 as pb

WRITTEN: EnumCodec[Written, pb.Written] = EnumCodec(Written, pb.Written, "WRITTEN_")

# ------------------------------------------------------------------------------ questions and replies


def decode_attach(data: bytes) -> AttachShard:
    """Decodes an Attach request to a shard."""
    return AttachShard(decode_attach_spec(data))


def encode_flush(question: Flush) -> bytes:
    """Encodes the question whether the coordinator has received all events."""
    return pb.FlushRequest(wait_ns=question.wait_ns).SerializeToString()


def decode_flush(data: bytes) -> Flush:
    """The inverse."""
    return Flush(quantity(common.parse(pb.FlushRequest, data).wait_ns, "nanoseconds"))


def encode_get_offers(question: GetOffers) -> bytes:
    """Encodes the question for the shard's transports."""
    return pb.GetOffersRequest().SerializeToString()


def decode_get_offers(data: bytes) -> GetOffers:
    """The inverse."""
    common.parse(pb.GetOffersRequest, data)
    return GetOffers()


def encode_suspect(question: Suspect, namespace: NamespaceId) -> bytes:
    """Encodes a reader's report that the bytes of these pages did not match their checksums."""
    return pb.SuspectRequest(
        namespace=namespace, epoch=question.epoch, keys=pages.encode_keys(question.keys)
    ).SerializeToString()


def decode_suspect(data: bytes) -> tuple[NamespaceId, Suspect]:
    """The inverse."""
    m = common.parse(pb.SuspectRequest, data)
    keys = pages.decode_keys(m.keys, limits.SUSPECTS_PER_CALL, "pages suspected at once")
    return common.decode_namespace(m.namespace), Suspect(common.epoch(m.epoch), tuple(keys))


def encode_reply(reply: Reply) -> bytes:
    """Encodes any reply of a shard to a question. Grants to a transport are not encoded: they stay in the process."""
    match reply:
        case Refused():
            m = pb.ShardReply(refused=common.encode_refusal(reply))
        case Done():
            m = pb.ShardReply(done=common_pb2.Done(ok=reply.ok))
        case AttachedShard():
            attached = pb.AttachedShard(
                protocol_version=PROTOCOL_VERSION,
                namespace=reply.namespace,
                epoch=reply.epoch,
                lease_ttl_ns=reply.lease_ttl_ns,
            )
            m = pb.ShardReply(attached=attached)
        case Offers():
            offers = pb.Offers(
                protocol_version=PROTOCOL_VERSION,
                epoch=reply.epoch,
                transports=[offer.transport for offer in reply.offers],
                addresses=[offer.address for offer in reply.offers],
                versions=[offer.version for offer in reply.offers],
                details=[offer.details for offer in reply.offers],
                refused=[transport for transport, _ in reply.refused],
                reasons=[why for _, why in reply.refused],
            )
            m = pb.ShardReply(offers=offers)
        case _:
            raise AssertionError(f"{type(reply).__name__} is not a reply that a shard sends")
    return m.SerializeToString()


def decode_reply(data: bytes) -> Reply:
    """The inverse."""
    m = common.parse(pb.ShardReply, data)
    match m.WhichOneof("reply"):
        case "refused":
            return common.decode_refusal(m.refused)
        case "done":
            return Done(m.done.ok)
        case "attached":
            a = m.attached
            common.check_version(a.protocol_version)
            lease_ttl_ns = quantity(a.lease_ttl_ns, "nanoseconds")
            return AttachedShard(common.decode_namespace(a.namespace), common.epoch(a.epoch), lease_ttl_ns)
        case "offers":
            common.check_version(m.offers.protocol_version)
            return _decode_offers(m.offers)
        case _:
            raise ProtocolError("the shard's answer is empty, or of a kind that is not known here: upgrade this side")


def _decode_offers(m: pb.Offers) -> Offers:
    versions, details = m.versions or [0] * len(m.transports), m.details or [b""] * len(m.transports)
    agree("offers", m.transports, m.addresses, versions, details)
    agree("refusals", m.refused, m.reasons)
    common.at_most(len(m.transports) + len(m.refused), limits.TRANSPORTS, "transports of a shard")
    transports = [common.text(name, "a transport's name") for name in (*m.transports, *m.refused)]
    said = [common.text(word, "an offer") for word in (*m.addresses, *m.reasons)]
    common.at_most(max(map(len, details), default=0), limits.OFFER_BYTES, "bytes of an offer's details")
    offered = len(m.transports)
    offers = tuple(map(Offer, transports[:offered], said[:offered], versions, details))
    return Offers(common.epoch(m.epoch), offers, tuple(zip(transports[offered:], said[offered:], strict=True)))


# -------------------------------------------------------------------------------------------- reading


def encode_read_request(request: ReadRequest) -> bytes:
    """Encodes the layers and pages that a load wants."""
    wants = request.wants
    return pb.ReadRequest(
        namespace=request.namespace,
        holder=request.attempt.holder,
        attempt=request.attempt.counter,
        epoch=request.epoch,
        keys=pages.encode_keys([want.key for want in wants]),
        layer_starts=[want.layer_start for want in wants],
        layer_stops=[want.layer_stop for want in wants],
        accept=common.LOSS.encode[request.accept],
    ).SerializeToString()


def decode_read_request(data: bytes) -> ReadRequest:
    """The inverse."""
    m = common.parse(pb.ReadRequest, data)
    keys = pages.decode_keys(m.keys, limits.PAGES_PER_CALL, "pages in a call")
    agree("pages", keys, m.layer_starts, m.layer_stops)
    wants = tuple(map(PageWant, keys, m.layer_starts, m.layer_stops))
    for want in wants:
        if not want.layer_start < want.layer_stop <= want.key.part.layers:
            raise ProtocolError(
                f"layers {want.layer_start}:{want.layer_stop} were asked for of a page that has {want.key.part.layers}"
            )
    return ReadRequest(
        *(common.decode_namespace(m.namespace), common.decode_attempt(m.holder, m.attempt), common.epoch(m.epoch)),
        wants,
        common.LOSS.decode(m.accept),
    )


def encode_read_head(outcome: Iterable[Miss | None]) -> bytes:
    """Encodes for each wanted page None if it is sent, otherwise its miss."""
    misses: Interned[Miss] = Interned()
    miss_of = [0 if miss is None else misses[miss] + 1 for miss in outcome]
    return pb.ReadHead(miss_of=miss_of, misses=common.encode_misses(misses)).SerializeToString()


def decode_read_head(data: bytes) -> list[Miss | None]:
    """The inverse."""
    m = common.parse(pb.ReadHead, data)
    return common.decode_misses(m.misses, numbers(m.miss_of, limits.PAGES_PER_CALL, "pages in a call"))


# -------------------------------------------------------------------------------------------- writing


def encode_write_request(request: WriteRequest) -> bytes:
    """Encodes the pages that a store wants to write."""
    return pb.WriteRequest(
        namespace=request.namespace,
        holder=request.attempt.holder,
        attempt=request.attempt.counter,
        epoch=request.epoch,
        wait_ns=request.wait_ns,
        pages=pages.encode_new_pages(request.pages),
    ).SerializeToString()


def decode_write_request(data: bytes) -> WriteRequest:
    """The inverse."""
    m = common.parse(pb.WriteRequest, data)
    return WriteRequest(
        namespace=common.decode_namespace(m.namespace),
        attempt=common.decode_attempt(m.holder, m.attempt),
        epoch=common.epoch(m.epoch),
        pages=pages.decode_new_pages(m.pages, limits.PAGES_PER_CALL, "pages in a call"),
        wait_ns=quantity(m.wait_ns, "nanoseconds"),
    )


def encode_write_head(outcome: Iterable[Written | None]) -> bytes:
    """Encodes for each page None if it is to be sent, otherwise its outcome."""
    outcomes = [pb.WRITTEN_UNSPECIFIED if one is None else WRITTEN.encode[one] for one in outcome]
    return pb.WriteHead(outcomes=outcomes).SerializeToString()


def decode_write_head(data: bytes) -> list[Written | None]:
    """The inverse."""
    outcomes = numbers(common.parse(pb.WriteHead, data).outcomes, limits.PAGES_PER_CALL, "pages in a call")
    return [None if one == pb.WRITTEN_UNSPECIFIED else WRITTEN.decode(one) for one in outcomes]


def encode_write_tail(outcome: Iterable[Written]) -> bytes:
    """Encodes the outcome of each page."""
    return pb.WriteTail(outcomes=[WRITTEN.encode[one] for one in outcome]).SerializeToString()


def decode_write_tail(data: bytes) -> list[Written]:
    """The inverse."""
    outcomes = numbers(common.parse(pb.WriteTail, data).outcomes, limits.PAGES_PER_CALL, "pages in a call")
    return WRITTEN.decode_all(outcomes)
