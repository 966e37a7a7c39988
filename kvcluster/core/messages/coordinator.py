"""Worker to coordinator, and what it answers. Who asks, and about which namespace, the envelope says (request.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId, ShardId
from kvcluster.core.messages.common import Need, Plan, Run, ShardAddress
from kvcluster.core.messages.reports import ShardInfo
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec, Part


@dataclass(frozen=True, slots=True)
class Attach:
    """A worker names its spec. Answered by Attached."""

    spec: KVSpec


@dataclass(frozen=True, slots=True)
class Attached:
    """The namespace of the caller's spec, and the terms of this coordinator. Nanoseconds. `wants_tokens`: who stores
    is to tell token ids too, for outsiders (core/event_emitter.py)."""

    namespace: NamespaceId
    epoch: Epoch
    ticket_ttl_ns: int
    run_blocks: int
    shards: tuple[ShardAddress, ...] = ()
    wants_tokens: bool = False


@dataclass(frozen=True, slots=True)
class PrepareLoad:
    """How far can these blocks be restored, and from where? Answered by LoadGrant.

    `hashes` is the chain from the first block of the sequence. With `hold`, the blocks of the answer are
    promised: they count as used now, are spared for a while and get a ticket.
    """

    attempt: Attempt
    hashes: tuple[BlockHash, ...]
    need: Need
    hold: bool = True


@dataclass(frozen=True, slots=True)
class LoadGrant:
    """The first `blocks` blocks can be restored, by `runs`. `miss` says why not one more, None at the end.

    Runs cover blocks 0 to `blocks`; which groups of a block are to be read follows from each group's reuse
    rule. `hold_ns` is how long the blocks are spared, 0 where no hold was asked for.
    """

    blocks: int
    runs: tuple[Run, ...]
    hold_ns: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class PrepareStore:
    """Which of these blocks are worth writing, and where to? Answered by StoreGrant.

    `hashes` continue a chain at depth `first`, after `parent`; `run` is the hash of the first block of
    their run (see placement.py), which is one of `hashes` when they begin it. `parts` are the (group, part)
    pages that the worker would write for every block. `host` is where the worker runs. `tokens` are the token ids of
    these blocks where they are wanted (Attached), or empty.
    """

    attempt: Attempt
    first: int
    parent: BlockHash
    run: BlockHash
    hashes: tuple[BlockHash, ...]
    parts: tuple[tuple[int, Part], ...]
    loss: Loss = Loss.EXACT
    host: str = ""
    tokens: tuple[int, ...] = ()


class Decision(Enum):
    """What becomes of a block that a worker wants to store."""

    WRITE = "write"
    COMMITTED = "committed"
    PENDING = "pending"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class StoreRun:
    """`count` consecutive blocks with one decision: where to write them, or why they are not written."""

    count: int
    decision: Decision
    shard: ShardAddress | None = None
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """What becomes of each block of a PrepareStore, in order."""

    runs: tuple[StoreRun, ...]


@dataclass(frozen=True, slots=True)
class RenewTicket:
    """The holder still means to use its ticket. Answered by Done(False) where it is gone."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class EndTicket:
    """The holder is done with its ticket, or has given up. Answered by Done."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Explain:
    """Where is each of these blocks, or why is it not? Promises and touches nothing. Answered by Explained."""

    hashes: tuple[BlockHash, ...]
    need: Need


@dataclass(frozen=True, slots=True)
class BlockFate:
    """Of `count` consecutive blocks: the plan that serves them, or the reason that nothing does."""

    count: int
    plan: Plan | None
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class Explained:
    """What becomes of each block of an Explain, in order."""

    fates: tuple[BlockFate, ...]


@dataclass(frozen=True, slots=True)
class Siblings:
    """Which other namespaces has this tenant? Answered by SiblingSpecs, the most alike first."""


@dataclass(frozen=True, slots=True)
class SiblingSpecs:
    """Specs of the caller's other namespaces."""

    specs: tuple[KVSpec, ...]


@dataclass(frozen=True, slots=True)
class GetNamespaces:
    """Which namespaces has this tenant? Answered by Namespaces."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The caller's namespaces, each its spec and how many blocks it holds; those of one model one after the other, the
    fullest first, and no more than limits.LISTED_NAMESPACES."""

    known: tuple[tuple[KVSpec, int], ...]


@dataclass(frozen=True, slots=True)
class PinBlocks:
    """Do not evict these blocks for `ttl_ns`. Answered by BlocksPinned, which says how many fitted the share.

    `replicas` is on how many shards each of them is to lie, as far as there are as many with room.
    """

    hashes: tuple[BlockHash, ...]
    ttl_ns: int
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class UnpinBlocks:
    """Let these blocks be evicted again. Answered by BlocksPinned with the number unpinned."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksPinned:
    """How many of the blocks are (un)pinned now."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Purge:
    """Forget every block of these namespaces of the tenant, for good. Answered by Purged.

    A namespace is meant where each of the three that is not None equals its spec's; all None: every namespace
    ("clear"). Once answered, no lookup finds what was stored before, whichever process restarts or was cut off.
    """

    model: str | None = None
    weights: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Purged:
    """How many blocks were known and are forgotten."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Move what is worth keeping from this shard to others, then let it go. Answered by Done(False) where it is not
    known. It is under way from then on; GetStatus shows how far."""

    shard: ShardId


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """From now on these settings hold: of the tiers (tiering.py), and `cache`, which is on or off. What was moved
    before stays as it is. Answered by Done; or Refused, and nothing is set, where one is not known or has no such
    value."""

    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GetStatus:
    """What is there and how is it used? Answered by Status."""


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard as the coordinator sees it. `state`: joining, up, draining or lost."""

    info: ShardInfo
    state: str
    seen_ns_ago: int


@dataclass(frozen=True, slots=True)
class Status:
    """The cluster as the coordinator sees it. `counters` only grow since this epoch began; `policy` are the settings
    that SetPolicy takes; `fallen` are the namespaces that q4 is too lossy for, with what it loses there in
    millionths."""

    epoch: Epoch
    state: str
    uptime_ns: int
    namespaces: int
    blocks: int
    tickets: int
    shards: tuple[ShardStatus, ...]
    counters: tuple[tuple[str, int], ...]
    policy: tuple[tuple[str, str], ...] = ()
    fallen: tuple[tuple[NamespaceId, int], ...] = ()
