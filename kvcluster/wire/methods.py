"""The unary methods of both services, as tables: everything that a server or client needs to use the protocol.

    data = method.encode_request(question, namespace)   a worker or shard asks; a namespace if the method has one
    request = method.decode_request(data, call, tenant) the server decodes; it sets call and tenant itself
    data = method.encode_reply(reply)                   the server answers, possibly with Refused
    reply = method.decode_reply(data)                   the client decodes

gRPC sees only bytes. `Read` and `Write` of a shard are streams of frames instead (frames.py). A row of a table is the
method's name, which is that of the question in the core; the codecs of the question; and the type of its reply. Refused
may come instead of that. The codecs of a question about one namespace carry the namespace too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from kvcluster.core.ids import CallId, NamespaceId, Tenant
from kvcluster.core.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    BlocksPinned,
    CoordinatorQuestion,
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
    Request,
    SetPolicy,
    SetWeights,
    ShardQuestion,
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

Question = CoordinatorQuestion | ShardQuestion
Q = TypeVar("Q", bound=Question)

COORDINATOR_SERVICE = "kvcluster.v1.Coordinator"
SHARD_SERVICE = "kvcluster.v1.Shard"


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. Every decode raises ProtocolError, LimitError or SpecError for malformed input.

    Only `Ping` has no question: its question is None, its bytes are empty, and the server answers Done.
    """

    name: str
    path: str
    encode_question: Callable[[Question | None, NamespaceId | None], bytes]
    decode_question: Callable[[bytes], tuple[NamespaceId | None, Question | None]]
    encode_reply: Callable[[Reply], bytes]
    decode_reply: Callable[[bytes], Reply]

    def encode_request(self, question: Question | None, namespace: NamespaceId | None = None) -> bytes:
        """Returns the bytes that a client sends. A namespace is given if and only if the question is about one."""
        return self.encode_question(question, namespace)

    def decode_request(self, data: bytes, call: CallId, tenant: Tenant) -> Request[Question | None]:
        """Returns the request for the core, from a caller of that tenant."""
        namespace, question = self.decode_question(data)
        return Request(call, tenant, namespace, question)


@dataclass(frozen=True, slots=True)
class _Service:
    """What all methods of one service share."""

    path: str
    encode_reply: Callable[[Reply], bytes]
    decode_reply: Callable[[bytes], Reply]

    def method(
        self,
        name: str,
        kind: type[Q],
        answer: type[Reply],
        encode: Callable[[Q], bytes],
        decode: Callable[[bytes], Q],
    ) -> Method:
        """Returns the method of a question that is not about one namespace."""

        def encode_question(question: Question | None, namespace: NamespaceId | None) -> bytes:
            assert isinstance(question, kind), f"{name} asks a {kind.__name__}"
            assert namespace is None, f"{name} is not asked about a namespace"
            return encode(question)

        def decode_question(data: bytes) -> tuple[None, Q]:
            return None, decode(data)

        return self._answered_by(name, answer, encode_question, decode_question)

    def in_namespace(
        self,
        name: str,
        kind: type[Q],
        answer: type[Reply],
        encode: Callable[[Q, NamespaceId], bytes],
        decode: Callable[[bytes], tuple[NamespaceId, Q]],
    ) -> Method:
        """Returns the method of a question about one namespace."""

        def encode_question(question: Question | None, namespace: NamespaceId | None) -> bytes:
            assert isinstance(question, kind), f"{name} asks a {kind.__name__}"
            assert namespace is not None, f"{name} is asked about a namespace"
            return encode(question, namespace)

        return self._answered_by(name, answer, encode_question, decode)

    def ping(self) -> Method:
        """Returns a method without content, to check that the server answers, and to measure an empty call."""

        def encode_question(question: Question | None, namespace: NamespaceId | None) -> bytes:
            assert question is None and namespace is None, "Ping asks nothing"
            return b""

        def decode_question(data: bytes) -> tuple[None, None]:
            decode_reply(data)
            return None, None

        def encode_reply(reply: Reply) -> bytes:
            assert reply == Done(), "Ping is answered by Done"
            return b""

        def decode_reply(data: bytes) -> Reply:
            if data:
                raise ProtocolError(f"a Ping is empty, but {len(data)} bytes came")
            return Done()

        return Method("Ping", f"/{self.path}/Ping", encode_question, decode_question, encode_reply, decode_reply)

    def _answered_by(
        self,
        name: str,
        answer: type[Reply],
        encode_question: Callable[[Question | None, NamespaceId | None], bytes],
        decode_question: Callable[[bytes], tuple[NamespaceId | None, Question | None]],
    ) -> Method:
        def encode_reply(reply: Reply) -> bytes:
            assert isinstance(reply, (answer, Refused)), f"{name} is answered by {answer.__name__}"
            return self.encode_reply(reply)

        def decode_reply(data: bytes) -> Reply:
            reply = self.decode_reply(data)
            if not isinstance(reply, (answer, Refused)):
                raise ProtocolError(f"{name} was answered by {type(reply).__name__}, not {answer.__name__}")
            return reply

        return Method(name, f"/{self.path}/{name}", encode_question, decode_question, encode_reply, decode_reply)


