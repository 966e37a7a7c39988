"""A client's process: what the client's plans need of a network (loads.py, stores.py), and no more.

It asks the coordinator within the time that is left, attaches namespaces, and opens connections to shards. A lost
answer is asked for again; an answer that does not come at all is returned as None or as an error, and never raised.
"""

from __future__ import annotations

from typing import Protocol

from kvcluster.core.ids import Attempt, Holder, NamespaceId
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    CoordinatorQuestion,
    EndTicket,
    PageKey,
    ReadRequest,
    Refused,
    RefusedKind,
    ShardAddress,
    WriteRequest,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import LimitError
from kvcluster.replay.core_stepper import Build
from kvcluster.replay.kernel import TIMED_OUT, Clock, Process, Script
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transport.base import RefusedByShard, Unavailable
from tests.sim.content import Model
from tests.sim.network import BROKEN, Line
from tests.sim.sessions import Layer, SessionRequest
from tests.sim.shard import Addresses
from tests.sim.surroundings import Surroundings
from tests.sim.violation import require

BREAKER_MS = 50
"""Short, so that a breaker that opened during the faults is closed again by the time everything must be at rest."""


class ReaderJudge(Protocol):
    """What a client shows to the oracle (oracle.py), or asks of it."""

    def accepted(self, space: NamespaceId, key: PageKey, layer: Layer, accept: Loss) -> None:
        """A reader that accepts that loss has accepted these bytes."""

    def refused(self, key: PageKey, layer: Layer) -> None:
        """A reader got bytes that do not match their checksum."""

    def was_committed(self, space: NamespaceId, key: PageKey) -> bool:
        """Whether any shard has ever committed this page."""


class ClientSurroundings(Surroundings, Addresses, Protocol):
    """What a client needs of its world."""

    @property
    def oracle(self) -> ReaderJudge: ...


