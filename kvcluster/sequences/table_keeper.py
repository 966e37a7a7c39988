"""Keeps the coordinator's block tables of one client's sequences up to date, in batches. Pure.

When blocks of a sequence are sealed, the coordinator is sent their names, never their tokens. One message covers many
blocks of many sequences, and nothing waits for its answer. One message is under way at a time. It is numbered, and sent
again unchanged until it is answered: the coordinator applies it once.

For each sequence this keeps `told`, the number of leading blocks of the table that have been reported. A fork that has
not been reported yet begins with the reported blocks that it shares with its parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Epoch, Holder, SequenceId
from kvcluster.core.messages import SyncTables, TableChange, TablesSynced
from kvcluster.sequences.state import SequenceState


@dataclass(slots=True)
class _Reported:
    """What has been reported of a sequence. `state` is None once it is closed. `parent`: it is to be opened as a fork
    of that sequence."""

    state: SequenceState | None
    told: int = 0
    parent: SequenceId | None = None
    stale: bool = True
    """Whether the coordinator has more blocks than `told`, or does not know the sequence."""
    last: TableChange | None = None
    """The change that is sent before the sequence is reported as closed."""

    @property
    def pending(self) -> bool:
        return self.state is None or self.stale or self.told < self.state.sealed


class TableKeeper:
    """`next_sync(now)` returns the message to send, `synced` takes its answer. `interval_ns` lies between two messages,
    unless the lease has to be renewed before."""

    def __init__(self, holder: Holder, *, interval_ns: int) -> None:
        self._holder = holder
        self._interval_ns = interval_ns
        self._number = 0
        self._known: dict[SequenceId, _Reported] = {}
        self._changed: dict[SequenceId, None] = {}  # those that may be pending, the longest waiting first
        self._forks: dict[SequenceId, None] = {}  # those with a parent that have not been reported yet
        self._under_way: SyncTables | None = None
        self._next_at = 0
        self._renew_at: int | None = None
        self._epoch: Epoch | None = None  # of the coordinator that answered last

    def __len__(self) -> int:
        return len(self._known)

    # ---------------------------------------------------------------------------------- the sequences' changes

    def opened(self, state: SequenceState, parent: SequenceState | None = None) -> None:
        """A sequence was opened, as a fork of `parent` if there is one."""
        known = self._known[parent.name] if parent is not None else None
        if known is not None and parent is not None and known.told and not known.stale:
            # The first message about the child may follow others about its parent: it refers to blocks that the parent
            # has had since before the fork, and `cut` withdraws that if the parent loses some of them.
            self._known[state.name] = _Reported(state, known.told, parent.name)
            self._forks[state.name] = None
        else:
            self._known[state.name] = _Reported(state)
        self._changed[state.name] = None

    def sealed(self, state: SequenceState) -> None:
        """Blocks of a sequence were sealed."""
        self._changed[state.name] = None

    def cut(self, state: SequenceState) -> None:
        """The sealed blocks of a sequence were cut to `state.sealed`."""
        known = self._known[state.name]
        if state.sealed < known.told:
            self._orphan({state.name: state.sealed})
            known.told, known.stale = state.sealed, True
            if not known.told:  # it shares no reported block with its parent now, which may be closed first
                known.parent = None
                self._forks.pop(state.name, None)
            self._changed[state.name] = None

    def closed(self, state: SequenceState) -> None:
        """A sequence is about to be closed. Private blocks that have not been reported yet are reported first, so that
        the coordinator has them erased at once."""
        self._orphan({state.name: 0})
        self._forks.pop(state.name, None)
        known = self._known[state.name]
        if any(block.private for block in state.blocks[known.told : state.sealed]):
            known.last = self._change(state.name, known, state, limits.BLOCKS_PER_CALL)
        known.state = None
        self._changed[state.name] = None

    # ------------------------------------------------------------------------------------------- the messages

    def due(self, now: int) -> bool:
        """Whether next_sync returns a message."""
        at = self.next_due()
        return at is not None and now >= at

    def next_due(self) -> int | None:
        """Returns when the next message is due; None if none will be until something changes."""
        if self._under_way is not None or (self._changed and self._renew_at is None):
            return self._next_at
        return min(self._next_at, self._renew_at) if self._changed and self._renew_at is not None else self._renew_at

    def next_sync(self, now: int) -> SyncTables | None:
        """Returns the message that is due, the same one until it is answered; None if none is due."""
        if not self.due(now):
            return None
        if self._under_way is None:
            self._number += 1
            self._under_way = SyncTables(self._holder, self._number, tuple(self._changes()))
            self._next_at = now + self._interval_ns
            self._renew_at = None
        return self._under_way

    def synced(self, answer: TablesSynced, now: int) -> None:
        """Takes the answer to the message under way."""
        assert self._under_way is not None
        for change in self._under_way.changes:
            if change.closed:
                self._known.pop(change.sequence, None)
        keep = {change.sequence: change.keep for change in self._under_way.changes}
        for name in answer.refused:  # its table is unchanged; the next sealed blocks report it again
            if name in self._known:
                self._known[name].told = min(self._known[name].told, keep[name])
                self._known[name].stale = True
        # Another coordinator may have forgotten all in an answer that was lost.
        forgotten = answer.forgotten or self._epoch not in (None, answer.epoch)
        self._epoch = answer.epoch
        for name in [*self._known] if forgotten else answer.reopen:
            if name in self._known:
                self._forget(name)
        self._orphan({name: self._known[name].told for name in keep if name in self._known})
        self._under_way = None
        self._renew_at = now + answer.ttl_ns // 3 if self._known else None

    def failed(self, now: int) -> None:
        """No answer was received: the same message is sent again, after the interval."""
        self._next_at = now + self._interval_ns

    # ------------------------------------------------------------------------------------------------ helpers

    def _changes(self) -> list[TableChange]:
        changes: list[TableChange] = []
        hashes = limits.BLOCKS_PER_CALL
        for name in [*self._changed]:
            if not hashes or len(changes) >= limits.SEQUENCES_PER_HOLDER - 1:
                break
            known = self._known[name]
            if known.last is not None and len(known.last.blocks) > hashes:
                break
            del self._changed[name]
            if known.state is None:
                if known.last is not None:
                    changes.append(known.last)
                    hashes -= len(known.last.blocks)
                changes.append(TableChange(name, 0, closed=True))
            elif known.pending:
                changes.append(self._change(name, known, known.state, hashes))
                hashes -= len(changes[-1].blocks)
                if known.pending:  # it has more blocks than this message takes
                    self._changed[name] = None
        return changes

    def _change(self, name: SequenceId, known: _Reported, state: SequenceState, room: int) -> TableChange:
        blocks = state.blocks[known.told : min(state.sealed, known.told + room)]
        names = tuple(block.name for block in blocks if block.name is not None)
        assert len(names) == len(blocks), "a sealed block without its name"
        private = sum(block.private for block in blocks)
        change = TableChange(name, known.told, names, private, known.parent)
        known.told += len(blocks)
        known.stale, known.parent = False, None
        self._forks.pop(name, None)
        return change

    def _orphan(self, blocks_left: Mapping[SequenceId, int]) -> None:
        """`blocks_left`: how many blocks the coordinator has, or is to keep, of each of these parents. A fork that
        begins with more blocks of its parent is opened on its own: the coordinator may have others in their place."""
        for name in [*self._forks]:
            fork = self._known[name]
            if fork.parent is not None and fork.told > blocks_left.get(fork.parent, fork.told):
                self._forget(name)

    def _forget(self, name: SequenceId) -> None:
        """Has all blocks of a sequence reported again, without a parent."""
        self._known[name] = _Reported(self._known[name].state)
        self._forks.pop(name, None)
        self._changed[name] = None
