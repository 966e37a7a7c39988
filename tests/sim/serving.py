"""Page sessions as a simulated shard carries them out: the real ones (transport/page_session.py), over pipes.

A copy that is under way when its lease is revoked is finished first, as with real threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import (
    AttendRequest,
    Done,
    PageSlot,
    PinGrant,
    ReadRequest,
    Refused,
    RefusedKind,
    Reply,
    SpanGrant,
    SpanMiss,
    SpanPages,
    SpansLacking,
    WriteGrant,
    WriteRequest,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.replay.core_stepper import Answered, Build
from kvcluster.replay.kernel import MS, TIMED_OUT, Promise, Script
from kvcluster.transport.page_session import (
    LONGEST_NS,
    AskCore,
    Committed,
    CoreAnswered,
    Fail,
    Finished,
    Granted,
    MoveFrame,
    MoveNext,
    Open,
    PageSession,
    Refuse,
    SessionEffect,
    SessionEvent,
    Stopped,
)
from tests.sim.network import Pipe
from tests.sim.sessions import FINISHED, ArrivedSums, Layer, Session, SessionRequest, SpanRead
from tests.sim.surroundings import Surroundings
from tests.sim.violation import require

SLOW_NS = 300 * MS
"""The mean time between two frames of a slow reader: its lease sometimes expires."""


class SessionMemory(Protocol):
    """The pages of a shard, as a session reads and writes them."""

    def verified(self, pages: SpanPages) -> bool:
        """Whether the pages of a span match their checksums, which is looked at when they are first used."""

    def bytes_of(self, slot: PageSlot) -> bytes | None:
        """Returns the bytes of a page."""

    def is_rotten(self, slot: PageSlot) -> bool:
        """Whether a fault has changed any byte of the page."""

    def load_layer(self, item: int, slot: PageSlot, layer: int) -> Layer:
        """Returns the bytes of a layer, with the checksum that was committed with them."""

    def store_layer(self, slot: PageSlot, layer: Layer) -> None:
        """Writes a layer to its place in the page."""

    def verify(self, namespace: NamespaceId, slot: PageSlot, sums: list[int]) -> bytes | None:
        """Returns the packed checksums if the page matches `sums`; None if it does not."""


class SessionBook(Protocol):
    """The sessions of a shard that are under way."""

    def begin(self, session: Session) -> bool:
        """Adds a session; False if its attempt has one already."""

    def finish(self, session: Session) -> None:
        """Removes a session, which moves nothing any more."""


class SessionHost(SessionBook, Protocol):
    """The shard process that carries a session out."""

    @property
    def world(self) -> Surroundings: ...

    @property
    def storage(self) -> SessionMemory: ...

    def now(self) -> int:
        """Returns the time on the clock of its node."""

    def submit(self, build: Build, answered: Answered | None = None) -> object:
        """Has the core step the message that `build` makes for a call id; `answered` gets the reply."""


def serve(shard: SessionHost, opening: SessionRequest, up: Pipe, down: Pipe) -> Script:
    """Carries out one load, store or Attend, from its opening to its end."""
    request = opening.request
    if isinstance(request, WriteRequest):
        request = replace(request, wait_ns=min(request.wait_ns, opening.patience_ns))
    plan = PageSession(opening.caller, request)
    namespace = None if isinstance(request, AttendRequest) else request.namespace
    session = Session(request.attempt, namespace, up, writes=isinstance(request, WriteRequest), plan=plan)
    if not shard.begin(session):
        down.put(Refused(RefusedKind.BAD, f"attempt {request.attempt} is under way already"))
        return
    effect = yield from _drive(shard, session, plan, Open())
    if isinstance(effect, Granted) and isinstance(request, AttendRequest):
        yield from _attend(shard, session, plan, request, effect.pages, shard.now() + opening.patience_ns, down)
    elif isinstance(effect, Granted):
        down.put([None if isinstance(page, PageSlot) else page for page in effect.pages])
        give_up = shard.now() + opening.patience_ns
        assert not isinstance(request, AttendRequest)
        if isinstance(request, WriteRequest):
            yield from _write(shard, session, plan, request, effect.pages, give_up, up, down)
        else:
            yield from _read(shard, session, plan, request, effect.pages, give_up, up, down)
    elif isinstance(effect, Refuse):
        down.put(effect.refused)
    session.moving = False
    shard.finish(session)
    yield from _drive(shard, session, plan, Stopped())


def _drive(shard: SessionHost, session: Session, plan: PageSession, event: SessionEvent) -> Script:
    """Steps an event, and asks the core what the session wants to know. Returns the last effect; None if there is
    none."""
    effects: list[SessionEffect] = plan.step(event)
    while effects and isinstance(effects[0], AskCore):
        ask = effects[0]
        answered = Promise()
        shard.submit(ask.build, partial(_answered, session, answered))
        reply = yield answered, LONGEST_NS
        session.refused = session.refused or reply == Done(False)
        late = Miss(MissReason.DEADLINE, "the shard does not answer")
        effects = plan.step(CoreAnswered(late if reply is TIMED_OUT else reply))
    moves = bool(effects) and isinstance(effects[0], MoveFrame)
    require(not (moves and session.refused), "a frame moves under a lease that the core has refused to renew")
    return effects[0] if effects else None


def _answered(session: Session, answered: Promise, reply: Reply) -> None:
    if isinstance(reply, SpanGrant):
        session.pages = [slot for pages in reply.spans if isinstance(pages, SpanPages) for slot in pages.slots]
    if isinstance(reply, WriteGrant | PinGrant):
        session.pages = [page if isinstance(page, PageSlot) else None for page in reply.pages]
    answered.fulfil(reply)


def _attend(
    shard: SessionHost,
    session: Session,
    plan: PageSession,
    request: AttendRequest,
    granted: Sequence[object],
    give_up: int,
    down: Pipe,
) -> Script:
    """Attends to one span after the other, as a compute does to one subtree after the other: a span's pages are
    verified when they are first used, and read when it is their turn."""
    spans = dict(zip(request.spans, granted, strict=True))
    lacking = {span: why for span, why in spans.items() if isinstance(why, SpanMiss)}
    found: list[SpanRead] = []
    for span, pages in spans.items():
        if lacking or not isinstance(pages, SpanPages):
            break
        yield None, int(2 * shard.world.scenario.frame_ns * shard.world.rng.random())
        effect = yield from _drive(shard, session, plan, MoveNext())
        if not isinstance(effect, MoveFrame) or shard.now() > give_up:
            return
        if not shard.storage.verified(pages):
            lacking[span] = SpanMiss.CORRUPT
            break
        found += [
            SpanRead(span, slot, shard.storage.bytes_of(slot), sound=not shard.storage.is_rotten(slot))
            for slot in pages.slots
        ]
    down.put(SpansLacking(tuple(lacking.items())) if lacking else found)


def _read(
    shard: SessionHost,
    session: Session,
    plan: PageSession,
    request: ReadRequest,
    pages: Sequence[object],
    give_up: int,
    up: Pipe,
    down: Pipe,
) -> Script:
    rng, scenario = shard.world.rng, shard.world.scenario
    layers = [
        (item, slot, layer)
        for item, (slot, want) in enumerate(zip(pages, request.wants, strict=True))
        if isinstance(slot, PageSlot)
        for layer in range(want.layer_start, want.layer_stop)
    ]
    # A slow reader: pages that are evicted meanwhile are evicted while it reads them.
    slow = shard.world.working and rng.random() < 0.1
    frame_ns = SLOW_NS if slow else scenario.frame_ns
    for start in range(0, len(layers), scenario.frame_layers):
        heard = yield up.next(), int(frame_ns * 2 * rng.random())
        if heard is not TIMED_OUT or shard.now() > give_up:
            break
        effect = yield from _drive(shard, session, plan, MoveNext())
        if not isinstance(effect, MoveFrame):
            break
        down.put([shard.storage.load_layer(*each) for each in layers[start : start + scenario.frame_layers]])
    else:
        down.put(FINISHED)
    if session.revoked:
        yield None, rng.randrange(20 * MS)


def _write(
    shard: SessionHost,
    session: Session,
    plan: PageSession,
    request: WriteRequest,
    pages: Sequence[object],
    give_up: int,
    up: Pipe,
    down: Pipe,
) -> Script:
    slots = {item: page for item, page in enumerate(pages) if isinstance(page, PageSlot)}
    arrived = ArrivedSums()
    while True:
        heard = yield up.next(), max(1, give_up - shard.now())
        if heard is FINISHED:
            session.moving = False
            done = _finished(shard, request, slots, arrived)
            effect = yield from _drive(shard, session, plan, done)
            if isinstance(effect, Committed):
                down.put(effect.outcome)
            return
        if not isinstance(heard, list):
            break
        effect = yield from _drive(shard, session, plan, MoveNext())
        if isinstance(effect, Fail):
            break
        for layer in heard:
            assert layer.item in slots, "a worker sent a page that was not granted"
            shard.storage.store_layer(slots[layer.item], layer)
            arrived.add(layer)
    if session.revoked:  # a copy that was under way ends when it ends
        heard = yield up.next(), shard.world.rng.randrange(20 * MS)
        for layer in heard if isinstance(heard, list) else ():
            if layer.item in slots:
                shard.storage.store_layer(slots[layer.item], layer)


def _finished(shard: SessionHost, request: WriteRequest, slots: dict[int, PageSlot], arrived: ArrivedSums) -> Finished:
    """Verifies the current bytes of the pages against the writer's checksums."""
    verified: dict[int, bytes] = {}
    missing: int | None = None
    for item, slot in slots.items():
        sums = arrived.whole(item, slot)
        if sums is None:
            missing = item if missing is None else missing
            continue
        packed = shard.storage.verify(request.namespace, slot, sums)
        if packed is not None:
            verified[item] = packed
    return Finished(verified, missing)
