"""The block tables of open sequences: from a sequence to its block hashes, in order.

A table is a chain of sealed blocks, each of which knows its parent and never changes, and a length in tokens.
So a fork shares all blocks of its parent at no cost, and what one sequence seals or drops does not affect another.
A block is freed by its reference count when the last table drops it. (A vector with shared prefixes would take a
third of the memory, but would keep truncated blocks as long as a fork lives.)

The invariant: sealed blocks * block_tokens <= length. The tokens beyond are the unsealed tail, which stays with
its worker. A sequence belongs to one holder. This module does not know whether that holder is alive: the caller that
learns that its lease has ended calls `close_holder`. A request that cannot be served changes nothing; the returned
Outcome says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, Holder, NamespaceId


class Outcome(Enum):
    """The outcome of a request to a table."""

    DONE = "done"
    UNKNOWN = "unknown"  # no such sequence is open; its holder may reopen it
    EXISTS = "exists"  # a sequence of that id is open already
    SHORT = "short"  # the sequence has fewer tokens than that
    LIMIT = "limit"  # it would exceed a limit of limits.py


class _Block:
    """A sealed block and, through its parent, all before it. The root of a chain has depth 0 and no parent."""

    __slots__ = ("depth", "hash", "parent")

    def __init__(self, block: BlockHash, parent: _Block | None) -> None:
        self.hash = block
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0


class BlockTable:
    """One open sequence. `length` counts tokens, sealed and not."""

    __slots__ = ("_tip", "block_tokens", "holder", "length", "namespace")

    def __init__(self, holder: Holder, namespace: NamespaceId, block_tokens: int, tip: _Block, length: int) -> None:
        self.holder = holder
        self.namespace = namespace
        self.block_tokens = block_tokens
        self.length = length
        self._tip = tip

    @property
    def sealed(self) -> int:
        """The number of sealed blocks."""
        return self._tip.depth

    @property
    def parent(self) -> BlockHash:
        """The parent of the next block: the hash of the last sealed block, or the root."""
        return self._tip.hash

    def hashes(self) -> tuple[BlockHash, ...]:
        """The sealed blocks, first to last."""
        backwards: list[BlockHash] = []
        block = self._tip
        while block.parent is not None:
            backwards.append(block.hash)
            block = block.parent
        assert len(backwards) == self.sealed
        return tuple(reversed(backwards))


class BlockTables:
    """All open sequences. Workers choose the ids."""

    def __init__(self) -> None:
        self._tables: dict[bytes, BlockTable] = {}
        self._held: dict[Holder, dict[bytes, None]] = {}  # never an empty one

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def holders(self) -> int:
        """The number of holders that have a sequence open."""
        return len(self._held)

    def count(self, holder: Holder) -> int:
        """Returns the number of sequences that `holder` has open."""
        return len(self._held.get(holder, ()))

    def get(self, sequence: bytes) -> BlockTable | None:
        """Returns the sequence, which the caller must not change; None if it is not open."""
        return self._tables.get(sequence)

    def table(self, sequence: bytes) -> tuple[BlockHash, ...] | None:
        """Returns the sealed blocks of `sequence`, first to last; None if it is not open."""
        table = self._tables.get(sequence)
        return table.hashes() if table is not None else None

    def length(self, sequence: bytes) -> int | None:
        """Returns the number of tokens of `sequence`, the unsealed tail included; None if it is not open."""
        table = self._tables.get(sequence)
        return table.length if table is not None else None

    def open(
        self, sequence: bytes, holder: Holder, namespace: NamespaceId, root: BlockHash, *, block_tokens: int
    ) -> Outcome:
        """Opens an empty sequence. `root` is the parent of its first block (hashing.root)."""
        assert block_tokens >= 1
        return self._admit(sequence, BlockTable(holder, namespace, block_tokens, _Block(root, None), 0))

    def extend(self, sequence: bytes, tokens: int) -> Outcome:
        """Appends `tokens` unsealed tokens."""
        assert tokens >= 0
        table = self._tables.get(sequence)
        if table is None:
            return Outcome.UNKNOWN
        if table.length + tokens > limits.TOKENS_PER_SEQUENCE:
            return Outcome.LIMIT
        table.length += tokens
        return Outcome.DONE

    def seal(self, sequence: bytes, hashes: Sequence[BlockHash]) -> Outcome:
        """Seals the next blocks under these hashes. Returns SHORT if the tokens do not fill them all."""
        table = self._tables.get(sequence)
        if table is None:
            return Outcome.UNKNOWN
        if (table.sealed + len(hashes)) * table.block_tokens > table.length:
            return Outcome.SHORT
        for block in hashes:
            table._tip = _Block(block, table._tip)
        return Outcome.DONE

    def fork(self, sequence: bytes, child: bytes, holder: Holder) -> Outcome:
        """Opens `child` with the same blocks and length, for `holder`. The worker copies the unsealed tail."""
        table = self._tables.get(sequence)
        if table is None:
            return Outcome.UNKNOWN
        return self._admit(child, BlockTable(holder, table.namespace, table.block_tokens, table._tip, table.length))

    def truncate(self, sequence: bytes, tokens: int) -> Outcome:
        """Keeps the first `tokens` tokens. If this cuts a sealed block, the block's remaining tokens become
        unsealed."""
        assert tokens >= 0
        table = self._tables.get(sequence)
        if table is None:
            return Outcome.UNKNOWN
        if tokens > table.length:
            return Outcome.SHORT
        table.length = tokens
        keep = tokens // table.block_tokens
        while table._tip.depth > keep:
            assert table._tip.parent is not None
            table._tip = table._tip.parent
        return Outcome.DONE

    def close(self, sequence: bytes) -> Outcome:
        """Closes the sequence; its forks stay open."""
        table = self._tables.pop(sequence, None)
        if table is None:
            return Outcome.UNKNOWN
        own = self._held[table.holder]
        del own[sequence]
        if not own:
            del self._held[table.holder]
        return Outcome.DONE

    def close_holder(self, holder: Holder) -> int:
        """Closes every sequence of a holder that is gone. Returns their number."""
        own = self._held.pop(holder, {})
        for sequence in own:
            del self._tables[sequence]
        return len(own)

    def check(self) -> None:
        """Asserts that every sequence belongs to one holder, and that sealed blocks do not exceed the tokens."""
        owned = {sequence: holder for holder, own in self._held.items() for sequence in own}
        assert owned == {sequence: table.holder for sequence, table in self._tables.items()}
        assert sum(map(len, self._held.values())) == len(owned) and all(self._held.values())
        assert all(table.sealed * table.block_tokens <= table.length for table in self._tables.values())

    def _admit(self, sequence: bytes, table: BlockTable) -> Outcome:
        if sequence in self._tables:
            return Outcome.EXISTS
        own = self._held.get(table.holder)
        if len(own or ()) >= limits.SEQUENCES_PER_HOLDER or (own is None and len(self._held) >= limits.HOLDERS):
            return Outcome.LIMIT
        self._held.setdefault(table.holder, {})[sequence] = None
        self._tables[sequence] = table
        return Outcome.DONE
