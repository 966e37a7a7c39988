"""Shards that pull, played by a test towards a coordinator."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    BlocksPinned,
    Done,
    Drain,
    PageEvent,
    PinBlocks,
    Purge,
    Purged,
    TierUse,
)
from tests.core.lone_coordinator import Heard, LoneCoordinator, Voice
from tests.core.samples import OURS, SECOND, ours


def wanted(ack: Heard) -> list[BlockHash]:
    """Returns the blocks that this shard is ordered to pull."""
    return [new.key.hash for new in ack.pull.pages] if ack.pull is not None else []


def pull(voice: Voice, ack: Heard, *came: BlockHash) -> Heard:
    """The shard has done as it was told: these came, all of them where none is named. What it is told then."""
    assert ack.pull is not None
    space, into, codec = ack.pull.spec.namespace(OURS), ack.pull.into, ack.pull.codec
    told = [
        PageEvent(space, new.key, new.parent, new.depth, into, new.loss, codec)
        for new in ack.pull.pages
        if not came or new.key.hash in came
    ]
    voice.ends(ack.pull)
    return voice.report(*told)


def pull_in_vain(voice: Voice, ack: Heard) -> Heard:
    voice.ends(ack.pull)
    return voice.report()


def pull_all(*voices: Voice) -> list[BlockHash]:
    """Every shard carries out its orders until none is left; returns what was pulled, in order."""
    out: list[BlockHash] = []
    for _ in range(50):
        acks = [(voice, voice.report()) for voice in voices]
        if not any(ack.pull is not None for _, ack in acks):
            return out
        for voice, ack in acks:
            if ack.pull is not None:
                out += wanted(ack)
                pull(voice, ack)
    raise AssertionError("pulls without end")


def drain(coordinator: LoneCoordinator, voice: Voice, *, known: bool = True) -> bool:
    """Drains a shard, which knows it at once, or with `known=False` by the answer to its next report."""
    done = coordinator.ask(Done, ours(Drain(voice.info.shard))).ok
    if done and known:
        voice.info = replace(voice.info, draining=True)
    return done


def purge(coordinator: LoneCoordinator) -> int:
    return coordinator.ask(Purged, ours(Purge())).blocks


def want(coordinator: LoneCoordinator, replicas: int, *blocks: BlockHash) -> None:
    pin = ours(PinBlocks(blocks, 60 * SECOND, replicas), coordinator.space)
    assert coordinator.ask(BlocksPinned, pin).blocks == len(blocks)


def others(
    coordinator: LoneCoordinator, names: str, capacity_pages: int = 100, below: tuple[TierUse, ...] = ()
) -> list[Voice]:
    voices = [coordinator.voice(name, capacity_pages=capacity_pages, below=below) for name in names]
    for voice in voices:
        voice.join()
    return voices


def homes(coordinator: LoneCoordinator, block: BlockHash) -> list[str]:
    """The shards, alive, that the index names for this block."""
    for space in coordinator.core.state.namespaces:
        record = space.index.get(block)
        if record is not None:
            slots = dict.fromkeys(copy.slot for copy in record.copies.entries)
            alive = [slot for slot in slots if coordinator.core.state.book.alive(slot)]
            return sorted(coordinator.core.state.book.address(slot).shard for slot in alive)
    return []


def lose(coordinator: LoneCoordinator, *staying: Voice) -> None:
    """All others fall silent, and are lost."""
    for _ in range(6):
        coordinator.now += SECOND
        for voice in staying:
            voice.report()
    coordinator.later(0)
