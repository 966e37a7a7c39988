"""Every message that goes into a core `step`, and every effect that comes out of one.

A question reaches a core in a `Request` (common.py), which names the caller's tenant and the namespace; the core
answers it with `Answer(call, reply)`, at once or in a later step. Messages of the driver itself (Tick, Moved) have no
Request. Questions arrive from outside only through wire/, which has validated their shapes and bounds; the core
asserts, and decides.

    worker -> coordinator   Attach, PrepareLoad, PrepareStore, RenewTicket, EndTicket, Explain, Siblings, GetNamespaces,
                            PinBlocks, UnpinBlocks, GetPins, Purge, Drain, SetPolicy,
                            GetStatus                                                 coordinator.py
                            RegisterEngine, GetEngines, SetWeights                    coordinator.py
                            SyncTables                                                sequences_and_spans.py
                            Probe                                                     orders.py
    shard  -> coordinator   Report, Inventory                                         reports.py
    shard  -> process of the coordinator   IssueCredential                            reports.py
    coordinator -> shard, in the answer   EvictOrder, MoveOrder, PullOrder              orders.py
    worker -> shard         AttachShard, GetOffers, Pin, Unpin, Reserve, Commit, Abort,
                            Renew, Flush, Suspect                                     shard.py
                            RegisterSpans, PinSpans                                   sequences_and_spans.py
    a transport's exchange  ReadRequest, WriteRequest, TicketBody                     exchange.py
                            AttendRequest                                             sequences_and_spans.py
    driver -> core          Tick, Stalled, Republish, SetQuotas, Verified, Moved, Staged, SavePages,
                            ReportAnswered, ReportFailed                              effects.py
    core -> driver          Answer, Revoke, Send, Verify, Fetch, MovePages, Stage, Erase, Persist,
                            KeepSettings, Publish, Warn, Leave                        effects.py
    coordinator -> subscribers   Publish                                              reports.py

Other packages import them from here. What this file imports is all that it makes public.
"""

from __future__ import annotations

from kvcluster.core.groups import PageKey
from kvcluster.core.messages.common import (
    Done,
    Need,
    Plan,
    Refused,
    RefusedKind,
    Request,
    Run,
    ShardAddress,
    Source,
    request_of,
)
from kvcluster.core.messages.coordinator import (
    Attach,
    Attached,
    BlockFate,
    BlocksPinned,
    Decision,
    Drain,
    EndTicket,
    EngineInfo,
    Engines,
    Explain,
    Explained,
    GetEngines,
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
    Registered,
    RegisterEngine,
    RenewTicket,
    SetPolicy,
    SetWeights,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Status,
    StoreGrant,
    StoreRun,
    TenantStatus,
    TenantTier,
    UnpinBlocks,
)
from kvcluster.core.messages.effects import (
    Answer,
    Effect,
    Erase,
    Fetch,
    KeepSettings,
    Leave,
    Moved,
    MovePages,
    PageMove,
    PagesSaved,
    Persist,
    Reply,
    ReportAnswered,
    ReportFailed,
    Republish,
    Revoke,
    SavePages,
    ScheduleSeen,
    Send,
    SetQuotas,
    Stage,
    Staged,
    Stalled,
    Tick,
    TierLost,
    Verified,
    Verify,
    Warn,
)
from kvcluster.core.messages.exchange import (
    NewPages,
    PageWant,
    PageWants,
    ReadRequest,
    TicketBody,
    WantKind,
    WriteRequest,
)
from kvcluster.core.messages.orders import (
    EvictOrder,
    Findings,
    Link,
    ListeningPort,
    Move,
    MoveOrder,
    Order,
    OrderProgress,
    PeersTried,
    Probe,
    Probed,
    ProbeOrder,
    ProcessFacts,
    PullOrder,
    ShardFindings,
    TryPeers,
)
from kvcluster.core.messages.reports import (
    Inventory,
    IssueCredential,
    IssuedCredential,
    LeaveReason,
    PageEvent,
    ProcessInfo,
    Publish,
    PurgedEvent,
    RemovedEvent,
    Report,
    ReportAck,
    ShardInfo,
    StreamEvent,
    TierUse,
    Tombstone,
)
from kvcluster.core.messages.sequences_and_spans import (
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
    SyncTables,
    TableChange,
    TablesSynced,
)
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

CoordinatorMessage = Request[CoordinatorQuestion] | ScheduleSeen | SetQuotas | Republish | Tick | Stalled

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
