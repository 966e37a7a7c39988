"""Questions to the coordinator: one deadline, attached namespaces, and failures as misses.

The client asks questions of the core's messages; the port carries them, with a namespace if they are asked within one.
The server itself determines the call and the tenant.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvcluster.core.ids import NamespaceId, Tenant
from kvcluster.core.messages import Attach, Attached, CoordinatorQuestion, Refused, RefusedKind, Reply
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LimitError, ProtocolError, Unreachable
from kvcluster.runtime.uninterrupted import without_interrupt
from kvcluster.transport.base import Cancelled, Deadline, RateLimited, Unavailable
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR

R = TypeVar("R")
log = logging.getLogger(__name__)

_FAIR_S = 0.1
"""If a question with less time than this is not answered in time, that shows nothing about the coordinator."""

_CLOSING_MS = 2_000
"""What `close` sends to the coordinator are hints, so it waits no longer than this for one that hangs."""


class CoordinatorPort(Protocol):
    """Carries a question to the coordinator, with the namespace that it is about, if any. Raises Unavailable if it is
    not answered: DEADLINE if the answer would have arrived too late, otherwise COORDINATOR_LOST."""

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply: ...

    def cut_off(self) -> None:
        """Ends questions that are under way, which raise Unavailable. Later ones may be asked."""

    def close(self) -> None: ...


class NothingStored(Unavailable):
    """The tenant whose KV is read has stored nothing under a spec, or nothing may be read of it any more: a miss, of a
    coordinator that answers."""


def unanswered(trouble: Unavailable, detail: str) -> Unavailable:
    """Returns the error for a question that the coordinator has not answered, because of `trouble`, whose own reason is
    that of any server: it may be SHARD_LOST."""
    late = trouble.miss.reason is MissReason.DEADLINE
    return Unavailable(Miss(MissReason.DEADLINE if late else MissReason.COORDINATOR_LOST, detail))


class GrpcPort:
    """The coordinator over gRPC."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        try:
            return self._connection.ask(COORDINATOR[type(question).__name__], question, deadline, namespace)
        except (Cancelled, RateLimited):
            raise
        except Unavailable as trouble:  # its reasons are those of any server: name this one
            late = trouble.miss.reason is MissReason.DEADLINE
            why = "has not answered in time" if late else f"does not answer ({trouble.miss.detail})"
            raise unanswered(trouble, f"the coordinator at {self._connection.address} {why}") from None

    def cut_off(self) -> None:
        self._connection.cut_off()

    def close(self) -> None:
        self._connection.close()


class WatchedPort:
    """A port to the coordinator that logs the beginning and the end of an outage as warnings. Thread-safe."""

    def __init__(self, port: CoordinatorPort, *, clock: Callable[[], float] = time.time) -> None:
        self._port = port
        self._clock = clock
        self._outage = Outage()
        self._lock = threading.Lock()

    @without_interrupt()
    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        fair = deadline.remaining_s() >= _FAIR_S
        try:
            answer = self._port.ask(question, deadline, namespace)
        except (Cancelled, RateLimited):
            raise
        except Unavailable as error:
            if fair or error.miss.reason is not MissReason.DEADLINE:
                with self._lock:
                    said = self._outage.failed(error.miss, self._clock())
                if said:
                    log.warning("kvcluster: %s", said)
            raise
        if not self._outage.settled:
            with self._lock:
                said = self._outage.answered(self._clock())
            if said:
                log.warning("kvcluster: %s", said)
        return answer

    def cut_off(self) -> None:
        self._port.cut_off()

    def close(self) -> None:
        self._port.close()


