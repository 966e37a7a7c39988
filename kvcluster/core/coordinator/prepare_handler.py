"""Grants to workers: how far a chain can be loaded and from where, which pages a worker may write, and on which shard.

Every grant is a hint with a ticket: the shards grant the pins and decide which attempt writes. A prepare names its
attempt, so a worker that lost the answer can ask again and gets the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import TypeAlias

from kvcluster.config import CoordinatorConfig
from kvcluster.core.coordinator.coordinator_state import MS, CoordinatorState
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.coordinator.need_planner import NeedPlanner
from kvcluster.core.coordinator.replicator import Replicator
from kvcluster.core.coordinator.tickets import IssuedTicket
from kvcluster.core.coordinator.tiering import Tiering
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import (
    Answer,
    BlockFate,
    Decision,
    Done,
    Effect,
    EndTicket,
    Explain,
    Explained,
    LoadGrant,
    Need,
    Plan,
    PrepareLoad,
    PrepareStore,
    Refused,
    RefusedKind,
    RenewTicket,
    Request,
    ShardAddress,
    StoreGrant,
    StoreRun,
)
from kvcluster.core.miss import PURGING, Miss, MissReason
from kvcluster.core.placement import run_start
from kvcluster.core.read_grants import may_read
from kvcluster.core.tiers import INGEST

_Fate: TypeAlias = tuple[Decision, ShardAddress | None, Miss | None]
"""The fields of a StoreRun besides its count."""


class PrepareHandler:
    """Answers PrepareLoad, PrepareStore and Explain, and renews and ends tickets."""

    def __init__(
        self, state: CoordinatorState, config: CoordinatorConfig, replicator: Replicator, tiering: Tiering
    ) -> None:
        self._state = state
        self._tiering = tiering
        self._replicator = replicator
        self._hold = config.hold_ms * MS
        self._refresh = config.refresh_ms * MS
        self._run_blocks = config.run_blocks

    def prepare_load(self, request: Request[PrepareLoad], space: CoordinatorNamespace, now: int) -> list[Effect]:
        state, m = self._state, request.question
        if not space.fits(m.need):
            return [Answer(request.call, _BAD_PART)]
        if state.off:
            return [Answer(request.call, LoadGrant(0, (), 0, OFF))]
        again = self._answered_before(request, space, LoadGrant)
        if again is not None:
            return [Answer(request.call, again)]
        found = space.index.find(m.hashes, m.need, youngest=m.attempt.holder[-1] % 2 == 1)
        miss = None
        if found.blocks < len(m.hashes):
            miss = found.miss or self._why_absent(space, m.hashes[found.blocks], now)
        if m.awaited is not None and miss is not None and (found.blocks < m.awaited or _is_pending(miss)):
            return [Answer(request.call, LoadGrant(found.blocks, found.runs, 0, miss))]
        if m.hashes and not m.again:
            self._count_lookup(space, request, found.blocks, miss)
        hashes = m.hashes[: found.blocks]
        if not m.hold:
            return [Answer(request.call, LoadGrant(found.blocks, found.runs, 0, miss))]
        held = hashes[: self._may_hold(space, request, hashes)]
        space.index.touch(held, now, now + self._hold)
        space.index.touch(hashes[len(held) :], now, 0)
        self._replicator.loaded(space, hashes, now)
        self._tiering.loaded(space, hashes, now)
        grant = LoadGrant(found.blocks, found.runs, self._hold if held else 0, miss)
        if held:
            ticket = IssuedTicket(request.tenant, m.attempt, space.id, grant, now + state.tickets.ttl_ns, held)
            ticket.known, ticket.block_bytes = self._known(space), space.spec.block_bytes
            state.tickets.add(ticket)
        return [Answer(request.call, grant)]

    def prepare_store(self, request: Request[PrepareStore], space: CoordinatorNamespace, now: int) -> list[Effect]:
        state, m = self._state, request.question
        if not m.parts or not all(space.has(group, part) for group, part in m.parts):
            return [Answer(request.call, _BAD_PART)]
        again = self._answered_before(request, space, StoreGrant)
        if again is not None and not state.off:
            return [Answer(request.call, again)]
        state.count(space.tenant, "stores")
        page_bytes = max(space.page_bytes(group, part) for group, part in m.parts)
        refused = self._why_no_store(space.tenant, m)
        if refused is not None or 0 < state.members.largest_bytes < page_bytes:
            state.count(space.tenant, "refused_blocks", len(m.hashes))
            if refused is None:
                return [Answer(request.call, _never_fits(page_bytes, state.members.largest_bytes))]
            return [Answer(request.call, StoreGrant((StoreRun(len(m.hashes), Decision.REFUSED, miss=refused),)))]
        space.index.touch_ancestors(m.parent, now, now - self._refresh)
        emitter = state.emitter if not space.spec.private else None
        if emitter is not None and len(m.tokens) == len(m.hashes) * space.spec.block_tokens:
            emitter.remember(space.id, m.hashes, m.tokens, space.spec.block_tokens, now)
        # Each page is planned separately: a worker may write several parts of one group, and all of them must be
        # present.
        askings = [NeedPlanner(state.book, Need((None,) * group + (part,), m.loss)) for group, part in m.parts]
        place_run = state.members.place
        member = partial(place_run, tenant=space.tenant, host=m.host, page_bytes=page_bytes, purged=space.purged)
        placed = cache(_placed)  # so that blocks with one fate share one object, which is quick to compare
        place = cache(lambda run: placed(member(run) or self._why_not_placed(space)))
        writes: list[BlockHash] = []
        block_bytes = sum(space.page_bytes(group, part) for group, part in m.parts)
        room = state.limits.room(space.tenant, INGEST)
        fits = len(m.hashes) if room is None else room // max(1, block_bytes)
        fates = [self._decide(space, m, askings, at, place, writes, fits) for at in range(len(m.hashes))]
        if room is not None and (beyond := fates.count(_OVER_LIMIT)):
            state.limits.refused(space.tenant, beyond * block_bytes)
        runs = [StoreRun(len(list(alike)), *fate) for fate, alike in groupby(fates)]
        for run in runs:
            state.count(space.tenant, _COUNTED[run.decision], run.count)
        grant = StoreGrant(tuple(runs))
        if writes:
            expires_at = now + state.tickets.ttl_ns
            name, known = (space.tenant, m.attempt), self._known(space)
            ticket = IssuedTicket(*name, space.id, grant, expires_at, writes=tuple(writes), places=m.parts, known=known)
            ticket.writing_bytes = len(writes) * block_bytes
            state.tickets.add(ticket)
        return [Answer(request.call, grant)]

    def explain(self, request: Request[Explain], space: CoordinatorNamespace, now: int) -> list[Effect]:
        """Answers for each block where it can be loaded from, or why it cannot. Promises nothing."""
        m = request.question
        if not space.fits(m.need):
            return [Answer(request.call, _BAD_PART)]
        asking = NeedPlanner(self._state.book, m.need)

        def fate_of(block: BlockHash) -> tuple[Plan | None, Miss | None]:
            record = space.index.get(block)
            served = asking.serve(record.copies) if record is not None else None
            if served is None:
                return None, self._why_absent(space, block, now)
            return (served.plan, None) if served.complete else (None, served.miss)

        fates = [BlockFate(sum(1 for _ in alike), *fate) for fate, alike in groupby(map(fate_of, m.hashes))]
        return [Answer(request.call, Explained(tuple(fates)))]

    def renew(self, request: Request[RenewTicket], now: int) -> list[Effect]:
        """Renews a ticket. One of a reader whose grant was taken back ends instead."""
        tickets, name = self._state.tickets, (request.tenant, request.question.attempt)
        ticket = tickets.get(name)
        if ticket is None:
            return [Answer(request.call, Done(False))]
        space = self._state.namespaces.known(ticket.space)
        if space is not None and not may_read(request.tenant, request.reads, space.tenant, space.spec):
            tickets.end(name)
            self._release(ticket)
            return [Answer(request.call, Done(False))]
        tickets.renew(name, now)
        if space is not None:
            space.index.renew(ticket.hashes, now, now + self._hold)
        return [Answer(request.call, Done())]

    def end(self, request: Request[EndTicket], now: int) -> list[Effect]:
        ticket = self._state.tickets.end((request.tenant, request.question.attempt))
        if ticket is None:
            self._state.counters["late"] += 1
        else:
            self._release(ticket)
        return [Answer(request.call, Done(ticket is not None))]

    def end_expired(self, now: int) -> None:
        for ticket in self._state.tickets.end_expired(now):
            self._release(ticket)

    def _why_absent(self, space: CoordinatorNamespace, block: BlockHash, now: int) -> Miss:
        """Returns the reason why there is no record of this block."""
        if self._state.rebuilding:
            return _REBUILDING
        if self._state.tickets.writers.writing(space.id, block):
            return _BEING_WRITTEN
        return self._state.evicted.why(space.id, block, now) or _NEVER_SEEN

    def _count_lookup(
        self, space: CoordinatorNamespace, request: Request[PrepareLoad], hit: int, miss: Miss | None
    ) -> None:
        """Counts a lookup that found the first `hit` blocks, as its caller's. `miss`: why not one more."""
        state, m, tokens = self._state, request.question, space.spec.block_tokens
        asked = len(m.hashes)
        for name, amount in (("loads", 1), ("asked_blocks", asked), ("hit_blocks", hit)):
            state.count(request.tenant, name, amount)
        state.count(request.tenant, "asked_tokens", asked * tokens)
        state.count(request.tenant, "hit_tokens", hit * tokens)
        if m.hold:
            state.counters["reused_tokens"] += hit * tokens
        if miss is not None:
            state.missed_tokens[miss.reason] += (asked - hit) * tokens

    def _may_hold(self, space: CoordinatorNamespace, request: Request[PrepareLoad], hashes: Sequence[BlockHash]) -> int:
        """Returns how many of these blocks, from the first on, a ticket of this attempt may hold."""
        state, tenant, attempt = self._state, request.tenant, request.question.attempt
        if not self._hold:
            return 0
        alone = state.namespaces.tenants < 2 and tenant == space.tenant
        count = state.tickets.holds.fitting(
            *(space.id, tenant, hashes),
            block_bytes=space.spec.block_bytes,
            capacity_bytes=None if state.rebuilding or alone else state.members.addressable_bytes,
        )
        return 0 if state.tickets.full((tenant, attempt.holder), count) else count

    def _release(self, ticket: IssuedTicket) -> None:
        space = self._state.namespaces.known(ticket.space)
        if space is not None:
            space.index.release(ticket.hashes, ticket.expires_at - self._state.tickets.ttl_ns + self._hold)

    def _decide(
        self,
        space: CoordinatorNamespace,
        m: PrepareStore,
        askings: Sequence[NeedPlanner],
        at: int,
        place: Callable[[BlockHash], _Fate],
        writes: list[BlockHash],
        fits: int,
    ) -> _Fate:
        """Returns the decision for one block of a store. Adds it to `writes` if the attempt may write it; `fits` is how
        many blocks its tenant may store below its limit."""
        block = m.hashes[at]
        record = space.index.get(block)
        if record is not None and all(asking.complete(record.copies) for asking in askings):
            return _COMMITTED
        writer = self._state.tickets.writers.writer
        if all(writer(space.id, block, place) is not None for place in m.parts):
            return _PENDING
        start = run_start(m.first + at, self._run_blocks) - m.first
        fate = place(m.run if start <= 0 else m.hashes[start])
        if fate[0] is Decision.WRITE:
            if len(writes) >= fits:
                return _OVER_LIMIT
            writes.append(block)
        return fate

    def _why_not_placed(self, space: CoordinatorNamespace) -> Miss:
        """Returns the reason why no shard can take a block."""
        late = any(member.takes(space.tenant) and member.purged < space.purged for member in self._state.members.all())
        return PURGING if late else _NO_ROOM

    def _answered_before(
        self,
        request: Request[PrepareLoad] | Request[PrepareStore],
        space: CoordinatorNamespace,
        kind: type[LoadGrant | StoreGrant],
    ) -> LoadGrant | StoreGrant | Refused | None:
        """Returns the answer that this attempt got before, if it repeats a prepare whose reply was lost.

        Returns None, so that the prepare is answered like a new one, if there was none, or if a shard has been lost or
        the namespace purged since: no answer may name lost or purged blocks.
        """
        ticket = self._state.tickets.get((request.tenant, request.question.attempt))
        if ticket is None:
            return None
        if ticket.space != space.id or not isinstance(ticket.answer, kind):
            return _OTHER_ATTEMPT
        if ticket.known == self._known(space):
            return ticket.answer
        self._state.tickets.end(ticket.name)
        self._release(ticket)
        return None

    def _known(self, space: CoordinatorNamespace) -> tuple[int, int]:
        return self._state.book.version, space.purged

    def _why_no_store(self, tenant: Tenant, m: PrepareStore) -> Miss | None:
        if self._state.off:
            return OFF
        if self._state.rebuilding:
            return _REBUILDING
        if not any(member.joined for member in self._state.members.all()):
            return Miss(MissReason.SHARD_LOST, "no shard is up")
        if self._state.tickets.full((tenant, m.attempt.holder), len(m.hashes) * len(m.parts)):
            return Miss(MissReason.FULL, "the limit of held tickets is reached; end some")
        return None


