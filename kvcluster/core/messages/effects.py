"""What comes out of a core's step: effects, which the driver carries out in order.

An effect holds all that is needed to carry it out. For one that takes time (Send, Verify, Fetch, MovePages, Stage), its
docstring names the message that reports its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.ids import Attempt, BlockHash, CallId, NamespaceId, Tenant
from kvcluster.core.messages.common import Done, Refused, ShardAddress
from kvcluster.core.messages.coordinator import (
    Attached,
    BlocksPinned,
    Explained,
    LoadGrant,
    Namespaces,
    PinList,
    Purged,
    SiblingSpecs,
    Status,
    StoreGrant,
)
from kvcluster.core.messages.driver import PagesSaved
from kvcluster.core.messages.engines import Engines, Registered
from kvcluster.core.messages.events import Publish
from kvcluster.core.messages.probe import Probed, TryPeers
from kvcluster.core.messages.reports import Inventory, Report, ReportAck, Tombstone
from kvcluster.core.messages.sequences import TablesSynced
from kvcluster.core.messages.shard import AttachedShard, CommitGrant, Offers, PageSlot, PinGrant, WriteGrant
from kvcluster.core.messages.spans import SpanGrant, SpansPending
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec

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
