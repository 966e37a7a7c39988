"""Bugs of open sequences: whose blocks are found, which pages are kept, what coordinators are told and erase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcluster.core.coordinator.eraser import Eraser
from kvcluster.core.coordinator.sequence_handler import SequenceHandler
from kvcluster.sequences.block_pages import BlockPages
from kvcluster.sequences.open_sequences import OpenSequences
from kvcluster.sequences.resident_window import ResidentWindow
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.store_queue import StoreQueue
from kvcluster.sequences.table_keeper import TableKeeper
from tests.sim.bugs.planting import planted


@planted(StoreQueue, "next")
def private_stored_as_public(original: Any, self: StoreQueue) -> Any:
    """Private blocks are stored in the namespace of the public ones, where others find them."""
    batch = original(self)
    return batch._replace(private=False) if batch is not None else None


@planted(SequenceState, "private")
def dropped_made_public(original: Any, self: SequenceState) -> bool:
    """What a sequence makes after it has dropped tokens is public, though others would take it for KV that was computed
    with them."""
    follows_private = self.sealed > 0 and self.blocks[self.sealed - 1].private
    return follows_private or len(self.tokens) < self.block_tokens


@planted(ResidentWindow, "_next_drop")
def sinks_dropped(original: Any, self: ResidentWindow, state: Any) -> int:
    """The oldest tokens are dropped from the first one on, those that every later token attends to included."""
    return int(state.dropped.stop)


@planted(BlockPages, "write_entry")
def entries_of_forks_stay(original: Any, self: BlockPages, block: Any, page: Any) -> None:
    """Where a block gets a page or gives it up, the tables of some sequences that share it are not changed."""
    owners = list(block.family)
    for state in owners[1:]:
        del block.family[state]
    original(self, block, page)
    block.family.update(dict.fromkeys(owners))


@planted(OpenSequences, "fork")
def fork_without_a_reference(original: Any, self: OpenSequences, state: Any, name: Any) -> Any:
    """A fork does not count as a reference to the pages that it shares with its parent."""
    child = original(self, state, name)
    if child.tip is not None and child.tip.references > 1:
        child.tip.references -= 1
    return child


@planted(TableKeeper, "_change")
def truncated_brought_back(original: Any, self: TableKeeper, name: Any, known: Any, state: Any, room: int) -> Any:
    """A table that is told again, because the coordinator has forgotten it, has the blocks that were cut off since the
    last message."""
    told = original(self, name, known, state, room)
    old = [block for block in _LONGEST[state] if block.name is not None]
    if told.keep or told.parent is not None or len(old) <= len(told.blocks):
        return told
    names = tuple(block.name for block in old)
    return replace(told, blocks=names, private=sum(block.private for block in old))


_LONGEST: dict[Any, list[Any]] = {}
"""The most blocks that each sequence has had sealed."""


@truncated_brought_back.also(TableKeeper, "opened")
def _opened(original: Any, self: TableKeeper, state: Any, parent: Any = None) -> None:
    _LONGEST[state] = state.blocks[: state.sealed]
    original(self, state, parent)


@truncated_brought_back.also(TableKeeper, "sealed")
def _sealed(original: Any, self: TableKeeper, state: Any) -> None:
    if state.sealed > len(_LONGEST[state]):
        _LONGEST[state] = state.blocks[: state.sealed]
    original(self, state)


@planted(Eraser, "unclaimed")
def private_pages_stay(original: Any, self: Eraser, name: Any) -> None:
    """The private pages of a sequence that is closed are not erased."""
    self._waiting.pop(name, None)


@planted(Eraser, "__init__")
def no_grace(original: Any, self: Eraser, grace_ns: int, namespaces: Any, book: Any, tables: Any) -> None:
    """Private blocks that no sequence claims are erased at once, even if the coordinator has just restarted."""
    original(self, 0, namespaces, book, tables)


@planted(SequenceHandler, "sync")
def repeat_applied_again(original: Any, self: SequenceHandler, request: Any, space: Any, now: int) -> Any:
    """A message about tables that is repeated because its answer was lost is applied as if it were a new one."""
    held = self._holders.get((request.tenant, request.question.holder))
    if held is not None and request.question.number <= held.number:
        request = replace(request, question=replace(request.question, number=held.number + 1))
    return original(self, request, space, now)
