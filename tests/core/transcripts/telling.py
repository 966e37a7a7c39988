"""Formats the effects of the cores for transcripts: one line for each, unchanged as long as the protocol is.

A line tells what a reader of the protocol needs and leaves out what follows from the rest: addresses, specs,
checksums, counters, and where in the arena a page lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    Attached,
    AttachedShard,
    BlocksPinned,
    CommitGrant,
    Done,
    Drain,
    EndTicket,
    EvictOrder,
    Explained,
    Flush,
    Inventory,
    LeaveReason,
    LoadGrant,
    Order,
    OrderProgress,
    PageEvent,
    PageSlot,
    PinGrant,
    Plan,
    PullOrder,
    Purged,
    Refused,
    RemovedEvent,
    Renew,
    RenewTicket,
    Reply,
    Report,
    ReportAck,
    ShardInfo,
    Status,
    StoreGrant,
    StreamEvent,
    Suspect,
    TablesSynced,
    Tombstone,
    WriteGrant,
)
from tests.core.transcripts.names import MS, Names, pages

NO_NEWS = ((), OrderProgress(), False)
"""The substance of a heartbeat that says only that the shard lives."""

_DONE: dict[type, tuple[str, str]] = {
    RenewTicket: ("the ticket is renewed", "there is no such ticket"),
    EndTicket: ("the ticket is ended", "there is no such ticket"),
    Renew: ("the lease is renewed", "the lease has ended"),
    Flush: ("the coordinator has heard of all", "the coordinator has not heard of all"),
    Drain: ("the drain is under way", "there is no such shard"),
    Suspect: ("noted", "not noted"),
}


class Teller:
    """Tells messages in the names of one transcript."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def reply(self, question: object, asked: Sequence[BlockHash], reply: Reply) -> str:
        """An answer to a question about these blocks."""
        match reply:
            case Refused(kind, detail):
                return f"refused ({kind.value}): {detail}"
            case Done(ok):
                return _DONE.get(type(question), ("done", "there is nothing to end"))[not ok]
            case Attached():
                shards = " ".join(f"{shard.shard}@{shard.epoch}" for shard in reply.shards) or "none"
                return f"attached; epoch {reply.epoch}, shards: {shards}"
            case AttachedShard():
                return f"attached; epoch {reply.epoch}, leases run {reply.lease_ttl_ns // MS} ms"
            case LoadGrant():
                return self._load_grant(asked, reply)
            case StoreGrant(runs):
                told = [
                    run.decision.value
                    + (f" to {run.shard.shard}" if run.shard else "")
                    + (f": {run.miss}" if run.miss and str(run.miss) != run.decision.value else "")
                    for run in runs
                ]
                return self._runs(asked, [run.count for run in runs], told)
            case Explained(fates):
                told = [self._plan(fate.plan) if fate.plan else f"missing, {fate.miss}" for fate in fates]
                return self._runs(asked, [fate.count for fate in fates], told)
            case BlocksPinned(blocks):
                return f"{self._names.told(asked[:blocks])} (of {len(asked)} asked)"
            case TablesSynced():
                return self._synced(reply)
            case Purged(blocks):
                return f"forgotten: {blocks}"
            case PinGrant(found):
                return self._each(asked, ["pinned" if isinstance(one, PageSlot) else str(one) for one in found])
            case WriteGrant(found):
                return self._each(asked, ["to be written" if isinstance(one, PageSlot) else one.value for one in found])
            case CommitGrant(written):
                return self._each(asked, [one.value for one in written])
            case Status():
                return self._status(reply)
            case ReportAck():
                return self.ack(reply)
        raise AssertionError(f"no words are known for {type(reply).__name__}")

    def letter(self, message: Report | Inventory) -> str:
        """Formats a message from a shard to the coordinator."""
        told: list[str] = []
        if isinstance(message, Inventory):
            rest = "" if message.last and not message.chunk else f", chunk {message.chunk}"
            stones = "".join(f", purged {self.stone(stone)}" for stone in message.tombstones)
            told.append(f"inventory up to {message.upto}{rest}: {self._names.told(p.key.hash for p in message.pages)}")
            return f"{told[0]}{stones}; {self._info(message.info)} [epoch {message.coordinator}]"
        if message.events:
            told.append(f"report from {message.first}: {' '.join(map(self._event, message.events))}")
        else:
            told.append("report: no news")
        if message.pressure:
            told.append(f"wants room for {pages(sum(nbytes for _, nbytes in message.pressure))}")
        if message.orders.accepted:
            running = " and ".join(map(str, message.orders.running))
            told.append(f"orders up to {message.orders.accepted} accepted{f', {running} running' if running else ''}")
        return f"{', '.join(told)}; {self._info(message.info)} [epoch {message.coordinator}]"

    def ack(self, ack: ReportAck) -> str:
        """Formats an answer of the coordinator to a shard."""
        told = [] if ack.inventory or ack.leave else [f"acknowledged up to {ack.acked}"]
        if ack.inventory:
            told.append("send an inventory")
        told += map(self._order, ack.orders)
        told += [f"purge {self.stone(stone)}" for stone in ack.tombstones]
        if ack.drain:
            told.append("drain")
        if ack.leave is not None:
            told.append(
                {LeaveReason.REPLACED: "leave, you are replaced", LeaveReason.DRAINED: "leave, you are drained"}[
                    ack.leave
                ]
            )
        return f"{', '.join(told)} [epoch {ack.epoch}]"

    def substance(self, message: Report | Inventory | ReportAck) -> object:
        """What of a heartbeat or its answer is news where it was not there the last time."""
        if isinstance(message, ReportAck):
            return replace(message, acked=0)
        if isinstance(message, Inventory):
            return NO_NEWS
        return (message.pressure, message.orders, message.info.draining)

    def _order(self, order: Order) -> str:
        match order:
            case EvictOrder(number, blocks):
                return f"order {number}: evict {self._names.told(block for _, block in blocks)}"
            case PullOrder(number, source, pages=pages):
                return f"order {number}: pull {self._names.told(page.key.hash for page in pages)} from {source.shard}"
        raise AssertionError(f"transcripts have no words for {type(order).__name__}")

    def stone(self, stone: Tombstone) -> str:
        """A tombstone: its number and what it names."""
        named = [
            f"{name} {value}" for name in ("model", "weights", "adapter") if (value := getattr(stone, name)) is not None
        ]
        return f"{', '.join(named) or 'everything'} of tenant {stone.tenant} (tombstone {stone.number})"

    def blocks(self, slots: Sequence[PageSlot]) -> str:
        """The blocks of some pages."""
        return self._names.told(slot.key.hash for slot in slots)

    def _synced(self, reply: TablesSynced) -> str:
        told = [f"synced for {reply.ttl_ns // MS} ms"] if not reply.forgotten else ["all tables are to be sent whole"]
        for what, sequences in (("reopen", reply.reopen), ("refused", reply.refused)):
            if sequences:
                told.append(f"{what}: {' '.join(sequence.decode().strip() for sequence in sequences)}")
        return "; ".join(told)

    def _load_grant(self, asked: Sequence[BlockHash], grant: LoadGrant) -> str:
        told = self._runs(asked, [run.count for run in grant.runs], [self._plan(run.plan) for run in grant.runs])
        parts = [told] if grant.blocks else []
        if grant.miss is not None:
            parts.append(f"{self._names.told(asked[grant.blocks : grant.blocks + 1])} missing, {grant.miss}")
        if grant.hold_ns:
            parts.append(f"held for {grant.hold_ns // MS} ms")
        return "; ".join(parts)

    def _plan(self, plan: Plan) -> str:
        return "on " + " and ".join(dict.fromkeys(source.shard.shard for cover in plan for source in cover or ()))

    def _runs(self, asked: Sequence[BlockHash], counts: Sequence[int], told: Sequence[str]) -> str:
        lines = []
        at = 0
        for count, one in zip(counts, told, strict=True):
            lines.append(f"{self._names.told(asked[at : at + count])} {one}")
            at += count
        return "; ".join(lines)

    def _each(self, asked: Sequence[BlockHash], told: Sequence[str]) -> str:
        """As `_runs`, where each block has something said of its own."""
        counts: list[int] = []
        joined: list[str] = []
        for one in told:
            if joined and joined[-1] == one:
                counts[-1] += 1
            else:
                joined.append(one)
                counts.append(1)
        return self._runs(asked, counts, joined) or "nothing"

    def _event(self, event: StreamEvent) -> str:
        match event:
            case PageEvent():
                return f"+{self._names.told([event.key.hash])}"
            case RemovedEvent():
                return f"-{self._names.told([event.key.hash])}{'(corrupt)' if event.corrupt else ''}"
        return f"purged({event.number})"

    def _info(self, info: ShardInfo) -> str:
        return f"{pages(info.free_bytes)} of {pages(info.capacity_bytes)} free{', draining' if info.draining else ''}"

    def _status(self, status: Status) -> str:
        shards = ", ".join(f"{shard.info.shard} {shard.state}" for shard in status.shards) or "no shards"
        known = f"blocks: {status.blocks}, tickets: {status.tickets}"
        if status.sequences or status.private_blocks:
            known += (
                f", private: {status.private_blocks}, sequences: {status.sequences} of {status.claimed_blocks} blocks"
            )
        return f"{status.state}, epoch {status.epoch}; {known}; {shards}"
