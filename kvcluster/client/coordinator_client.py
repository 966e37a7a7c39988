"""Questions to the coordinator: one deadline, attached namespaces, and trouble as a miss.

The client asks core questions; the port carries them, with the namespace of those that are asked within one. Call and
tenant are the server's own knowledge.
"""

from __future__ import annotations

import threading
from typing import Protocol, TypeVar

from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Attach, Attached, CoordinatorQuestion, Refused, RefusedKind, Reply
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LimitError, ProtocolError
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR

R = TypeVar("R")


class CoordinatorPort(Protocol):
    """Carries a question to the coordinator, with the namespace that it is about, if any. Raises Unavailable where no
    answer comes."""

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply: ...

    def close(self) -> None: ...


class GrpcPort:
    """The coordinator over gRPC."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        return self._connection.ask(COORDINATOR[type(question).__name__], question, deadline, namespace)

    def close(self) -> None:
        self._connection.close()


class CoordinatorClient:
    """Asks within a namespace, attaching its spec first and again when the coordinator has forgotten it."""

    def __init__(self, port: CoordinatorPort) -> None:
        self._port = port
        self._attached: dict[KVSpec, Attached] = {}
        self._lock = threading.Lock()

    def attach(self, spec: KVSpec, deadline: Deadline) -> Attached:
        """The namespace of a spec, asked for once."""
        with self._lock:
            known = self._attached.get(spec)
        if known is not None:
            return known
        attached = expect(Attached, self._port.ask(Attach(spec), deadline))
        with self._lock:
            self._attached[spec] = attached
        return attached

    def spec_of(self, namespace: NamespaceId) -> KVSpec | None:
        """The spec of a namespace that was attached here."""
        with self._lock:
            return next((spec for spec, known in self._attached.items() if known.namespace == namespace), None)

    def is_attached(self, spec: KVSpec) -> bool:
        with self._lock:
            return spec in self._attached

    @property
    def wants_tokens(self) -> bool:
        """Does the coordinator that was attached to want token ids with stores?"""
        with self._lock:
            return any(known.wants_tokens for known in self._attached.values())

    def namespace(self, spec: KVSpec, deadline: Deadline) -> NamespaceId:
        return self.attach(spec, deadline).namespace

    def ask(self, kind: type[R], spec: KVSpec, question: CoordinatorQuestion, deadline: Deadline) -> R:
        """Asks within the namespace of that spec, and returns an answer of that kind.

        Raises Unavailable where none comes, CallerError or LimitError where the question was wrong.
        """
        answer = self._ask(question, self.namespace(spec, deadline), deadline)
        if isinstance(answer, Refused) and answer.kind is RefusedKind.UNKNOWN_NAMESPACE:
            with self._lock:
                self._attached.pop(spec, None)
            answer = self._ask(question, self.namespace(spec, deadline), deadline)
        return expect(kind, answer)

    def _ask(self, question: CoordinatorQuestion, namespace: NamespaceId, deadline: Deadline) -> Reply:
        """Asks once more where the answer was lost: a prepare names its attempt, so that it is not done twice."""
        try:
            return self._port.ask(question, deadline, namespace)
        except Unavailable:
            if not deadline.remaining_s():
                raise
            return self._port.ask(question, deadline, namespace)

    def request(self, kind: type[R], question: CoordinatorQuestion, deadline: Deadline) -> R:
        """Asks a question that belongs to no namespace, and returns an answer of that kind. Raises as `ask`."""
        return expect(kind, self._port.ask(question, deadline))

    def close(self) -> None:
        self._port.close()


def expect(kind: type[R], answer: Reply) -> R:
    """The answer, if it is of that kind; else the error that it amounts to."""
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Refused):
        if answer.kind in (RefusedKind.UNKNOWN_NAMESPACE, RefusedKind.STALE):  # though it was attached just now
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"the coordinator forgets what it knew: {answer.detail}"))
        raise (LimitError if answer.kind is RefusedKind.LIMIT else CallerError)(answer.detail)
    raise ProtocolError(f"the server answered {type(answer).__name__} where {kind.__name__} belongs")
