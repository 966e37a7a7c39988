"""Every message that goes into a core `step`, and every effect that comes out of one.

A question carries `call`, which the driver made up; the core answers it with `Answer(call, reply)`, at
once or in a later step. `tenant` is always the one that the caller's credential names. Messages come from
outside only through wire/, which has validated their shapes and bounds; the core asserts, and decides.

    worker -> coordinator   Attach, PrepareLoad, PrepareStore, RenewTicket, EndTicket, Explain, Siblings,
                            PinBlocks, UnpinBlocks, GetStatus                         coordinator.py
    shard  -> coordinator   Report, Inventory                                         reports.py
    worker -> shard         AttachShard, Pin, Unpin, Reserve, Commit, Abort, Renew, Flush     shard.py
    a transport's exchange  ReadRequest, WriteRequest, TicketBody                     exchange.py
    driver -> both          Tick, Stalled;   driver -> shard   ReportAnswered, ReportFailed
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.ids import Attempt, CallId
from kvcluster.core.messages.common import (
    PROTOCOL_VERSION,
    Done,
    Need,
    PageKey,
    Plan,
    Refused,
    RefusedKind,
    Run,
    ShardAddress,
    Source,
    Tier,
)
from kvcluster.core.messages.coordinator import (
    Attach,
    Attached,
    BlockFate,
    Decision,
    EndTicket,
    Explain,
    Explained,
    GetStatus,
    LoadGrant,
    PinBlocks,
    Pinned,
    PrepareLoad,
    PrepareStore,
    RenewTicket,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Status,
    StoreGrant,
    StoreRun,
    UnpinBlocks,
)
from kvcluster.core.messages.exchange import (
    PageWant,
    ReadRequest,
    TicketBody,
    WriteRequest,
)
from kvcluster.core.messages.reports import (
    EvictOrder,
    GoneEvent,
    Inventory,
    PageEvent,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    ShardInfo,
    StreamEvent,
)
from kvcluster.core.messages.shard import (
    Abort,
    AttachedShard,
    AttachShard,
    Commit,
    CommitGrant,
    Flush,
    NewPage,
    PageSlot,
    Pin,
    PinGrant,
    Renew,
    Reserve,
    Unpin,
    WriteGrant,
    Written,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the asker of `call`."""

    call: CallId
    reply: Reply


@dataclass(frozen=True, slots=True)
class Revoke:
    """The lease of `attempt` has ended: stop moving its bytes, then say Unpin or Abort."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Send:
    """Carry this to the coordinator; answer with ReportAnswered or ReportFailed."""

    message: Report | Inventory


@dataclass(frozen=True, slots=True)
class Leave:
    """This incarnation is over: give up what it holds and end the process."""

    reason: str


Effect = Answer | Revoke | Send | Leave


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing arrived, but `next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """This process stood still for `late_ns`: nobody may be blamed for what they could not deliver."""

    late_ns: int


Reply = (
    Attached
    | LoadGrant
    | StoreGrant
    | Explained
    | SiblingSpecs
    | Pinned
    | Status
    | AttachedShard
    | PinGrant
    | WriteGrant
    | CommitGrant
    | ReportAck
    | Done
    | Refused
)

CoordinatorMessage = (
    Attach
    | PrepareLoad
    | PrepareStore
    | RenewTicket
    | EndTicket
    | Explain
    | Siblings
    | PinBlocks
    | UnpinBlocks
    | GetStatus
    | Report
    | Inventory
    | Tick
    | Stalled
)

ShardMessage = (
    AttachShard
    | Pin
    | Unpin
    | Reserve
    | Commit
    | Abort
    | Renew
    | Flush
    | ReportAnswered
    | ReportFailed
    | Tick
    | Stalled
)

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Answer",
    "Attach",
    "AttachShard",
    "Attached",
    "AttachedShard",
    "BlockFate",
    "Commit",
    "CommitGrant",
    "CoordinatorMessage",
    "Decision",
    "Done",
    "Effect",
    "EndTicket",
    "EvictOrder",
    "Explain",
    "Explained",
    "Flush",
    "GetStatus",
    "GoneEvent",
    "Inventory",
    "Leave",
    "LoadGrant",
    "Need",
    "NewPage",
    "PageEvent",
    "PageKey",
    "PageSlot",
    "PageWant",
    "Pin",
    "PinBlocks",
    "PinGrant",
    "Pinned",
    "Plan",
    "PrepareLoad",
    "PrepareStore",
    "ReadRequest",
    "Refused",
    "RefusedKind",
    "Renew",
    "RenewTicket",
    "Reply",
    "Report",
    "ReportAck",
    "ReportAnswered",
    "ReportFailed",
    "Reserve",
    "Revoke",
    "Run",
    "Send",
    "ShardAddress",
    "ShardInfo",
    "ShardMessage",
    "ShardStatus",
    "SiblingSpecs",
    "Siblings",
    "Source",
    "Stalled",
    "Status",
    "StoreGrant",
    "StoreRun",
    "StreamEvent",
    "Tick",
    "TicketBody",
    "Tier",
    "Unpin",
    "UnpinBlocks",
    "WriteGrant",
    "WriteRequest",
    "Written",
]
