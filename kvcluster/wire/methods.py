"""The unary methods of both services, as tables: everything that a server or client needs in order to speak.

    data = method.encode_request(message)               a worker or shard asks
    message = method.decode_request(data, call, tenant) a server reads; call and tenant are its own knowledge
    data = method.encode_reply(reply)                   it answers, perhaps with Refused
    reply = method.decode_reply(data)                   the asker reads

gRPC sees only bytes. `Read` and `Write` of a shard are streams of frames instead (frames.py). A row of a table is
a name, which is that of the message in the core, the codecs of the request, and which reply of its service belongs
to it; Refused may come instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from kvcluster.core.ids import CallId, Tenant
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    BlocksPinned,
    CoordinatorMessage,
    Done,
    Drain,
    EndTicket,
    Engines,
    Explain,
    Explained,
    Flush,
    GetEngines,
    GetNamespaces,
    GetOffers,
    GetStatus,
    Inventory,
    LoadGrant,
    Namespaces,
    Offers,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Purge,
    Purged,
    Refused,
    Registered,
    RegisterEngine,
    RenewTicket,
    Reply,
    Report,
    ReportAck,
    SetPolicy,
    SetWeights,
    ShardMessage,
    Siblings,
    SiblingSpecs,
    Status,
    StoreGrant,
    Suspect,
    UnpinBlocks,
)
from kvcluster.errors import ProtocolError
from kvcluster.wire import answers, coordinator, engines, reports, shard
from kvcluster.wire.v1 import coordinator_pb2

Question = CoordinatorMessage | ShardMessage
Q = TypeVar("Q", bound=Question)

COORDINATOR_SERVICE = "kvcluster.v1.Coordinator"
SHARD_SERVICE = "kvcluster.v1.Shard"


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. Every decode raises ProtocolError, LimitError or SpecError for what is not as it should be.

    `Ping` alone asks nothing: its message is None, its bytes are empty, and its server answers Done.
    """

    name: str
    path: str
    encode_request: Callable[[Question | None], bytes]
    decode_request: Callable[[bytes, CallId, Tenant], Question | None]
    encode_reply: Callable[[Reply], bytes]
    decode_reply: Callable[[bytes], Reply]


@dataclass(frozen=True, slots=True)
class _Service:
    """What the methods of one service share."""

    path: str
    encode_reply: Callable[[Reply], bytes]
    decode_reply: Callable[[bytes], Reply]

    def method(
        self,
        name: str,
        question: type[Q],
        answer: type[Reply],
        encode: Callable[[Q], bytes],
        decode: Callable[[bytes, CallId, Tenant], Q],
    ) -> Method:
        def encode_request(message: Question | None) -> bytes:
            assert isinstance(message, question), f"{name} asks a {question.__name__}"
            return encode(message)

        def encode_reply(reply: Reply) -> bytes:
            assert isinstance(reply, (answer, Refused)), f"{name} is answered by {answer.__name__}"
            return self.encode_reply(reply)

        def decode_reply(data: bytes) -> Reply:
            reply = self.decode_reply(data)
            if not isinstance(reply, (answer, Refused)):
                raise ProtocolError(f"{name} was answered by {type(reply).__name__}, not {answer.__name__}")
            return reply

        return Method(name, f"/{self.path}/{name}", encode_request, decode, encode_reply, decode_reply)

    def ping(self) -> Method:
        """A question without content, which shows that somebody listens, and what an empty call costs."""

        def encode_request(message: Question | None) -> bytes:
            assert message is None, "Ping asks nothing"
            return b""

        def decode_request(data: bytes, call: CallId, tenant: Tenant) -> None:
            decode_reply(data)

        def encode_reply(reply: Reply) -> bytes:
            assert reply == Done(), "Ping is answered by Done"
            return b""

        def decode_reply(data: bytes) -> Reply:
            if data:
                raise ProtocolError(f"a Ping is empty, but {len(data)} bytes came")
            return Done()

        return Method("Ping", f"/{self.path}/Ping", encode_request, decode_request, encode_reply, decode_reply)


