"""The second phase: all faults are healed, work ends, and within a bounded time the cluster must come to rest.

Then every call has ended, the index matches what the shards hold, nothing is pinned, leased, promised or awaited, and
only the current incarnations live. Finally a worker loads what the shards hold, and stores what they do not.
"""

from __future__ import annotations

from collections import Counter

from kvcluster.core.ids import BlockHash, NamespaceId, ShardId
from kvcluster.core.messages import PageKey, Tier
from kvcluster.core.tiers import INGEST, STAGING
from kvcluster.replay.kernel import MS, SECOND, TIMED_OUT, Script
from tests.sim import content
from tests.sim.sequence_worker import SequenceWorker
from tests.sim.violation import Violation, require
from tests.sim.worker import Worker
from tests.sim.world import SimulatedWorld

REST_NS = 20 * SECOND
"""Every term and timeout has passed by then, several times over."""
_LOOK_NS = 200 * MS
_LOOKS = 20


def come_to_rest(world: SimulatedWorld) -> None:
    """Raises Violation with the first condition that still does not hold when the time is up."""
    world.journal.add((world.kernel.now, "world", "heals", ()))
    world.working = False
    world.bad_wire_until = 0
    world.network.heal()
    for process in list(world.processes()):
        process.resume()
    for node in range(world.scenario.nodes):
        world.bind(node, None)
    healed_at = world.kernel.now
    give_up = healed_at + REST_NS
    while True:
        world.kernel.run(world.kernel.now + _LOOK_NS)
        try:
            _all_is_at_rest(world, healed_at)
            break
        except Violation as not_yet:
            world.end_superseded()
            if world.kernel.now >= give_up:
                raise Violation(f"{REST_NS // SECOND} s after the healing: {not_yet}") from None
    world.check()
    _serve_again(world)
    world.check()


def _all_is_at_rest(world: SimulatedWorld, healed_at: int) -> None:
    coordinator = world.coordinator
    require(not coordinator.dead and not coordinator.core.rebuilding, "the coordinator is not back")
    require(all(worker.idle for worker in world.workers), "a call has not ended")
    require(not len(coordinator.core.state.tickets), "a ticket is left")
    require(not coordinator.unanswered(), "the coordinator has not answered a question")
    require(not coordinator.listener.behind and not coordinator.core.republishing, "a listener to KV events is behind")
    require(not any(world.shards[name].dead for name in world.names), "a shard has not been restarted")
    living = [shard for shard in world.incarnations.values() if not shard.dead]
    require(
        sorted(shard.shard for shard in living) == sorted(world.names), "a shard is missing, or an old one lives on"
    )
    members = [member.info.shard for member in coordinator.core.state.members.all()]
    require(sorted(members) == sorted(world.names), "a shard that is gone is still a member")
    for shard in living:
        member = coordinator.core.state.members.get(shard.shard)
        require(member is not None, f"{shard.shard} is not known")
        assert member is not None
        require(member.info.epoch == shard.core.epoch and member.joined, f"{shard.shard} is not up")
        require(shard.core.state.member(shard.now()), f"{shard.shard} has no coordinator")
        # A report that was lost before the healing is awaited for longer than a shard may be silent.
        silent_ns = coordinator.now() - coordinator.heard[shard.shard, shard.core.epoch]
        require(silent_ns < world.kernel.now - healed_at, f"{shard.shard} has not reported since")
        late = any(member.purged < space.purged for space in coordinator.core.state.namespaces)
        require(not late, f"{shard.shard} has a purge to carry out")
        require(not member.draining, f"{shard.shard} is still draining")
        require(not len(shard.core.leases), f"{shard.shard} has a lease left")
        require(not shard.sessions, f"{shard.shard} has a session left")
        require(not shard.unanswered(), f"{shard.shard} has not answered a question")
        require(not len(member.orders), f"{shard.shard} has an order left")
        require(not shard.core.order_progress.running, f"{shard.shard} still carries out an order")
        # Otherwise its next report is answered by an order to evict, perhaps of blocks that are being loaded.
        for allocator in shard.core.pool.allocators.values():
            low_bytes = world.scenario.config.coordinator.low_free * allocator.capacity_bytes
            require(allocator.free_bytes >= low_bytes, f"{shard.shard} has too little free room")
        pages = [(page.space, page.key, page.tier) for page in shard.core.pool.everything()]
        require(len(list(shard.core.pool.ready())) == len(pages), f"{shard.shard} has a page that is not READY")
        require(
            all(page.pins == 0 for page in shard.core.pool.everything()), f"{shard.shard} has a pin without an owner"
        )
    require(_told(world) == _held(world), "the index is not what the shards hold")
    world.quota_oracle.at_rest()
    _sequences_are_over(world)


def _sequences_are_over(world: SimulatedWorld) -> None:
    """All sequences are closed, or their holders are gone: nothing of them is left but public blocks."""
    core = world.coordinator.core
    require(not len(core.state.tables) and not core.state.tables.releasing, "a table of a sequence is left")
    require(not core.state.tables.claimed_blocks, "a block is claimed without a sequence")
    require(not core.state.namespaces.private_blocks, "a private block is left")
    for worker in world.workers:
        if isinstance(worker, SequenceWorker):
            worker.machine.check()
            require(not worker.machine.pages.used, "a page of the resident set is in use without a sequence")