def _table(methods: Iterable[Method]) -> Mapping[str, Method]:
    return {method.name: method for method in methods}


_C = _Service(COORDINATOR_SERVICE, answers.encode_reply, answers.decode_reply)
_S = _Service(SHARD_SERVICE, shard.encode_reply, shard.decode_reply)
_c = coordinator

COORDINATOR: Mapping[str, Method] = _table(
    [
        _C.method("Attach", Attach, Attached, _c.encode_attach, _c.decode_attach),
        _C.in_namespace("PrepareLoad", PrepareLoad, LoadGrant, _c.encode_prepare_load, _c.decode_prepare_load),
        _C.in_namespace("PrepareStore", PrepareStore, StoreGrant, _c.encode_prepare_store, _c.decode_prepare_store),
        _C.method("RenewTicket", RenewTicket, Done, _c.encode_ticket_end, _c.decode_renew_ticket),
        _C.method("EndTicket", EndTicket, Done, _c.encode_ticket_end, _c.decode_end_ticket),
        _C.in_namespace("Explain", Explain, Explained, _c.encode_explain, _c.decode_explain),
        _C.in_namespace("Siblings", Siblings, SiblingSpecs, _c.encode_siblings, _c.decode_siblings),
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
        _C.in_namespace("PinBlocks", PinBlocks, BlocksPinned, _c.encode_pin_blocks, _c.decode_pin_blocks),
        _C.in_namespace("UnpinBlocks", UnpinBlocks, BlocksPinned, _c.encode_unpin_blocks, _c.decode_unpin_blocks),
        _C.method("Purge", Purge, Purged, _c.encode_purge, _c.decode_purge),
        _C.method("Drain", Drain, Done, _c.encode_drain, _c.decode_drain),
        _C.method("SetPolicy", SetPolicy, Done, _c.encode_set_policy, _c.decode_set_policy),
        _C.method("GetStatus", GetStatus, Status, _c.encode_get_status, _c.decode_get_status),
        _C.method("Report", Report, ReportAck, reports.encode_report, reports.decode_report),
        _C.method("Inventory", Inventory, ReportAck, reports.encode_inventory, reports.decode_inventory),
        _C.ping(),
    ]
)
"""The methods of the coordinator, by name. Only shards of the cluster may call `Report` and `Inventory`, only operators
`Drain` and `SetPolicy`."""

SHARD: Mapping[str, Method] = _table(
    [
        _S.method("Attach", AttachShard, AttachedShard, _c.encode_attach, shard.decode_attach),
        _S.method("GetOffers", GetOffers, Offers, shard.encode_get_offers, shard.decode_get_offers),
        _S.method("Flush", Flush, Done, shard.encode_flush, shard.decode_flush),
        _S.in_namespace("Suspect", Suspect, Done, shard.encode_suspect, shard.decode_suspect),
        _S.ping(),
    ]
)
"""The methods of a shard, by name, besides Read and Write."""


def version_question() -> Method:
    """Returns an Attach without a spec, to check the protocol version. A coordinator of this version answers
    CallerError, any other ProtocolError, since versions are compared before anything else is read. The coordinator
    keeps no state of it."""

    def encode_question(question: Question | None, namespace: NamespaceId | None) -> bytes:
        assert question is None, "it names nothing"
        return coordinator_pb2.AttachRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()

    return replace(COORDINATOR["Attach"], encode_question=encode_question)
