"""What must hold between any two steps: checked by tests, the simulator, and whoever doubts.

Each function raises AssertionError with a sentence. They read; they change nothing.
"""

from __future__ import annotations

from kvcluster.core.coordinator import Coordinator
from kvcluster.core.leases import LeaseKind
from kvcluster.core.pool import PageState
from kvcluster.core.shard import Shard


def check_shard(shard: Shard) -> None:
    """Conservation of room, and every pin and every page being written has its lease."""
    pool = shard.pool
    pool.check()
    pins: dict[int, int] = {}
    writing: dict[int, int] = {}
    for lease in shard.leases.all():
        for page in lease.pages:
            if page is None:
                continue
            counted = pins if lease.kind is LeaseKind.READ else writing
            counted[page.generation] = counted.get(page.generation, 0) + 1
    for page in pool.everything():
        assert page.pins == pins.pop(page.generation, 0), f"page {page.generation} has pins without a lease"
        writers = writing.pop(page.generation, 0)
        assert (page.state is PageState.WRITING) == (writers == 1), f"page {page.generation} and its writers disagree"
        assert page.state is not PageState.FREE
        assert bool(page.sums) == (page.state is not PageState.WRITING), "READY means summed"
    assert not pins and not writing, "a lease holds pages that are gone"


def check_coordinator(coordinator: Coordinator) -> None:
    """Every record is reachable by its hash and says something; members and slots agree."""
    book = coordinator.book
    slots = [member.slot for member in coordinator.members.all()]
    assert len(set(slots)) == len(slots), "two members share a slot"
    assert all(book.alive(slot) for slot in slots), "a member's slot is dead"
    for space in coordinator.directory:
        for record in space.index:
            assert space.index.get(record.hash) is record
            assert record.space == space.id
            assert record.copies.entries, "a record without copies"
        assert all(space.index.get(block) is not None for block in space.pinned), "a pin of a block that is gone"
