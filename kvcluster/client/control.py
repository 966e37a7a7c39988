"""Questions to the coordinator: one deadline, attached namespaces, and trouble as a miss.

The client speaks in core messages; the port carries them. Over gRPC the server fills in the call and the tenant,
so what stands there on this side means nothing.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from kvcluster.core.ids import CallId, NamespaceId, Tenant
from kvcluster.core.messages import Attach, Attached, CoordinatorMessage, Refused, RefusedKind, Reply
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LimitError, ProtocolError
from kvcluster.transport.rpc import Connection
from kvcluster.transport.seam import Deadline, Trouble
from kvcluster.wire.methods import COORDINATOR

NO_CALL = CallId(0)
NOBODY = Tenant("")
R = TypeVar("R")


class CoordinatorPort(Protocol):
    """Carries a question to the coordinator. Raises Trouble where no answer comes."""

    def ask(self, message: CoordinatorMessage, deadline: Deadline) -> Reply: ...

    def close(self) -> None: ...


class GrpcPort:
    """The coordinator over gRPC."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, message: CoordinatorMessage, deadline: Deadline) -> Reply:
        return self._connection.ask(COORDINATOR[type(message).__name__], message, deadline)

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
        attached = expect(Attached, self._port.ask(Attach(NO_CALL, NOBODY, spec), deadline))
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

    def ask(self, kind: type[R], spec: KVSpec, message: Any, deadline: Deadline) -> R:
        """Asks `message`, whose namespace is filled in here, and returns an answer of that kind.

        Raises Trouble where none comes, CallerError or LimitError where the question was wrong.
        """
        answer = self._ask(replace(message, namespace=self.namespace(spec, deadline)), deadline)
        if isinstance(answer, Refused) and answer.kind is RefusedKind.UNKNOWN_NAMESPACE:
            with self._lock:
                self._attached.pop(spec, None)
            answer = self._ask(replace(message, namespace=self.namespace(spec, deadline)), deadline)
        return expect(kind, answer)

    def _ask(self, message: CoordinatorMessage, deadline: Deadline) -> Reply:
        """Asks once more where the answer was lost: a prepare names its attempt, so that it is not done twice."""
        try:
            return self._port.ask(message, deadline)
        except Trouble:
            if not deadline.remaining_s():
                raise
            return self._port.ask(message, deadline)

    def say(self, kind: type[R], message: Any, deadline: Deadline) -> R:
        """Asks a question that belongs to no namespace."""
        return expect(kind, self._port.ask(message, deadline))

    def close(self) -> None:
        self._port.close()


def expect(kind: type[R], answer: Reply) -> R:
    """The answer, if it is of that kind; else the error that it amounts to."""
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Refused):
        if answer.kind in (RefusedKind.UNKNOWN_NAMESPACE, RefusedKind.STALE):  # though it was attached just now
            raise Trouble(Miss(MissReason.SHARD_LOST, f"the coordinator forgets what it knew: {answer.detail}"))
        raise (LimitError if answer.kind is RefusedKind.LIMIT else CallerError)(answer.detail)
    raise ProtocolError(f"the server answered {type(answer).__name__} where {kind.__name__} belongs")
