"""Brings blocks of sequences that are not in the resident set to where they can be used.

`bring` loads them into the resident set and waits for them. `provide` makes them attendable: pages of this host's
shards are borrowed, and read where they lie, raw or encoded, without a page of the resident set; all others are loaded
into it layer by layer, so that the next layer is on its way while one is attended to.

Loads are begun and awaited by the threads that need them. The lock of the runner is never held during I/O.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Need
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, LostTokens
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.layer_query import BlockRun, LayerLoads
from kvcluster.sequences.missing_tokens import AbsentBlocks, BlockFetch
from kvcluster.sequences.runner import SequenceRunner
from kvcluster.sequences.state import SequenceState
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.tickets import Ticket, Tickets
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transfers.zero_copy import BorrowedBlocks, Borrower
from kvcluster.transport.base import Deadline

_LEND_AGAIN_S = 5.0
"""How long blocks that must be streamed are not asked for again on this host, if none of them could be borrowed."""

_TRIES = 3
"""Failed loads in a row after which a block counts as lost."""


class SequenceLoads:
    """The loans and loads of one client's sequences. `accept`: the worst loss of a block that is used. Thread-safe."""

    def __init__(
        self,
        spec: KVSpec,
        parts: tuple[Part | None, ...],
        runner: SequenceRunner,
        *,
        tickets: Tickets,
        transfers: TransferQueue,
        borrower: Borrower,
        accept: Loss,
    ) -> None:
        self._spec = spec
        self._private_spec = replace(spec, private=True)
        self._parts = parts
        self._runner = runner
        self._tickets = tickets
        self._transfers = transfers
        self._borrower = borrower
        self._accept = accept
        self._lend_at = 0.0
        self.absent = AbsentBlocks()  # used under the runner's lock
        (part,) = parts
        assert part is not None, "a client without sequences"
        self.layers = LayerLoads(transfers, part, find=self._find, lost=self._lost, lock=runner.lock)

    def find(self, names: Sequence[BlockHash], deadline: Deadline) -> list[Loss]:
        """Returns the loss of each leading block of these that the cluster has."""
        losses: list[Loss] = []
        need = Need(self._parts, self._accept)
        for first in range(0, len(names), limits.BLOCKS_PER_CALL):
            hashes = names[first : first + limits.BLOCKS_PER_CALL]
            with self._tickets.prepare(self._spec, hashes, need, deadline, hold=False) as ticket:
                for run in ticket.body.runs:
                    sources = [source for of_group in run.plan if of_group for source in of_group]
                    losses += [max((source.loss for source in sources), default=Loss.EXACT)] * run.count
                if ticket.blocks < len(hashes):
                    break
        return losses

    def bring(self, state: SequenceState, depths: Sequence[int], deadline: Deadline) -> None:
        """Loads those of these blocks of a sequence that are absent into the resident set, and waits for them. The
        caller holds all of them (SequenceRunner.holding). Raises ResidentSetFull, or LostTokens if one of them cannot
        be loaded by the deadline."""
        failed: list[LostTokens] = []
        waited = False
        while True:
            with self._runner.lock:
                absent = [state.blocks[depth] for depth in state.absent(depths)]
                if not absent:
                    return
                if waited and not deadline.remaining_s():
                    raise failed[-1] if failed else self._lost(absent[0], Miss(MissReason.DEADLINE, "it has not come"))
                begun = {self.absent.fetched[block][1]: None for block in absent if block in self.absent.fetched}
                new = [block for block in absent if block not in self.absent.fetched]
            if new:
                loss = self.provide(new, deadline, lend=False)
                with self._runner.lock:
                    state.loss = max(state.loss, loss)
            for fetch in begun:
                why = self.finish(fetch, deadline)
                failed += [why] if why is not None else []
            if len(failed) >= _TRIES:
                raise failed[-1]
            waited = not new

    def provide(
        self, blocks: Sequence[SequenceBlock], deadline: Deadline, *, lend: bool, only_free: bool = False
    ) -> Loss:
        """Borrows absent blocks, if they may be lent, and begins to load the others. The caller holds them, and those
        that are needed with them. With `only_free` no page is taken that holds a block: blocks without room are not
        loaded. Returns the worst loss of them. Raises ResidentSetFull, or LostTokens if one of them can be neither
        borrowed nor loaded."""
        loss = Loss.EXACT
        for spec, chunk, ticket in self._prepared(blocks, deadline):
            loss = max(loss, ticket.loss)
            with ExitStack() as held:
                held.enter_context(ticket)
                others = self._borrow(spec, chunk, ticket, deadline) if lend else chunk
                if len(others) == len(chunk) and not (only_free and not self._fits(len(chunk))):
                    self._fetch(spec, chunk, ticket, deadline)
                    held.pop_all()
            if len(others) < len(chunk):
                self.provide(others, deadline, lend=False, only_free=only_free)
        return loss

    def fetching(self, block: SequenceBlock) -> bool:
        """Whether a block is on its way into the resident set. Called in the lock."""
        return block in self.absent.fetched

    @property
    def loaded_bytes(self) -> int:
        """KV that this client has loaded, by whatever call."""
        return self._transfers.loaded_bytes

    def lend(self, blocks: Sequence[SequenceBlock], deadline: Deadline) -> Loss:
        """Borrows those of these absent blocks that can be borrowed; loads none. Returns their worst loss. If none can,
        none is asked for again for a while: they lie on other hosts. Raises LostTokens."""
        if time.monotonic() < self._lend_at:
            return Loss.EXACT
        loss, lent = Loss.EXACT, False
        for spec, chunk, ticket in self._prepared(blocks, deadline):
            with ticket:
                others = self._borrow(spec, chunk, ticket, deadline)
            if len(others) < len(chunk):
                loss, lent = max(loss, ticket.loss), True
        self._lend_at = 0.0 if lent else time.monotonic() + _LEND_AGAIN_S
        return loss

    def finish(self, fetch: BlockFetch, deadline: Deadline) -> LostTokens | None:
        """Waits for a load to end, at most until the deadline. What was loaded is in the resident set then. Returns why
        not all was loaded, if so. Raises as Transfer.result."""
        if not fetch.transfer.wait_ended(deadline):
            return self._lost(fetch.blocks[0], Miss(MissReason.DEADLINE, "its load takes too long"))
        loaded = _loaded_blocks(fetch)
        with self._runner.lock:
            if loaded < len(fetch.blocks) and not self._runner.wait_for_readers(deadline):
                return self._lost(fetch.blocks[loaded], Miss(MissReason.DEADLINE, "its load failed, and others read"))
            if fetch in self.absent.fetches:
                self._settle(fetch, loaded)
        result = fetch.transfer.result()
        if result.blocks == len(fetch.blocks):
            return None
        return self._lost(fetch.blocks[result.blocks], result.miss or Miss(MissReason.DEADLINE, "its load failed"))

    def valid(self, loan: BorrowedBlocks) -> bool:
        """Whether what was read of a loan counts. If not, its blocks are absent. The caller is still `reading`: as soon
        as no thread is, a sweep may close the loan, and then BorrowedBlocks.valid raises."""
        if loan.valid():
            return True
        with self._runner.lock:
            self.absent.lost(loan)
        return False

    def sweep(self) -> None:
        """Returns loans that are not used any more, and ends loads that have ended. Does nothing while attention
        reads."""
        with self._runner.lock:
            if self._runner.readers:
                return
            self.settle()
            ended = self.absent.sweep()
        for loan in ended:
            loan.close()

    def settle(self) -> bool:
        """Puts what has been loaded into the resident set. Returns whether a load had ended. Called in the lock, while
        nothing reads."""
        ended = [fetch for fetch in self.absent.fetches if fetch.transfer.done()]
        for fetch in ended:
            self._settle(fetch, _loaded_blocks(fetch))
        return bool(ended)

    # ------------------------------------------------------------------------------------------- helpers

    def _find(self, blocks: Sequence[SequenceBlock], deadline: Deadline) -> list[BlockRun]:
        """Returns where these absent blocks lie. Raises LostTokens."""
        return list(self._prepared(blocks, deadline, hold=False))

    def _prepared(
        self, blocks: Sequence[SequenceBlock], deadline: Deadline, *, hold: bool = True
    ) -> Iterator[BlockRun]:
        """Yields these absent blocks in their order, as many at a time as one ticket has. Raises LostTokens."""
        left = list(blocks)
        while left:
            private = left[0].private
            count = next((at for at, block in enumerate(left) if block.private != private), len(left))
            chunk = left[: min(count, limits.BLOCKS_PER_CALL)]
            spec = self._private_spec if private else self._spec
            ticket = self._prepare(spec, chunk, deadline, hold=hold)
            left = left[ticket.blocks :]
            yield spec, chunk[: ticket.blocks], ticket

    def _prepare(self, spec: KVSpec, blocks: Sequence[SequenceBlock], deadline: Deadline, *, hold: bool) -> Ticket:
        """Returns a ticket for some leading blocks of these, at least one. Raises LostTokens."""
        names = [block.name for block in blocks if block.name is not None]
        need = Need(self._parts, max(self._accept, *(block.loss for block in blocks)))
        ticket = self._tickets.prepare(spec, names, need, deadline, hold=hold)
        if not ticket.blocks:  # perhaps it was stored, and its shard has not reported it yet
            ticket.release()
            self._runner.flush_shards(deadline)
            ticket = self._tickets.prepare(spec, names, need, deadline, hold=hold)
        if not ticket.blocks:
            ticket.release()
            raise self._lost(blocks[0], ticket.miss or Miss(MissReason.NEVER_SEEN))
        return ticket

    def _borrow(
        self, spec: KVSpec, blocks: Sequence[SequenceBlock], ticket: Ticket, deadline: Deadline
    ) -> list[SequenceBlock]:
        """Borrows what can be borrowed, and returns the other blocks."""
        loan = self._borrower.borrow(ticket.body, spec, deadline)
        with self._runner.lock:
            others = self.absent.lend(blocks, loan)
        if len(others) == len(blocks):
            loan.close()
        return others

    def _fetch(
        self,
        spec: KVSpec,
        blocks: Sequence[SequenceBlock],
        ticket: Ticket,
        deadline: Deadline,
    ) -> None:
        """Begins to load blocks of a ticket into pages of the resident set, and releases the ticket when that ends.
        Raises before it has begun."""
        runner = self._runner
        with runner.lock:
            pages = runner.with_room(partial(runner.machine.take, len(blocks)), deadline)
        bound = bind(runner.memory.paged(pages), spec, self._parts, len(blocks), writable=True)
        transfer = self._transfers.load(ticket.body, 0, bound, spec, deadline)
        with runner.lock:
            self.absent.fetch(BlockFetch(blocks, pages, transfer, ticket))

    def _fits(self, blocks: int) -> bool:
        with self._runner.lock:
            pages = self._runner.machine.pages
            return blocks * pages.page_bytes <= pages.free_bytes

    def _settle(self, fetch: BlockFetch, loaded: int) -> None:
        self.absent.fetch_ended(fetch)
        for at, (block, page) in enumerate(zip(fetch.blocks, fetch.pages, strict=True)):
            self._runner.machine.placed(block, page, loaded=at < loaded)
        fetch.ticket.release()

    def _lost(self, block: SequenceBlock, miss: Miss) -> LostTokens:
        position = block.depth * self._spec.block_tokens
        return LostTokens(position, f"the block at token {position} of this sequence is lost: {miss}")


def _loaded_blocks(fetch: BlockFetch) -> int:
    """Returns the number of leading blocks that a load, which has ended, has loaded."""
    try:
        return fetch.transfer.result().blocks
    except KVClusterError:
        return 0
