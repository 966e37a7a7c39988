"""Borrowing: reads a ticket's blocks in place in the arenas of this host's shards, without a copy.

For callers that compute attention over pages in place. A page is available exactly as it lies, raw or encoded, or not
at all: it is not looked for on another shard, decoded, gathered from several pages, or copied. Other pages can be
loaded as usual.

Bytes that are read in place can be verified only beforehand. The pin leases of the shards keep them unchanged; the
borrower renews these while the blocks are open, but they may still end. So a result computed from them counts only
after `valid` has returned True.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import ReadRequest, ShardAddress, TicketBody
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.runtime.uninterrupted import uninterrupted, without_interrupt
from kvcluster.transfers.layouts import check_open
from kvcluster.transfers.lease_keeper import LeaseKeeper
from kvcluster.transfers.pieces import Piece, PieceList, Pieces, each, plan_pieces
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.unpicklable import Unpicklable
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.forks import OwnProcess
from kvcluster.transport.shm_views import BorrowedPages, NotLent

if TYPE_CHECKING:
    from kvcluster.transfers.tensors import Tensor

_RENEW_MS = 200
"""Time for writing a few bytes to a socket. If that takes longer, the shard has stopped reading."""

Place = tuple[int, int]
"""A block and a group."""

CodedView = tuple[memoryview, Codec]
"""Bytes of a page, and how they are encoded."""

_ENCODED = Miss(MissReason.LOSSY, "it lies there encoded, and what is borrowed is not decoded: load it")


@dataclass(frozen=True, slots=True)
class Loans:
    """The pages that borrowed blocks lie in. `end` gives them back; `abandon` is called instead if the blocks are
    collected before. That must not wait; it returns whether pages were still borrowed."""

    pages: Sequence[BorrowedPages]
    end: Callable[[], object]
    abandon: Callable[[], bool]


class BorrowedBlocks(Unpicklable):
    """Blocks of a ticket in place in shared memory. Made by `client.borrow`; thread-safe; a context manager.

    Compute from pages or tensors within the `with` block, then call `valid`, and discard the result if it is False:

        with client.borrow(ticket) as blocks:
            result = attend(query, [blocks.tensor(i) for i in range(blocks.blocks)])
            if not blocks.valid():
                result = recompute(query)

    The leases are renewed until the `with` block ends and releases the pages; neither page nor tensor may be used after
    it. One that is collected without `close` is closed then, with a ResourceWarning, whatever views of it are left. A
    forked child must not touch them: it does not have the memory mapped, and would end (SIGSEGV).
    """

    instead = "pass bytes(ticket), and borrow there"

    keeps: object = None
    """What must not be collected before this."""

    def __init__(
        self,
        body: TicketBody,
        spec: KVSpec,
        parts: Sequence[Part | None],
        *,
        loans: Loans,
        views: Mapping[Place, CodedView],
        misses: Mapping[int, Miss],
        deadline: Callable[[float | None], Deadline],
    ) -> None:
        self._process = OwnProcess()
        self.blocks = len(body.hashes)
        self._spec = spec
        self._parts = parts
        self._loans = loans.pages
        self._views = views
        self._misses = misses
        self._deadline = deadline
        self._end = loans.end
        self._lock = threading.Lock()
        self._ended = False
        self._unclosed = weakref.finalize(self, _collected, loans.abandon, self.blocks)
        self._unclosed.atexit = False

    def __repr__(self) -> str:
        state = "released" if self._ended else f"{self.blocks - len(self._misses)} in place"
        return f"<BorrowedBlocks: {self.blocks} blocks, {state}>"

    def page(self, block: int, group: int = 0) -> memoryview | None:
        """Returns the bytes of this client's part of a block, read-only, in page layout: `[layers, planes,
        block_tokens, heads, dim]`. None if they are not available in place (see `why`), or the group does not need this
        block.

        After `close` the view is released: using it raises ValueError.
        """
        found = self.coded_page(block, group)
        return found[0] if found is not None and found[1] is Codec.RAW else None

    def coded_page(self, block: int, group: int = 0) -> CodedView | None:
        """Returns what `page` returns, or, if the page lies there encoded, its encoded bytes; with the codec
        (docs/codecs.md). For attention that decodes as it reads."""
        self._part(block, group)
        return self._views.get((block, group))

    def tensor(self, block: int, group: int = 0) -> Tensor | None:
        """Returns the bytes of `page`, without a copy, as a tensor `[layers, planes, block_tokens, heads, dim]` of the
        spec's dtype. Raises CallerError if the group's planes do not make one tensor: use `page` then.

        The tensor must not be written. torch has no read-only tensors, so it does not refuse a write, but the memory is
        mapped read-only, and a write ends the process (SIGSEGV) without changing the page. After `close` reads are not
        refused either, and return what the shard has written there since. The process keeps the mapping, and with it
        the memory of a shard that has ended, until the last such tensor is freed.
        """
        part = self._part(block, group)
        try:
            from kvcluster.transfers.tensors import page_tensor
        except ModuleNotFoundError:
            raise CallerError("without torch installed there are no tensors; use page(block)") from None
        return page_tensor(self._spec, group, part, self.page(block, group))

    def why(self, block: int) -> Miss | None:
        """Returns why not all of this block is available in place, raw; None if it is. `shard_lost` also stands for a
        shard that is not reached over shared memory; `part` for pages that do not hold exactly these heads and
        layers."""
        self._check_block(block)
        return self._misses.get(block)

    def valid(self, deadline_ms: float | None = None) -> bool:
        """Whether every view was that of its page until now. Call it when the computation is over. It asks each shard
        one question. False if a shard does not confirm by the deadline; from then on always False."""
        loans = self._loans  # read before the check: `close` empties it, and an empty list would count as valid
        self._check_open()
        deadline = self._deadline(deadline_ms)
        return uninterrupted(lambda call: all(loan.valid(deadline) for loan in loans))

    def close(self) -> None:
        """Releases the pages. May be called again. In a forked child it does nothing."""
        if not self._process.forked:
            uninterrupted(lambda call: self._close())

    def _close(self) -> None:
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self._unclosed.detach()
            self._end()
            self._views, self._loans = {}, ()  # so that a reference to this object keeps no memory

    def __enter__(self) -> BorrowedBlocks:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _part(self, block: int, group: int) -> Part:
        self._check_open()
        self._check_block(block)
        if type(group) is not int or not 0 <= group < len(self._parts):
            raise CallerError(f"there is no group {group!r}; the spec has {len(self._parts)}, counted from 0")
        part = self._parts[group]
        if part is None:
            raise CallerError(f"this client holds no part of group {group}; connect with one that does")
        return part

    def _check_block(self, block: int) -> None:
        if type(block) is not int or not 0 <= block < self.blocks:
            raise CallerError(f"there is no block {block!r}; the ticket has {self.blocks}, counted from 0")

    def _check_open(self) -> None:
        self._process.check("object")
        if self._ended:
            raise CallerError("these blocks were released: use them within the `with` block, or borrow them again")


def _collected(abandon: Callable[[], bool], blocks: int) -> None:
    """Borrowed blocks were collected that were not closed. Their client may have closed them."""
    if abandon():
        text = f"{blocks:,} borrowed blocks were not closed: close them, or open them by `with`"
        warnings.warn(text, ResourceWarning, stacklevel=2)


class Borrower:
    """The blocks that one client has borrowed and not released; thread-safe. One thread renews their leases, and waits
    for no shard. It is not the thread of the tickets, which may have to wait for the coordinator."""

    def __init__(
        self,
        shards: ShardConnections,
        parts: tuple[Part | None, ...],
        *,
        next_attempt: Callable[[], Attempt],
        deadline: Callable[[float | None], Deadline],
    ) -> None:
        self._shards = shards
        self._parts = parts
        self._next_attempt = next_attempt
        self._deadline = deadline
        self._keeper = LeaseKeeper(self._renew, self._released)
        self._loans: dict[Attempt, BorrowedPages] = {}
        self._open: dict[ExitStack, weakref.ref[BorrowedBlocks]] = {}
        self._stacks: dict[Attempt, ExitStack] = {}  # of the open ones
        self._lock = threading.Lock()
        self._closed = False

    @without_interrupt(BorrowedBlocks.close)
    def borrow(self, body: TicketBody, spec: KVSpec, deadline: Deadline) -> BorrowedBlocks:
        """As Client.borrow. Shards are asked one after another, none for longer than its share of the time."""
        pieces = plan_pieces(body, spec, self._parts)
        whole, misses = _whole_pages(pieces, self._parts)
        views: dict[Place, CodedView] = {}
        loans: dict[Attempt, BorrowedPages] = {}
        asks = [
            (shard, every[at : at + limits.READ_PAGES])
            for shard, every in whole.items()
            for at in range(0, len(every), limits.READ_PAGES)
        ]
        with ExitStack() as stack:
            for asked, (shard, of_shard) in enumerate(asks):
                share = deadline.share(len(asks) - asked)
                attempt = self._next_attempt()
                taken = self._take(attempt, shard, spec, body, of_shard, share, stack)
                if isinstance(taken, Miss):
                    misses = dict.fromkeys((piece.block for piece in of_shard), taken) | misses
                    continue
                loans[attempt] = taken
                for piece, view, coded, miss in zip(of_shard, taken.views, taken.codecs, taken.outcome, strict=True):
                    if view is not None:
                        views[piece.block, piece.group] = view, coded
                    why = _ENCODED if coded is not Codec.RAW else miss
                    if why is not None:
                        misses.setdefault(piece.block, why)
                self._report(shard, spec, body.namespace, of_shard, taken.outcome, share)
            held = stack.pop_all()
            stack.callback(held.close)
            blocks = BorrowedBlocks(
                body,
                spec,
                self._parts,
                loans=Loans(
                    [*loans.values()],
                    end=partial(self._give_back, held),
                    abandon=partial(self._keeper.abandon, [*loans]),
                ),
                views=views,
                misses=misses,
                deadline=self._deadline,
            )
            with self._lock:
                check_open(self._closed)
                self._open[held] = weakref.ref(blocks)
                self._stacks.update(dict.fromkeys(loans, held))
                stack.pop_all()
        return blocks

    def close(self) -> None:
        """Releases everything, and ends the thread."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for held in left:
            blocks = self._open[held]()
            if blocks is not None:
                blocks.close()
            self._give_back(held)
        self._keeper.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _take(
        self,
        attempt: Attempt,
        shard: ShardAddress,
        spec: KVSpec,
        body: TicketBody,
        pieces: Sequence[Piece],
        deadline: Deadline,
        until: ExitStack,
    ) -> BorrowedPages | Miss:
        """Borrows these pages of one shard, and has the lease renewed until the stack `until` is closed. Returns the
        miss if the shard lends none."""
        wants = tuple(piece.want for piece in pieces)
        request = ReadRequest(body.namespace, attempt, shard.epoch, wants, body.loss)
        try:
            loan = self._shards.borrow(shard, spec, request, deadline, until=until)
        except NotLent as why:
            return Miss(MissReason.SHARD_LOST, f"{shard.shard} is not reached over shared memory: {why}")
        except Unavailable as trouble:
            return trouble.miss
        with self._lock:
            self._loans[attempt] = loan
        until.callback(self._forget, attempt)
        self._keeper.keep(attempt, loan.lease_ttl_ns)
        return loan

    def _report(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        namespace: NamespaceId,
        pieces: Sequence[Piece],
        outcome: Sequence[Miss | None],
        deadline: Deadline,
    ) -> None:
        """Reports to the shard which of its pages did not match their checksums, as loads do."""
        corrupt = [
            piece.want.key
            for piece, miss in zip(pieces, outcome, strict=True)
            if miss is not None and miss.reason is MissReason.CORRUPT
        ]
        if corrupt:
            self._shards.suspect(shard, spec, namespace, corrupt[: limits.SUSPECTS_PER_CALL], deadline)

    def _renew(self, attempt: Attempt) -> bool:
        with self._lock:
            loan = self._loans.get(attempt)
        return loan is not None and loan.renew(Deadline.after_ms(_RENEW_MS))

    def _forget(self, attempt: Attempt) -> None:
        self._keeper.release(attempt)
        with self._lock:
            del self._loans[attempt]

    def _released(self, attempt: Attempt) -> bool:
        """Gives back the pages of blocks that were collected. Does nothing for closed ones, which have given theirs
        back."""
        with self._lock:
            held = self._stacks.get(attempt)
        if held is not None:
            self._give_back(held)
        return True

    def _give_back(self, held: ExitStack) -> None:
        with self._lock:
            self._open.pop(held, None)
            for attempt in [attempt for attempt, stack in self._stacks.items() if stack is held]:
                del self._stacks[attempt]
        held.close()


def _whole_pages(pieces: Pieces, parts: Sequence[Part | None]) -> tuple[Pieces, dict[int, Miss]]:
    """Returns those of a load's pieces that alone are a worker's part of their block: all its heads and no others, and
    all its layers; and for each block with a group that has no such piece, the miss."""
    whole: Pieces = {}
    for shard, of_shard in pieces.items():
        kept = [piece for piece in of_shard if piece.rect == parts[piece.group]]
        if kept:
            whole[shard] = PieceList.of(kept)
    there = {(piece.block, piece.group) for piece in each(whole)}
    misses = {
        piece.block: Miss(MissReason.PART, f"no single page holds exactly {parts[piece.group]} of group {piece.group}")
        for piece in each(pieces)
        if (piece.block, piece.group) not in there
    }
    return whole, misses
