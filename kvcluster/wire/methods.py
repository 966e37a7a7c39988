"""The unary methods of both services, as tables: everything that a server or client needs to use the protocol.

    data = method.encode_request(question, namespace)   a worker or shard asks; a namespace if the method has one
    request = method.decode_request(data, call, caller) the server decodes; it sets call and caller itself
    data = method.encode_reply(reply)                   the server answers, possibly with Refused
    reply = method.decode_reply(data)                   the client decodes

Each of the four takes the version of the conversation (versions.py), decode_request as that of the caller. A message
that has a field for it carries it, and it is compared before anything else of the message is read.

gRPC sees only bytes. `Read` and `Write` of a shard are streams of frames instead (frames.py). A row of a table is the
method's name, which is that of the question in the core; the struct of the question; and the type of its reply. Refused
may be returned instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from kvcluster.core import limits
from kvcluster.core.ids import Caller, CallId, NamespaceId
from kvcluster.core.messages import (
    Attached,
    AttachedShard,
    BlocksPinned,
    CoordinatorQuestion,
    Done,
    Engines,
    Explained,
    IssueCredential,
    IssuedCredential,
    LoadGrant,
    Namespaces,
    Offers,
    PinList,
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
    request_of,
)
from kvcluster.errors import ProtocolError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.wire import answers, coordinator, reports, shard
from kvcluster.wire.checks import parse
from kvcluster.wire.common import NAMESPACE
from kvcluster.wire.fields import OneOf, Struct
from kvcluster.wire.v1 import coordinator_pb2 as pb
from kvcluster.wire.versions import check_version

Question = CoordinatorQuestion | ShardQuestion | IssueCredential
COORDINATOR_SERVICE = "kvcluster.v1.Coordinator"
SHARD_SERVICE = "kvcluster.v1.Shard"


class Method:
    """One RPC, whose question is `asked` and which is answered by `answer`, one of `replies`, or Refused. It is about
    one namespace if the message of its question has a field for that. Every decode raises ProtocolError, LimitError or
    SpecError for malformed input.

    Only `Ping` has no question: its question is None, and the server answers Done; of all others `asks` is True.
    `most_bytes`: the longest message of a question, known before it is parsed.
    """

    def __init__(
        self,
        path: str,
        asked: Struct[Any],
        answer: type[Reply],
        replies: OneOf,
        most_bytes: int = limits.SMALL_QUESTION_BYTES,
    ) -> None:
        self.path = path
        self.most_bytes = most_bytes
        self.name = path.rpartition("/")[2]
        self.asks = asked.kind is not type(None)
        self._asked = asked
        self._answer = answer
        self._replies = replies
        self._in_namespace = "namespace" in asked.message.DESCRIPTOR.fields_by_name
        self._asked_versioned = _is_versioned(asked.message)
        self._answered = replies.field_of(answer)
        self._answer_versioned = _is_versioned(type(getattr(replies.message(), self._answered)))

    def encode_request(
        self, question: Question | None, namespace: NamespaceId | None = None, version: int = PROTOCOL_VERSION
    ) -> bytes:
        """Returns the bytes that a client sends. A namespace is given if and only if the question is about one."""
        assert isinstance(question, self._asked.kind), f"{self.name} does not ask {question}"
        about = f"{self.name} is {'' if self._in_namespace else 'not '}about a namespace"
        assert (namespace is not None) == self._in_namespace, about
        m: Any = self._asked.encode(question)
        if namespace is not None:
            m.namespace = namespace
        if self._asked_versioned:
            m.protocol_version = version
        data: bytes = m.SerializeToString()
        return data

    def decode_question(self, data: bytes, version: int) -> tuple[NamespaceId | None, Question | None]:
        """Returns the namespace that a question is about, if its method has one, and the question."""
        m: Any = parse(self._asked.message, data, self.most_bytes)
        if self._asked_versioned:  # a caller without an answer states its oldest version, perhaps unknown here
            check_version(m.protocol_version, oldest=1, newest=version, of=f"a question ({self.name})")
        return NAMESPACE.decode(m.namespace) if self._in_namespace else None, self._asked.decode(m)

    def decode_request(self, data: bytes, call: CallId, caller: Caller) -> Request[Question | None]:
        """Returns the request for the core, from that caller."""
        namespace, question = self.decode_question(data, caller.version)
        return request_of(caller, call, namespace, question)

    def encode_reply(self, reply: Reply, version: int = PROTOCOL_VERSION) -> bytes:
        """Returns the bytes that a server answers."""
        assert isinstance(reply, (self._answer, Refused)), f"{self.name} is answered by {self._answer.__name__}"
        m: Any = self._replies.encode(reply)
        if self._answer_versioned and isinstance(reply, self._answer):
            getattr(m, self._answered).protocol_version = version
        data: bytes = m.SerializeToString()
        return data

    def decode_reply(self, data: bytes, version: int = PROTOCOL_VERSION) -> Reply:
        """The inverse."""
        m: Any = parse(self._replies.message, data)
        if self._answer_versioned and m.HasField(self._answered):
            theirs = getattr(m, self._answered).protocol_version
            check_version(theirs, newest=version, oldest=version, of=f"an answer ({self.name})")
        reply: Reply = self._replies.decode(m)
        if not isinstance(reply, (self._answer, Refused)):
            raise ProtocolError(f"{self.name} was answered by {type(reply).__name__}, not {self._answer.__name__}")
        return reply


def _is_versioned(message: type[Message]) -> bool:
    return "protocol_version" in message.DESCRIPTOR.fields_by_name


def _table(service: str, reply: OneOf, methods: Mapping[str, tuple[Struct[Any], type[Reply]]]) -> Mapping[str, Method]:
    return {
        name: Method(f"/{service}/{name}", *row, reply, _MOST.get(name, limits.SMALL_QUESTION_BYTES))
        for name, row in methods.items()
    }


_NAME_BLOCKS = ("PrepareLoad", "PrepareStore", "Explain", "SyncTables", "PinBlocks", "UnpinBlocks", "RegisterSpans")
_LONG_TEXTS = ("RegisterEngine", "SetPolicy")
_OF_SHARDS = ("Report", "Inventory")
_MOST = dict.fromkeys((*_NAME_BLOCKS, *_LONG_TEXTS), limits.QUESTION_BYTES)
_MOST |= dict.fromkeys(_OF_SHARDS, limits.MESSAGE_BYTES)

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
        "GetPins": (coordinator.GET_PINS, PinList),
        "Purge": (coordinator.PURGE, Purged),
        "Drain": (coordinator.DRAIN, Done),
        "SetPolicy": (coordinator.SET_POLICY, Done),
        "Probe": (coordinator.PROBE, Probed),
        "GetStatus": (coordinator.GET_STATUS, Status),
        "IssueCredential": (reports.ISSUE_CREDENTIAL, IssuedCredential),
        "Report": (reports.REPORT, ReportAck),
        "Inventory": (reports.INVENTORY, ReportAck),
        "Ping": _PING,
    },
)
"""The methods of the coordinator, by name. Only shards may call `IssueCredential`, `Report` and `Inventory`, operators
alone `Drain`, `SetPolicy` and `Probe`."""

SHARD: Mapping[str, Method] = _table(
    SHARD_SERVICE,
    shard.REPLY,
    {
        "Attach": (coordinator.ATTACH_SHARD, AttachedShard),
        "GetOffers": (shard.GET_OFFERS, Offers),
        "Flush": (shard.FLUSH, Done),
        "Suspect": (shard.SUSPECT, Done),
        "RegisterSpans": (shard.REGISTER_SPANS, Done),
        "Ping": _PING,
    },
)
"""The methods of a shard, by name, besides Read and Write."""


class VersionQuestion(Method):
    """An Attach without a spec, to check the protocol version. A coordinator with a version in common answers
    CallerError, any other VersionError, since versions are compared before anything else is read. The coordinator
    keeps no state of it."""

    def __init__(self) -> None:
        super().__init__(COORDINATOR["Attach"].path, coordinator.ATTACH, Attached, answers.REPLY)

    def encode_request(
        self, question: Question | None, namespace: NamespaceId | None = None, version: int = PROTOCOL_VERSION
    ) -> bytes:
        """As Method, whatever the question."""
        data: bytes = pb.AttachRequest(protocol_version=version).SerializeToString()
        return data
