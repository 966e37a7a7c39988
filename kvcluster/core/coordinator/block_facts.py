"""The Facts about a block that the coordinator provides to an eviction policy: its bytes, the cost of computing it
again, and its tenant.

**The cost of computing a block again** is an estimate in *token-layers*: the work of one token in one layer of the
model, without attention. A block of T tokens in n layers costs T * n of them, plus its attention, which grows with the
context before it: attention over CROSSOVER_TOKENS tokens of context is as much work as all the rest of a layer. So a
block costs

    the sum over its groups of  block_tokens * layers * (1 + context_tokens / CROSSOVER_TOKENS)

where the context is the number of tokens before the block; at most the window in a group that has one, and 0 in a group
of recurrent state (`last`). The result is in thousandths, rounded down.

The estimate leaves out what the coordinator does not know: a spec gives no width of the model, number of query heads,
experts, or speed of a GPU. So blocks of one model compare well, but a token-layer of a large model counts as much as
one of a small model.

**Replicas first** (`ReplicasFirst`): a shard evicts copies of blocks that another shard keeps before any block that
only it has. Before both it evicts blocks of superseded weights (run_versions.py).
"""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.groups import Reuse
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Tier
from kvcluster.core.spec import KVSpec
from kvcluster.eviction import Block, EvictionPolicy

CROSSOVER_TOKENS = 32_768
"""A dense layer of width h takes about 24 h^2 operations per token, and attention over n tokens 4 n h. They are equal
at n = 6 h, which is 24,576 tokens at h = 4,096 (models of 8 billion parameters) and 49,152 at h = 8,192 (70
billion)."""


_THOUSANDTHS = 1_000


def recompute_cost(spec: KVSpec, depth: int) -> int:
    """Returns the cost of computing the block at that depth, given its prefix, in thousandths of a token-layer."""
    before = depth * spec.block_tokens
    total = 0
    for group in spec.groups:
        total += len(group.layers) * (CROSSOVER_TOKENS + _context(group.reuse, before))
    return spec.block_tokens * total * _THOUSANDTHS // CROSSOVER_TOKENS


def _context(reuse: Reuse, before: int) -> int:
    """Returns how many of the `before` tokens a token attends to in that group."""
    if reuse.kind == "chunk":
        return before % reuse.tokens
    return {"prefix": before, "window": min(before, reuse.tokens), "last": 0}[reuse.kind]


class BlockFacts:
    """The Facts (kvcluster/eviction) of the records that lie in one tier of the shard with that slot."""

    def __init__(self, namespaces: NamespaceTable, slot: int, tier: Tier) -> None:
        self._namespaces = namespaces
        self._slot = slot
        self._tier = tier

    def nbytes(self, block: Block) -> int:
        assert isinstance(block, BlockRecord)
        return self._namespaces.bytes_on(block, self._slot, self._tier) or 1

    def recompute(self, block: Block) -> int:
        return recompute_cost(self._space(block).spec, block.depth)

    def tenant(self, block: Block) -> str:
        return self._space(block).tenant

    def _space(self, block: Block) -> CoordinatorNamespace:
        assert isinstance(block, BlockRecord)
        space = self._namespaces.known(block.space)
        assert space is not None, "a record of a namespace that is not known"
        return space


_BEFORE_ALL = -1
"""The score of a replica: below every score of a policy, of which only orphans' are negative."""

_SUPERSEDED = -2
"""The score of a block that no engine will ask for."""


class ReplicasFirst:
    """The eviction policy of the shard with that slot: blocks of namespaces that are `superseded` in no order, then
    replicas in no order, then other blocks as `policy` scores.

    Of the shards that hold a block, the one that joined first keeps it, so that two shards do not both evict it because
    the other has a copy.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        book: ReplicaTable,
        slot: int,
        superseded: Callable[[NamespaceId], bool] = lambda space: False,
    ) -> None:
        self.scores_fall = policy.scores_fall
        self._superseded = superseded
        self._policy = policy
        self._book = book
        self._slot = slot

    def score(self, block: Block, now: int) -> int:
        assert isinstance(block, BlockRecord)
        if self._superseded(block.space):
            return _SUPERSEDED
        if len(block.copies.places) > 1 and self._is_kept_elsewhere(block):
            return _BEFORE_ALL
        return self._policy.score(block, now)

    def evicted(self, score: int, now: int) -> None:
        if score not in (_BEFORE_ALL, _SUPERSEDED):
            self._policy.evicted(score, now)

    def _is_kept_elsewhere(self, record: BlockRecord) -> bool:
        copies = record.copies
        return any(
            slot < self._slot
            and self._book.stays(slot)
            and all(copies.holds(slot, here.group, here.part) for here in copies.of(self._slot))
            for slot in copies.slots
        )
