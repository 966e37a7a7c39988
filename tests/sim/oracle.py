"""The oracle: judges from outside, at every step, what no process inside the system can decide.

It sees all clocks, all memories and all processes at once, and knows the correct bytes of every page (content.py). Each
promise is one method with one sentence, raised as a Violation. It must not accuse falsely: what a fault explains is not
a violation, and what no fault explains is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, CallId, NamespaceId
from kvcluster.core.messages import (
    Answer,
    Commit,
    CommitGrant,
    Effect,
    Moved,
    MovePages,
    PageKey,
    PageSlot,
    Pin,
    PinGrant,
    Refused,
    ReportAnswered,
    Request,
    Reserve,
    Revoke,
    ShardAddress,
    Staged,
    Stalled,
    Suspect,
    Tick,
    Tier,
    TierLost,
    Verified,
    WriteGrant,
    Written,
)
from kvcluster.core.miss import Loss
from kvcluster.core.shard.page import PageState
from kvcluster.core.tiers import INGEST
from kvcluster.replay.kernel import MS, Kernel
from tests.sim import content
from tests.sim.memory import UNIT_BYTES
from tests.sim.sessions import Layer
from tests.sim.shard import ShardProcess
from tests.sim.tier_io import TierPlace
from tests.sim.violation import require

Name = tuple[NamespaceId, PageKey]
"""A page, on any shard and in any tier."""


class Oracle:
    """Judges what readers get and what shards do, in one world. Coordinators are judged in coordinator_oracle.py.

    A coordinator that has not heard of a shard for `membership_ttl_ns` may have given it up.
    """

    def __init__(self, kernel: Kernel, *, membership_ttl_ns: int) -> None:
        self._kernel = kernel
        self._ttl = membership_ttl_ns
        self.placed: dict[Name, dict[str, int]] = {}
        """When each page was last committed, by the name of the shard."""
        self._saves: dict[Attempt, None] = {}  # the batches of shards that save their pages because they stop
        self._pins: dict[tuple[ShardAddress, CallId], Request[Pin]] = {}  # those that are not answered
        self._of_shard: dict[type, Callable[[ShardProcess, Any, list[Effect]], None]] = {
            Pin: self._pin,
            Reserve: self._reserve,
            Commit: self._commit,
            ReportAnswered: self._report_answered,
            Verified: self._verified,
            Moved: self._moved,
            Staged: self._staged,
            TierLost: self._tier_lost,
            Suspect: self._suspect,
            Tick: self._tick,
            Stalled: self._stalled,
        }

    # -------------------------------------------------------------------------------------------- readers

    def accepted(self, space: NamespaceId, key: PageKey, layer: Layer, accept: Loss) -> None:
        """A reader that accepts that loss has accepted these bytes."""
        right = content.content(space, key, layer.codec, layer.loss).layer(layer.layer)
        require(layer.data == right, f"a reader accepted wrong bytes of {key.hash.hex()[:6]}")
        require(layer.loss <= accept, f"a reader that accepts {accept.name} got {layer.loss.name}")

    def refused(self, key: PageKey, layer: Layer) -> None:
        """A reader got bytes that do not match their sum."""
        require(not layer.sound, f"bytes of {key.hash.hex()[:6]} that no fault has touched do not match their sum")

    def was_committed(self, space: NamespaceId, key: PageKey) -> bool:
        """Whether any shard has ever committed this page."""
        return (space, key) in self.placed

    # --------------------------------------------------------------------------------------------- shards

    def shard_stepped(self, shard: ShardProcess, message: object, effects: list[Effect], now: int) -> None:
        if shard.core.state.stopping:
            self._gave_way_to_saved(shard)
            self._begins_to_save(effects)
        if isinstance(message, Request) and isinstance(message.question, Pin):
            self._pins[shard.address, message.call] = message
        judge = self._of_shard.get(type(message.question if isinstance(message, Request) else message))
        if judge is not None:
            judge(shard, message, effects)
        shard.heard.stepped(shard.core, effects)
        for effect in effects:
            if isinstance(effect, Answer) and isinstance(effect.reply, PinGrant):
                pin = self._pins.pop((shard.address, effect.call))
                self._granted_pins(shard, pin, effect.reply, now, staged=isinstance(message, Staged))
            elif slots := _granted_to_store(effect):
                require(not shard.core.state.stopping, "a shard that stops accepts a store")
                self._may_grant(shard, now)
                self._check_not_in_use(shard, slots)
                self._gave_way(shard)

    def _granted_pins(self, shard: ShardProcess, pin: Request[Pin], grant: PinGrant, now: int, *, staged: bool) -> None:
        """`staged`: it waited until its pages were read from a store, and has private copies of some."""
        slots = [page for page in grant.pages if isinstance(page, PageSlot)]
        for slot in slots if not staged else ():
            page = shard.core.pool.on(slot.tier, namespace_of(pin), slot.key)
            require(
                page is not None and page.state is PageState.READY and page.generation == slot.generation,
                f"a page of {slot.key.hash.hex()[:6]} that is not READY is given to a reader",
            )
        near = pin.question.on_device
        in_place = all(slot.tier.spec.addressable or (near and slot.tier.spec.on_device) for slot in slots)
        require(in_place, "a reader is sent to a store")
        if slots:
            self._may_grant(shard, now)

    def _gave_way_to_saved(self, shard: ShardProcess) -> None:
        """While a shard saves its pages, colder pages in its store give way, each with its decoded twin, and no
        others."""
        gone = self._vanished(shard)
        stored = {place[:2] for place in gone if not place[2].spec.addressable}
        for place in gone:
            slot = shard.ready[place][0]
            decoded = slot.codec is Codec.RAW and slot.loss is not Loss.EXACT
            if not place[2].spec.addressable or (decoded and place[:2] in stored):
                del shard.ready[place]

    def _begins_to_save(self, effects: list[Effect]) -> None:
        """What a stopping shard begins to write is public: sequences end with the shard. A demotion that was under way
        may end: the next incarnation finds its pages, as those that were demoted before, and erases them."""
        for effect in effects:
            if isinstance(effect, MovePages):
                private = any(content.private_holder(page.target.key.hash) is not None for page in effect.pages)
                require(not private, "a private page is saved to disk")
                self._saves[effect.attempt] = None

    def _gave_way(self, shard: ShardProcess) -> None:
        """A page that is gone without an order must have been replaced by one of less loss."""
        for place in self._vanished(shard):
            slot, _ = shard.ready.pop(place)
            others = (shard.core.pool.on(tier, place[0], place[1]) for tier in shard.core.pool.allocators)
            better = any(other is not None and other.loss < slot.loss for other in others)
            require(better, "a page is gone without an order and without a better copy")

    def _pin(self, shard: ShardProcess, request: Request[Pin], effects: list[Effect]) -> None:
        tenant, owner = request.tenant, content.BY_SPACE[namespace_of(request)].tenant
        if request.question.epoch != shard.core.epoch or owner not in (tenant, "", *request.reads):
            require(_refused(effects) or tenant == "", "a pin meant for another incarnation or tenant is granted")
        for key in request.question.keys if tenant else ():  # a shard that copies pages has no tenant
            holder = content.private_holder(key.hash)
            served = holder in (None, request.question.attempt.holder) or _refused(effects)
            require(served, "a private block is served to another worker")

    def _reserve(self, shard: ShardProcess, request: Request[Reserve], effects: list[Effect]) -> None:
        owner = content.BY_SPACE[namespace_of(request)].tenant
        if request.question.epoch != shard.core.epoch or owner != request.tenant:
            require(_refused(effects), "a reservation meant for another incarnation or tenant is granted")

    def _may_grant(self, shard: ShardProcess, now: int) -> None:
        """A shard that may already be replaced grants and commits nothing: judged by the clock of its coordinator."""
        coordinator = shard.coordinator
        require(coordinator is not None, "a shard that no coordinator knows grants pages")
        assert coordinator is not None
        if not coordinator.dead:
            heard = coordinator.heard.get((shard.shard, shard.core.epoch))
            require(
                heard is not None and coordinator.now() - heard < self._ttl,
                "a shard grants or commits pages after its coordinator may have given it up",
            )

    def _check_not_in_use(self, shard: ShardProcess, slots: list[PageSlot]) -> None:
        """Memory under a lease is not granted to another writer: a lease lasts until its session has stopped moving
        bytes."""
        granted = _units(slots)
        for session in shard.sessions.values():
            if session.pages and session.moving:
                both = granted & _units(page for page in session.pages if page is not None).keys()
                require(
                    not both, f"memory that {session.attempt} still {'writes' if session.writes else 'reads'} is reused"
                )

    def _commit(self, shard: ShardProcess, request: Request[Commit], effects: list[Effect]) -> None:
        m = request.question
        reply = effects[0].reply if isinstance(effects[0], Answer) else None
        assert isinstance(reply, CommitGrant)
        committed = [index for index, fate in zip(m.indices, reply.pages, strict=True) if fate is Written.COMMITTED]
        session = shard.sessions.get(m.attempt)
        may = session is not None and not session.revoked and shard.core.state.member(shard.now())
        require(not may or Written.LOST not in reply.pages, "pages written under a live lease are lost")
        if not committed:
            return
        assert session is not None
        assert session.namespace is not None
        self._may_grant(shard, shard.now())
        require(not session.revoked, "a lease that was revoked is committed")
        for index in committed:
            slot = session.pages[index]
            assert slot is not None
            right = content.content(session.namespace, slot.key, slot.codec, slot.loss).data
            private = content.private_holder(slot.key.hash) is not None
            require(private == content.BY_SPACE[session.namespace].spec.private, "a private block is stored as public")
            require(
                shard.memory[slot.tier].view(slot) == right, f"wrong bytes of {slot.key.hash.hex()[:6]} are committed"
            )
            name = session.namespace, slot.key
            stored_at = session.stored_at.get(slot.key, self._kernel.now)
            shard.ready[session.namespace, slot.key, slot.tier] = (slot, stored_at)
            self.placed.setdefault(name, {})[shard.name] = self._kernel.now
        self._gave_way(shard)

    def _report_answered(self, shard: ShardProcess, m: ReportAnswered, effects: list[Effect]) -> None:
        ack = m.ack
        # A page with a twin below, or without room there, is dropped when a move begins; the move may have had to wait
        # for this answer.
        evicts = shard.heard.answered(shard.core, ack)
        if evicts or shard.heard.moving or ack.tombstones or ack.leave is not None:
            if ack.epoch < shard.adopted and ack.leave is None:
                require(not self._vanished(shard), "a shard obeys a superseded coordinator")
            else:
                for place in self._vanished(shard):
                    del shard.ready[place]
                shard.purged = max([shard.purged, *(stone.number for stone in ack.tombstones)])

    def _stalled(self, shard: ShardProcess, m: Stalled, effects: list[Effect]) -> None:
        """No lease is over because its shard was stalled: nothing could renew it meanwhile."""
        running = (lease for lease in shard.core.leases.all() if shard.core.leases.running(lease.attempt))
        for lease in running:
            require(lease.expires_at > shard.now() - MS, "a lease is over because its shard was stalled")

    def _verified(self, shard: ShardProcess, m: Verified, effects: list[Effect]) -> None:
        self._only_rotten_are_gone(shard, effects)

    def _only_rotten_are_gone(self, shard: ShardProcess, effects: list[Effect]) -> None:
        """The room of a page that is gone may be what a store has waited for: what gives way to that is judged with its
        grant."""
        gone = {place: shard.ready[place][0] for place in self._vanished(shard)}
        rotten = {place[:2] for place, slot in gone.items() if shard.storage.is_rotten(slot)}
        granted = {slot.key for effect in effects for slot in _granted_to_store(effect)}
        for place in gone:
            if place[:2] in rotten:
                del shard.ready[place]
            else:
                require(place[1] in granted, "a sound page is condemned as corrupt")

    def _moved(self, shard: ShardProcess, m: Moved, effects: list[Effect]) -> None:
        """A page that is READY in its new place is correct there; a page that is gone from its old one was demoted, or
        corrupt."""
        order, session = shard.tier_io.moves[m.attempt], shard.sessions[m.attempt]
        for namespace, _, _, _, _, source, target, _ in order.pages:
            page = shard.core.pool.on(target.tier, namespace, target.key)
            if page is None or page.generation != target.generation:
                continue
            require(not session.revoked, "a lease that was revoked is committed")
            if m.attempt not in self._saves:  # it needs no coordinator for those
                self._may_grant(shard, shard.now())
            right = content.content(namespace, target.key, target.codec, target.loss).data
            rotten = shard.storage.is_rotten(target)  # corrupted since they were summed there
            require(
                rotten or shard.storage.bytes_of(target) == right,
                f"wrong bytes of {target.key.hash.hex()[:6]} are moved",
            )
            known = shard.ready.get((namespace, source.key, source.tier))
            assert known is not None, "what was moved lay there"
            shard.ready[namespace, target.key, target.tier] = (target, known[1])
        moved = {(page.namespace, page.source.key) for page in order.pages}
        for place in self._vanished(shard):
            slot, _ = shard.ready.pop(place)
            # The next batch may have begun, which drops pages without room below, or with a twin; if there is a store,
            # also from the other tiers, and pages that the store gives up.
            next_one = slot.tier is INGEST or bool(shard.core.pool.stores)
            require(place[:2] in moved or next_one, "a page is gone that was not moved")

    def _staged(self, shard: ShardProcess, m: Staged, effects: list[Effect]) -> None:
        """A page that is read from disk is correct in memory; a page that is gone from the disk was corrupt."""
        order = shard.tier_io.moves[m.attempt]
        answers = [effect.reply for effect in effects if isinstance(effect, Answer)]
        lent = {slot for reply in answers if isinstance(reply, PinGrant) for slot in reply.pages}
        for page in order.pages:
            slot = page.target._replace(sums=page.source.sums)
            if slot in lent:
                right = content.content(page.namespace, slot.key, slot.codec, slot.loss).data
                sound = shard.storage.is_rotten(slot) or shard.storage.bytes_of(slot) == right
                require(sound, f"wrong bytes of {slot.key.hash.hex()[:6]} are read from disk")
        self._only_rotten_are_gone(shard, effects)

    def _tier_lost(self, shard: ShardProcess, m: TierLost, effects: list[Effect]) -> None:
        gone = {place: shard.ready.pop(place) for place in self._vanished(shard)}
        require(all(tier is m.tier for _, _, tier in gone), "a page is gone with a tier that it was not in")
        require(not any(tier is m.tier for _, _, tier in shard.ready), "a page stays in a tier that is lost")

    def _suspect(self, shard: ShardProcess, request: Request[Suspect], effects: list[Effect]) -> None:
        require(not self._vanished(shard), "a page is condemned only because a reader suspects it")

    def _tick(self, shard: ShardProcess, m: Tick, effects: list[Effect]) -> None:
        if shard.backlog:
            revoked = any(isinstance(effect, Revoke) for effect in effects)
            require(not revoked, "leases are judged before the messages that have arrived")

    def check_pages(self, shard: ShardProcess) -> None:
        """A shard holds exactly what was committed and not removed by an order or a failed verification."""
        ready = {(page.space, page.key, page.tier) for page in shard.core.pool.ready()}
        require(
            ready == shard.ready.keys(), f"{shard.name} holds pages that were not committed, or lost some by itself"
        )
        for (space, key, tier), (slot, _) in shard.ready.items():
            data = shard.memory[tier].view(slot) if tier.spec.addressable else shard.storage.bytes_of(slot)
            if data != content.content(space, key, slot.codec, slot.loss).data:
                require(shard.storage.is_rotten(slot), f"{shard.name} holds wrong bytes of {key.hash.hex()[:6]}")

    def _vanished(self, shard: ShardProcess) -> list[TierPlace]:
        on = shard.core.pool.on
        gone: list[TierPlace] = []
        for place, (slot, _) in shard.ready.items():
            space, key, tier = place
            page = on(tier, space, key)
            if page is None or page.generation != slot.generation:
                gone.append(place)
        return gone


def namespace_of(request: Request[Any]) -> NamespaceId:
    """Returns the namespace of a question about one."""
    assert request.namespace is not None
    return request.namespace


def _units(slots: Iterable[PageSlot]) -> dict[tuple[Tier, int], None]:
    units: dict[tuple[Tier, int], None] = {}
    for slot in slots:
        for unit in range(slot.offset // UNIT_BYTES, -(-(slot.offset + slot.nbytes) // UNIT_BYTES)):
            units[slot.tier, unit] = None
    return units


def _refused(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Answer) and isinstance(effect.reply, Refused) for effect in effects)


def _granted_to_store(effect: Effect) -> list[PageSlot]:
    """Returns the places that an effect gives to a writer."""
    if not (isinstance(effect, Answer) and isinstance(effect.reply, WriteGrant)):
        return []
    return [page for page in effect.reply.pages if isinstance(page, PageSlot)]
