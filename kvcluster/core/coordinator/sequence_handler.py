"""Keeps the block tables of open sequences as their workers send them, under a lease for each holder.

A worker numbers its messages (messages/sequences_and_spans.py). The last answer is kept with the lease if it is short,
so a repeated message, whose reply was lost, changes nothing; a repeat of one with a long answer is treated as a gap. A
message with a lower number is a delayed repeat: it is refused. After a gap in the numbers the coordinator has missed a
message: it drops what it knew of the holder and asks for all tables again; until they can have arrived, what they
claimed stays. The end of a lease closes every sequence of the holder. A holder's tables belong to the tenant of their
request: another tenant's message with the same holder id neither sees nor changes them.

Claimed blocks are spared from eviction, up to the share of all bytes that each tenant has (tenant_shares.py): a change
beyond it is refused. Private blocks that lose their last claim are handed to the eraser. Chains of closed tables are
released in slices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.block_tables import Claims, Outcome
from kvcluster.core.coordinator.coordinator_state import MS, CoordinatorState
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.ids import SequenceId
from kvcluster.core.messages import (
    Answer,
    Effect,
    Refused,
    RefusedKind,
    Request,
    SyncTables,
    TableChange,
    TablesSynced,
)
from kvcluster.core.tenant_shares import Owner, Shares


@dataclass(slots=True)
class _Holder:
    """A holder with a lease. `number` is that of its last message, which got this answer; None for a long one."""

    number: int
    answer: TablesSynced | None
    expires_at: int


class SequenceHandler:
    """Answers SyncTables, and ends leases."""

    def __init__(self, state: CoordinatorState, config: CoordinatorConfig) -> None:
        self._state = state
        self._ttl = config.sequence_ttl_ms * MS
        self._holders: dict[Owner, _Holder] = {}  # in order of expiry
        self._shares = Shares(limits.HOLDERS)

    @property
    def holders(self) -> int:
        """The number of holders with a lease."""
        return len(self._holders)

    @property
    def next_expiry(self) -> int | None:
        return next(iter(self._holders.values())).expires_at if self._holders else None

    def sync(self, request: Request[SyncTables], space: CoordinatorNamespace, now: int) -> list[Effect]:
        state, m = self._state, request.question
        if space.spec.private:
            return [Answer(request.call, _PRIVATE)]
        owner = request.tenant, m.holder
        held = self._holders.get(owner)
        if held is None and self._shares.full(request.tenant):
            return [Answer(request.call, _TOO_MANY)]
        if held is not None and m.number < held.number:
            return [Answer(request.call, _LATE)]
        if held is not None and m.number == held.number and held.answer is not None:
            answer = held.answer
        elif m.number == (held.number if held is not None else 0) + 1:
            answer = self._changed(owner, m, space, now)
        else:
            state.tables.close_owner(owner, reclaims=True)
            answer = TablesSynced(self._ttl, state.epoch, forgotten=True)
        if self._holders.pop(owner, None) is None:
            self._shares.add(request.tenant)
        is_short = len(answer.reopen) + len(answer.refused) <= limits.ANSWERED_SEQUENCES
        self._holders[owner] = _Holder(m.number, answer if is_short else None, now + self._ttl)
        return [Answer(request.call, answer)]

    def end_expired(self, now: int) -> None:
        """Ends leases that have run out, at most as many as one step may; the rest are due at once."""
        closed = 0
        while self._holders and closed < limits.SEQUENCES_PER_HOLDER:
            owner, held = next(iter(self._holders.items()))
            if held.expires_at > now:
                return
            del self._holders[owner]
            self._shares.remove(owner[0])
            closed += 1 + self._state.tables.close_owner(owner)

    def release_some(self, now: int, most: int = limits.RELEASED_PER_STEP) -> int:
        """Releases some blocks of closed and truncated tables, and has private ones erased: at once, or after a grace
        if their holder is to send its tables again. Returns their number."""
        done, unclaimed, awaited = self._state.tables.release_some(most)
        for name in unclaimed:
            self._state.eraser.unclaimed(name)
        for name in awaited:
            self._state.eraser.recorded(name, now)
        return done

    def extend(self, late_ns: int) -> None:
        """Extends all leases by the time for which this process was stalled, since it could not receive renewals."""
        for held in self._holders.values():
            held.expires_at += late_ns

    # -------------------------------------------------------------------------------------- one message

    def _changed(self, owner: Owner, m: SyncTables, space: CoordinatorNamespace, now: int) -> TablesSynced:
        """Makes the changes of a message, in order, and returns the answer."""
        state = self._state
        public = self._claims_in(space)
        pages = self._private_pages(space) if any(change.private for change in m.changes) else None
        private = self._claims_in(pages) if pages is not None else None
        capacity_bytes = self._capacity_bytes()
        stored_blocks = None if state.rebuilding else state.namespaces.stored_blocks(space.tenant)
        reopen: dict[SequenceId, None] = {}
        refused: dict[SequenceId, None] = {}
        left = limits.RELEASED_PER_STEP
        for change in m.changes:
            outcome = state.tables.change(
                *(owner, change, public, private), capacity_bytes=capacity_bytes, stored_blocks=stored_blocks
            )
            if outcome is Outcome.DONE:
                self._claimed(change, private)
            else:
                (reopen if outcome is Outcome.UNKNOWN else refused)[change.sequence] = None
            left -= self.release_some(now, left)  # at once, so that the next change may use the room
        return TablesSynced(self._ttl, state.epoch, tuple(reopen), tuple(refused))

    def _claimed(self, change: TableChange, private: Claims | None) -> None:
        if private is not None and not change.closed:
            for block in change.blocks[len(change.blocks) - change.private :]:
                self._state.eraser.claimed((private.space, block))

    def _private_pages(self, space: CoordinatorNamespace) -> CoordinatorNamespace | None:
        """Returns the namespace of the private pages beside this one; None if the tenant has too many namespaces."""
        return self._state.namespaces.attach(space.tenant, replace(space.spec, private=True))

    def _claims_in(self, space: CoordinatorNamespace) -> Claims:
        spec = space.spec
        return self._state.tables.claims_in(
            space.id,
            space.tenant,
            private=spec.private,
            block_bytes=spec.block_bytes,
            block_tokens=spec.block_tokens,
        )

    def _capacity_bytes(self) -> int | None:
        """Returns the bytes of all shards where claimed blocks mostly stay; None while not all shards are known."""
        return None if self._state.rebuilding else self._state.members.addressable_bytes


_PRIVATE = Refused(RefusedKind.BAD, "tables are synced in the namespace of the public blocks")
_LATE = Refused(RefusedKind.STALE, "this message about tables was repeated, and arrived after a later one")
_TOO_MANY = Refused(RefusedKind.LIMIT, "this tenant has reached the limit of workers with open sequences")