class CoordinatorClient:
    """Asks within a namespace. Attaches its spec first, and again if the coordinator no longer knows it. Logs when the
    coordinator stops answering, and when it answers again (Outage)."""

    def __init__(self, port: CoordinatorPort, owner: Tenant | None = None) -> None:
        """`owner`: the tenant whose KV is read by a grant; None for that of the credential."""
        self.owner = owner
        self._was_granted = False
        self._port = WatchedPort(port)
        self._attached: dict[KVSpec, Attached] = {}  # each use of it is one step of the interpreter: no lock
        self._last: Deadline | None = None
        """When the last question of a client that closes must have been answered."""

    def attach(self, spec: KVSpec, deadline: Deadline) -> Attached:
        """Returns the namespace of a spec; asks the coordinator only the first time. Raises NothingStored if an `owner`
        has stored nothing under it."""
        known = self._attached.get(spec)
        if known is None:
            answer = self._port.ask(Attach(spec, self.owner), self._in_time(deadline))
            if isinstance(answer, Refused) and self._finds_nothing(answer):
                raise NothingStored(Miss(MissReason.NEVER_SEEN, answer.detail))
            known = expect(Attached, answer)
            if self.owner is not None and known.namespace != spec.namespace(self.owner):
                raise CallerError("this cluster's release reads the KV of no other tenant: upgrade it")
            self._attached[spec], self._was_granted = known, True
        return known

    def _finds_nothing(self, refused: Refused) -> bool:
        """Whether an `owner` has nothing of a spec, or nothing more for this client, whose grant was taken back."""
        taken_back = self._was_granted and refused.kind is RefusedKind.BAD
        return self.owner is not None and (taken_back or refused.kind is RefusedKind.UNKNOWN_NAMESPACE)

    @property
    def read_only(self) -> bool:
        """Whether nothing can be stored: the KV is another tenant's, or the credential is read-only. False until the
        coordinator has been asked."""
        return self.owner is not None or any(known.read_only for known in list(self._attached.values()))

    def check_may_store(self) -> None:
        """Raises CallerError if this client is `read_only`."""
        if self.owner is not None:
            raise CallerError(
                f"this client reads the KV of tenant {self.owner!r}, and changes nothing: connect without `reads` for "
                "what its own tenant stores"
            )
        if self.read_only:
            raise CallerError("this client's token is read-only: it looks up and loads, and changes nothing")

    def spec_of(self, namespace: NamespaceId) -> KVSpec | None:
        """Returns the spec of a namespace, None if this client has not attached it."""
        return next((spec for spec, known in list(self._attached.items()) if known.namespace == namespace), None)

    def is_attached(self, spec: KVSpec) -> bool:
        return spec in self._attached

    @property
    def wants_tokens(self) -> bool:
        """Whether the coordinator asked for token ids with stores when a spec was attached."""
        return any(known.wants_tokens for known in list(self._attached.values()))

    def namespace(self, spec: KVSpec, deadline: Deadline) -> NamespaceId:
        return self.attach(spec, deadline).namespace if self.owner is None else spec.namespace(self.owner)

    def ask(self, kind: type[R], spec: KVSpec, question: CoordinatorQuestion, deadline: Deadline) -> R:
        """Asks within the namespace of `spec`, and returns an answer of type `kind`.

        Raises Unavailable if it is not answered, CallerError or LimitError if the coordinator refuses the question, and
        ProtocolError if the answer has another type.
        """
        answer = self._ask(question, self.attach(spec, deadline).namespace, deadline)
        if isinstance(answer, Refused) and answer.kind is RefusedKind.UNKNOWN_NAMESPACE:
            self._attached.pop(spec, None)
            answer = self._ask(question, self.attach(spec, deadline).namespace, deadline)
        return expect(kind, answer)

    def _ask(self, question: CoordinatorQuestion, namespace: NamespaceId, deadline: Deadline) -> Reply:
        """Asks once more if the answer was lost. A prepare names its attempt, so that it is not done twice."""
        try:
            return self._port.ask(question, self._in_time(deadline), namespace)
        except Unavailable as trouble:
            if not deadline.remaining_s() or isinstance(trouble, Cancelled | RateLimited):
                raise
            return self._port.ask(question, self._in_time(deadline), namespace)

    def request(self, kind: type[R], question: CoordinatorQuestion, deadline: Deadline) -> R:
        """Asks a question that belongs to no namespace, and returns an answer of type `kind`. Raises as `ask`."""
        return expect(kind, self._port.ask(question, self._in_time(deadline)))

    def require(self, kind: type[R], question: CoordinatorQuestion, deadline: Deadline, advice: str) -> R:
        """As `request`, for a question whose answer cannot be a miss. Raises Unreachable, with `advice`, if the
        coordinator does not answer."""
        try:
            return self.request(kind, question, deadline)
        except Unavailable as trouble:
            raise Unreachable(f"the coordinator does not answer: {trouble.miss}; {advice}") from None

    def end_questions(self) -> None:
        """Ends the questions under way, whose callers wait. Those that follow, by which a client that closes ends its
        tickets and tables, have _CLOSING_MS in all."""
        self._last = Deadline.after_ms(_CLOSING_MS)
        self._port.cut_off()

    def close(self) -> None:
        self._port.close()

    def _in_time(self, deadline: Deadline) -> Deadline:
        last = self._last
        return deadline if last is None else min(deadline, last, key=lambda each: each.at_ns)


def expect(kind: type[R], answer: Reply) -> R:
    """Returns the answer if its type is `kind`; otherwise raises the matching error."""
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Refused):
        if answer.kind in (RefusedKind.UNKNOWN_NAMESPACE, RefusedKind.STALE):  # although it was just attached
            raise Unavailable(Miss(MissReason.COORDINATOR_LOST, f"it lost its state: {answer.detail}"))
        raise (LimitError if answer.kind is RefusedKind.LIMIT else CallerError)(answer.detail)
    raise ProtocolError(f"the server answered {type(answer).__name__}, expected {kind.__name__}")


FAILURES = 2


class Outage:
    """Decides which answers and failures are logged. Times are in seconds since the epoch, for people to read.

    It reports when the coordinator has stopped answering a client, and when it answers again: an engine continues
    without the cache, so nothing else would show it.

    The coordinator has failed when FAILURES questions in a row were not answered: one may be this process's own
    fault, whose thread got no CPU time to read the answer. A coordinator that has never answered has not stopped:
    that is an error of `connect`. The answer that ends an outage is that of the next question, so an engine without
    requests reports it late. This class writes no log and reads no clock: its callers do.
    """

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._since = 0.0  # of the first of them
        self._has_answered = False
        self._reported = False

    @property
    def settled(self) -> bool:
        """Whether an answer changes nothing."""
        return self._has_answered and not self._failures

    def failed(self, why: Miss, now: float) -> str:
        """Records that a question was not answered. Returns what to report; "" for nothing."""
        if not self._failures:
            self._since = now
        self._failures += 1
        if self._reported or not self._has_answered or self._failures < FAILURES:
            return ""
        self._reported = True
        return (
            f"the cluster has not answered since {_clock(self._since)} ({why}): everything is computed, and nothing is "
            "stored, until it answers again. `kvcluster status` and `kvcluster doctor` show what is left of it"
        )

    def answered(self, now: float) -> str:
        """Records an answer. Returns as `failed`."""
        ended, self._reported = self._reported, False
        self._has_answered, self._failures = True, 0
        since = f"it did not from {_clock(self._since)} on, for {max(0.0, now - self._since):.0f} s"
        return f"the cluster answers again; {since}" if ended else ""


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
