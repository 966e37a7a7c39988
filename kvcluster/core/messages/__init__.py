"""Every message that goes into a core `step`, and every effect that comes out of one.

A question reaches a core in a `Request` (request.py), which names the caller's tenant and the namespace; the core
answers it with `Answer(call, reply)`, at once or in a later step. Messages of the driver itself (Tick, Moved) come
without a Request. Questions arrive from outside only through wire/, which has validated their shapes and bounds; the
core asserts, and decides.

    worker -> coordinator   Attach, PrepareLoad, PrepareStore, RenewTicket, EndTicket, Explain, Siblings, GetNamespaces,
                            PinBlocks, UnpinBlocks, Purge, Drain, SetPolicy, GetStatus   coordinator.py
                            RegisterEngine, GetEngines, SetWeights                    engines.py
    shard  -> coordinator   Report, Inventory                                         reports.py
    coordinator -> shard, in the answer   EvictOrder, MoveOrder, PullOrder              orders.py
    worker -> shard         AttachShard, GetOffers, Pin, Unpin, Reserve, Commit, Abort,
                            Renew, Flush, Suspect                                     shard.py
    a transport's exchange  ReadRequest, WriteRequest, TicketBody                     exchange.py
    driver -> both          Tick, Stalled;   driver -> shard   ReportAnswered, ReportFailed, Verified,
                                               Moved, Staged;   driver -> coordinator   Retell
    coordinator -> subscribers   Publish                                              events.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.ids import Attempt, BlockHash, CallId, NamespaceId, Tenant
from kvcluster.core.messages.common import (
    PROTOCOL_VERSION,
    Done,
    Need,
    Plan,
    Refused,
    RefusedKind,
    Run,
    ShardAddress,
    Source,
)
from kvcluster.core.messages.coordinator import (
    Attach,
    Attached,
    BlockFate,
    BlocksPinned,
    Decision,
    Drain,
    EndTicket,
    Explain,
    Explained,
    GetNamespaces,
    GetStatus,
    LoadGrant,
    Namespaces,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Purge,
    Purged,
    RenewTicket,
    SetPolicy,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Status,
    StoreGrant,
    StoreRun,
    UnpinBlocks,
)
from kvcluster.core.messages.engines import (
    EngineInfo,
    Engines,
    GetEngines,
    Registered,
    RegisterEngine,
    SetWeights,
)
from kvcluster.core.messages.events import Publish
from kvcluster.core.messages.exchange import (
    PageWant,
    ReadRequest,
    TicketBody,
    WriteRequest,
)
from kvcluster.core.messages.orders import (
    EvictOrder,
    Move,
    MoveOrder,
    Order,
    OrderProgress,
    PullOrder,
)
from kvcluster.core.messages.reports import (
    GoneEvent,
    Inventory,
    LeaveReason,
    PageEvent,
    PurgedEvent,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    ShardInfo,
    StreamEvent,
    TierUse,
    Tombstone,
)
from kvcluster.core.messages.request import Request
from kvcluster.core.messages.shard import (
    Abort,
    AttachedShard,
    AttachShard,
    Commit,
    CommitGrant,
    Flush,
    GetOffers,
    Moved,
    NewPage,
    Offer,
    Offers,
    PageSlot,
    Pin,
    PinGrant,
    Renew,
    Reserve,
    Staged,
    Suspect,
    Unpin,
    Verified,
    WriteGrant,
    Written,
)
from kvcluster.core.page_key import PageKey
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `reply` to the caller of `call`."""

    call: CallId
    reply: Reply


@dataclass(frozen=True, slots=True)
class Revoke:
    """The lease of `attempt` has ended: stop moving its bytes, then send Unpin or Abort."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the coordinator; answer with ReportAnswered or ReportFailed."""

    message: Report | Inventory


