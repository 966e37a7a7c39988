"""Which blocks change their tier: turns watermarks into demotions, and heat into promotions.

A shard that has tiers below is relieved by demotion: of each tier the coldest blocks go into the next one, encoded as
the policy says or as they are (tiers.Takes), and only out of its lowest tier anything is evicted (evictor.py). The
first blocks of a sequence, which every later token attends to (attention sinks: Xiao et al., StreamingLLM, 2023), go
down raw. Runs that are loaded often from below are brought up again as far as there is room above the watermark;
nothing is demoted for them before they are there, and then the coldest is.

One order a shard is under way at a time; the next is worked out when the shard has carried it out.

Shards tell what pages have lost by q4, of a few of them. A namespace that has lost more than its budget in the mean
gets q8 from then on, until somebody sets the codec again.

The policy may change while it runs: what goes down from then on follows it, and what is below stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvcluster.config import CODECS, CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.evictor import Evictor
from kvcluster.core.hot_prefixes import HotPrefixes
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.index import BlockRecord
from kvcluster.core.members import Member
from kvcluster.core.messages import Effect, Move, MoveOrder, Tier, Warn
from kvcluster.core.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.replica_sets import ReplicaTable
from kvcluster.core.tiers import FASTEST, Takes

MS = 1_000_000
SAMPLES_WANTED = 8
"""Pages of a namespace that are looked at before it is judged."""

_TOO_LOSSY = "q4 is too lossy for namespace {}: pages lose {:.3f}, and the budget is {:.3f}. They go down in q8 now"


class Tiering:
    """Makes the orders, and knows what is hot below."""

    def __init__(
        self, config: CoordinatorConfig, directory: NamespaceTable, book: ReplicaTable, evictor: Evictor
    ) -> None:
        self._low = config.low_free
        self._codec = Codec[config.host_codec.upper()]
        self._raw_blocks = config.host_raw_blocks
        self._hot_prefixes = HotPrefixes(
            loads=config.promote_loads, window_ns=config.hot_window_ms * MS, run_blocks=config.run_blocks
        )
        self._directory = directory
        self._book = book
        self._evictor = evictor
        self._budget = int(config.q4_error_budget * 1e6)
        self._samples: dict[NamespaceId, tuple[int, int]] = {}  # how many, and their sum in millionths
        self._fallen: dict[NamespaceId, int] = {}  # what q4 is too lossy for, with the mean of its samples
        self._hot: dict[int, dict[tuple[NamespaceId, BlockHash], None]] = {}  # by slot: what is to be promoted there

    def loaded(self, space: CoordinatorNamespace, hashes: Sequence[BlockHash], now: int) -> None:
        """A load was promised these blocks, a chain from its first block on."""
        for run in self._hot_prefixes.loaded(hashes, now):
            for block in run:
                record = space.index.get(block)
                for slot in _only_below(record) if record is not None else ():
                    hot = self._hot.setdefault(slot, {}) if self._book.alive(slot) else {}
                    if len(hot) < limits.PROMOTIONS:
                        hot[space.id, block] = None

    def sampled(self, samples: Sequence[tuple[NamespaceId, int]]) -> list[Effect]:
        """What pages of these namespaces have lost by q4, in millionths."""
        effects: list[Effect] = []
        for space, error in samples:
            if space in self._fallen or self._directory.known(space) is None:
                continue
            count, total = self._samples.get(space, (0, 0))
            count, total = count + 1, total + error
            self._samples[space] = count, total
            if count >= SAMPLES_WANTED and total > count * self._budget:
                del self._samples[space]
                self._fallen[space] = mean = total // count
                effects.append(Warn(_TOO_LOSSY.format(space.hex()[:8], mean / 1e6, self._budget / 1e6)))
        return effects

    @property
    def fallen(self) -> tuple[tuple[NamespaceId, int], ...]:
        """The namespaces that q4 is too lossy for, and what it loses there, in millionths."""
        return tuple(self._fallen.items())

    @property
    def policy(self) -> tuple[tuple[str, str], ...]:
        """What `set` takes, as it is."""
        return (
            ("host.codec", self._codec.name.lower()),
            ("host.raw_blocks", str(self._raw_blocks)),
            ("promote.loads", str(self._hot_prefixes.loads)),
        )

    def set(self, settings: Sequence[tuple[str, str]]) -> str | None:
        """Changes the policy; or says why not, and changes nothing."""
        known = dict(self.policy)
        for name, value in settings:
            if name not in known:
                return f"there is no policy {name!r}; there is cache, {', '.join(known)}"
            if name == "host.codec" and value not in CODECS:
                return f"{name}: there is no codec {value!r}; there is {', '.join(CODECS)}"
            if name != "host.codec" and not (value.isascii() and value.isdigit() and len(value) < 10):
                return f"{name} is a number of blocks or loads, not {value!r}"
            if name == "promote.loads" and not int(value):
                return "promote.loads must be at least 1"
            known[name] = value
        if any(name == "host.codec" for name, _ in settings):  # somebody has decided: it is tried again
            self._fallen.clear()
        self._codec = Codec[known["host.codec"].upper()]
        self._raw_blocks, self._hot_prefixes.loads = int(known["host.raw_blocks"]), int(known["promote.loads"])
        return None

    def demote(self, member: Member, pressure_bytes: int, now: int) -> int:
        """Orders what is to leave each tier but the lowest for the one below it. Returns the bytes that the lowest
        lacks for that. Room is made before it is taken: what leaves a lower tier goes first."""
        moves: list[Move] = []
        waited = pressure_bytes
        for tier, to in pairwise(member.info.tiers):
            victims = self._evictor.victims(member, tier, waited, now)
            below = sum(self._bytes_below(record, member.slot, tier, to) for record in victims)
            moves[:0] = [Move(record.space, record.hash, to, self._codec_of(record)) for record in victims]
            use = member.info.use(to)
            waited = max(0, below - use.free_bytes) + use.wanted_bytes
        self.order(member, moves)
        return waited

    def promote(self, member: Member) -> None:
        """Orders up what is hot below, as far as there is room above."""
        moves: list[Move] = []
        room = member.info.use(FASTEST).room(self._low)
        for space_id, block in self._hot.pop(member.slot, {}):
            record = self._directory.record(space_id, block)
            if record is None or member.slot not in _only_below(record):
                continue
            below = min(copy.tier for copy in record.copies.of(member.slot))
            room -= self._directory.bytes_on(record, member.slot, below, raw=True)
            if room < 0:
                break  # what stays hot is noticed again
            moves.append(Move(space_id, block, FASTEST))
        self.order(member, moves[: limits.EVICTIONS_PER_ORDER])

    def order(self, member: Member, moves: Sequence[Move]) -> None:
        """Gives this shard an order, where there is anything to move."""
        if moves:
            member.orders.give(lambda number: MoveOrder(number, tuple(moves)))

    def settle(self, member: Member, order: MoveOrder) -> None:
        """The order has ended, or its shard is gone: what was to go and did not is queued again."""
        for move in order.moves:
            record = self._directory.record(move.namespace, move.hash)
            leaves = member.info.above(move.to)
            if leaves is not None and record is not None and record.copies.on(member.slot, leaves):
                member.cold[leaves].push(record)

    def forget(self, member: Member) -> None:
        """Its shard is gone."""
        self._hot.pop(member.slot, None)

    def _codec_of(self, record: BlockRecord) -> Codec:
        if record.depth < self._raw_blocks:
            return Codec.RAW
        return Codec.Q8 if self._codec is Codec.Q4 and record.space in self._fallen else self._codec

    def _bytes_below(self, record: BlockRecord, slot: int, tier: Tier, to: Tier) -> int:
        """What a block of that tier takes in the one below, where it does not lie there already."""
        if any(copy.tier >= to for copy in record.copies.of(slot)):
            return 0
        if to.spec.takes is Takes.UNCHANGED:
            return self._directory.bytes_on(record, slot, tier)
        space = self._directory.known(record.space)
        assert space is not None, "a record of a namespace that is not known"
        codecs = (Codec.RAW, self._codec_of(record))
        here = record.copies.of(slot)
        return sum(min(space.page_bytes(copy.group, copy.part, codec) for codec in codecs) for copy in here)


def _only_below(record: BlockRecord) -> list[int]:
    """The slots of the shards that have it in a tier below, and not in the device tier."""
    return [slot for slot in record.copies.slots if not record.copies.on(slot, FASTEST)]
