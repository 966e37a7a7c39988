"""Every message that goes into a core `step`, and every effect that comes out of one.

A question reaches a core in a `Request` (request.py), which names the caller's tenant and the namespace; the core
answers it with `Answer(call, reply)`, at once or in a later step. Messages of the driver itself (Tick, Moved) come
without a Request. Questions arrive from outside only through wire/, which has validated their shapes and bounds; the
core asserts, and decides.

    worker -> coordinator   Attach, PrepareLoad, PrepareStore, RenewTicket, EndTicket, Explain, Siblings, GetNamespaces,
                            PinBlocks, UnpinBlocks, GetPins, Purge, Drain, SetPolicy,
                            GetStatus                                                 coordinator.py
                            RegisterEngine, GetEngines, SetWeights                    engines.py
                            SyncTables                                                sequences.py
                            Probe                                                     probe.py
    shard  -> coordinator   Report, Inventory                                         reports.py
    coordinator -> shard, in the answer   EvictOrder, MoveOrder, PullOrder              orders.py
    worker -> shard         AttachShard, GetOffers, Pin, Unpin, Reserve, Commit, Abort,
                            Renew, Flush, Suspect                                     shard.py
                            RegisterSpans, PinSpans                                   spans.py
    a transport's exchange  ReadRequest, WriteRequest, TicketBody                     exchange.py
                            AttendRequest                                             spans.py
    driver -> core          Tick, Stalled, Retell, Verified, Moved, Staged, SavePages,
                            ReportAnswered, ReportFailed                              driver.py
    core -> driver          Answer, Revoke, Send, Verify, Fetch, MovePages, Stage, Erase, Persist,
                            KeepSettings, Publish, Warn, Leave                        effects.py
    coordinator -> subscribers   Publish                                              events.py

Other packages import them from here. What this file imports is all that it makes public.
"""

from __future__ import annotations

from kvcluster.core.messages.common import (
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
    GetPins,
    GetStatus,
    LoadGrant,
    Namespaces,
    PinBlocks,
    PinList,
    PinnedRun,
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
from kvcluster.core.messages.driver import (
    Moved,
    PagesSaved,
    ReportAnswered,
    ReportFailed,
    Retell,
    SavePages,
    ScheduleSeen,
    Staged,
    Stalled,
    Tick,
    TierLost,
    Verified,
)
from kvcluster.core.messages.effects import (
    Answer,
    Effect,
    Erase,
    Fetch,
    KeepSettings,
    Leave,
    MovePages,
    PageMove,
    Persist,
    Reply,
    Revoke,
    Send,
    Stage,
    Verify,
    Warn,
)
from kvcluster.core.messages.engines import EngineInfo, Engines, GetEngines, Registered, RegisterEngine, SetWeights
from kvcluster.core.messages.events import Publish
from kvcluster.core.messages.exchange import (
    NewPages,
    PageWant,
    PageWants,
    ReadRequest,
    TicketBody,
    WantKind,
    WriteRequest,
)
from kvcluster.core.messages.orders import EvictOrder, Move, MoveOrder, Order, OrderProgress, PullOrder
from kvcluster.core.messages.probe import (
    Findings,
    Link,
    ListeningPort,
    PeersTried,
    Probe,
    Probed,
    ProbeOrder,
    ProcessFacts,
    ShardFindings,
    TryPeers,
)
from kvcluster.core.messages.reports import (
    GoneEvent,
    Inventory,
    LeaveReason,
    PageEvent,
    ProcessInfo,
    PurgedEvent,
    Report,
    ReportAck,
    ShardInfo,
    StreamEvent,
    TierUse,
    Tombstone,
)
from kvcluster.core.messages.request import Request
from kvcluster.core.messages.sequences import SyncTables, TableChange, TablesSynced
from kvcluster.core.messages.shard import (
    Abort,
    AttachedShard,
    AttachShard,
    Commit,
    CommitGrant,
    Flush,
    GetOffers,
    NewPage,
    Offer,
    Offers,
    PageSlot,
    Pin,
    PinGrant,
    Renew,
    Reserve,
    Suspect,
    Unpin,
    WriteGrant,
    Written,
)
from kvcluster.core.messages.spans import (
    AttendAnswer,
    AttendDeclined,
    Attended,
    AttendRequest,
    AttendRow,
    DeclineReason,
    PinSpans,
    RegisterSpans,
    SpanBlocks,
    SpanGrant,
    SpanMiss,
    SpanPages,
    SpansLacking,
    SpansPending,
)
from kvcluster.core.page_key import PageKey
from kvcluster.core.tiers import Tier

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
    | SyncTables
    | PinBlocks
    | UnpinBlocks
    | GetPins
    | Purge
    | Drain
    | SetPolicy
    | Probe
    | GetStatus
    | Report
    | Inventory
)

CoordinatorMessage = Request[CoordinatorQuestion] | ScheduleSeen | Retell | Tick | Stalled

ShardQuestion = (
    AttachShard
    | GetOffers
    | Pin
    | PinSpans
    | Unpin
    | Reserve
    | Commit
    | Abort
    | Renew
    | Flush
    | Suspect
    | RegisterSpans
)

ShardMessage = (
    Request[ShardQuestion]
    | Verified
    | Moved
    | Staged
    | TierLost
    | PeersTried
    | SavePages
    | ReportAnswered
    | ReportFailed
    | Tick
    | Stalled
)