class ClientProcess(Process):
    """One incarnation of a client."""

    def __init__(self, world: ClientSurroundings, name: str, node: int, clock: Clock, holder: Holder) -> None:
        super().__init__(world.kernel, name, node, clock)
        self.world = world
        self.holder = holder
        self._attempts = 0
        self._asked = 0
        self._asking: dict[int, int] = {}  # when each question under way was asked
        self.policy = ShardHealth(breaker_failures=3, breaker_ms=BREAKER_MS)
        self._plans = 0  # the number under way
        self._attached: dict[Model, Attached] = {}
        self._attached_shards: dict[tuple[ShardAddress, NamespaceId], None] = {}

    def attempt(self) -> Attempt:
        self._attempts += 1
        return Attempt(self.holder, self._attempts)

    def plan_began(self) -> None:
        """Counts a load or store that begins."""
        self._plans += 1

    def plan_ended(self) -> None:
        """Counts a load or store that has stopped all its exchanges. If no other is under way, every permit of a
        breaker must have been settled."""
        self._plans -= 1
        probing = [name for name, breaker in self.policy.status(self.now()).items() if breaker["state"] == "probing"]
        require(self._plans > 0 or not probing, f"no exchange is under way, but {probing} wait for a probe")

    # ------------------------------------------------------------------------------------------- questions

    def ask(self, build: Build, give_up: int) -> Script:
        """Asks the coordinator one question. Returns the reply, or None if no answer comes."""
        promise = self.world.network.ask(self, self.world.coordinator_seen_by(self), build)
        self._asked += 1
        number = self._asked
        self._asking[number] = self.now()
        reply = yield promise, max(1, min(give_up - self.now(), self.world.scenario.patience_ns // 2))
        del self._asking[number]
        return reply if promise.ready and reply is not BROKEN else None

    def unanswered_ns(self) -> int:
        """Returns for how long the coordinator has not answered a question that is under way; 0 if none is."""
        return self.now() - next(iter(self._asking.values())) if self._asking else 0

    def question(self, model: Model, question: CoordinatorQuestion, give_up: int) -> Script:
        """As `ask`, within a namespace: attaches it first, again if the coordinator has forgotten it, and asks again if
        the answer was lost."""
        reply = None
        for _ in range(4):
            if model not in self._attached:
                attached = yield from self.ask(model.asks(Attach(model.spec, model.owner)), give_up)
                if not isinstance(attached, Attached):
                    continue
                self._attached[model] = attached
            reply = yield from self.ask(model.asks(question, model.space), give_up)
            if isinstance(reply, Refused) and reply.kind is RefusedKind.UNKNOWN_NAMESPACE:
                self._attached.pop(model, None)
            elif reply is not None or self.now() >= give_up:
                return reply
        return reply

    def end_ticket(self, model: Model, attempt: Attempt) -> None:
        """Ends a ticket without waiting for the answer. If the message is lost, the ticket ends by time."""
        self.world.network.ask(self, self.world.coordinator_seen_by(self), model.asks(EndTicket(attempt)))

    def attach(self, model: Model, give_up: int) -> Script:
        """Returns the coordinator's answer to attaching the namespace; None if it cannot be asked."""
        for _ in range(2):
            if model in self._attached or self.now() >= give_up:
                break
            attached = yield from self.ask(model.asks(Attach(model.spec, model.owner)), give_up)
            if isinstance(attached, Attached):
                self._attached[model] = attached
        return self._attached.get(model)

    # --------------------------------------------------------------------------------------------- shards

    def attach_shard(self, model: Model, shard: ShardAddress, give_up: int) -> Script:
        """Attaches the namespace at a shard, if it is not yet. Returns None, or the error that `open` returns."""
        if (shard, model.space) in self._attached_shards:
            return None
        process = self.world.shard_at(shard.address)
        promise = self.world.network.ask(self, process, model.asks(AttachShard(model.spec, model.owner)))
        reply = yield promise, max(1, min(give_up - self.now(), self.world.scenario.patience_ns // 2))
        if isinstance(reply, Refused):
            return LimitError(reply.detail) if model.reader is None else Unavailable(Miss(MissReason.SHARD_LOST))
        if not isinstance(reply, AttachedShard):
            return _trouble(reply)
        if reply.epoch != shard.epoch:
            return RefusedByShard(Refused(RefusedKind.STALE, "another incarnation answers"))
        self._attached_shards[shard, model.space] = None
        return None

    def forget_shard(self, model: Model, shard: ShardAddress) -> None:
        """A shard may have forgotten the namespace: it is attached again before it is used."""
        self._attached_shards.pop((shard, model.space), None)

    def open(self, model: Model, shard: ShardAddress, request: ReadRequest | WriteRequest, give_up: int) -> Script:
        """Opens a connection. Returns it with the head of its answer, which holds for each page None or why not; or
        returns the error that the client's connections (transfers/shard_connections.py) would raise."""
        if self.now() >= give_up:
            return Unavailable(Miss(MissReason.DEADLINE))
        process = self.world.shard_at(shard.address)
        refused = yield from self.attach_shard(model, shard, give_up)
        if refused is not None:
            return refused
        left_ns = give_up - self.now()
        if process is None or left_ns <= 0:
            return _trouble(TIMED_OUT)
        line: Line = self.world.network.connect(
            self, process, process.serve, SessionRequest(model.caller, request, left_ns)
        )
        head = yield line.down.next(), left_ns
        if isinstance(head, list):
            return line, head
        line.up.hang_up()
        self.world.network.close(line)
        if not isinstance(head, Refused):
            return _trouble(head)
        if head.kind is RefusedKind.UNKNOWN_NAMESPACE:
            self.forget_shard(model, shard)
        return RefusedByShard(head)


def _trouble(heard: object) -> Unavailable:
    return Unavailable(Miss(MissReason.DEADLINE if heard is TIMED_OUT else MissReason.SHARD_LOST, "no answer"))
