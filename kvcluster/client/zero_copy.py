"""Borrowing: a ticket's blocks read where they lie in the arenas of this host's shards, without a copy.

For who attends over pages in place. A page is had as it lies or not at all: nothing is looked for on another shard,
decoded, gathered from several pages, or copied. What is not to be had so can be loaded as ever.

Bytes that are read in place can be verified beforehand only. That they stayed those of their pages rests on the pin
leases of the shards, which the borrower renews while the blocks are open, and which may end all the same. So what was
computed from them counts when `valid` has said so afterwards, and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvcluster.client.lease_keeper import LeaseKeeper
from kvcluster.client.pieces import Piece, Pieces, each, plan_pieces
from kvcluster.client.shard_connections import ShardConnections
from kvcluster.core import limits
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import ReadRequest, ShardAddress, TicketBody
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.shm_views import BorrowedPages, NotLent

if TYPE_CHECKING:
    from kvcluster.client.tensors import Tensor

_RENEW_MS = 200
"""To hand a few bytes to the system. A shard that has not taken what it was sent before has stopped."""

Place = tuple[int, int]
"""A block and a group."""


class BorrowedBlocks:
    """Blocks of a ticket where they lie in shared memory. Made by `client.borrow`; thread-safe; a context manager.

    Compute from pages or tensors within the block, then ask `valid`, and throw the result away where it says no:

        with client.borrow(ticket) as blocks:
            out = attend(query, [blocks.tensor(i) for i in range(blocks.blocks)])
            if not blocks.valid():
                ...

    The leases are renewed until the block ends and gives the pages back; neither page nor tensor may be used after it.
    Nor may a child that is forked touch them: it does not have the memory, and would end (SIGSEGV).
    """

    def __init__(
        self,
        body: TicketBody,
        spec: KVSpec,
        parts: Sequence[Part | None],
        *,
        loans: Sequence[BorrowedPages],
        views: Mapping[Place, memoryview],
        misses: Mapping[int, Miss],
        deadline: Callable[[float | None], Deadline],
        end: Callable[[BorrowedBlocks], object],
    ) -> None:
        self.blocks = len(body.hashes)
        self._spec = spec
        self._parts = parts
        self._loans = loans
        self._views = views
        self._misses = misses
        self._deadline = deadline
        self._end = end
        self._lock = threading.Lock()
        self._ended = False

    def page(self, block: int, group: int = 0) -> memoryview | None:
        """Bytes of this client's part of a block, read-only, in page layout: `[layers, planes, block_tokens, heads,
        dim]`. None where they cannot be had so (see `why`), or the group does not need this block.

        After the end the view is released: to use it raises ValueError.
        """
        self._part(block, group)
        return self._views.get((block, group))

    def tensor(self, block: int, group: int = 0) -> Tensor | None:
        """The bytes of `page`, without a copy, as a tensor `[layers, planes, block_tokens, heads, dim]` of the spec's
        dtype. Raises CallerError where the group's planes do not make one tensor: take `page` then.

        It must not be written. torch knows no read-only tensors, so nothing refuses it: the memory is mapped for
        reading only, and a write ends the process (SIGSEGV). The page stays as it was. After the end nothing refuses
        to read it either, and it shows whatever the shard has put there; until the last such tensor is gone the
        process keeps the mapping, and with it the memory of a shard that has ended.
        """
        part = self._part(block, group)
        try:
            from kvcluster.client.tensors import page_tensor
        except ModuleNotFoundError:
            raise CallerError("without torch installed there are no tensors; take page(block)") from None
        return page_tensor(self._spec, group, part, self._views.get((block, group)))

    def why(self, block: int) -> Miss | None:
        """Why not all of this block can be had so; None where it can. `shard_lost` stands for a shard that is reached
        over something else, too; `part` for pages that do not hold just these heads, or not all of these layers."""
        self._check_block(block)
        return self._misses.get(block)

    def valid(self, deadline_ms: float | None = None) -> bool:
        """Was every view that of its page until now? To be asked when the computation is over. One question to each
        shard; False where one does not say so by the deadline, and from then on."""
        loans = self._loans  # before it is known to be open: at the end there are none, who would all be valid
        self._check_open()
        deadline = self._deadline(deadline_ms)
        return all(loan.valid(deadline) for loan in loans)

    def close(self) -> None:
        """Gives the pages back. May be called again."""
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self._end(self)
            self._views, self._loans = {}, ()  # so that whoever keeps this keeps no memory

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
        if self._ended:
            raise CallerError("these blocks were given back: use them within the `with` block, and borrow them again")


class Borrower:
    """What one client has borrowed and not given back; thread-safe. One thread renews all of it, and waits for no
    shard: it is another than that of the tickets, which may have to wait for the coordinator."""

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
        self._keeper = LeaseKeeper(self._renew, lambda attempt: True)  # whoever releases a loan has ended it
        self._loans: dict[Attempt, BorrowedPages] = {}
        self._open: dict[BorrowedBlocks, ExitStack] = {}
        self._lock = threading.Lock()
        self._closed = False

    def borrow(self, body: TicketBody, spec: KVSpec, deadline: Deadline) -> BorrowedBlocks:
        """As Client.borrow. Shards are asked one after another, none for longer than its share of the time."""
        pieces = plan_pieces(body, spec, self._parts)
        whole, misses = _whole_pages(pieces, self._parts)
        views: dict[Place, memoryview] = {}
        loans: list[BorrowedPages] = []
        with ExitStack() as stack:
            for asked, (shard, of_shard) in enumerate(whole.items()):
                share = deadline.share(len(whole) - asked)
                taken = self._take(shard, spec, body, of_shard, share, stack)
                if isinstance(taken, Miss):
                    misses = dict.fromkeys((piece.block for piece in of_shard), taken) | misses
                    continue
                loans.append(taken)
                for piece, view, miss in zip(of_shard, taken.views, taken.outcome, strict=True):
                    if view is not None:
                        views[piece.block, piece.group] = view
                    elif miss is not None:
                        misses.setdefault(piece.block, miss)
                self._report(shard, spec, body.namespace, of_shard, taken.outcome, share)
            blocks = BorrowedBlocks(
                body,
                spec,
                self._parts,
                loans=loans,
                views=views,
                misses=misses,
                deadline=self._deadline,
                end=self._give_back,
            )
            with self._lock:
                if self._closed:
                    raise CallerError("this client is closed; connect again")
                self._open[blocks] = stack.pop_all()
        return blocks

    def close(self) -> None:
        """Gives everything back, and ends the thread."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for blocks in left:
            blocks.close()
        self._keeper.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _take(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        body: TicketBody,
        pieces: Sequence[Piece],
        deadline: Deadline,
        until: ExitStack,
    ) -> BorrowedPages | Miss:
        """These pages of one shard, renewed until that stack is closed; or why there are none."""
        wants = tuple(piece.want for piece in pieces)
        request = ReadRequest(body.namespace, self._next_attempt(), shard.epoch, wants, body.loss)
        try:
            loan = self._shards.borrow(shard, spec, request, deadline, until=until)
        except NotLent as why:
            return Miss(MissReason.SHARD_LOST, f"{shard.shard} is not reached over shared memory: {why}")
        except Unavailable as trouble:
            return trouble.miss
        with self._lock:
            self._loans[request.attempt] = loan
        until.callback(self._forget, request.attempt)
        self._keeper.keep(request.attempt, loan.lease_ttl_ns)
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
        """Tells a shard which of its pages did not match, as loads do."""
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

    def _give_back(self, blocks: BorrowedBlocks) -> None:
        with self._lock:
            stack = self._open.pop(blocks)
        stack.close()


def _whole_pages(pieces: Pieces, parts: Sequence[Part | None]) -> tuple[Pieces, dict[int, Miss]]:
    """Of a load's pieces those that alone are a worker's part of their block: all its heads and no others, and all its
    layers. And for each block of which some are not, why."""
    whole: Pieces = {}
    for shard, of_shard in pieces.items():
        kept = [piece for piece in of_shard if piece.rect == parts[piece.group]]
        if kept:
            whole[shard] = kept
    there = {(piece.block, piece.group) for piece in each(whole)}
    misses = {
        piece.block: Miss(MissReason.PART, f"no one page has just {parts[piece.group]} of group {piece.group}")
        for piece in each(pieces)
        if (piece.block, piece.group) not in there
    }
    return whole, misses
