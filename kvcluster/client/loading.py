"""The load job: from a ticket's plan to verified bytes in the caller's memory.

Which pages to read from which shard follows from the ticket alone. Each shard is read on a thread of its own, or on a
few where its transport is faster so: whoever waits for bytes that do not come cannot be woken, and while one waits
others verify and copy. This job waits for all of them at once. What bytes go through is sink.py; how far the load has
come stands on one board (board.py).

What a read fails to give is looked for on other shards within the same deadline (retry.py), and so is what it has been
silent about for a while, which it may still bring if nobody else has it. Layers that did not match their checksums are
read from elsewhere likewise, and reported to their shard.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvcluster.client.board import Board
from kvcluster.client.control import NO_CALL, NOBODY, Control
from kvcluster.client.memory import Bound
from kvcluster.client.pieces import Piece, Pieces
from kvcluster.client.results import Loaded
from kvcluster.client.retry import Found, RetryPlan
from kvcluster.client.shards import Shards
from kvcluster.client.shares import share_out
from kvcluster.client.sink import Sink
from kvcluster.client.transfer import GivenUp, Transfer
from kvcluster.core import limits
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import Explain, Explained, PageKey, ReadRequest, ShardAddress, TicketBody, Tier
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import KVClusterError
from kvcluster.transport.seam import Deadline, Trouble, to_its_end

PATIENCE = 4
"""A shard that sends nothing for this part of the call's time is silent: early enough to read it all from another."""

ASKING = 4
"""Asking where else blocks lie takes this part of the time left at most: what has come must still be told in time."""

READERS = 32
"""Exchanges by which a client reads at once: sixteen shards, by two streams each. Threads are started as they are
needed, and each that hangs is kept until its call's deadline."""

_CORRUPT = Miss(MissReason.CORRUPT)
_UNNAMED = NamespaceId(b"")  # filled in by Control


@dataclass(eq=False, slots=True)
class _Read:
    """One exchange with a shard, and how it ended: an outcome for each piece, or an error."""

    shard: ShardAddress
    pieces: Sequence[Piece]
    sink: Sink
    looked_elsewhere: bool = False
    abandoned: bool = False  # others bring all that it has not brought
    outcome: list[Miss | None] = field(default_factory=list)
    error: BaseException | None = None

    def why(self, item: int) -> Miss:
        """Why what is left of an item has not come."""
        if item in self.sink.unreadable:
            return self.sink.unreadable[item]
        if item in self.sink.corrupt:
            return _CORRUPT
        if isinstance(self.error, Trouble):
            return self.error.miss
        return self.outcome[item] or Miss(MissReason.SHARD_LOST, "the shard sent less than it promised")

    def has_lost_more(self, item: int) -> bool:
        """Is an item there, but with more loss than was to be expected?"""
        miss = self.outcome[item] if self.outcome else None
        return miss is not None and miss.reason is MissReason.LOSSY


