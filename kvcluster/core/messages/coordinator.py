"""Questions of workers to the coordinator, and its answers. The envelope (common.py) names the caller's tenant and the
namespace. The last questions are about the engines that use the cache: what they report about themselves, and the
weights that an operator sets for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvcluster.core.groups import Part
from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages.common import Need, Plan, Run, ShardAddress
from kvcluster.core.messages.reports import ShardInfo
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class Attach:
    """Attaches a worker by its spec. `owner`: the tenant whose KV it reads by a grant; None for that of its
    credential. Answered by Attached."""

    spec: KVSpec
    owner: Tenant | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """The namespace of the caller's spec, and the terms of this coordinator (times in nanoseconds). `wants_tokens`:
    stores are to include token ids, for subscribers of KV events (core/coordinator/event_emitter.py). `read_only`: the
    caller's credential stores nothing."""

    namespace: NamespaceId
    epoch: Epoch
    ticket_ttl_ns: int
    run_blocks: int
    shards: tuple[ShardAddress, ...] = ()
    wants_tokens: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class PrepareLoad:
    """Asks how far these blocks can be restored, and from where. Answered by LoadGrant.

    `hashes` is the chain from the first block of the sequence. With `hold`, the blocks of the answer are promised: they
    count as used now, are spared from eviction for a while and get a ticket.

    A lookup is counted when it is answered, once. While the asker waits for blocks that others store, it repeats its
    question with `awaited`: an answer with fewer blocks than that, or with the next one being written, promises nothing
    and is not counted, because the asker asks again. `awaited` is None in a last or only question. `again` is for the
    load of what an earlier lookup has found, which was counted already.
    """

    attempt: Attempt
    hashes: tuple[BlockHash, ...]
    need: Need
    hold: bool = True
    awaited: int | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class LoadGrant:
    """The first `blocks` blocks can be restored, by `runs`. `miss`: why not one more; None at the end of the chain.

    Runs cover blocks 0 to `blocks`; each group's reuse rule determines which groups of a block are to be read.
    `hold_ns` is the time for which the blocks are spared from eviction, 0 without a hold.
    """

    blocks: int
    runs: tuple[Run, ...]
    hold_ns: int
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class PrepareStore:
    """Asks which of these blocks to write, and where to. Answered by StoreGrant.

    `hashes` continue a chain at depth `first`, after `parent`; `run` is the hash of the first block of their run (see
    placement.py), which is one of `hashes` if they begin it. `parts` are the (group, part) pages that the worker would
    write for every block. `host` is where the worker runs. `tokens` are the token ids of these blocks if the
    coordinator wants them (Attached), at most limits.STORE_TOKENS, otherwise empty.
    """

    attempt: Attempt
    first: int
    parent: BlockHash
    run: BlockHash
    hashes: tuple[BlockHash, ...]
    parts: tuple[tuple[int, Part], ...]
    loss: Loss = Loss.EXACT
    host: str = ""
    tokens: Sequence[int] = ()


class Decision(Enum):
    """The decision on a block that a worker wants to store."""

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
    """The decisions on the blocks of a PrepareStore, in order."""

    runs: tuple[StoreRun, ...]


@dataclass(frozen=True, slots=True)
class RenewTicket:
    """Renews a ticket. Answered by Done(False) if it has ended."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class EndTicket:
    """Ends a ticket that its holder has used, or has given up. Answered by Done."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Explain:
    """Asks where each of these blocks is, or why it is not available. Has no side effects. Answered by Explained."""

    hashes: tuple[BlockHash, ...]
    need: Need


@dataclass(frozen=True, slots=True)
class BlockFate:
    """For `count` consecutive blocks: the plan that serves them, or the reason why none does."""

    count: int
    plan: Plan | None
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class Explained:
    """The fates of the blocks of an Explain, in order."""

    fates: tuple[BlockFate, ...]


@dataclass(frozen=True, slots=True)
class Siblings:
    """Asks for the tenant's other namespaces that hold blocks. Answered by SiblingSpecs, the most similar first."""


@dataclass(frozen=True, slots=True)
class SiblingSpecs:
    """Specs of the caller's other namespaces."""

    specs: tuple[KVSpec, ...]


@dataclass(frozen=True, slots=True)
class GetNamespaces:
    """Asks for the tenant's namespaces. Answered by Namespaces."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The specs of the caller's namespaces, each with the number of blocks that it holds; grouped by model, then the
    largest first; at most limits.LISTED_NAMESPACES."""

    known: tuple[tuple[KVSpec, int], ...]