@dataclass(frozen=True, slots=True)
class Verify:
    """Read these pages of the arena and compare them with their checksums; answer with Verified in any case.

    `namespaces[i]` is that of `slots[i]`. The pages are pinned under `attempt` until the answer.
    """

    attempt: Attempt
    namespaces: tuple[NamespaceId, ...]
    slots: tuple[PageSlot, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fill these pages from another shard, under a write lease of this shard itself; end it with Commit or Abort."""

    attempt: Attempt
    namespace: NamespaceId
    source: ShardAddress
    slots: tuple[PageSlot, ...]


class PageMove(NamedTuple):
    """One page to move between tiers: `target` is to hold what `source` holds, in the codec of `target`. `sampled`:
    report the loss that this causes. On disk, its tenant, spec, parent and depth are recorded with it."""

    namespace: NamespaceId
    tenant: Tenant
    spec: KVSpec
    parent: BlockHash
    depth: int
    source: PageSlot
    target: PageSlot
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class MovePages:
    """Encode, decode or copy each of these pages to its new place, and verify it; answer with Moved in any case.

    Until the answer the sources are pinned, and the targets belong to this attempt alone.
    """

    attempt: Attempt
    pages: tuple[PageMove, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Read each of these pages from disk into its private copy in memory, for a waiting reader, and verify it there;
    answer with Staged in any case. Sources and targets as with MovePages."""

    attempt: Attempt
    pages: tuple[PageMove, ...]


@dataclass(frozen=True, slots=True)
class Erase:
    """Make sure that no process that starts later finds on disk what `purged` names and was written until now; then
    persist `tombstones`, the complete list, beside it."""

    purged: tuple[Tombstone, ...]
    tombstones: tuple[Tombstone, ...]


@dataclass(frozen=True, slots=True)
class Warn:
    """A message for the operator, to be logged once."""

    text: str


@dataclass(frozen=True, slots=True)
class Persist:
    """Write these tombstones, the complete list, to disk before any later effect is carried out."""

    tombstones: tuple[Tombstone, ...]


@dataclass(frozen=True, slots=True)
class KeepSettings:
    """Like Persist, for all settings that SetPolicy has set."""

    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """This incarnation is over: drop all that it holds and end the process. `for_good`: do not start another one."""

    reason: str
    for_good: bool = False


Effect = (
    Answer
    | Revoke
    | Send
    | Verify
    | Fetch
    | MovePages
    | Stage
    | Erase
    | Persist
    | KeepSettings
    | Publish
    | Warn
    | Leave
)


@dataclass(frozen=True, slots=True)
class Tick:
    """No message has arrived, but `next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class Retell:
    """A subscriber has missed events: publish all blocks again, in later ticks."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """This process was stalled for `late_ns`: extend all terms by it, since messages could not arrive."""

    late_ns: int


Reply = (
    Attached
    | LoadGrant
    | StoreGrant
    | Explained
    | SiblingSpecs
    | Namespaces
    | Registered
    | Engines
    | BlocksPinned
    | Purged
    | Status
    | AttachedShard
    | Offers
    | PinGrant
    | WriteGrant
    | CommitGrant
    | ReportAck
    | Done
    | Refused
)

CoordinatorQuestion = (
    Attach
    | PrepareLoad
    | PrepareStore
    | RenewTicket
    | EndTicket
    | Explain
    | Siblings
    | GetNamespaces
    | RegisterEngine
    | GetEngines
    | SetWeights
    | PinBlocks
    | UnpinBlocks
    | Purge
    | Drain
    | SetPolicy
    | GetStatus
    | Report
    | Inventory
)

CoordinatorMessage = Request[CoordinatorQuestion] | Retell | Tick | Stalled

ShardQuestion = AttachShard | GetOffers | Pin | Unpin | Reserve | Commit | Abort | Renew | Flush | Suspect

ShardMessage = Request[ShardQuestion] | Verified | Moved | Staged | ReportAnswered | ReportFailed | Tick | Stalled

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Answer",
    "Attach",
    "AttachShard",
    "Attached",
    "AttachedShard",
    "BlockFate",
    "BlocksPinned",
    "Commit",
    "CommitGrant",
    "CoordinatorMessage",
    "CoordinatorQuestion",
    "Decision",
    "Done",
    "Drain",
    "Effect",
    "EndTicket",
    "EngineInfo",
    "Engines",
    "Erase",
    "EvictOrder",
    "Explain",
    "Explained",
    "Fetch",
    "Flush",
    "GetEngines",
    "GetNamespaces",
    "GetOffers",
    "GetStatus",
    "GoneEvent",
    "Inventory",
    "KeepSettings",
    "Leave",
    "LeaveReason",
    "LoadGrant",
    "Move",
    "MoveOrder",
    "MovePages",
    "Moved",
    "Namespaces",
    "Need",
    "NewPage",
    "Offer",
    "Offers",
    "Order",
    "OrderProgress",
    "PageEvent",
    "PageKey",
    "PageMove",
    "PageSlot",
    "PageWant",
    "Persist",
    "Pin",
    "PinBlocks",
    "PinGrant",
    "Plan",
    "PrepareLoad",
    "PrepareStore",
    "Publish",
    "PullOrder",
    "Purge",
    "Purged",
    "PurgedEvent",
    "ReadRequest",
    "Refused",
    "RefusedKind",
    "RegisterEngine",
    "Registered",
    "Renew",
    "RenewTicket",
    "Reply",
    "Report",
    "ReportAck",
    "ReportAnswered",
    "ReportFailed",
    "Request",
    "Reserve",
    "Retell",
    "Revoke",
    "Run",
    "Send",
    "SetPolicy",
    "SetWeights",
    "ShardAddress",
    "ShardInfo",
    "ShardMessage",
    "ShardQuestion",
    "ShardStatus",
    "SiblingSpecs",
    "Siblings",
    "Source",
    "Stage",
    "Staged",
    "Stalled",
    "Status",
    "StoreGrant",
    "StoreRun",
    "StreamEvent",
    "Suspect",
    "Tick",
    "TicketBody",
    "Tier",
    "TierUse",
    "Tombstone",
    "Unpin",
    "UnpinBlocks",
    "Verified",
    "Verify",
    "Warn",
    "WriteGrant",
    "WriteRequest",
    "Written",
]
