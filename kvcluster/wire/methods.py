"""The unary methods of both services, as tables: everything that a server or client needs to use the protocol.

    data = method.encode_request(question, namespace)   a worker or shard asks; a namespace if the method has one
    request = method.decode_request(data, call, caller) the server decodes; it sets call and caller itself
    data = method.encode_reply(reply)                   the server answers, possibly with Refused
    reply = method.decode_reply(data)                   the client decodes

Each of the four takes the version of the conversation (versions.py), decode_request as that of the caller. A message
that has a field for it carries it, and it is compared before anything else of the message is read.

gRPC sees only bytes. `Read` and `Write` of a shard are streams of frames instead (frames.py). A row of a table is the
method's name, which is that of the question in the core; the struct of the question; and the type of its reply. Refused
may come instead of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from kvcluster.core.ids import Caller, CallId, NamespaceId
from kvcluster.core.messages import (
    Attached,
    AttachedShard,
    BlocksPinned,
    CoordinatorQuestion,
    Done,
    Engines,
    Explained,
    LoadGrant,
    Namespaces,
    Offers,
    Probed,
    Purged,
    Refused,
    Registered,
    Reply,
    ReportAck,
    Request,
    ShardQuestion,
    SiblingSpecs,
    Status,
    StoreGrant,
    TablesSynced,
)
from kvcluster.errors import ProtocolError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import answers, coordinator, reports, shard, spans
from kvcluster.wire.checks import parse
from kvcluster.wire.common import NAMESPACE
from kvcluster.wire.fields import OneOf, Struct
from kvcluster.wire.v1 import coordinator_pb2 as pb
from kvcluster.wire.versions import check_version

Question = CoordinatorQuestion | ShardQuestion
COORDINATOR_SERVICE = "kvcluster.v1.Coordinator"
SHARD_SERVICE = "kvcluster.v1.Shard"


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. Every decode raises ProtocolError, LimitError or SpecError for malformed input.

    Only `Ping` has no question: its question is None, and the server answers Done.
    """

    name: str
    path: str
    encode_question: Callable[[Question | None, NamespaceId | None, int], bytes]
    decode_question: Callable[[bytes, int], tuple[NamespaceId | None, Question | None]]
    encode_answer: Callable[[Reply, int], bytes]
    decode_answer: Callable[[bytes, int], Reply]

    def encode_request(
        self, question: Question | None, namespace: NamespaceId | None = None, version: int = PROTOCOL_VERSION
    ) -> bytes:
        """Returns the bytes that a client sends. A namespace is given if and only if the question is about one."""
        return self.encode_question(question, namespace, version)

    def decode_request(self, data: bytes, call: CallId, caller: Caller) -> Request[Question | None]:
        """Returns the request for the core, from that caller."""
        namespace, question = self.decode_question(data, caller.version)
        return Request(call, caller.tenant, namespace, question, caller.operator)

    def encode_reply(self, reply: Reply, version: int = PROTOCOL_VERSION) -> bytes:
        """Returns the bytes that a server answers."""
        return self.encode_answer(reply, version)

    def decode_reply(self, data: bytes, version: int = PROTOCOL_VERSION) -> Reply:
        """The inverse."""
        return self.decode_answer(data, version)


def _table(service: str, reply: OneOf, methods: Mapping[str, tuple[Struct[Any], type[Reply]]]) -> Mapping[str, Method]:
    return {name: _method(f"/{service}/{name}", name, *row, reply) for name, row in methods.items()}


