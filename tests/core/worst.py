"""The worst message of every kind that limits.py and the wire allow, and the state that makes it the worst.

Each builder takes a size and returns a core in its state and the message to step. `python -m tests.core.worst` steps
every one at its full size and prints the processor time that it took. test_bounded_work.py counts lines instead.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcluster.config import CoordinatorConfig, ShardConfig
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.coordinator.engine_registry import RECORD_BYTES
from kvcluster.core.doctor_probes import SINCE_VERSION
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES
from kvcluster.core.groups import PREFIX, Group, Part, Plane, window
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, NamespaceId, SequenceId, ShardId, SpanId, Tenant
from kvcluster.core.messages import (
    Abort,
    Attach,
    AttachShard,
    Commit,
    Drain,
    EndTicket,
    EngineInfo,
    EvictOrder,
    Explain,
    Findings,
    Flush,
    GetEngines,
    GetNamespaces,
    GetOffers,
    GetPins,
    GetStatus,
    Inventory,
    Link,
    Move,
    Moved,
    MoveOrder,
    MovePages,
    Need,
    NewPage,
    PageEvent,
    PageKey,
    PeersTried,
    Pin,
    PinBlocks,
    PinSpans,
    PrepareLoad,
    PrepareStore,
    Probe,
    Purge,
    RegisterEngine,
    RegisterSpans,
    RemovedEvent,
    Renew,
    RenewTicket,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Republish,
    Request,
    Reserve,
    SavePages,
    ScheduleSeen,
    Send,
    SetPolicy,
    SetQuotas,
    SetWeights,
    ShardInfo,
    Siblings,
    SpanBlocks,
    Stage,
    Staged,
    Stalled,
    StreamEvent,
    Suspect,
    SyncTables,
    TableChange,
    Tick,
    Tier,
    TierLost,
    TierUse,
    Tombstone,
    Unpin,
    UnpinBlocks,
    Verified,
    Verify,
)
from kvcluster.core.miss import Loss
from kvcluster.core.quotas import Quotas, TenantQuota, TierQuota
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.shard.shard import Shard
from kvcluster.core.spec import KVSpec
from tests.core.build import block, holder, parent
from tests.core.samples import MEMBERSHIP_MS, OURS, SECOND, SUMS

NOW = 50 * SECOND
CALL = CallId(1)
HEADS = 16_384
SPEC = KVSpec.uniform(
    model="m", weights="w", num_layers=512, num_kv_heads=HEADS, head_dim=1, dtype="uint8", block_tokens=1
)
"""Of many layers and heads, so that parts can overlap in as many ways as may be."""
SPACE = SPEC.namespace(OURS)
SMALL = KVSpec.uniform(model="m", weights="w", num_layers=1, num_kv_heads=8, head_dim=8, dtype="uint8", block_tokens=1)
PAGE = SMALL.page_bytes(0, SMALL.whole(0))
ROW, TILE = Part(0, 1, 0, HEADS), Part(0, 1, 0, 8)


@dataclass(frozen=True, slots=True)
class Step:
    """A core, and the message that it is about to step."""

    core: Coordinator | Shard
    message: Any
    now: int = NOW


def attempt(counter: int) -> Attempt:
    """Each of another worker, as far as there may be as many."""
    return Attempt(holder(counter % limits.HOLDERS), counter)


def asks(question: Any, namespace: NamespaceId | None = None, *, call: CallId = CALL) -> Request[Any]:
    return Request(call, OURS, namespace, question)


def odd_parts(count: int) -> list[Part]:
    """Parts that overlap, none of them aligned with another. 256 of them leave holes in SPEC, which costs most: then it
    is looked for what would fill them, too."""
    layers = len(SPEC.groups[0].layers)
    tops = [at * (layers - 1) // count for at in range(count)]
    return [
        Part(top, min(layers, top + 2 + at % 7), 0 if at % 2 else at, HEADS - at if at % 2 else HEADS)
        for at, top in enumerate(tops)
    ]


# ------------------------------------------------------------------------------------ the coordinator's


class Shards:
    """Shards as the coordinator hears them."""

    def __init__(self, core: Coordinator) -> None:
        self._core = core
        self._told: dict[str, int] = {}

    def info(self, number: int, **said: Any) -> ShardInfo:
        use = TierUse(Tier.HOST, 2**50, 2**49, 0)
        info = ShardInfo(ShardId(f"s{number}"), Epoch(1), "a:1", "", 2**50, 2**49, 0, 0, others=(use,))
        return replace(info, **said)

    def join(self, number: int) -> None:
        info = self.info(number)
        self._core.step(asks(Report(info, Epoch(0), 1)), NOW)
        self._core.step(asks(Inventory(info, self._core.epoch, 0, 0, True, ())), NOW)
        self._told[info.shard] = 0

    def report(
        self, number: int, events: Sequence[StreamEvent], *, pressure_bytes: int = 0, **said: Any
    ) -> Request[Report]:
        """The next one of this shard."""
        info = self.info(number, **said)
        first = self._told[info.shard] + 1
        pressure = ((OURS, pressure_bytes),) if pressure_bytes else ()
        return asks(Report(info, self._core.epoch, first, tuple(events), pressure=pressure))

    def tell(self, number: int, events: Sequence[StreamEvent]) -> None:
        for at in range(0, len(events), limits.REPORTS_PER_MESSAGE):
            some = events[at : at + limits.REPORTS_PER_MESSAGE]
            self._core.step(self.report(number, some), NOW)
            self._told[f"s{number}"] += len(some)


def coordinator(shards: int = 2, *, spec: KVSpec = SPEC, **config: Any) -> tuple[Coordinator, Shards]:
    settings = replace(CoordinatorConfig(), **config)
    core = Coordinator(Epoch(100), settings, membership_ttl_ms=MEMBERSHIP_MS, expected=shards, now=NOW, announces=True)
    core.step(asks(Attach(spec)), NOW)
    heard = Shards(core)
    for number in range(shards):
        heard.join(number)
    return core, heard


def event(number: int, part: Part, *, spec: KVSpec = SPEC, tier: Tier = Tier.RAM) -> PageEvent:
    key = PageKey(block(number), 0, part)
    return PageEvent(spec.namespace(OURS), key, parent(number), number, tier, Loss.EXACT)


def hashes(count: int) -> tuple[BlockHash, ...]:
    return tuple(map(block, range(count)))


def whole(spec: KVSpec = SPEC) -> Need:
    return Need((spec.whole(0),))


def scattered(blocks: int) -> Coordinator:
    """Each block lies in two parts that no other block lies in."""
    core, shards = coordinator()
    layers = len(SPEC.groups[0].layers)
    shards.tell(0, [event(at, Part(0, layers, 0, at + 1)) for at in range(blocks)])
    shards.tell(1, [event(at, Part(0, layers, at, HEADS)) for at in range(blocks)])
    return core


def in_pieces(blocks: int, parts: int) -> Coordinator:
    """Each block lies in so many parts, and no two blocks lie alike."""
    core, shards = coordinator()
    odd = odd_parts(parts)
    for at in range(blocks):
        shards.tell(0, [event(at, part) for part in odd])
    shards.tell(1, [event(at, Part(0, 1, at, at + 1)) for at in range(blocks)])
    return core


def held(blocks: int, *, ways: int = 64) -> tuple[Coordinator, Shards]:
    """Blocks that lie whole on one shard, and a row of each of `ways` in turn on the other."""
    core, shards = coordinator()
    shards.tell(0, [event(at, SPEC.whole(0)) for at in range(blocks)])
    shards.tell(1, [event(at, Part(0, 1, 0, 1 + at % ways)) for at in range(blocks)])
    return core, shards


def namespaces(count: int) -> Coordinator:
    """A tenant with so many namespaces, each of which holds a block."""
    core, shards = coordinator(1, spec=SMALL)
    specs = [replace(SMALL, weights=f"w{number}") for number in range(count - 1)]
    for spec in specs:
        core.step(asks(Attach(spec)), NOW)
    shards.tell(0, [event(at, SMALL.whole(0), spec=spec) for at, spec in enumerate((SMALL, *specs))])
    return core


def engines(count: int) -> Coordinator:
    core, _ = coordinator(1)
    for number in range(count):
        info = EngineInfo(f"e{number}", f"n{number}", "m", "w", private=True)
        core.step(asks(RegisterEngine(info)), NOW)
    return core


def tickets(count: int, blocks: int = 1) -> Coordinator:
    core, _ = held(blocks)
    for number in range(count):
        core.step(asks(PrepareLoad(attempt(number), hashes(blocks), whole()), SPACE), NOW)
    return core


def attach(size: int) -> Step:
    return Step(namespaces(size), asks(Attach(replace(SMALL, weights="new"))))


def prepare_load(size: int) -> Step:
    return Step(scattered(size), asks(PrepareLoad(attempt(1), hashes(size), whole()), SPACE))


def prepare_store(size: int) -> Step:
    """Of as many parts as may be, for blocks that are there in as many others."""
    parts = tuple((0, Part(at, at + 1, 3, HEADS - 3)) for at in range(limits.PARTS_PER_BLOCK))
    blocks = size // len(parts)
    known = hashes(blocks)
    core = in_pieces(blocks, 32)
    return Step(core, asks(PrepareStore(attempt(1), 0, parent(0), known[0], known, parts), SPACE))


def renew_ticket(size: int) -> Step:
    return Step(tickets(1, size), asks(RenewTicket(attempt(0))))


def end_ticket(size: int) -> Step:
    """The end of the ticket of a store of that many pages."""
    core, _ = coordinator()
    parts = tuple((0, Part(at, at + 1, 0, HEADS)) for at in range(8))
    known = hashes(size // len(parts))
    core.step(asks(PrepareStore(attempt(1), 0, parent(0), known[0], known, parts), SPACE), NOW)
    return Step(core, asks(EndTicket(attempt(1))))


def explain(size: int) -> Step:
    """Blocks in as many odd parts as a shard keeps, which no one page covers."""
    blocks = 16
    return Step(in_pieces(blocks, size), asks(Explain(hashes(blocks), whole()), SPACE))


def prepare_load_of_many_groups(size: int) -> Step:
    """Of sixteen groups, most of which need only the last blocks, on two shards in turn."""
    groups = tuple(
        Group((at,), (Plane("k", 8, 8, "uint8"),), PREFIX if at % 6 == 0 else window(1_024)) for at in range(16)
    )
    spec = KVSpec("m", "w", block_tokens=1, groups=groups)
    core, shards = coordinator(spec=spec)
    space, part = spec.namespace(OURS), Part(0, 1, 0, 8)
    for at in range(size):
        keys = [PageKey(block(at), group, part) for group in range(len(groups))]
        shards.tell(at % 2, [PageEvent(space, key, parent(at), at, Tier.RAM, Loss.EXACT) for key in keys])
    return Step(core, asks(PrepareLoad(attempt(1), hashes(size), Need((part,) * len(groups))), space))


def explain_with_failed_shards(size: int) -> Step:
    """On as many shards as a block may lie on, all of which the reader avoids."""
    core, shards = coordinator(limits.REPLICAS)
    for number in range(limits.REPLICAS):
        shards.tell(number, [event(at, Part(0, 1 + at % 511, 0, HEADS)) for at in range(size)])
    avoid = tuple(ShardId(f"s{number}") for number in range(limits.AVOIDED_SHARDS))
    return Step(core, asks(Explain(hashes(size), Need((SPEC.whole(0),), avoid=avoid)), SPACE))


def siblings(size: int) -> Step:
    return Step(namespaces(size), asks(Siblings(), SMALL.namespace(OURS)))


def get_namespaces(size: int) -> Step:
    return Step(namespaces(size), asks(GetNamespaces()))


def register_engine(size: int) -> Step:
    return Step(engines(size), asks(RegisterEngine(EngineInfo("new", "n", "m", "w"))))


def get_engines(size: int) -> Step:
    return Step(engines(size), asks(GetEngines()))


def set_weights(size: int) -> Step:
    return Step(engines(size), asks(SetWeights("m", "new")))


def sequence(number: int) -> SequenceId:
    return SequenceId(number.to_bytes(16, "big"))


def syncs(number: int, *changes: TableChange, of: int = 1) -> Request[Any]:
    return asks(SyncTables(holder(of), number, changes), SPACE)


def opens(core: Coordinator, number: int, blocks: int, *, of: int = 1) -> int:
    """Opens a sequence of so many private blocks, in as many messages as that takes. Returns the next number."""
    for first in range(0, blocks, limits.BLOCKS_PER_CALL):
        added = tuple(map(block, range(first, min(blocks, first + limits.BLOCKS_PER_CALL))))
        core.step(syncs(number, TableChange(sequence(of), first, added, len(added)), of=of), NOW)
        number += 1
    return number


def stored_privately(blocks: int) -> tuple[Coordinator, Shards]:
    core, shards = coordinator()
    spec = replace(SPEC, private=True)
    core.step(asks(Attach(spec)), NOW)
    shards.tell(0, [event(at, Part(0, 1, 0, 8), spec=spec) for at in range(blocks)])
    return core, shards


def sync_tables(size: int) -> Step:
    """A sequence of that many private blocks replaces one of as many others, which are stored."""
    core, _ = stored_privately(size)
    number = opens(core, 1, size)
    others = tuple(map(block, range(size, 2 * size)))
    return Step(core, syncs(number, TableChange(sequence(1), 0, others, size)))


def sync_many_tables(size: int) -> Step:
    """As many forks of a long sequence as a message may have, each from another place."""
    core, _ = coordinator()
    number = opens(core, 1, 4 * limits.BLOCKS_PER_CALL)
    forks = [TableChange(sequence(2 + at), 1 + 7 * at, (block(at),), parent=sequence(1)) for at in range(size)]
    return Step(core, syncs(number, *forks))


def sync_that_closes(size: int) -> Step:
    """The end of a sequence of that many stored blocks."""
    core, _ = stored_privately(size)
    number = opens(core, 1, size)
    return Step(core, syncs(number, TableChange(sequence(1), 0, closed=True)))


def sync_out_of_turn(size: int) -> Step:
    """All tables of a holder are dropped."""
    core, _ = coordinator()
    core.step(syncs(1, *(TableChange(sequence(at), 0, (block(at),)) for at in range(size))), NOW)
    return Step(core, syncs(7))


def pin_blocks(size: int) -> Step:
    """All are pinned already, and wanted on more shards."""
    core, _ = held(size)
    core.step(asks(PinBlocks(hashes(size), SECOND), SPACE), NOW)
    return Step(core, asks(PinBlocks(hashes(size), SECOND, limits.REPLICAS), SPACE))


def unpin_blocks(size: int) -> Step:
    core, _ = held(size)
    core.step(asks(PinBlocks(hashes(size), SECOND), SPACE), NOW)
    return Step(core, asks(UnpinBlocks(hashes(size)), SPACE))


def get_pins(size: int) -> Step:
    """All are pinned, and each until another time."""
    core, _ = held(size)
    core.step(asks(PinBlocks(hashes(size), SECOND), SPACE), NOW)
    for space in core.state.namespaces:
        for at, (one, (until, _)) in enumerate(list(space.pinned.items())):
            space.pinned.pin(one, until + at, 1)
    return Step(core, asks(GetPins()))


def purge(size: int) -> Step:
    """A purge of that many blocks, with as many tombstones as are allowed."""
    core, _ = held(size)
    for number in range(limits.TOMBSTONES_PER_TENANT - 1):
        core.step(asks(Purge(model=f"m{number}")), NOW)
    return Step(core, asks(Purge(model="m")))


def drain(size: int) -> Step:
    return Step(held(size)[0], asks(Drain(ShardId("s0"))))


def set_policy(size: int) -> Step:
    core, _ = coordinator(1)
    return Step(core, asks(SetPolicy((("promote.loads", "3"),) * size)))


def get_status(size: int) -> Step:
    return Step(coordinator(size)[0], asks(GetStatus()))


def begin_probe(size: int) -> Step:
    core, _ = coordinator(size)
    for member in core.state.members.all():
        member.info = replace(member.info, protocol=SINCE_VERSION)
    return Step(core, asks(Probe()))


def schedule_seen(size: int) -> Step:
    orphans = tuple((ShardId(f"s{number}"), "node") for number in range(size))
    return Step(coordinator(1)[0], ScheduleSeen(("a shard waits",) * size, orphans))


def set_quotas(size: int) -> Step:
    quota = TenantQuota({Tier.RAM: TierQuota(1, 2, 3)}, pinned=1)
    return Step(coordinator(1)[0], SetQuotas(Quotas(quota, {Tenant(f"t{number}"): quota for number in range(size)})))


def report(size: int) -> Step:
    """Corrupt pages of blocks that lie elsewhere too, while the shard asks for room, all of which has been promised."""
    core, shards = held(size)
    core.step(asks(PrepareLoad(attempt(1), hashes(min(size, limits.BLOCKS_PER_CALL)), whole()), SPACE), NOW)
    gone = [RemovedEvent(SPACE, PageKey(block(at), 0, SPEC.whole(0)), True, Tier.RAM) for at in range(size)]
    return Step(core, shards.report(0, gone, pressure_bytes=2**40))


def report_of_pieces(size: int) -> Step:
    """One part more of blocks that lie in as many as a shard keeps, and each unlike the others."""
    core, shards = coordinator()
    odd = odd_parts(limits.PARTS_PER_BLOCK - 1)
    for at in range(size // 16):
        shards.tell(0, [event(at, part) for part in odd[: 128 + at % 64]])
    new = [event(at % (size // 16), Part(0, 1, 0, 2 + at)) for at in range(size)]
    return Step(core, shards.report(0, new, pressure_bytes=2**40))


def report_of_a_target(size: int) -> Step:
    """A shard has a little room, and each requested block takes more."""
    core, shards = held(size)
    core.step(asks(PinBlocks(hashes(size), SECOND, limits.REPLICAS), SPACE), NOW)
    little = int(CoordinatorConfig().low_free * 2**50) + 1
    use = TierUse(Tier.HOST, 2**50, little, 0)
    return Step(core, shards.report(1, [], free_bytes=little, others=(use,)))


def report_of_a_draining_shard(size: int) -> Step:
    """No other shard has room for its blocks, and there are many to check."""
    core, shards = coordinator(64)
    shards.tell(0, [event(at, SPEC.whole(0)) for at in range(size)])
    core.step(asks(Drain(ShardId("s0"))), NOW)
    while core.next_deadline() == 0:
        core.step(Tick(), NOW)
    little = int(CoordinatorConfig().low_free * 2**50) + 1
    use = TierUse(Tier.HOST, 2**50, little, 0)
    for number in range(1, 64):
        core.step(shards.report(number, [], free_bytes=little, others=(use,)), NOW)
    return Step(core, shards.report(0, [], draining=True))


def inventory(size: int) -> Step:
    core, shards = held(1)
    pages = tuple(event(at, SPEC.whole(0)) for at in range(size))
    return Step(core, asks(Inventory(shards.info(0), core.epoch, 1, 0, False, pages)))


def republish(size: int) -> Step:
    return Step(namespaces(size), Republish())


def coordinator_tick(size: int) -> Step:
    """Tickets have run out, shards are lost, and what they held is to be swept and repaired."""
    core = tickets(8, size)
    return Step(core, Tick(), NOW + 3_600 * SECOND)


def tick_that_ends_leases(size: int) -> Step:
    """The leases of many holders run out, each with many sequences; the graces of as many blocks do, too."""
    core, _ = stored_privately(size)
    for of in range(8):
        core.step(syncs(1, *(TableChange(sequence(at), 0) for at in range(size // 16)), of=of), NOW)
    opens(core, 1, size, of=9)
    return Step(core, Tick(), NOW + 3_600 * SECOND)


def report_of_a_shard_that_erases(size: int) -> Step:
    """All blocks are to be erased at once, and room is wanted."""
    core, shards = stored_privately(size)
    opens(core, 1, size)
    core.step(syncs(9), NOW)
    while core.next_deadline() == 0:
        core.step(Tick(), NOW)
    return Step(core, shards.report(0, [], pressure_bytes=2**40))


def coordinator_stalled(size: int) -> Step:
    return Step(tickets(size), Stalled(SECOND))


COORDINATOR: list[tuple[type, Callable[[int], Step], int]] = [
    (Attach, attach, limits.NAMESPACES_PER_TENANT),
    (PrepareLoad, prepare_load, limits.BLOCKS_PER_CALL),
    (PrepareLoad, prepare_load_of_many_groups, limits.BLOCKS_PER_CALL),
    (PrepareStore, prepare_store, limits.PAGES_PER_CALL),
    (RenewTicket, renew_ticket, limits.BLOCKS_PER_CALL),
    (EndTicket, end_ticket, limits.PAGES_PER_CALL),
    (Explain, explain, limits.PARTS_PER_BLOCK),
    (Explain, explain_with_failed_shards, limits.BLOCKS_PER_CALL // 16),
    (Siblings, siblings, limits.NAMESPACES_PER_TENANT),
    (GetNamespaces, get_namespaces, limits.NAMESPACES_PER_TENANT),
    (RegisterEngine, register_engine, limits.ENGINES_BYTES // RECORD_BYTES),
    (GetEngines, get_engines, limits.ENGINES_BYTES // RECORD_BYTES),
    (SetWeights, set_weights, limits.ENGINES_BYTES // RECORD_BYTES),
    (SyncTables, sync_tables, limits.BLOCKS_PER_CALL),
    (SyncTables, sync_many_tables, limits.SEQUENCES_PER_HOLDER),
    (SyncTables, sync_that_closes, 8 * limits.BLOCKS_PER_CALL),
    (SyncTables, sync_out_of_turn, limits.SEQUENCES_PER_HOLDER),
    (PinBlocks, pin_blocks, limits.BLOCKS_PER_CALL),
    (UnpinBlocks, unpin_blocks, limits.BLOCKS_PER_CALL),
    (GetPins, get_pins, limits.BLOCKS_PER_CALL),
    (Purge, purge, 8 * limits.BLOCKS_PER_CALL),
    (Drain, drain, 8 * limits.BLOCKS_PER_CALL),
    (SetPolicy, set_policy, limits.POLICIES),
    (Probe, begin_probe, limits.PROBED_SHARDS),
    (GetStatus, get_status, 256),
    (Report, report, limits.REPORTS_PER_MESSAGE),
    (Report, report_of_pieces, limits.REPORTS_PER_MESSAGE),
    (Report, report_of_a_target, limits.BLOCKS_PER_CALL),
    (Report, report_of_a_draining_shard, limits.BLOCKS_PER_CALL),
    (Report, report_of_a_shard_that_erases, limits.BLOCKS_PER_CALL),
    (Inventory, inventory, limits.INVENTORY_CHUNK),
    (ScheduleSeen, schedule_seen, limits.SCHEDULE_LINES),
    (SetQuotas, set_quotas, limits.QUOTA_TENANTS),
    (Republish, republish, limits.NAMESPACES_PER_TENANT),
    (Tick, coordinator_tick, limits.BLOCKS_PER_CALL),
    (Tick, tick_that_ends_leases, 8 * limits.BLOCKS_PER_CALL),
    (Stalled, coordinator_stalled, limits.TICKETS),
]

# ------------------------------------------------------------------------------------------ the shard's


class LoneShard:
    """A shard that a coordinator knows, with room for so many pages of SMALL in its RAM tier."""

    def __init__(
        self, pages: int, *, host_pages: int = 0, found: RecoveredPages | None = None, scrub_bytes: int = 0
    ) -> None:
        config = ShardConfig(
            ram_bytes=pages * PAGE,
            host_bytes=host_pages * PAGE,
            disk_dir="",
            extent_bytes=0,
            scrub_bytes=scrub_bytes,
        )
        self.core = Shard(
            *(ShardId("a"), Epoch(7), config),
            membership_ttl_ms=3_600_000,
            address="a:1",
            host="",
            found={} if found is None else {Tier.DISK: found},
        )
        self.space = SMALL.namespace(OURS)
        self._sent: Report | Inventory | None = None
        self.step(asks(AttachShard(SMALL)))
        self.settle()

    def step(self, message: Any) -> list[Any]:
        effects = self.core.step(message, NOW)
        for effect in effects:
            if isinstance(effect, Send):
                self._sent = effect.message
        return effects

    def ack(self, **said: Any) -> ReportAnswered:
        """Returns the answer to the message under way."""
        message, self._sent = self._sent, None
        if message is None:
            return ReportAnswered(ReportAck(Epoch(100), 0, **said))
        told = message.upto if isinstance(message, Inventory) else message.first + len(message.events) - 1
        return ReportAnswered(ReportAck(Epoch(100), told, **said))

    def settle(self) -> None:
        while self._sent is not None:
            self.step(self.ack())

    def ask(self, **said: Any) -> ReportAnswered:
        """The answer to the next heartbeat, which says this."""
        if self._sent is None:
            self.step(asks(Flush(0)))
        if self._sent is None:
            self.core.state.report_sender.report_soon()
            self.step(asks(GetOffers()))
        return self.ack(**said)

    def reserve(self, counter: int, blocks: Iterable[int], part: Part = TILE, *, wait_ns: int = 0) -> Request[Reserve]:
        pages = tuple(NewPage(PageKey(block(at), 0, part), parent(at), at) for at in blocks)
        return asks(Reserve(attempt(counter), Epoch(7), pages, wait_ns), self.space, call=CallId(counter))

    def commit(self, counter: int, pages: int) -> Request[Commit]:
        return asks(Commit(attempt(counter), tuple(range(pages)), (SUMS,) * pages))

    def store(self, counter: int, blocks: range) -> None:
        self.step(self.reserve(counter, blocks))
        self.step(self.commit(counter, len(blocks)))
        self.settle()

    def pin(self, counter: int, blocks: Iterable[int]) -> Request[Pin]:
        keys = tuple(PageKey(block(at), 0, TILE) for at in blocks)
        return asks(Pin(attempt(counter), Epoch(7), keys, Loss.Q4), self.space, call=CallId(counter))


def holding(size: int, **more: Any) -> LoneShard:
    shard = LoneShard(size + 1_024, **more)
    shard.store(1, range(size))
    return shard


def crowded(size: int) -> LoneShard:
    """Full, and a reservation of so many pages waits for room."""
    shard = LoneShard(512)
    shard.store(1, range(512))
    shard.step(shard.reserve(2, range(1_000, 1_000 + size), wait_ns=SECOND))
    shard.settle()
    return shard


def leased(size: int) -> LoneShard:
    shard = LoneShard(64)
    shard.store(1, range(1))
    for counter in range(2, 2 + size):
        shard.step(shard.pin(counter, range(1)))
    return shard


def attach_shard(size: int) -> Step:
    shard = LoneShard(size + 64)
    for number in range(size - 1):
        spec = replace(SMALL, weights=f"w{number}")
        shard.space = spec.namespace(OURS)
        shard.step(asks(AttachShard(spec)))
        shard.store(number + 1, range(1))
    shard.space = SMALL.namespace(OURS)
    shard.store(size, range(1))
    return Step(shard.core, asks(AttachShard(replace(SMALL, weights="new"))))


def get_offers(size: int) -> Step:
    return Step(crowded(size).core, asks(GetOffers()))


def pin(size: int) -> Step:
    shard = holding(size)
    return Step(shard.core, shard.pin(2, range(size)))


def unpin(size: int) -> Step:
    shard = holding(size)
    shard.step(shard.pin(2, range(size)))
    return Step(shard.core, asks(Unpin(attempt(2))))


def reserve(size: int) -> Step:
    shard = LoneShard(size + 64)
    return Step(shard.core, shard.reserve(1, range(size)))


def commit(size: int) -> Step:
    shard = LoneShard(size + 64)
    shard.step(shard.reserve(1, range(size)))
    return Step(shard.core, shard.commit(1, size))


def abort(size: int) -> Step:
    shard = LoneShard(size + 64)
    shard.step(shard.reserve(1, range(size)))
    return Step(shard.core, asks(Abort(attempt(1))))


def renew(size: int) -> Step:
    """While others wait for room."""
    return Step(crowded(size).core, asks(Renew(attempt(1))))


def flush(size: int) -> Step:
    """The last flush that may wait."""
    shard = holding(1)
    shard.step(shard.reserve(2, range(10, 11)))
    shard.step(shard.commit(2, 1))
    for number in range(size):
        shard.step(asks(Flush(SECOND), call=CallId(10 + number)))
    return Step(shard.core, asks(Flush(SECOND)))


def suspect(size: int) -> Step:
    shard = holding(size)
    keys = tuple(PageKey(block(at), 0, TILE) for at in range(size))
    return Step(shard.core, asks(Suspect(Epoch(7), keys), shard.space))


_SPAN_BLOCKS = 32
"""Blocks of one span: a cut of positions, in blocks of 16."""


def spans(size: int, first: int = 0) -> tuple[SpanBlocks, ...]:
    """So many blocks, in spans."""
    return tuple(
        SpanBlocks(SpanId(first + at), 0, TILE, at, tuple(map(block, range(at, min(size, at + _SPAN_BLOCKS)))))
        for at in range(0, size, _SPAN_BLOCKS)
    )


def register_spans(size: int) -> Step:
    """As many end."""
    shard = holding(1)
    before = spans(size)
    shard.step(asks(RegisterSpans(holder(2), Epoch(7), before), shard.space))
    ended = tuple(each.span for each in before)
    return Step(shard.core, asks(RegisterSpans(holder(2), Epoch(7), spans(size, size), ended), shard.space))


def pin_spans(size: int) -> Step:
    """Whose pages were never looked for."""
    shard = holding(size)
    named = spans(size)
    shard.step(asks(RegisterSpans(holder(2), Epoch(7), named), shard.space))
    return Step(shard.core, asks(PinSpans(attempt(2), Epoch(7), tuple(each.span for each in named))))


def verified(size: int) -> Step:
    """All suspects are corrupt."""
    shard = holding(4 * size)
    effects: list[Any] = []
    shard.step(shard.pin(2, range(1)))
    for first in range(0, size + limits.SUSPECTS_PER_CALL, limits.SUSPECTS_PER_CALL):
        keys = tuple(PageKey(block(at), 0, TILE) for at in range(first, first + limits.SUSPECTS_PER_CALL))
        effects += shard.step(asks(Suspect(Epoch(7), keys), shard.space))
    (reading,) = [effect for effect in effects if isinstance(effect, Verify)]
    effects = shard.step(Verified(reading.attempt, ()))
    (reading,) = [effect for effect in effects if isinstance(effect, Verify)]
    return Step(shard.core, Verified(reading.attempt, tuple(range(len(reading.slots)))))


def moving(size: int) -> tuple[LoneShard, MovePages]:
    shard = holding(size, host_pages=size)
    moves = tuple(Move(shard.space, block(at), Tier.HOST) for at in range(size))
    (pages,) = [
        effect for effect in shard.step(shard.ask(orders=(MoveOrder(1, moves),))) if isinstance(effect, MovePages)
    ]
    return shard, pages


def moved(size: int) -> Step:
    shard, pages = moving(size)
    return Step(shard.core, Moved(pages.attempt, (SUMS,) * len(pages.pages)))


def on_disk(size: int) -> LoneShard:
    """So many pages on disk, and nowhere else."""
    per_file = 1_024
    file_bytes = HEAD_BYTES + SECTOR_BYTES * (per_file + 64)
    found = RecoveredPages(
        capacity_bytes=(size // per_file + 2) * file_bytes, file_bytes=file_bytes, specs=((OURS, SMALL),)
    )
    shard = holding(size, host_pages=2 * size, found=found)
    for tier in (Tier.HOST, Tier.DISK):
        for first in range(0, size, limits.MOVES_PER_ORDER):
            blocks = range(first, min(size, first + limits.MOVES_PER_ORDER))
            moves = tuple(Move(shard.space, block(at), tier) for at in blocks)
            number = 1 + first // limits.MOVES_PER_ORDER + (1_000 if tier is Tier.DISK else 0)
            effects = shard.step(shard.ask(orders=(MoveOrder(number, moves),)))
            while batch := [effect for effect in effects if isinstance(effect, MovePages)]:
                effects = shard.step(Moved(batch[0].attempt, (SUMS,) * len(batch[0].pages)))
            shard.settle()
    return shard


def tier_lost(size: int) -> Step:
    return Step(on_disk(size).core, TierLost(Tier.DISK, "the drive has failed"))


def staged(size: int) -> Step:
    """Staged pages that a reader wanted from disk."""
    shard = on_disk(size)
    (stage,) = [effect for effect in shard.step(shard.pin(2, range(size))) if isinstance(effect, Stage)]
    assert len(stage.pages) == size
    return Step(shard.core, Staged(stage.attempt))


def peers_tried(size: int) -> Step:
    links = tuple(Link(ShardId(f"s{number}"), "grpc", 1) for number in range(size))
    return Step(holding(1).core, PeersTried(Findings(1, links=links)))


def save_pages(size: int) -> Step:
    """The first step, which lists the pages, of a deadline that has come already."""
    file_bytes = HEAD_BYTES + SECTOR_BYTES * 64
    found = RecoveredPages(capacity_bytes=2 * file_bytes, file_bytes=file_bytes, specs=((OURS, SMALL),))
    shard = holding(size, host_pages=size, found=found)
    return Step(shard.core, SavePages(CALL, 0, Codec.Q8, 1))


def report_answered(size: int) -> Step:
    """With tombstones that name all that this shard holds, and an order to evict what is gone then."""
    shard = holding(size)
    stones = tuple(Tombstone(number, OURS, model=f"m{number}") for number in range(1, limits.TOMBSTONES_PER_TENANT))
    order = EvictOrder(1, tuple((shard.space, block(at)) for at in range(limits.EVICTIONS_PER_ORDER)))
    return Step(shard.core, shard.ask(tombstones=(*stones, Tombstone(1_000, OURS)), orders=(order,)))


def report_failed(size: int) -> Step:
    shard = crowded(size)
    shard.ask()
    return Step(shard.core, ReportFailed())


def shard_tick(size: int) -> Step:
    """All leases run out."""
    return Step(leased(size).core, Tick(), NOW + 1_800 * SECOND)


def shard_stalled(size: int) -> Step:
    return Step(leased(size).core, Stalled(SECOND))


SHARD: list[tuple[type, Callable[[int], Step], int]] = [
    (AttachShard, attach_shard, limits.NAMESPACES_PER_TENANT),
    (GetOffers, get_offers, limits.WAITING_PAGES),
    (Pin, pin, limits.READ_PAGES),
    (Unpin, unpin, limits.PAGES_PER_CALL),
    (Reserve, reserve, limits.WRITE_PAGES),
    (Commit, commit, limits.WRITE_PAGES),
    (Abort, abort, limits.WRITE_PAGES),
    (Renew, renew, limits.WAITING_PAGES),
    (Flush, flush, limits.FLUSHES),
    (Suspect, suspect, limits.SUSPECTS_PER_CALL),
    (RegisterSpans, register_spans, limits.SPAN_BLOCKS_PER_CALL),
    (PinSpans, pin_spans, limits.PAGES_PER_CALL),
    (Verified, verified, limits.SUSPECTS),
    (Moved, moved, limits.EVICTIONS_PER_ORDER),
    (Staged, staged, limits.BLOCKS_PER_CALL),
    (TierLost, tier_lost, limits.PAGES_PER_CALL),
    (PeersTried, peers_tried, limits.PROBE_LINKS),
    (SavePages, save_pages, limits.PAGES_PER_CALL),
    (ReportAnswered, report_answered, limits.PAGES_PER_CALL),
    (ReportFailed, report_failed, limits.WAITING_PAGES),
    (Tick, shard_tick, limits.LEASES),
    (Stalled, shard_stalled, limits.LEASES),
]


def main() -> None:
    """Prints the processor time of each step at its full size."""
    for name, cases in (("coordinator", COORDINATOR), ("shard", SHARD)):
        for _, build, size in cases:
            step = build(size)
            gc.collect()
            began = time.process_time()
            step.core.step(step.message, step.now)
            print(f"{name:12} {build.__name__:28} {size:7,} {(time.process_time() - began) * 1e3:9.1f} ms", flush=True)


if __name__ == "__main__":
    main()