@dataclass(frozen=True, slots=True)
class PinBlocks:
    """Protects these blocks from eviction for `ttl_ns`. Answered by BlocksPinned: the number that fitted the share for
    pins.

    `replicas` is the number of shards on which each of them is to lie, as far as that many have room.
    """

    hashes: tuple[BlockHash, ...]
    ttl_ns: int
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class UnpinBlocks:
    """Unpins these blocks. Answered by BlocksPinned with the number unpinned."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksPinned:
    """The number of blocks that were pinned, or unpinned."""

    blocks: int


@dataclass(frozen=True, slots=True)
class GetPins:
    """Asks which blocks are pinned: of the caller's tenant, for an operator of all. Answered by PinList.

    `model`: of this model alone. `skip`: `next` of the last answer, 0 at first.
    """

    model: str | None = None
    skip: int = 0


@dataclass(frozen=True, slots=True)
class PinnedRun:
    """Consecutive pinned blocks of a prompt: the first is at depth `first` and follows the block `before`. Each takes
    `block_bytes` in all tiers of all shards, and is pinned for `left_ns` more."""

    tenant: Tenant
    spec: KVSpec
    before: BlockHash
    first: int
    blocks: tuple[BlockHash, ...]
    block_bytes: int
    left_ns: int


@dataclass(frozen=True, slots=True)
class PinList:
    """The pinned blocks among the next limits.BLOCKS_PER_CALL that were examined. `next`: what the next question is to
    skip; 0 if this was the last. `more`: the number of blocks that are left. What is pinned or unpinned between two
    questions may be missing, or listed twice."""

    runs: tuple[PinnedRun, ...]
    next: int = 0
    more: int = 0


@dataclass(frozen=True, slots=True)
class Purge:
    """Permanently forgets every block of these namespaces of the tenant. Answered by Purged.

    A namespace is purged if each of the three fields that is not None equals its spec's; if all are None, every
    namespace is ("clear"). Once this is answered, no lookup finds what was stored before, whichever process restarts or
    was cut off.
    """

    model: str | None = None
    weights: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Purged:
    """The number of known blocks that are forgotten."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Moves the blocks worth keeping from this shard to others, then dismisses it. Answered at once: Done(False) if the
    shard is not known; otherwise the drain has begun, and GetStatus shows its progress. `leaving`: its node is about to
    be taken down, so that no shard is to start there again."""

    shard: ShardId
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Changes settings from now on: those of the tiers (tiering.py), and `cache`, which is on or off. Blocks that were
    moved before stay as they are. Answered by Done; or by Refused, and nothing is set, if a setting is unknown or has
    an invalid value."""

    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Asks for the state of the cluster. Answered by Status."""


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard as the coordinator sees it. `state`: joining, up, stopping, draining or lost. `restarts`: how often it
    has restarted since the coordinator started, and `restarted_ns_ago` the last time; 0 if it has not."""

    info: ShardInfo
    state: str
    seen_ns_ago: int
    restarts: int = 0
    restarted_ns_ago: int = 0


class TenantTier(NamedTuple):
    """What a tenant has in one tier of all shards, in the bytes that it is charged for; and the floor and the limit of
    its quota, None for none."""

    tier: Tier
    used_bytes: int
    floor_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What one tenant has, and what its quota grants it; None for no bound but that of all tenants. The rates are those
    of one server: `calls_per_1000_s` calls in a thousand seconds, and `bytes_per_s` of loads and stores of a shard."""

    tenant: Tenant
    tiers: tuple[TenantTier, ...] = ()
    pinned_bytes: int = 0
    most_pinned_bytes: int | None = None
    sequences: int = 0
    most_sequences: int | None = None
    engines: int = 0
    most_engines: int | None = None
    calls_per_1000_s: int | None = None
    bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The cluster as the coordinator sees it. `counters` only grow since this epoch began; `policy` has the settings
    that SetPolicy takes; `fallen` has the namespaces that q4 is too lossy for, with their mean loss in millionths.

    `tenant`: all figures are those of this tenant, and shards are shown without their use; CLUSTER for the whole
    cluster, as operators see it. `namespaces` and `blocks` leave private ones out; `private_blocks` counts those.
    `sequences` are open, and their tables name `claimed_blocks` different blocks. `node`, `release`, `config_hash` and
    `protocol` are the coordinator's own, as in ShardInfo; a tenant does not see the hash. `waiting` and `orphans` are
    as in ScheduleSeen, for operators; empty where no reconciler runs. `tenants` has each tenant that stores or has a
    quota; to a tenant its own. `warnings` are sentences about the quotas, for operators."""

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
    sequences: int = 0
    claimed_blocks: int = 0
    private_blocks: int = 0
    tenant: Tenant = CLUSTER
    node: str = ""
    release: str = ""
    config_hash: str = ""
    protocol: int = 0
    waiting: tuple[str, ...] = ()
    orphans: tuple[tuple[ShardId, str], ...] = ()
    tenants: tuple[TenantStatus, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One running engine. `engine` is a random id of this incarnation, `name` is for people: its host and process.

    `facts` are (name, value) pairs that its KV depends on or might: versions, hash algorithm, dtype, layout. `weights`
    is what it caches under now. `withdrawn` is the number of times that its weights have changed in memory; while it is
    `private` after such a change, it shares with no other engine. It is `ready` to share again once it holds nothing
    that the previous weights have computed. `protocol` is the newest version of the protocol that it speaks, 0 from an
    engine of a version before 3.
    """

    engine: str
    name: str
    model: str
    weights: str
    facts: tuple[tuple[str, str], ...] = ()
    private: bool = False
    withdrawn: int = 0
    ready: bool = True
    protocol: int = 0


@dataclass(frozen=True, slots=True)
class RegisterEngine:
    """Registers a running engine, which does so again before `Registered.ttl_ns` has passed."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Registered:
    """`weights`: what this engine is to cache under from now on, "" if no operator has set it. It holds for the
    withdrawal that the question named, and for no later one."""

    ttl_ns: int
    weights: str = ""


@dataclass(frozen=True, slots=True)
class GetEngines:
    """Asks for the running engines of this tenant. Answered by Engines."""


@dataclass(frozen=True, slots=True)
class SetWeights:
    """Orders the engines of that model that are private now and ready to cache under `weights`; if `engine` is given,
    only the one with that id or name. Answered by Engines: those that will receive the order."""

    model: str
    weights: str
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines, by model and name, each with the nanoseconds since it last registered."""

    known: tuple[tuple[EngineInfo, int], ...]