class Load:
    """One load. `run` belongs to the client's loading thread."""

    def __init__(
        self,
        control: Control,
        shards: Shards,
        readers: Executor,
        spec: KVSpec,
        body: TicketBody,
        parts: Sequence[Part | None],
        into: Bound,
        board: Board,
        transfer: Transfer[Loaded],
        next_attempt: Callable[[], Attempt],
        deadline: Deadline,
    ) -> None:
        self._spec = spec
        self._body = body
        self._into = into
        self._board = board
        self._transfer = transfer
        self._control = control
        self._shards = shards
        self._readers = readers
        self._next_attempt = next_attempt
        self._deadline = deadline
        self._decodes = any(
            source.loss is Loss.Q4 and source.tier > Tier.DEVICE
            for run in body.runs
            for group in run.plan
            for source in group or ()
        )
        self._plan = RetryPlan(body.hashes, parts, body.need.accept)
        self._reads: list[_Read] = []
        self._ended: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()  # None: look at the transfer

    def run(self, pieces: Pieces) -> Loaded:
        """Reads all of it, or what can be had, and says how far the prefix is valid.

        Raises Trouble where nobody waits any more, and what a shard's answer showed to be a mistake.
        """
        patience_ns = int(self._deadline.remaining_s() * 1e9) // PATIENCE
        self._transfer.on_cancel(lambda: self._ended.put(None))
        try:
            self._start(pieces)
            while self._reads:
                read = self._wait(patience_ns)
                if read is None:
                    self._transfer.check()
                    for silent in self._silent(patience_ns):
                        self._hurry(silent)
                elif read in self._reads:
                    self._reads.remove(read)
                    self._settle(read)
        finally:
            self._transfer.on_cancel(lambda: None)  # so that nothing of this job is kept by what it made
            for left in self._reads:
                with left.sink.gate:
                    left.sink.close()
                self._report(left)
            self._reads.clear()
        return self._board.loaded(Miss(MissReason.SHARD_LOST))

    # ----------------------------------------------------------------------------------------- reading

    def _start(self, pieces: Pieces) -> None:
        spare = READERS - len(self._reads)
        started: list[_Read] = []
        for shard, of_shard in pieces.items():
            streams = self._shards.streams(shard)
            most = min(streams.decoding if self._decodes else streams.loads, spare // len(pieces))
            sizes = [piece.nbytes(self._spec) for piece in of_shard]
            for run in share_out(sizes, most):
                share = of_shard[run.start : run.stop]
                sink = Sink(self._body.namespace, self._spec, self._into, share, self._board, self._transfer)
                started.append(_Read(shard, share, sink))
        self._reads += started
        for read in started:
            self._readers.submit(self._drive, read)

    def _drive(self, read: _Read) -> None:
        """On a reader's thread: one exchange, from its pin to its last byte."""
        wants = tuple(piece.want for piece in read.pieces)
        # An attempt of its own: the shard keeps one lease an attempt.
        request = ReadRequest(self._body.namespace, self._next_attempt(), read.shard.epoch, wants, self._board.loss)
        try:
            progress = self._shards.read(
                read.shard, self._spec, request, read.sink, self._deadline, abandoned=lambda: read.abandoned
            )
            read.outcome = to_its_end(progress)
        except Trouble as trouble:
            read.error = trouble.with_traceback(None)  # its frames would keep the caller's memory
        except BaseException as error:
            read.error = error
        self._ended.put(read)

    def _wait(self, patience_ns: int) -> _Read | None:
        """A read that has ended; None where it is time to look after the others."""
        due = [read.sink.heard_ns + patience_ns for read in self._reads if not read.looked_elsewhere]
        wait_ns = min([self._deadline.at_ns, *due]) - time.monotonic_ns()
        try:
            return self._ended.get(timeout=max(0, wait_ns) / 1e9)
        except queue.Empty:
            return None

    def _silent(self, patience_ns: int) -> list[_Read]:
        now = time.monotonic_ns()
        return [r for r in self._reads if not r.looked_elsewhere and r.sink.heard_ns + patience_ns <= now]

    # ---------------------------------------------------------------------------------- what did not come

    def _settle(self, read: _Read) -> None:
        """A read has ended: what it did not bring comes from elsewhere, or is why its block failed."""
        if isinstance(read.error, GivenUp):
            self._transfer.check()
        if read.error is not None and not isinstance(read.error, Trouble):
            raise read.error
        self._report(read)
        missing = [(item, rest) for item in range(len(read.pieces)) for rest in read.sink.rests(item)]
        for item, rest in missing:
            self._board.failed(rest.block, read.why(item))
        # What has lost more since the ticket was made is there all the same, and its shard is to say so.
        lossy = [rest for item, rest in missing if read.has_lost_more(item)]
        gone = [rest for item, rest in missing if not read.has_lost_more(item)]
        found = self._look(read.shard, gone) | self._look(None, lossy)
        moved: Pieces = {}
        for _, rest in missing:
            self._move(rest, found, moved)
        self._start(moved)

    def _hurry(self, read: _Read) -> None:
        """Of a silent exchange's pieces others bring what they have. What nobody else has is still waited for."""
        read.looked_elsewhere = True
        sink, items = read.sink, range(len(read.pieces))
        with sink.gate:
            rests = [rest for item in items for rest in sink.rests(item)]
        found = self._look(read.shard, rests)
        silent = Miss(MissReason.DEADLINE, f"{read.shard.shard} is silent")
        moved: Pieces = {}
        waiting = False
        with sink.gate:
            for item in items:
                rests = list(sink.rests(item))
                if rests and all(self._plan.elsewhere(rest, found) for rest in rests):
                    sink.drop(item)
                    for rest in rests:
                        self._move(rest, found, moved)
                        self._board.failed(rest.block, silent)
                else:
                    waiting = waiting or bool(rests)
            read.abandoned = not waiting
            if read.abandoned:
                sink.close()
        if read.abandoned:
            self._reads.remove(read)
            self._shards.blame(read.shard, silent)
            self._report(read)
        self._start(moved)

    def _look(self, shard: ShardAddress | None, rests: Sequence[Piece]) -> Found:
        """Where these lie, but on that shard, which has failed. Nobody who could be asked, or no time to: nowhere."""
        if shard is not None:
            self._plan.failed(shard.shard, rests)
        found: Found = {}
        deadline = self._deadline.share(ASKING)
        for question in self._plan.questions(rests):
            explain = Explain(NO_CALL, NOBODY, _UNNAMED, question.hashes, question.need)
            try:
                explained = self._control.ask(Explained, self._spec, explain, deadline)
            except KVClusterError:  # what has come stays known, and so does why the rest has not
                break
            found |= self._plan.found(question, explained.fates)
        for sources in found.values():
            self._board.found(max((source.loss for source in sources), default=Loss.EXACT))
        return found

    def _move(self, rest: Piece, found: Found, moved: Pieces) -> None:
        """Puts other pieces in its place, if there are any. Under the gate of a sink that may still bring it."""
        placed = self._plan.elsewhere(rest, found)
        if placed is None:
            return
        self._board.moved(rest, (piece for _, piece in placed))
        for shard, piece in placed:
            moved.setdefault(shard, []).append(piece)

    def _report(self, read: _Read) -> None:
        """Tells a shard which of its pages did not match here. Nobody waits for that."""
        suspect = (item for item in read.sink.corrupt if item not in read.sink.unreadable)
        keys = dict.fromkeys(read.pieces[item].want.key for item in suspect)
        if keys:
            suspects: list[PageKey] = list(keys)[: limits.SUSPECTS_PER_CALL]
            shard, namespace = read.shard, self._body.namespace
            self._readers.submit(self._shards.suspect, shard, self._spec, namespace, suspects, self._deadline)