def _told(world: SimulatedWorld) -> Counter[tuple[int, NamespaceId, PageKey, Tier]]:
    """Returns what the index says, with the slots of shards."""
    return Counter(
        (copy.slot, space.id, PageKey(record.hash, copy.group, copy.part), copy.tier)
        for space in world.coordinator.core.state.namespaces
        for record in space.index
        for copy in record.copies.entries
    )


def _held(world: SimulatedWorld) -> Counter[tuple[int, NamespaceId, PageKey, Tier]]:
    """Returns what the living shards hold, with their slots; slot -1 is of one that the coordinator does not know."""
    members = world.coordinator.core.state.members
    slots = {member.info.shard: member.slot for member in members.all()}
    return Counter(
        (slots.get(shard.shard, -1), page.space, page.key, page.tier)
        for shard in world.incarnations.values()
        if not shard.dead
        for page in shard.core.pool.everything()
    )


def _serve_again(world: SimulatedWorld) -> None:
    """Checks that everything the shards hold can be loaded, and that new stores succeed."""
    worker = world.workers[0]
    done = worker.start(_final_calls(world, worker))
    world.kernel.run(world.kernel.now + 10 * SECOND)
    require(done.ready and done.value is not TIMED_OUT, "the last calls have not ended")


def _final_calls(world: SimulatedWorld, worker: Worker) -> Script:
    for model in world.models[:2]:
        hashes = content.chain(model, 0, 0)
        yield from _all_is_told(world)
        yield from _no_shard_is_left_alone(worker)
        expected, rotten = _restorable(world, model, hashes), _rotten(world)  # pages found now may be gone afterwards
        too_much, before = _is_too_much(world, hashes), _copies(world, model, hashes)
        loaded = yield from worker.load(model, hashes, model.need())
        # Reading them from disk may need room, and copies may have been evicted to make it, one that the coordinator
        # had chosen perhaps: a disk file is given up without an order.
        gone = world.scenario.config.shard.disk_bytes and not before <= _copies(world, model, hashes)
        excused = rotten or gone or too_much or _rotten(world)
        require(loaded == expected or excused, f"{expected} blocks can be loaded, and {loaded} were")
    for model in world.models:
        if len(model.whole()) == 1:  # one page size: only the shard knows whether two sizes fit together
            short = content.chain(model, 0, 0)[:1]
            stored = False
            yield from _all_is_told(world)
            yield from _no_shard_is_left_alone(worker)
            for _ in range(6):  # reports ask for room
                stored = stored or (yield from worker.store(model, short, 0, model.whole(), 300 * MS))
                if not stored:
                    yield None, _LOOK_NS  # it may be pending: the load may have had the block promoted
            require(stored or _rotten(world), "a block could not be stored after the healing")
            return


def _all_is_told(world: SimulatedWorld) -> Script:
    """Waits until the index is what the shards hold, and no shard is sending its inventory. The last load may have had
    pages promoted, and others evicted for them: a load that is granted these misses, or gets less than there is."""
    for _ in range(_LOOKS):
        current = all(member.joined for member in world.coordinator.core.state.members.all())
        if current and _told(world) == _held(world):
            return
        yield None, _LOOK_NS


def _no_shard_is_left_alone(worker: Worker) -> Script:
    """Waits until every breaker that opened during the faults lets one exchange through again."""
    open_ms = [breaker["open_ms"] for breaker in worker.policy.status(worker.now()).values()]
    yield None, (max(open_ms, default=0) + 1) * MS


def _copies(
    world: SimulatedWorld, model: content.Model, hashes: tuple[BlockHash, ...]
) -> set[tuple[ShardId, Tier, PageKey]]:
    """Returns where the pages of these blocks are."""
    return {
        (shard.shard, page.tier, page.key)
        for shard in world.incarnations.values()
        if not shard.dead
        for page in shard.core.pool.ready()
        if page.space == model.space and page.key.hash in hashes
    }


def _restorable(world: SimulatedWorld, model: content.Model, hashes: tuple[BlockHash, ...]) -> int:
    """Returns the longest boundary at which every group has the blocks that it needs before it on some shard."""
    ready = {key for _, _, key in _copies(world, model, hashes)}
    spec = model.spec
    whole, halves = model.whole(), model.halves()

    def has(block: BlockHash, group: int) -> bool:
        return any(
            all(PageKey(block, group, part) in ready for of, part in parts if of == group) for parts in (whole, halves)
        )

    for boundary in range(len(hashes), 0, -1):
        if all(
            has(block, group)
            for group in range(len(spec.groups))
            for block in hashes[
                boundary - spec.groups[group].reuse.blocks_needed(boundary, spec.block_tokens) : boundary
            ]
        ):
            return boundary
    return 0


def _is_too_much(world: SimulatedWorld, hashes: tuple[BlockHash, ...]) -> bool:
    """Returns whether some shard has to read pages of these blocks from a store, and all its pages of them below the
    first tier take more than half of its staging tier. With pages of two sizes, half of it may be wasted."""
    for shard in world.incarnations.values():
        pages = shard.core.pool.ready() if not shard.dead else ()
        below = [page for page in pages if page.tier is not INGEST and page.key.hash in hashes]
        if any(not page.tier.spec.addressable for page in below):
            room = shard.core.pool.memory[STAGING]
            if 2 * sum(room.size_class(page.nbytes) for page in below) > room.capacity_bytes:
                return True
    return False


def _rotten(world: SimulatedWorld) -> bool:
    living = [shard for shard in world.incarnations.values() if not shard.dead]
    return any(
        any(memory.rotten for memory in shard.memory.values())
        or any(store.has_rotten for store in shard.stores.values())
        for shard in living
    )
