"""The effects that a core's step returns, which the driver carries out in order; and what the driver itself reports to
a core: time has passed, the process was stalled, a job or a report has ended.

An effect holds all that is needed to carry it out. For one that takes time (Send, Verify, Fetch, MovePages, Stage), its
docstring names the message that reports its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, BlockHash, CallId, NamespaceId, ShardId, Tenant
from kvcluster.core.messages.common import Done, Refused, ShardAddress
from kvcluster.core.messages.coordinator import (
    Attached,
    BlocksPinned,
    Engines,
    Explained,
    LoadGrant,
    Namespaces,
    PinList,
    Purged,
    Registered,
    SiblingSpecs,
    Status,
    StoreGrant,
)
from kvcluster.core.messages.orders import Probed, TryPeers
from kvcluster.core.messages.reports import Inventory, IssuedCredential, Publish, Report, ReportAck, Tombstone
from kvcluster.core.messages.sequences_and_spans import SpanGrant, SpansPending, TablesSynced
from kvcluster.core.messages.shard import AttachedShard, CommitGrant, Offers, PageSlot, PinGrant, WriteGrant
from kvcluster.core.miss import Miss
from kvcluster.core.quotas import Quotas
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class Tick:
    """No message has arrived, but `next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class Republish:
    """A subscriber has missed events: publish all blocks again, in later ticks."""


@dataclass(frozen=True, slots=True)
class ScheduleSeen:
    """What the reconciler saw in its last pass (core/shard_scheduler.py). `waiting`: a sentence for each thing that the
    cluster lacks and waits for. `orphans`: volumes that belong to no running shard, each with the name of its node.
    `shards`: those that exist, that are started now, and that are waited for; None if that was not stated."""

    waiting: tuple[str, ...] = ()
    orphans: tuple[tuple[ShardId, str], ...] = ()
    shards: frozenset[ShardId] | None = None


@dataclass(frozen=True, slots=True)
class SetQuotas:
    """The quotas of tenants from now on, in place of all before. `trouble`: why the newest version of their file is not
    in use; "" if it is."""

    quotas: Quotas
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Stalled:
    """This process was stalled for `late_ns`: extend all terms by it, since messages could not arrive."""

    late_ns: int


@dataclass(frozen=True, slots=True)
class ReportAnswered:
    """The coordinator's answer to the report or inventory chunk that was sent last."""

    ack: ReportAck


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The report sent last was lost, or its answer was."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The shell has read the pages of the Verify of `attempt`; those with the indices `corrupt` did not match."""

    attempt: Attempt
    corrupt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The shell has carried out the MovePages of `attempt`. `sums[i]`: the packed per-layer checksums of page i in its
    new place; None if its content cannot be encoded, or could not be written to disk. Pages with the indices `corrupt`
    did not match the checksums that they were committed with. `errors`: for each sampled page its index and its loss,
    in millionths."""

    attempt: Attempt
    sums: tuple[bytes | None, ...]
    corrupt: tuple[int, ...] = ()
    errors: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """The shell has carried out the Stage of `attempt`. Pages with the indices `corrupt` could not be read, or do not
    match what was committed."""

    attempt: Attempt
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TierLost:
    """The store of a tier has failed for good, and `why`: its pages are lost, and nothing can be written there until
    the shard starts again."""

    tier: Tier
    why: str


@dataclass(frozen=True, slots=True)
class SavePages:
    """The shard is to stop: it writes the hottest pages in its memory to its durable store, until the time `until`.
    Answered by PagesSaved. The pages of the RAM tier are encoded in the codec that the coordinator last ordered
    for their namespace, `codec` before it has ordered any; those of the first `raw_blocks` blocks of a sequence are
    not."""

    call: CallId
    until: int
    codec: Codec
    raw_blocks: int


@dataclass(frozen=True, slots=True)
class PagesSaved:
    """What SavePages has written, and what it has left: pages that are lost when the shard ends."""

    pages: int
    nbytes: int
    left_pages: int
    left_bytes: int


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
    | PinList
    | Purged
    | Probed
    | Status
    | AttachedShard
    | Offers
    | PinGrant
    | WriteGrant
    | CommitGrant
    | SpanGrant
    | SpansPending
    | ReportAck
    | IssuedCredential
    | TablesSynced
    | PagesSaved
    | Done
    | Refused
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `reply` to the caller of `call`."""

    call: CallId
    reply: Reply


@dataclass(frozen=True, slots=True)
class Revoke:
    """The lease of `attempt` has ended, and `why`: stop moving its bytes, then send Unpin or Abort."""

    attempt: Attempt
    why: Miss


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
    """A message for the operator, to be logged once. `event` names what has happened, for machines."""

    text: str
    event: str


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
    | TryPeers
    | Persist
    | KeepSettings
    | Publish
    | Warn
    | Leave
)
