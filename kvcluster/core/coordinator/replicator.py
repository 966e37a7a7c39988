"""Replication: turns heat, pins, losses and drains into pull orders, so that blocks get further copies.

A *replica request* asks for a block to have so many copies, each on a different shard that is not draining. Requests
are made for hot runs, for pinned blocks, for blocks that a lost shard has left with fewer copies than before, and for
every block that only a draining shard holds, the last used first. A shard that reports, has room above its watermark
and no pull in progress is given the next requests that it can fulfil: pages of one namespace from one source. Its
report stream shows which pages arrived; the rest are requested again, a few times. Nothing is evicted for a copy, and
no copy is moved: a source drops its own when it is ordered to, or leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.coordinator.hot_prefixes import HotPrefixes
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.coordinator.pull_planner import PullKind, PullPlanner
from kvcluster.core.coordinator.replica_sets import ReplicaSet, ReplicaTable
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import NewPage, PullOrder, Tombstone

MS = 1_000_000
TRIES = 3
"""The most orders that a request goes into: a source whose pages are corrupt, or a target that fills up, must not cause
retries for ever."""

RETRY_NS = 250 * MS
"""A request that went into an order waits this long before the next. A target whose free room is fragmented reports at
once that nothing fitted; without the wait it would be given the same order again at once, without end."""

INSPECTED = 2_048
"""Requests examined for one order: most are for other shards, or fulfilled."""

NamespacedHash = tuple[NamespaceId, BlockHash]


class _ReplicaRequest:
    __slots__ = ("copies", "most", "not_before", "tries")

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.most = 0  # the highest number of copies since the request was made
        self.tries = TRIES
        self.not_before = 0


class Replicator:
    """Keeps the requests and gives the pull orders."""

    def __init__(self, config: CoordinatorConfig, state: CoordinatorState) -> None:
        self._hot_replicas = config.hot_replicas
        self._hot_prefixes = HotPrefixes(
            loads=config.hot_loads, window_ns=config.hot_window_ms * MS, run_blocks=config.run_blocks
        )
        self._state = state
        self._planner = PullPlanner(state.namespaces, state.book, low_free=config.low_free)
        self._requests: dict[NamespacedHash, _ReplicaRequest] = {}
        self._parked: dict[NamespacedHash, _ReplicaRequest] = {}  # there are too few shards for them now
        self._under_way: dict[int, dict[NamespacedHash, _ReplicaRequest]] = {}  # by the slot of the shard that pulls
        self._draining: dict[int, dict[NamespacedHash, _ReplicaRequest]] = {}  # by the slot of the draining shard
        self._listing: dict[int, DrainList] = {}  # by the same: blocks not among its requests yet
        self._placed: dict[int, dict[NamespacedHash, None]] = {}  # by the same: blocks copied elsewhere for it
        self._stuck: dict[int, int] = {}  # by the same: requests in a row that `drained` found no shard with room for

    def loaded(self, space: CoordinatorNamespace, hashes: Sequence[BlockHash], now: int) -> None:
        """Counts a load that was promised these blocks, a chain from its first block on."""
        if self._hot_replicas > 1 and len(self._state.members) > 1:
            for run in self._hot_prefixes.record_load(hashes, now):
                for block in run:
                    self.request_copies(space, block, self._hot_replicas)

    def request_copies(self, space: CoordinatorNamespace, block: BlockHash, copies: int) -> None:
        """Requests that this block lies on `copies` shards, or on as many as have room."""
        name = (space.id, block)
        known = self._requests.get(name)
        if known is not None:
            known.copies = max(known.copies, copies)
        elif len(self._requests) < limits.REPLICA_REQUESTS:
            self._requests[name] = _ReplicaRequest(copies)

    @property
    def requests(self) -> int:
        """The number of replica requests that wait for an order or for a shard with room."""
        waiting = (*self._draining.values(), self._requests, self._parked)
        return sum(map(len, waiting))

    def joined(self) -> None:
        """Retries the parked requests, because one more shard has completed its inventory."""
        parked, self._parked = self._parked, {}
        for name, request in parked.items():
            if len(self._requests) < limits.REPLICA_REQUESTS:
                self._requests.setdefault(name, request)

    def drain(self, member: Member, until: int) -> None:
        """Starts to drain this shard: all blocks that only it holds are to be copied elsewhere, and so are those still
        being written to it."""
        member.drain_until = until
        self._state.book.retire_slot(member.slot)
        self._draining.setdefault(member.slot, {})
        self._placed.setdefault(member.slot, {})
        self._listing[member.slot] = DrainList(member.slot, (space.index for space in self._state.namespaces))
        self.list_some()

    @property
    def listing(self) -> bool:
        """Whether `list_some` has yet to look at blocks on draining shards."""
        return bool(self._listing)

    def list_some(self) -> None:
        """Makes requests for some more blocks of draining shards."""
        slot = next(iter(self._listing), None)
        if slot is None:
            return
        for record in self._listing[slot].some():
            space = self._state.namespaces.known(record.space)
            if space is None or space.index.get(record.hash) is not record:
                continue
            self._draining[slot].setdefault((record.space, record.hash), _ReplicaRequest(1))
            copies = self._most_copies(record, slot)
            if copies > 1:  # it survives, but with one copy less
                self.request_copies(space, record.hash, copies)
        if self._listing[slot].done:
            del self._listing[slot]

    def committed(self, record: BlockRecord, member: Member) -> None:
        """Records that this block is on that shard now. If the shard is draining, requests a copy elsewhere."""
        requests = self._draining.get(member.slot)
        if requests is not None:
            requests.setdefault((record.space, record.hash), _ReplicaRequest(1))

    def order(self, target: Member, now: int) -> bool:
        """Gives the next pull order to a shard that has just reported. Returns False if there is none for it."""
        if not self._planner.has_room(target):
            return False
        for requests in (*self._draining.values(), self._requests):
            taken = self._pick(target, requests, now)
            if taken is not None:
                self._under_way[target.slot] = taken
                return True
        for name in list(islice(self._requests, INSPECTED)):  # none suits this shard: look at others next
            self._requests[name] = self._requests.pop(name)
        return False

    def settle(self, member: Member, order: PullOrder) -> None:
        """Handles the end of a pull, or of its shard. Requests that are not fulfilled are queued again."""
        ordered: dict[BlockHash, list[NewPage]] = {}
        for page in order.pages:
            ordered.setdefault(page.key.hash, []).append(page)
        alive = self._state.book.alive(member.slot)
        for name, request in self._under_way.pop(member.slot, {}).items():
            record = self._record(name)
            going = [slot for slot in self._draining if record is not None and record.copies.on(slot)]
            if record is not None and alive and _has_pulled(record, member.slot, ordered.get(record.hash, ())):
                copies = self._planner.fewest(record, self._planner.staying(record))
                if copies > request.most:  # a further copy resets the tries; one that replaces a lost one does not
                    request.most, request.tries, request.not_before = copies, TRIES, 0
                for slot in going:
                    self._placed[slot][name] = None
                if copies >= min(request.copies, self._stayers()):
                    self._park(name, request, copies)
                    continue  # the request is fulfilled: if the copy is evicted soon, it is not fetched again
            if record is None or not (request.tries or going):  # blocks of a draining shard are retried until it leaves
                continue
            (self._draining[going[0]] if going else self._requests).setdefault(name, request)

    def forget(self, member: Member) -> None:
        """Forgets a removed shard."""
        for by_slot in (self._draining, self._listing, self._placed, self._stuck):
            by_slot.pop(member.slot, None)

    def apply_tombstone(self, stone: Tombstone) -> None:
        """Withdraws all pulls of what the tombstone names. A source may carry out the purge later than a target, which
        would then keep purged pages."""
        for member in self._state.members.all():
            pull = member.orders.of(PullOrder)
            if pull is not None and stone.names(pull.tenant, pull.spec):
                member.orders.withdraw(pull)
                self.settle(member, pull)

    def repair(self, space: CoordinatorNamespace, record: BlockRecord, before: ReplicaSet, slot: int) -> None:
        """Handles the loss of the block's pages on that shard: those that other shards still hold are to have as many
        copies as before."""
        held = [(copy.group, copy.part) for copy in before.of(slot)]
        lost = [page for page in held if not record.copies.holds(slot, *page)]
        left = Counter(_pages(record))
        copies = max((left[page] for page in lost), default=0)
        if copies:
            self.request_copies(space, record.hash, copies + 1)
        self.replica_lost(record)

    def replica_lost(self, record: BlockRecord, *, evicted: bool = False) -> None:
        """Handles the loss of a copy: if a draining shard holds the block, requests a copy elsewhere.

        Makes no request if the lost copy was `evicted` after it was made for that drain: the next would be evicted as
        well.
        """
        name = (record.space, record.hash)
        for slot, requests in self._draining.items():
            if record.copies.on(slot) and not (evicted and name in self._placed[slot]):
                requests.setdefault(name, _ReplicaRequest(1))

    def drained(self, member: Member) -> bool:
        """Whether every block that this shard alone holds, and any other has room for, has been copied elsewhere."""
        members = self._state.members.all()
        pulls = [other.orders.of(PullOrder) for other in members]
        if any(pull is not None and pull.source.shard == member.info.shard for pull in pulls):
            return False  # blocks under way are on no list of requests
        if member.slot in self._listing:
            return False
        requests = self._draining.get(member.slot, {})
        stayers = self._stayers()
        takers = [member for member in members if self._planner.has_room(member)]
        for name in list(islice(requests, max(1, INSPECTED // max(1, len(takers))))):  # each may be tried on each taker
            request, record = requests[name], self._record(name)
            staying = self._planner.staying(record) if record is not None else {}
            if record is None or self._planner.fewest(record, staying) >= min(request.copies, stayers):
                del requests[name]
            elif any(self._planner.fits(other, record, staying, request.copies) for other in takers):
                self._stuck[member.slot] = 0
                return False
            else:  # look at others next
                requests[name] = requests.pop(name)
                self._stuck[member.slot] = self._stuck.get(member.slot, 0) + 1
        if any(not (other.cursor.current or other.draining) for other in members):
            return not requests  # their free room is not known yet
        return self._stuck.get(member.slot, 0) >= len(requests)

    def check(self) -> None:
        """Checks that every order has its requests and every draining shard its list. Raises AssertionError."""
        members = {member.slot: member for member in self._state.members.all()}
        pulls = {slot: member.orders.of(PullOrder) for slot, member in members.items()}
        assert all(pulls[slot] is not None for slot in self._under_way), "requests of an order that has ended"
        for member in members.values():
            assert (member.slot in self._draining) == member.draining, "the lists of draining shards are wrong"
            pull = pulls[member.slot]
            if pull is not None:
                assert pull.source.shard != member.info.shard, "a shard is to pull from itself"
                space = pull.spec.namespace(pull.tenant)
                pulled = self._under_way[member.slot]
                assert all((space, page.key.hash) in pulled for page in pull.pages), (
                    "pages of a pull that are on no list of requests"
                )
        assert all(slot in members for slot in (*self._draining, *self._stuck)), "a shard that is gone still drains"
        assert all(slot in self._draining for slot in self._listing), "a shard is listed that does not drain"
        assert list(self._placed) == list(self._draining), "moved blocks of shards that do not drain are remembered"
        under_way = [name for requests in self._under_way.values() for name in requests]
        assert len(set(under_way)) == len(under_way), "two shards pull one block at a time"
        assert len(self._requests) <= limits.REPLICA_REQUESTS + len(members) * limits.PULL_PAGES, "too many requests"
        assert len(self._parked) <= limits.REPLICA_REQUESTS, "too many parked requests"

    # --------------------------------------------------------------------------------------- one order

    def _pick(
        self, target: Member, requests: dict[NamespacedHash, _ReplicaRequest], now: int
    ) -> dict[NamespacedHash, _ReplicaRequest] | None:
        """Gives `target` an order for requests that it can fulfil from one source. Takes these off their list and
        returns them; None if there are none."""
        pages: list[NewPage] = []
        taken: dict[NamespacedHash, _ReplicaRequest] = {}
        kind: PullKind | None = None
        space: CoordinatorNamespace | None = None
        stayers, nbytes = self._stayers(), 0
        for name in list(islice(requests, INSPECTED)):
            request, record = requests[name], self._record(name)
            if record is None:
                del requests[name]
                continue
            staying = self._planner.staying(record)
            copies = self._planner.fewest(record, staying)
            if copies >= min(request.copies, stayers):
                del requests[name]
                self._park(name, request, copies)
                continue
            if request.not_before > now or self._is_under_way(name):
                continue
            if requests is self._requests and self._is_beyond_limit(record):
                continue
            if space is not None and record.space != space.id:
                continue
            found = self._planner.missing(record, staying, request.copies, target)
            if found is None or kind not in (None, found.kind):
                continue
            more = self._planner.nbytes(record, found)
            if nbytes + more > self._planner.room(target, found.kind.into):
                continue  # a smaller block may fit
            if pages and (nbytes + more > limits.PULL_BYTES or len(pages) + len(found.pages) > limits.PULL_PAGES):
                break
            nbytes += more
            kind, space = found.kind, self._state.namespaces.known(record.space)
            pages += found.pages[: limits.PULL_PAGES]
            request.tries -= 1
            request.not_before = now + RETRY_NS
            taken[name] = requests.pop(name)
        if kind is None or space is None:
            return None
        named = (kind.source, space.tenant, space.spec, tuple(pages), kind.codec, kind.into)
        target.orders.give(lambda number: PullOrder(number, *named))
        return taken

    def _park(self, name: NamespacedHash, request: _ReplicaRequest, copies: int) -> None:
        """Keeps a request until the next shard joins, if it asks for more than the `copies` that the present shards
        allow."""
        if copies < request.copies and len(self._parked) < limits.REPLICA_REQUESTS:
            self._parked[name] = request

    def _most_copies(self, record: BlockRecord, slot: int) -> int:
        """Returns the number of living shards that hold the most replicated of the pages that this shard has of the
        block."""
        pages = Counter(_pages(record, self._state.book))
        return max((pages[copy.group, copy.part] for copy in record.copies.of(slot)), default=0)

    def _stayers(self) -> int:
        """Returns the number of shards that are not draining."""
        return sum(not member.draining for member in self._state.members.all())

    def _is_beyond_limit(self, record: BlockRecord) -> bool:
        """Whether the tenant of this block is to lose some because of its limit. A replica, which nothing charges,
        would be charged as soon as the copy that is charged now is evicted, and has to be evicted as well."""
        return self._state.limits.is_beyond(self._state.namespaces.tenant(record.space))

    def _is_under_way(self, name: NamespacedHash) -> bool:
        """Whether any shard is pulling the block: two draining shards may both request it."""
        return any(name in taken for taken in self._under_way.values())

    def _record(self, name: NamespacedHash) -> BlockRecord | None:
        return self._state.namespaces.record(*name)


def _pages(record: BlockRecord, book: ReplicaTable | None = None) -> list[tuple[int, Part]]:
    """Returns the pages of a block, one entry per shard that holds it; if `book` is given, only of living shards."""
    entries = dict.fromkeys(copy[:3] for copy in record.copies.entries if book is None or book.alive(copy.slot))
    return [(group, part) for _, group, part in entries]


def _has_pulled(record: BlockRecord, slot: int, ordered: Sequence[NewPage]) -> bool:
    """Whether that shard holds all pages of this block that it was ordered to pull."""
    return all(record.copies.holds(slot, page.key.group, page.key.part) for page in ordered)


LISTED_BLOCKS = 4_096
"""Blocks examined or listed in one step, which takes as long as sweeping the same number (report_handler.py)."""


class DrainList:
    """The blocks of the draining shard in that slot, in the order in which they are to be copied elsewhere: the last
    used first, and chains from their roots on, so that the blocks that do not fit any more are those that would be
    missed least. `blocks`: those of each namespace, as they are now.

    An index of millions is neither searched nor sorted in one step. First all its blocks are examined, some in each
    step, and those on the shard are put on a heap; then they are taken off it, some in each step. Blocks that the shard
    stores meanwhile are added from its report stream, and blocks that it has lost meanwhile are left out.
    """

    def __init__(self, slot: int, blocks: Iterable[Iterable[BlockRecord]]) -> None:
        self._slot = slot
        self._unseen: Iterator[BlockRecord] | None = chain.from_iterable([list(some) for some in blocks])
        self._heap: list[tuple[int, int, int, BlockRecord]] = []
        self._seen = 0  # numbers the entries, so that records are never compared

    @property
    def done(self) -> bool:
        """Whether all of them have been listed."""
        return self._unseen is None and not self._heap

    def some(self) -> list[BlockRecord]:
        """Does one step of the work. Returns the blocks that are listed in it."""
        left = LISTED_BLOCKS
        while self._unseen is not None and left > 0:
            left -= 1
            record = next(self._unseen, None)
            if record is None:
                self._unseen = None
            elif record.copies.on(self._slot):
                self._seen += 1
                heappush(self._heap, (-record.stamp, record.depth, self._seen, record))
        listed: list[BlockRecord] = []
        while self._unseen is None and self._heap and left > 0:
            left -= 1
            record = heappop(self._heap)[-1]
            if record.copies.on(self._slot):
                listed.append(record)
        return listed
