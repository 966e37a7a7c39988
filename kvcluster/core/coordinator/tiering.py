"""Tiering: turns watermarks into demotions, and heat into promotions.

A shard that has lower tiers is relieved by demotion: the coldest blocks of each tier go into the next one, encoded as
the policy requires or unchanged (tiers.Takes); only its lowest tier evicts (evictor.py). Blocks of open sequences are
demoted too, if there is room below: they are never evicted. If one of them stays although there seemed to be room
below, no block that needs as much is ordered there until that room changes. The first blocks of a sequence, which every
later token attends to (attention sinks: Xiao et al., StreamingLLM, 2023), are demoted raw. Runs that are often loaded
from below INGEST are promoted there as far as there is room above the watermark. Nothing is demoted in advance to make
room for them; once they are there, the watermark demotes the coldest blocks. Blocks that readers on the device of a
shard's pool have read in INGEST are promoted to the pool, in place of blocks that no load was promised for a window.

A shard has one order at a time; the next is computed when the shard has carried it out.

Shards sample what some pages lose by q4 and report it. A namespace whose mean loss exceeds the budget gets q8 from then
on, until an operator sets the codec again.

The policy may change at run time: it applies to later demotions, and pages in lower tiers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from kvcluster.config import CODECS, CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.coordinator.evictor import Evictor
from kvcluster.core.coordinator.hot_prefixes import HotPrefixes
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import Effect, Move, MoveOrder, Tier, TierUse, Warn
from kvcluster.core.tiers import INGEST, Takes

MS = 1_000_000
SAMPLES_WANTED = 8
"""Samples of a namespace that are needed before it is judged."""

_TOO_LOSSY = "q4 is too lossy for namespace {}: its mean loss {:.3f} exceeds the budget {:.3f}; it gets q8 from now on"


class _Room(NamedTuple):
    """The use of a tier, as far as it decides what finds room there."""

    free_bytes: int
    pages: int

    @staticmethod
    def of(use: TierUse) -> _Room:
        return _Room(use.free_bytes, use.pages)


class _Futile(NamedTuple):
    """Claimed blocks of so many bytes did not find this room, although it seemed to suffice."""

    room: _Room
    nbytes: int


class Tiering:
    """Gives the move orders, and tracks which blocks are to be promoted."""

    def __init__(self, config: CoordinatorConfig, state: CoordinatorState, evictor: Evictor) -> None:
        self._low = config.low_free
        self._codec = Codec[config.host_codec.upper()]
        self._raw_blocks = config.host_raw_blocks
        self._hot_prefixes = HotPrefixes(
            loads=config.promote_loads, window_ns=config.hot_window_ms * MS, run_blocks=config.run_blocks
        )
        self._state = state
        self._evictor = evictor
        self._budget = int(config.q4_error_budget * 1e6)
        self._samples: dict[NamespaceId, tuple[int, int]] = {}  # their number, and their sum in millionths
        self._fallen: dict[NamespaceId, int] = {}  # namespaces that q4 is too lossy for, with the mean of their samples
        self._ordered: dict[int, dict[Tier, _Room]] = {}  # by slot: the room below its tiers when its order was given
        self._futile: dict[int, dict[Tier, _Futile]] = {}  # by slot and the tier below
        self._hot: dict[int, dict[tuple[NamespaceId, BlockHash], None]] = {}  # by slot: blocks to promote there

    def loaded(self, space: CoordinatorNamespace, hashes: Sequence[BlockHash], now: int) -> None:
        """Counts a load that was promised these blocks, a chain from its first block on."""
        for run in self._hot_prefixes.record_load(hashes, now):
            for block in run:
                record = space.index.get(block)
                if record is not None:
                    self._heat(record)

    def _heat(self, record: BlockRecord) -> None:
        """Remembers a hot block for each shard that has it below INGEST alone."""
        for slot in record.copies.slots:
            if self._state.members.at(slot) is not None and min(c.tier for c in record.copies.of(slot)) > INGEST:
                self._remember(slot, record.space, record.hash)

    def wanted_on_device(self, member: Member, blocks: Sequence[tuple[NamespaceId, BlockHash]]) -> None:
        """Remembers blocks that readers on the device of this shard's pool have read in INGEST."""
        if member.info.fastest.spec.on_device:
            for space, block in blocks:
                self._remember(member.slot, space, block)

    def _remember(self, slot: int, space: NamespaceId, block: BlockHash) -> None:
        hot = self._hot.setdefault(slot, {})
        if len(hot) < limits.PROMOTIONS:
            hot[space, block] = None

    def sampled(self, samples: Sequence[tuple[NamespaceId, int]]) -> list[Effect]:
        """Records samples of what pages of these namespaces lose by q4, in millionths. Returns a warning for each
        namespace that exceeds the budget."""
        effects: list[Effect] = []
        for space, error in samples:
            if space in self._fallen or self._state.namespaces.known(space) is None:
                continue
            count, total = self._samples.get(space, (0, 0))
            count, total = count + 1, total + error
            self._samples[space] = count, total
            if count >= SAMPLES_WANTED and total > count * self._budget:
                del self._samples[space]
                self._fallen[space] = mean = total // count
                effects.append(Warn(_TOO_LOSSY.format(space.hex()[:8], mean / 1e6, self._budget / 1e6), "q4_too_lossy"))
        return effects

    @property
    def fallen(self) -> tuple[tuple[NamespaceId, int], ...]:
        """The namespaces that q4 is too lossy for, with their mean loss in millionths."""
        return tuple(self._fallen.items())

    @property
    def policy(self) -> tuple[tuple[str, str], ...]:
        """The present values of the settings that `set` takes."""
        return (
            ("host.codec", self._codec.name.lower()),
            ("host.raw_blocks", str(self._raw_blocks)),
            ("promote.loads", str(self._hot_prefixes.loads)),
        )

    def set_policy(self, settings: Sequence[tuple[str, str]]) -> str | None:
        """Changes the policy. Returns None, or the reason for a refusal, in which case nothing changes."""
        known = dict(self.policy)
        for name, value in settings:
            if name not in known:
                return f"there is no policy {name!r}; there is cache, {', '.join(known)}"
            if name == "host.codec" and value not in CODECS:
                return f"{name}: there is no codec {value!r}; there is {', '.join(CODECS)}"
            if name != "host.codec" and not (value.isascii() and value.isdigit() and len(value) < 10):
                return f"{name} must be a number of blocks or loads, not {value!r}"
            if name == "promote.loads" and not int(value):
                return "promote.loads must be at least 1"
            known[name] = value
        if any(name == "host.codec" for name, _ in settings):  # an operator has decided: q4 is tried again
            self._fallen.clear()
        self._codec = Codec[known["host.codec"].upper()]
        self._raw_blocks, self._hot_prefixes.loads = int(known["host.raw_blocks"]), int(known["promote.loads"])
        return None

    def demote(self, member: Member, pressing: Mapping[Tenant, int], now: int) -> int:
        """Orders demotions from each tier except the lowest to the one below it. Returns the bytes to free in the
        lowest tier for that. Blocks that leave a lower tier come first in the order, so that room is freed before it is
        used. `pressing`: what the waiting reservations of each tenant lack."""
        moves: list[Move] = []
        waited = 0
        for tier, to in pairwise(member.info.tiers):
            waited += sum(pressing.values()) if tier is INGEST else 0
            keeps = self._room_below(member, tier, to)
            beyond = self._evictor.victims_beyond_limits(member, tier, now, keeps)
            victims = self._evictor.victims(member, tier, waited, now, keeps, leaving=beyond)
            if not victims:
                victims = self._evictor.victims_for_floors(member, tier, waited, pressing, now, keeps, leaving=beyond)
            victims = beyond + victims
            victims.sort(key=self._evictor.claimed, reverse=True)  # they take the room below first
            below = sum(self._bytes_below(record, member.slot, tier, to) for record in victims)
            moves[:0] = [self._demotion(record, to, now) for record in victims]
            use = member.info.use(to)
            waited = max(0, below - use.free_bytes) + use.wanted_bytes
        self._ordered[member.slot] = {tier: _Room.of(member.info.use(tier)) for tier in member.info.tiers}
        self.order(member, moves)
        return waited

    def promote(self, member: Member, now: int) -> None:
        """Orders promotions of hot blocks, as far as there is room or `_idle` blocks make some: from INGEST to the
        shard's fastest tier, and from below to INGEST, where every reader reads them in place."""
        fastest, moves = member.info.fastest, list[Move]()
        hot: dict[Tier, dict[Move, int]] = {INGEST: {}, fastest: {}}
        rooms: dict[tuple[Tenant, Tier], int | None] = {}
        for space_id, block in self._take_hot(member):
            record = self._state.namespaces.record(space_id, block)
            if record is None or not record.copies.on(member.slot) or record.copies.on(member.slot, fastest):
                continue
            below = min(copy.tier for copy in record.copies.of(member.slot))
            needed = self._state.namespaces.bytes_on(record, member.slot, below, raw=True)
            to = INGEST if below > INGEST else fastest
            if self._fits_limit(rooms, self._state.namespaces.tenant(space_id), to, needed):
                hot[to][Move(space_id, block, to, up=True)] = needed
        for to, wanted in hot.items():
            room = member.info.use(to).room(self._low)
            idle = [] if to is INGEST else self._idle(member, sum(wanted.values()) - room, now)
            given = [self._state.namespaces.bytes_on(record, member.slot, to) for record in idle]
            left, fit = room + sum(given), list[Move]()
            for move, nbytes in wanted.items():  # what does not fit and stays hot is found again
                if nbytes <= left:
                    fit.append(move)
                    left -= nbytes
            while given and given[-1] <= left:  # its place is not needed
                left -= given.pop()
                member.cold[to].push(idle.pop())
            below = member.info.next_below(to).tier
            moves += [self._demotion(record, below, now) for record in idle] + fit
        self.order(member, moves)

    def _fits_limit(self, rooms: dict[tuple[Tenant, Tier], int | None], tenant: Tenant, to: Tier, nbytes: int) -> bool:
        """Whether a tenant may have so many bytes more there; then takes them from its room in `rooms`. A block beyond
        the limit of its tenant would be demoted by the next order."""
        if (tenant, to) not in rooms:
            rooms[tenant, to] = self._state.limits.room(tenant, to)
        room = rooms[tenant, to]
        if room is None:
            return True
        if nbytes > room:
            return False
        rooms[tenant, to] = room - nbytes
        return True

    def _take_hot(self, member: Member) -> list[tuple[NamespaceId, BlockHash]]:
        """Returns the next blocks to promote on this shard, as many as one order names; the others stay for the next
        one."""
        hot = self._hot.pop(member.slot, {})
        taken = list(islice(hot, limits.EVICTIONS_PER_ORDER))
        left = dict.fromkeys(islice(hot, len(taken), None))
        if left:
            self._hot[member.slot] = left
        return taken

    def _idle(self, member: Member, nbytes: int, now: int) -> list[BlockRecord]:
        """Takes blocks off the queue of the shard's fastest tier, the coldest first, until they have so many bytes. It
        takes only blocks that no load was promised for a window and that lie below as a whole: to demote them copies
        nothing."""
        fastest, used = member.info.fastest, now - self._hot_prefixes.window_ns

        def keeps(record: BlockRecord) -> bool:
            here = record.copies.of(member.slot)
            below = {(copy.group, copy.part) for copy in here if copy.tier > fastest}
            alone = any((copy.group, copy.part) not in below for copy in here if copy.tier is fastest)
            return alone or record.stamp > used or self._evictor.claimed(record)

        return self._evictor.victims(member, fastest, nbytes, now, keeps) if nbytes > 0 else []

    def order(self, member: Member, moves: Sequence[Move]) -> None:
        """Gives this shard an order, if there is anything to move."""
        if moves:
            member.orders.give(lambda number: MoveOrder(number, tuple(moves)))

    def settle(self, member: Member, order: MoveOrder) -> None:
        """Handles the end of an order, or of its shard: blocks that were to be demoted and were not are queued
        again."""
        ordered = self._ordered.pop(member.slot, {})
        for move in order.moves:
            record = self._state.namespaces.record(move.namespace, move.hash)
            leaves = None if move.up else member.info.above(move.to)
            if leaves is not None and record is not None and record.copies.on(member.slot, leaves):
                member.cold[leaves].push(record)
                if move.keeps and _Room.of(member.info.use(move.to)) == ordered.get(move.to):
                    self._stays(member, record, leaves, move.to)

    def forget(self, member: Member) -> None:
        """Forgets a removed shard."""
        for memory in (self._hot, self._ordered, self._futile):
            memory.pop(member.slot, None)

    def _stays(self, member: Member, record: BlockRecord, leaves: Tier, to: Tier) -> None:
        """Records that a claimed block has stayed in the tier that it was to leave. The shard reports it at once;
        without this record the next orders would name such blocks in turns, without end."""
        room, nbytes = _Room.of(member.info.use(to)), self._bytes_below(record, member.slot, leaves, to)
        futile = self._futile.setdefault(member.slot, {})
        known = futile.get(to)
        least = min(nbytes, known.nbytes) if known is not None and known.room == room else nbytes
        futile[to] = _Futile(room, least)

    def _demotion(self, record: BlockRecord, to: Tier, now: int) -> Move:
        """Returns the move of a victim. A claimed one counts as used now: if it has to stay, others come first next."""
        keeps = self._evictor.claimed(record)
        if keeps:
            record.stamp = now
        return Move(record.space, record.hash, to, self._codec_of(record), keeps)

    def _room_below(self, member: Member, tier: Tier, to: Tier) -> Callable[[BlockRecord], bool]:
        """Returns a test of the next victim, which is true if the block is claimed and has to stay: the tier below has
        no room for it after the claimed blocks before it, or a block that needs no more has stayed and the room has not
        changed since."""
        use, futile = member.info.use(to), self._futile.get(member.slot, {}).get(to)
        room = use.free_bytes
        least = futile.nbytes if futile is not None and futile.room == _Room.of(use) else room + 1

        def keeps(record: BlockRecord) -> bool:
            nonlocal room
            if not self._evictor.claimed(record):
                return False
            needed = self._bytes_below(record, member.slot, tier, to)
            if needed > room or needed >= least:
                return True
            room -= needed
            return False

        return keeps

    def _codec_of(self, record: BlockRecord) -> Codec:
        if record.depth < self._raw_blocks:
            return Codec.RAW
        return Codec.Q8 if self._codec is Codec.Q4 and record.space in self._fallen else self._codec

    def _bytes_below(self, record: BlockRecord, slot: int, tier: Tier, to: Tier) -> int:
        """Returns the bytes that a block of `tier` will take in the tier below; 0 if it lies there already."""
        if any(copy.tier >= to for copy in record.copies.of(slot)):
            return 0
        if to.spec.takes is Takes.UNCHANGED:
            return self._state.namespaces.bytes_on(record, slot, tier)
        space = self._state.namespaces.known(record.space)
        assert space is not None, "a record of a namespace that is not known"
        codecs = (Codec.RAW, self._codec_of(record))
        here = record.copies.of(slot)
        return sum(min(space.page_bytes(copy.group, copy.part, codec) for codec in codecs) for copy in here)