def _table(methods: Iterable[Method]) -> Mapping[str, Method]:
    return {method.name: method for method in methods}


def _encode_attach(message: Attach | AttachShard) -> bytes:
    return coordinator.encode_attach(message.spec)


_C = _Service(COORDINATOR_SERVICE, answers.encode_reply, answers.decode_reply)
_S = _Service(SHARD_SERVICE, shard.encode_reply, shard.decode_reply)
_c = coordinator

COORDINATOR: Mapping[str, Method] = _table(
    [
        _C.method("Attach", Attach, Attached, _encode_attach, _c.decode_attach),
        _C.method("PrepareLoad", PrepareLoad, LoadGrant, _c.encode_prepare_load, _c.decode_prepare_load),
        _C.method("PrepareStore", PrepareStore, StoreGrant, _c.encode_prepare_store, _c.decode_prepare_store),
        _C.method("RenewTicket", RenewTicket, Done, _c.encode_ticket_end, _c.decode_renew_ticket),
        _C.method("EndTicket", EndTicket, Done, _c.encode_ticket_end, _c.decode_end_ticket),
        _C.method("Explain", Explain, Explained, _c.encode_explain, _c.decode_explain),
        _C.method("Siblings", Siblings, SiblingSpecs, _c.encode_siblings, _c.decode_siblings),
        _C.method("GetNamespaces", GetNamespaces, Namespaces, _c.encode_get_namespaces, _c.decode_get_namespaces),
        _C.method(
            "RegisterEngine",
            RegisterEngine,
            Registered,
            engines.encode_register_engine,
            engines.decode_register_engine,
        ),
        _C.method("GetEngines", GetEngines, Engines, engines.encode_get_engines, engines.decode_get_engines),
        _C.method("SetWeights", SetWeights, Engines, engines.encode_set_weights, engines.decode_set_weights),
        _C.method("PinBlocks", PinBlocks, BlocksPinned, _c.encode_pin_blocks, _c.decode_pin_blocks),
        _C.method("UnpinBlocks", UnpinBlocks, BlocksPinned, _c.encode_unpin_blocks, _c.decode_unpin_blocks),
        _C.method("Purge", Purge, Purged, _c.encode_purge, _c.decode_purge),
        _C.method("Drain", Drain, Done, _c.encode_drain, _c.decode_drain),
        _C.method("SetPolicy", SetPolicy, Done, _c.encode_set_policy, _c.decode_set_policy),
        _C.method("GetStatus", GetStatus, Status, _c.encode_get_status, _c.decode_get_status),
        _C.method("Report", Report, ReportAck, reports.encode_report, reports.decode_report),
        _C.method("Inventory", Inventory, ReportAck, reports.encode_inventory, reports.decode_inventory),
        _C.ping(),
    ]
)
"""What the coordinator answers, by name. `Report` and `Inventory` are for shards of the cluster alone, `Drain` and
`SetPolicy` for its operators."""

SHARD: Mapping[str, Method] = _table(
    [
        _S.method("Attach", AttachShard, AttachedShard, _encode_attach, shard.decode_attach),
        _S.method("GetOffers", GetOffers, Offers, shard.encode_get_offers, shard.decode_get_offers),
        _S.method("Flush", Flush, Done, shard.encode_flush, shard.decode_flush),
        _S.method("Suspect", Suspect, Done, shard.encode_suspect, shard.decode_suspect),
        _S.ping(),
    ]
)
"""What a shard answers, by name, beside Read and Write."""


def version_question() -> Method:
    """Attach, naming nothing: a coordinator that speaks this version of the protocol answers CallerError, any other
    ProtocolError, since versions are compared before anything else is read; and nothing of it is kept."""

    def encode_request(message: Question | None) -> bytes:
        assert message is None, "it names nothing"
        return coordinator_pb2.AttachRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()

    return replace(COORDINATOR["Attach"], encode_request=encode_request)
