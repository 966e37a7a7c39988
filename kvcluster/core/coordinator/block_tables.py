"""The block tables of open sequences, and the claims that they make on blocks.

A table is a chain of nodes, one for each block, each of which knows its parent and never changes. So a fork shares the
nodes of its parent at no cost, and what one sequence appends or drops does not affect another. A node counts the nodes
that follow it and the tables that end with it; it is released when nothing refers to it any more. A block is *claimed*
while at least one node names it.

Workers send the changes of their tables (messages/sequences_and_spans.py); tail lengths stay with the workers. A table
belongs to one owner, a holder of one tenant. This module does not know whether the holder is alive: the caller that
learns that its lease has ended calls `close_owner`.

A table may have a million nodes. Finding the first n blocks of a chain takes logarithmic time, since each node also
refers to an ancestor further up (Myers, An applicative random-access stack, 1983). Releasing a chain takes a step per
node, so the caller has it done in slices (`release_some`). Until then the blocks stay claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, NamespaceId, SequenceId, Tenant
from kvcluster.core.messages import TableChange
from kvcluster.core.tenant_shares import Owner, Shares

ClaimedName = tuple[NamespaceId, BlockHash]


class Outcome(Enum):
    """The outcome of a change. Only DONE changes anything."""

    DONE = "done"
    UNKNOWN = "unknown"  # the table, or its parent's, does not have so many blocks
    LIMIT = "limit"  # it would exceed a limit


class Claims:
    """The claimed blocks of one namespace, each with the number of nodes that name it."""

    __slots__ = ("block_bytes", "block_tokens", "counts", "private", "space", "tenant")

    def __init__(
        self, space: NamespaceId, tenant: Tenant, *, private: bool, block_bytes: int, block_tokens: int
    ) -> None:
        self.space = space
        self.tenant = tenant
        self.private = private
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.counts: dict[BlockHash, int] = {}


class _Node:
    """A block of a chain. `jump` is an ancestor; the root, of depth 0, is its own parent and jump. `reclaims`: a table
    with this node was closed because its owner is to send that table again."""

    __slots__ = ("claims", "depth", "hash", "jump", "parent", "reclaims", "refs")

    def __init__(self, block: BlockHash, parent: _Node | None, claims: Claims) -> None:
        self.hash = block
        self.claims = claims
        self.refs = 0
        self.reclaims = False
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.parent = self.jump = self
        if parent is not None:
            before = parent.jump
            even = parent.depth - before.depth == before.depth - before.jump.depth
            self.parent, self.jump = parent, before.jump if even else parent


class Released(NamedTuple):
    """What was released: the number of nodes, and the private blocks that have lost their last claim. Those that the
    owner is asked to send again are `awaited`, the others are `unclaimed`."""

    nodes: int
    unclaimed: list[ClaimedName]
    awaited: list[ClaimedName]


class _BlockTable:
    __slots__ = ("space", "tip")

    def __init__(self, space: NamespaceId, tip: _Node) -> None:
        self.space = space
        self.tip = tip


class BlockTables:
    """All open sequences, by owner. `share` (tenant_shares.py): of all bytes, for the blocks that a tenant claims
    alone. `quota`: the most sequences of a tenant."""

    def __init__(self, share: float, quota: Callable[[Tenant], int | None] = lambda tenant: None) -> None:
        no_claims = Claims(NamespaceId(b""), Tenant(""), private=False, block_bytes=0, block_tokens=1)
        self._root = _Node(BlockHash(b""), None, no_claims)
        self._tables: dict[Owner, dict[SequenceId, _BlockTable]] = {}  # never an empty one
        self._claims: dict[NamespaceId, Claims] = {}
        self._bytes = Shares(0, share)  # claimed
        self._released: list[_Node] = []  # chains to be released, each from its last node on
        self._shares = Shares(limits.SEQUENCES, quota=quota)
        self._claimed = 0
        self._nodes = Shares(limits.TABLE_BLOCKS)

    def __len__(self) -> int:
        return self._shares.total

    @property
    def claimed_blocks(self) -> int:
        """The number of different blocks that are claimed."""
        return self._claimed

    def sequences(self, tenant: Tenant) -> int:
        """Returns the number of a tenant's sequences."""
        return self._shares.held(tenant)

    def held(self, tenant: Tenant) -> tuple[int, int]:
        """Returns the number of a tenant's sequences, and of the different blocks that they claim."""
        claims = (claims for claims in self._claims.values() if claims.tenant == tenant)
        return self._shares.held(tenant), sum(len(one.counts) for one in claims)

    @property
    def releasing(self) -> bool:
        """Whether `release_some` has more to do."""
        return bool(self._released)

    def table(self, owner: Owner, sequence: SequenceId) -> tuple[BlockHash, ...] | None:
        """Returns the blocks of a sequence, first to last; None if the owner has no such sequence."""
        table = self._tables.get(owner, {}).get(sequence)
        return tuple(node.hash for node in _chain(table.tip)) if table is not None else None

    def count(self, owner: Owner) -> int:
        """Returns the number of sequences that this owner has open."""
        return len(self._tables.get(owner, ()))

    def claims(self, space: NamespaceId, block: BlockHash) -> int:
        """Returns the number of table nodes that name this block."""
        claims = self._claims.get(space)
        return claims.counts.get(block, 0) if claims is not None else 0

    def claims_in(
        self, space: NamespaceId, tenant: Tenant, *, private: bool, block_bytes: int, block_tokens: int
    ) -> Claims:
        """Returns the claims in a namespace, for `change`: its blocks have `block_bytes` raw bytes."""
        known = self._claims.get(space)
        return known or Claims(space, tenant, private=private, block_bytes=block_bytes, block_tokens=block_tokens)

    def change(
        self,
        owner: Owner,
        m: TableChange,
        public: Claims,
        private: Claims | None,
        *,
        capacity_bytes: int | None,
        stored_blocks: int | None = None,
    ) -> Outcome:
        """Makes one change, of a sequence with blocks in these namespaces. `capacity_bytes`: all bytes;
        `stored_blocks`: the blocks that shards have of the tenant; None if they are not known yet.

        Returns UNKNOWN if the table, or that of `parent`, has fewer than `keep` blocks here, and LIMIT if the change
        would exceed the tenant's share of all bytes, or a limit of limits.py.
        """
        if m.closed:
            self._close(owner, m.sequence)
            return Outcome.DONE
        own = self._tables.get(owner, {})
        base = self._base(own, m, public.space)
        if base is None:
            return Outcome.UNKNOWN
        added = [(public, m.blocks[: len(m.blocks) - m.private])]
        if m.private:
            if private is None:
                return Outcome.LIMIT
            added.append((private, m.blocks[len(m.blocks) - m.private :]))
        if not self._admits(owner, m, added, capacity_bytes, stored_blocks):
            return Outcome.LIMIT
        old = own.get(m.sequence)
        tip = base
        for claims, blocks in added:
            for block in blocks:
                tip.refs += 1
                tip = _Node(block, tip, claims)
                self._claim(block, claims)
        tip.refs += 1
        own[m.sequence] = _BlockTable(public.space, tip)
        self._tables[owner] = own
        if m.blocks:
            self._nodes.add(owner[0], len(m.blocks))
        if old is None:
            self._shares.add(owner[0])
        else:
            self._drop(old)
        return Outcome.DONE

    def _close(self, owner: Owner, sequence: SequenceId) -> None:
        own = self._tables.get(owner, {})
        if sequence in own:
            self._drop(own.pop(sequence))
            self._shares.remove(owner[0])
            if not own:
                del self._tables[owner]

    def close_owner(self, owner: Owner, *, reclaims: bool = False) -> int:
        """Closes every sequence of an owner whose lease has ended, or which `reclaims`: it is asked to send all tables
        again. Returns their number."""
        own = self._tables.pop(owner, {})
        for table in own.values():
            if reclaims and table.tip is not self._root:
                table.tip.reclaims = True
            self._drop(table)
        if own:
            self._shares.remove(owner[0], len(own))
        return len(own)

    def release_some(self, most: int) -> Released:
        """Releases at most so many nodes that nothing refers to."""
        done = 0
        released: dict[Tenant, int] = {}
        unclaimed, awaited = list[ClaimedName](), list[ClaimedName]()
        while self._released and done < most:
            node = self._released.pop()
            done += 1
            tenant = node.claims.tenant
            released[tenant] = released.get(tenant, 0) + 1
            if self._unclaim(node.hash, node.claims) and node.claims.private:
                (awaited if node.reclaims else unclaimed).append((node.claims.space, node.hash))
            node.parent.refs -= 1
            node.parent.reclaims = node.parent.reclaims or (node.reclaims and node.parent is not self._root)
            if not node.parent.refs and node.parent is not self._root:
                self._released.append(node.parent)
        for tenant, count in released.items():
            self._nodes.remove(tenant, count)
        return Released(done, unclaimed, awaited)

    def check(self) -> None:
        """Asserts that the counts of nodes, claims and bytes agree with the tables and the chains to be released."""
        refs: dict[_Node, int] = {}
        tips = [table.tip for own in self._tables.values() for table in own.values()]
        for tip in (*tips, *self._released):
            node = tip
            while node is not self._root and node not in refs:
                refs[node] = 0
                node = node.parent
        for node in list(refs):
            if node.parent in refs:
                refs[node.parent] += 1
        for tip in tips:
            if tip is not self._root:
                refs[tip] += 1
        assert all(node.refs == count for node, count in refs.items()), "references were counted wrongly"
        counts: dict[ClaimedName, int] = {}
        for node in refs:
            name = node.claims.space, node.hash
            counts[name] = counts.get(name, 0) + 1
        known = {(claims.space, block): n for claims in self._claims.values() for block, n in claims.counts.items()}
        assert counts == known, "claims were counted wrongly"
        assert (self._nodes.total, self._claimed, self._shares.total) == (len(refs), len(known), len(tips))
        assert all(self._tables.values()) and all(claims.counts for claims in self._claims.values())
        owed: dict[Tenant, int] = {}
        for claims in self._claims.values():
            owed[claims.tenant] = owed.get(claims.tenant, 0) + len(claims.counts) * claims.block_bytes
        assert owed == {tenant: self._bytes.held(tenant) for tenant in owed}, "bytes were counted wrongly"
        assert sum(owed.values()) == self._bytes.total, "bytes of a tenant without claims are counted"

    # ------------------------------------------------------------------------------------------ one table

    def _base(self, own: dict[SequenceId, _BlockTable], m: TableChange, space: NamespaceId) -> _Node | None:
        """Returns the node after which this change adds its blocks; None if the table is not known up to there."""
        if m.parent is None and not m.keep:
            return self._root
        table = own.get(m.sequence if m.parent is None else m.parent)
        if table is None or table.space != space or table.tip.depth < m.keep:
            return None
        node = table.tip
        while node.depth > m.keep:
            node = node.jump if node.jump.depth >= m.keep else node.parent
        return node

    def _admits(
        self,
        owner: Owner,
        m: TableChange,
        added: list[tuple[Claims, tuple[BlockHash, ...]]],
        capacity_bytes: int | None,
        stored_blocks: int | None,
    ) -> bool:
        """Whether a change that adds these blocks stays within all limits."""
        public, own = added[0][0], self._tables.get(owner, {})
        if m.sequence not in own and (len(own) >= limits.SEQUENCES_PER_HOLDER or self._shares.full(owner[0])):
            return False
        if (m.keep + len(m.blocks)) * public.block_tokens > limits.TOKENS_PER_SEQUENCE:
            return False
        if self._nodes.full(owner[0], len(m.blocks)):
            return False
        if m.blocks and stored_blocks is not None:
            most = limits.UNSTORED_TABLE_BLOCKS + 2 * stored_blocks
            if self._nodes.held(owner[0]) + len(m.blocks) > most:
                return False
        new = sum(
            claims.block_bytes * sum(block not in claims.counts for block in dict.fromkeys(blocks))
            for claims, blocks in added
        )
        if capacity_bytes is None or not new:
            return True
        self._bytes.most = capacity_bytes
        return not self._bytes.full(public.tenant, new)

    def _drop(self, table: _BlockTable) -> None:
        table.tip.refs -= 1
        if not table.tip.refs and table.tip is not self._root:
            self._released.append(table.tip)

    # ------------------------------------------------------------------------------------------ one block

    def _claim(self, block: BlockHash, claims: Claims) -> None:
        count = claims.counts.get(block, 0)
        claims.counts[block] = count + 1
        if not count:
            self._claimed += 1
            self._claims[claims.space] = claims
            self._bytes.add(claims.tenant, claims.block_bytes)

    def _unclaim(self, block: BlockHash, claims: Claims) -> bool:
        """Returns True if that was the block's last claim."""
        count = claims.counts[block] - 1
        if count:
            claims.counts[block] = count
            return False
        del claims.counts[block]
        self._claimed -= 1
        self._bytes.remove(claims.tenant, claims.block_bytes)
        if not claims.counts:
            del self._claims[claims.space]
        return True


def _chain(tip: _Node) -> list[_Node]:
    """Returns the nodes from the first block to `tip`."""
    backwards: list[_Node] = []
    while tip.depth:
        backwards.append(tip)
        tip = tip.parent
    return backwards[::-1]
