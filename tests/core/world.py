"""A cluster in a bottle: what the tests of the two state machines speak of, and both of them joined.

`World` joins one coordinator, some shards and some workers by a mail that loses, repeats and delays, and keeps its
own record of what was written where: the oracle by which no reader ever sees a wrong byte. Time is an integer that
the test moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvcluster.config import CoordinatorConfig, ShardConfig
from kvcluster.core import hashing
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import Attempt, BlockHash, CallId, Epoch, Holder, NamespaceId, ShardId, Tenant
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import (
    Abort,
    Answer,
    Attach,
    Attached,
    BlockFate,
    AttachShard,
    Commit,
    CommitGrant,
    CoordinatorMessage,
    Decision,
    Effect,
    EvictOrder,
    Explain,
    Explained,
    GetStatus,
    GoneEvent,
    Inventory,
    Leave,
    LoadGrant,
    Need,
    NewPage,
    PageEvent,
    PageKey,
    PageSlot,
    Pin,
    PinGrant,
    PrepareLoad,
    PrepareStore,
    Refused,
    RefusedKind,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Reserve,
    Revoke,
    Send,
    ShardAddress,
    ShardInfo,
    ShardMessage,
    Stalled,
    Status,
    StoreGrant,
    StoreRun,
    StreamEvent,
    Tick,
    Tier,
    Unpin,
    WriteGrant,
    Written,
)
from kvcluster.core.pool import PageState
from kvcluster.core.reasons import Loss, Miss
from kvcluster.core.shard import Shard
from kvcluster.core.spec import PREFIX, Group, KVSpec, Part, Plane, window

MS = 1_000_000
SECOND = 1_000 * MS
OURS, THEIRS = Tenant("ours"), Tenant("theirs")
MEMBERSHIP_MS = 5_000
SUMS = b"sums"

SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", block_tokens=2
)
"""The plain case. A page is PAGE bytes, and so is an extent here."""
WHOLE = SPEC.whole(0)
PAGE = SPEC.page_bytes(0, WHOLE)
LEFT, RIGHT = Part(0, 2, 0, 1), Part(0, 2, 1, 2)
"""Half the heads each."""

HYBRID = KVSpec(
    model="hybrid",
    weights="sha256:2",
    block_tokens=2,
    groups=(
        Group((0, 2), (Plane("k", 2, 4, "float32"),), PREFIX),
        Group((1, 3), (Plane("k", 2, 6, "float32"),), window(4)),
    ),
)
"""Two groups with pages of other sizes than SPEC's, one of which needs only the last blocks."""

R = TypeVar("R")


def chain(length: int, seed: int = 0, spec: KVSpec = SPEC, tenant: Tenant = OURS) -> tuple[BlockHash, ...]:
    """The first blocks of the conversation `seed`. All conversations with the same `seed // 2` begin alike."""
    tokens = [seed // 2, 0, seed, *range(2 * length)][: 2 * length]
    return tuple(hashing.chain(hashing.root(spec.namespace(tenant)), tokens, 2))


def root(spec: KVSpec = SPEC, tenant: Tenant = OURS) -> BlockHash:
    return hashing.root(spec.namespace(tenant))


def key(block: BlockHash, part: Part = WHOLE, group: int = 0) -> PageKey:
    return PageKey(block, group, part)


def holder(number: int) -> Holder:
    return Holder(number.to_bytes(16, "big"))


def attempt(counter: int, worker: int = 0) -> Attempt:
    return Attempt(holder(worker), counter)


def whole(spec: KVSpec = SPEC, accept: Loss = Loss.EXACT) -> Need:
    return Need(tuple(spec.whole(group) for group in range(len(spec.groups))), accept)


def page(
    block: BlockHash,
    part: Part = WHOLE,
    *,
    parent: BlockHash | None = None,
    depth: int = 0,
    loss: Loss = Loss.EXACT,
    tenant: Tenant = OURS,
) -> PageEvent:
    """What a shard tells of a page of SPEC that became READY."""
    return PageEvent(SPEC.namespace(tenant), key(block, part), parent or root(), depth, Tier.DEVICE, loss)


def pages(hashes: Sequence[BlockHash], part: Part = WHOLE) -> list[PageEvent]:
    """A chain of them, from its first block on."""
    parents = (root(), *hashes)
    return [page(block, part, parent=parents[depth], depth=depth) for depth, block in enumerate(hashes)]


def gone(block: BlockHash, part: Part = WHOLE, *, corrupt: bool = False) -> GoneEvent:
    return GoneEvent(SPEC.namespace(OURS), key(block, part), corrupt)
