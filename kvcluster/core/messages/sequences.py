"""Questions about the block tables of open sequences, from their workers to the coordinator
(core/coordinator/sequence_handler.py).

A worker sends the changes of many sequences in one SyncTables, in the namespace of their public blocks, and renews its
lease with it. A table longer than limits.BLOCKS_PER_CALL is sent in several messages: `keep` grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.ids import BlockHash, Epoch, Holder, SequenceId


@dataclass(frozen=True, slots=True)
class TableChange:
    """What became of one sequence's table: its first `keep` blocks stay, `blocks` follow them.

    `keep` is 0 for a new sequence without a parent; then a table that the sequence has is replaced. The last `private`
    of `blocks` are private: random ids, in the namespace of private pages. `parent` is set when the sequence is opened
    as a fork: it begins with the first `keep` blocks of the parent. With `closed` the table is dropped, and the other
    fields mean nothing.
    """

    sequence: SequenceId
    keep: int
    blocks: tuple[BlockHash, ...] = ()
    private: int = 0
    parent: SequenceId | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True)
class SyncTables:
    """Brings the tables of one holder up to date, and renews its lease; without changes it only renews. Answered by
    TablesSynced.

    `number` is 1, 2, ... for each holder; a repeat of the last number gets the same answer and changes nothing, and a
    lower number is refused (STALE). The changes name at most limits.BLOCKS_PER_CALL blocks in all. They are made in
    order.
    """

    holder: Holder
    number: int
    changes: tuple[TableChange, ...] = ()


@dataclass(frozen=True, slots=True)
class TablesSynced:
    """The lease from now on, the coordinator's epoch, and what of the changes was not made.

    `reopen`: the sequences whose table is not known as `keep` (or `parent`) says: send them whole. `refused`: those
    whose new blocks would exceed a limit (share, tokens, sequences); nothing of that change was made. `forgotten`: the
    coordinator knew nothing of this holder (it restarted, or the lease ended), and made no change: send all open tables
    whole, with the next numbers.
    """

    ttl_ns: int
    epoch: Epoch
    reopen: tuple[SequenceId, ...] = ()
    refused: tuple[SequenceId, ...] = ()
    forgotten: bool = False