def _method(path: str, name: str, asked: Struct[Any], answer: type[Reply], replies: OneOf) -> Method:
    """Returns the method of a question. It is about one namespace if its message has a field for that."""
    in_namespace = "namespace" in asked.message.DESCRIPTOR.fields_by_name
    asked_versioned = _is_versioned(asked.message)
    answered = replies.field_of(answer)
    answer_versioned = _is_versioned(type(getattr(replies.message(), answered)))

    def encode_question(question: Question | None, namespace: NamespaceId | None, version: int) -> bytes:
        assert isinstance(question, asked.kind), f"{name} does not ask {question}"
        assert (namespace is not None) == in_namespace, f"{name} is {'' if in_namespace else 'not '}about a namespace"
        m: Any = asked.encode(question)
        if namespace is not None:
            m.namespace = namespace
        if asked_versioned:
            m.protocol_version = version
        data: bytes = m.SerializeToString()
        return data

    def decode_question(data: bytes, version: int) -> tuple[NamespaceId | None, Question | None]:
        m: Any = parse(asked.message, data)
        if asked_versioned:  # before its first answer, a caller says its oldest version, which may not be spoken here
            check_version(m.protocol_version, oldest=1, newest=version, of=f"a question ({name})")
        return NAMESPACE.decode(m.namespace) if in_namespace else None, asked.decode(m)

    def encode_answer(reply: Reply, version: int) -> bytes:
        assert isinstance(reply, (answer, Refused)), f"{name} is answered by {answer.__name__}"
        m: Any = replies.encode(reply)
        if answer_versioned and isinstance(reply, answer):
            getattr(m, answered).protocol_version = version
        data: bytes = m.SerializeToString()
        return data

    def decode_answer(data: bytes, version: int) -> Reply:
        m: Any = parse(replies.message, data)
        if answer_versioned and m.HasField(answered):
            theirs = getattr(m, answered).protocol_version
            check_version(theirs, newest=version, oldest=version, of=f"an answer ({name})")
        reply: Reply = replies.decode(m)
        if not isinstance(reply, (answer, Refused)):
            raise ProtocolError(f"{name} was answered by {type(reply).__name__}, not {answer.__name__}")
        return reply

    return Method(name, path, encode_question, decode_question, encode_answer, decode_answer)


def _is_versioned(message: type[Message]) -> bool:
    return "protocol_version" in message.DESCRIPTOR.fields_by_name


_PING = Struct(pb.PingRequest, type(None)), Done

COORDINATOR: Mapping[str, Method] = _table(
    COORDINATOR_SERVICE,
    answers.REPLY,
    {
        "Attach": (coordinator.ATTACH, Attached),
        "PrepareLoad": (coordinator.PREPARE_LOAD, LoadGrant),
        "PrepareStore": (coordinator.PREPARE_STORE, StoreGrant),
        "RenewTicket": (coordinator.RENEW_TICKET, Done),
        "EndTicket": (coordinator.END_TICKET, Done),
        "Explain": (coordinator.EXPLAIN, Explained),
        "Siblings": (coordinator.SIBLINGS, SiblingSpecs),
        "GetNamespaces": (coordinator.GET_NAMESPACES, Namespaces),
        "RegisterEngine": (coordinator.REGISTER_ENGINE, Registered),
        "GetEngines": (coordinator.GET_ENGINES, Engines),
        "SetWeights": (coordinator.SET_WEIGHTS, Engines),
        "SyncTables": (coordinator.SYNC_TABLES, TablesSynced),
        "PinBlocks": (coordinator.PIN_BLOCKS, BlocksPinned),
        "UnpinBlocks": (coordinator.UNPIN_BLOCKS, BlocksPinned),
        "Purge": (coordinator.PURGE, Purged),
        "Drain": (coordinator.DRAIN, Done),
        "SetPolicy": (coordinator.SET_POLICY, Done),
        "Probe": (coordinator.PROBE, Probed),
        "GetStatus": (coordinator.GET_STATUS, Status),
        "Report": (reports.REPORT, ReportAck),
        "Inventory": (reports.INVENTORY, ReportAck),
        "Ping": _PING,
    },
)
"""The methods of the coordinator, by name. Only shards of the cluster may call `Report` and `Inventory`, only operators
`Drain`, `SetPolicy` and `Probe`."""

SHARD: Mapping[str, Method] = _table(
    SHARD_SERVICE,
    shard.REPLY,
    {
        "Attach": (coordinator.ATTACH_SHARD, AttachedShard),
        "GetOffers": (shard.GET_OFFERS, Offers),
        "Flush": (shard.FLUSH, Done),
        "Suspect": (shard.SUSPECT, Done),
        "RegisterSpans": (spans.REGISTER_SPANS, Done),
        "Ping": _PING,
    },
)
"""The methods of a shard, by name, besides Read and Write."""


def version_question() -> Method:
    """Returns an Attach without a spec, to check the protocol version. A coordinator with a version in common answers
    CallerError, any other VersionError, since versions are compared before anything else is read. The coordinator
    keeps no state of it."""

    def encode(question: Question | None, namespace: NamespaceId | None, version: int) -> bytes:
        data: bytes = pb.AttachRequest(protocol_version=version).SerializeToString()
        return data

    return replace(COORDINATOR["Attach"], encode_question=encode)
