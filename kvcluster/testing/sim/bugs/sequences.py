"""Bugs of open sequences: whose blocks are found, which pages are kept, what coordinators are told and erase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcluster.client.sequences.machine import SequenceMachine
from kvcluster.client.sequences.table_keeper import TableKeeper
from kvcluster.core.eraser import Eraser
from kvcluster.core.sequence_handler import SequenceHandler
from kvcluster.testing.sim.bugs.planting import Patch, planted


@planted
def private_stored_as_public() -> list[Patch]:
    """Private blocks are stored in the namespace of the public ones, where others find them."""
    next_store = SequenceMachine.next_store

    def as_public(self: SequenceMachine) -> Any:
        batch = next_store(self)
        return batch._replace(private=False) if batch is not None else None

    return [(SequenceMachine, "next_store", as_public)]


@planted
def fork_without_a_reference() -> list[Patch]:
    """A fork does not count as a reference to the pages that it shares with its parent."""
    fork = SequenceMachine.fork

    def forget(self: SequenceMachine, state: Any, name: Any) -> Any:
        child = fork(self, state, name)
        if child.tip is not None and child.tip.references > 1:
            child.tip.references -= 1
        return child

    return [(SequenceMachine, "fork", forget)]


@planted
def truncated_brought_back() -> list[Patch]:
    """A table that is told again, because the coordinator has forgotten it, has the blocks that were cut off since the
    last message."""
    opened, sealed, change = TableKeeper.opened, TableKeeper.sealed, TableKeeper._change
    longest: dict[Any, list[Any]] = {}

    def open_it(self: TableKeeper, state: Any, parent: Any = None) -> None:
        longest[state] = state.blocks[: state.sealed]
        opened(self, state, parent)

    def seal_it(self: TableKeeper, state: Any) -> None:
        if state.sealed > len(longest[state]):
            longest[state] = state.blocks[: state.sealed]
        sealed(self, state)

    def tell(self: TableKeeper, name: Any, known: Any, state: Any, room: int) -> Any:
        told = change(self, name, known, state, room)
        old = [block for block in longest[state] if block.name is not None]
        if told.keep or told.parent is not None or len(old) <= len(told.blocks):
            return told
        names = tuple(block.name for block in old)
        return replace(told, blocks=names, private=sum(block.private for block in old))

    return [(TableKeeper, "opened", open_it), (TableKeeper, "sealed", seal_it), (TableKeeper, "_change", tell)]


@planted
def private_pages_stay() -> list[Patch]:
    """The private pages of a sequence that is closed are not erased."""
    return [(Eraser, "unclaimed", lambda self, name: self._waiting.pop(name, None))]


@planted
def no_grace() -> list[Patch]:
    """Private blocks that no sequence claims are erased at once, even if the coordinator has just restarted."""
    original = Eraser.__init__

    def init(self: Eraser, grace_ns: int, directory: Any, book: Any, tables: Any) -> None:
        original(self, 0, directory, book, tables)

    return [(Eraser, "__init__", init)]


@planted
def repeat_applied_again() -> list[Patch]:
    """A message about tables that is repeated because its answer was lost is applied as if it were a new one."""
    sync = SequenceHandler.sync

    def apply(self: SequenceHandler, request: Any, space: Any, now: int) -> list[Any]:
        held = self._holders.get((request.tenant, request.question.holder))
        if held is not None and request.question.number <= held.number:
            request = replace(request, question=replace(request.question, number=held.number + 1))
        return sync(self, request, space, now)

    return [(SequenceHandler, "sync", apply)]