def _is_pending(miss: Miss) -> bool:
    return miss.reason is MissReason.PENDING


def _placed(where: Member | Miss) -> _Fate:
    """Returns the decision for a block whose run is placed on that shard, or, with a Miss, on none."""
    if isinstance(where, Miss):
        return Decision.REFUSED, None, where
    return Decision.WRITE, where.address, None


def _never_fits(page_bytes: int, largest_bytes: int) -> Refused:
    """Returns the answer to a store whose pages fit no shard, not even an empty one."""
    return Refused(
        RefusedKind.BAD,
        f"a page of {page_bytes} bytes never fits a shard: the largest has {largest_bytes}; "
        "raise ram_bytes or lower block_tokens",
    )


OFF = Miss(MissReason.OFF, "an operator has turned the cache off; `kvcluster on` turns it on again")
_REBUILDING, _BEING_WRITTEN, _NEVER_SEEN = map(Miss, (MissReason.REBUILDING, MissReason.PENDING, MissReason.NEVER_SEEN))
_COMMITTED: _Fate = Decision.COMMITTED, None, None
_PENDING: _Fate = Decision.PENDING, None, _BEING_WRITTEN
_BAD_PART = Refused(RefusedKind.BAD, "the spec of this namespace has no such group or part")
_NO_ROOM = Miss(MissReason.FULL, "no shard has room or can make some")
_OVER_LIMIT: _Fate = (
    Decision.REFUSED,
    None,
    Miss(MissReason.FULL, "this tenant is at its limit of the ram tier; its coldest blocks are evicted to make room"),
)
_OTHER_ATTEMPT = Refused(RefusedKind.BAD, "this attempt prepared something else; use a new attempt for each prepare")
_COUNTED = {
    Decision.WRITE: "write_blocks",
    Decision.COMMITTED: "duplicate_blocks",
    Decision.PENDING: "pending_blocks",
    Decision.REFUSED: "refused_blocks",
}
