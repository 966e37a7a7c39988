"""Workers with open sequences, as a coordinator hears them, and the private pages that a shard tells of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcluster.core.ids import BlockHash, SequenceId, Tenant
from kvcluster.core.messages import (
    EvictOrder,
    PageEvent,
    PageKey,
    RemovedEvent,
    SyncTables,
    TableChange,
    TablesSynced,
    Tier,
)
from kvcluster.core.miss import Loss
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_coordinator import Heard, LoneCoordinator, Voice
from tests.core.samples import OURS, SPEC, WHOLE, chain, holder

PRIVATE_SPEC = replace(SPEC, private=True)
PRIVATE = PRIVATE_SPEC.namespace(OURS)
Q, R, S = (SequenceId(letter * 16) for letter in (b"q", b"r", b"s"))
BLOCKS = chain(6)
PAGES = tuple(BlockHash(bytes([200 + number]) * 32) for number in range(6))
"""Ids of private blocks."""


class Syncing:
    """A worker that sends the changes of its tables, numbered from 1 on."""

    def __init__(self, coordinator: LoneCoordinator, number: int = 1, tenant: Tenant = OURS) -> None:
        self.coordinator = coordinator
        self.holder = holder(number)
        self.tenant = tenant
        self.number = 0

    def sync(self, *changes: TableChange, number: int | None = None) -> TablesSynced:
        """The next message; or the one of this number."""
        self.number = self.number + 1 if number is None else number
        message = SyncTables(self.holder, self.number, changes)
        space = self.coordinator.spec.namespace(self.tenant)
        return self.coordinator.ask(TablesSynced, build_request(message, self.tenant, space))

    def opens(self, sequence: SequenceId, blocks: Sequence[BlockHash], private: Sequence[BlockHash] = ()) -> None:
        answer = self.sync(TableChange(sequence, 0, (*blocks, *private), len(private)))
        assert not (answer.reopen or answer.refused or answer.forgotten)

    def closes(self, sequence: SequenceId) -> None:
        self.sync(TableChange(sequence, 0, closed=True))

    def table(self, sequence: SequenceId) -> tuple[BlockHash, ...] | None:
        return self.coordinator.core.state.tables.table((self.tenant, self.holder), sequence)


def private_page(block: BlockHash, tier: Tier = Tier.RAM) -> PageEvent:
    """What a shard tells of a private page that became READY. Private pages form no chain here."""
    return PageEvent(PRIVATE, PageKey(block, 0, WHOLE), BlockHash(bytes(32)), 0, tier, Loss.EXACT)


def private_gone(block: BlockHash, tier: Tier = Tier.RAM) -> RemovedEvent:
    return RemovedEvent(PRIVATE, PageKey(block, 0, WHOLE), False, tier)


def erased(ack: Heard) -> list[BlockHash]:
    """The private blocks that are to be evicted."""
    return [block for space, block in ack.evict.blocks if space == PRIVATE] if ack.evict is not None else []


def carries_out(voice: Voice, order: EvictOrder | None) -> Heard:
    """The shard carries out this order, of private pages, and reports it; returns the answer."""
    assert order is not None
    voice.ends(order)
    return voice.report(*(private_gone(block, order.tier) for _, block in order.blocks))
