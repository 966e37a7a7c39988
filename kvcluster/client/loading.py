"""The load job: from a ticket's plan to verified bytes in the caller's memory.

Which pages to read from which shard follows from the ticket alone. Every layer is verified, where it has come to lie,
against the hash that was asked for; one that does not match has not come, and is reported to its shard.

Each shard is read on a thread of its own, since whoever waits for bytes that do not come cannot be woken; this job
waits for all of them at once. What a shard fails to give is looked for on other shards within the same deadline
(retry.py), and so is what it has been silent about for a while, which it may still send if nobody else has it. How
far the load has come stands on one board, under the transfer's gate: it is true at every moment, whoever asks.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcluster.client.control import NO_CALL, NOBODY, Control
from kvcluster.client.pieces import Piece, Pieces, each, layer_counts
from kvcluster.client.results import Loaded
from kvcluster.client.retry import Found, RetryPlan
from kvcluster.client.shards import Shards
from kvcluster.client.transfer import GivenUp, Transfer
from kvcluster.core import limits
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import Explain, Explained, PageKey, ReadRequest, ShardAddress, TicketBody
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.pages import checksum, codec
from kvcluster.transport.seam import Deadline, Payload, Trouble

if TYPE_CHECKING:  # it imports torch, which a client without tensors need not have
    from kvcluster.client.memory import Bound

PATIENCE = 4
"""A shard that sends nothing for this part of the call's time is silent: early enough to read it all from another."""

ASKING = 4
"""Asking where else blocks lie takes this part of the time left at most: what has come must still be told in time."""

READERS = 16
"""Shards that a client reads at once. Each that hangs keeps a thread until its call's deadline."""

_CORRUPT = Miss(MissReason.CORRUPT)
_UNNAMED = NamespaceId(b"")  # filled in by Control


class Board:
    """How far a load has come. Changed under the gate of its transfer; once that is closed it stays as it is."""

    def __init__(self, body: TicketBody, spec: KVSpec, pieces: Pieces) -> None:
        self.layers = layer_counts(each(pieces), spec)
        self.nbytes = 0
        self.why: dict[int, Miss] = {}  # by block, the first thing that went wrong
        self._left = [0] * len(body.hashes)  # layers of pieces that have not come
        for piece in each(pieces):
            self._left[piece.block] += piece.layers
        # A block that fails in a group that is needed only at the end leaves no boundary that is known to be good.
        needed = [group for group, part in enumerate(body.need.parts) if part is not None]
        self._whole_prefix = all(spec.groups[group].reuse.kind == "prefix" for group in needed)

    def came(self, piece: Piece, layers: int, nbytes: int) -> None:
        self._left[piece.block] -= layers
        self.nbytes += nbytes

    def moved(self, block: int, more: int) -> None:
        """So many more layers of pieces are to come, since other pieces stand for one that will not."""
        self._left[block] += more

    def loaded(self, otherwise: Miss) -> Loaded:
        """The outcome as it stands. `otherwise` is why a block has not come of which nothing else is known."""
        failed = {block: self.why.get(block, otherwise) for block, left in enumerate(self._left) if left}
        if not failed:
            return Loaded(len(self._left), self.nbytes)
        first = min(failed)
        return Loaded(first if self._whole_prefix else 0, self.nbytes, failed[first], failed)


class _Sink:
    """Places and verifies what one shard sends, and knows what it has not sent. Layers of an item come in order.

    What does not verify may lie in the caller's memory, but is never told to have come: its block has failed, unless
    another shard's bytes take the place of these.
    """

    def __init__(self, load: Load, pieces: Sequence[Piece]) -> None:
        self._load = load
        self._pieces = pieces
        self._next = [piece.want.layer_start for piece in pieces]
        self.dropped: dict[int, None] = {}  # items that others bring
        self.corrupt: dict[int, list[tuple[int, int]]] = {}  # by item, the layers that did not match
        self.closed = False
        self._staging = memoryview(b"")
        self.heard_ns = time.monotonic_ns()

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        load, piece = self._load, self._pieces[item]
        part = piece.want.key.part
        layer_bytes = load.spec.layer_bytes(piece.group, part)
        if codec.check_codec(codec_id) is not None or data.nbytes != len(sums) * layer_bytes:
            with load.transfer.gate():
                if self._wanted(item, layer):
                    self._note(item, layer, layer + len(sums), data.nbytes, matches=False)
            return
        identity = checksum.identity(load.body.namespace, piece.want.key, codec_id)
        step = max(1, limits.CHUNK_BYTES // layer_bytes)
        for at in range(0, len(sums), step):
            these = sums[at : at + step]
            if not self._take(item, layer + at, these, identity, data):
                return

    def _take(self, item: int, layer: int, sums: Sequence[int], identity: int, data: Payload) -> bool:
        """Some layers into the caller's memory, and verified there; or first beside it, where it is strided. False
        where others bring them."""
        load, piece, stop = self._load, self._pieces[item], layer + len(sums)
        rect = piece.cut(layer, stop).rect
        nbytes = len(sums) * load.spec.layer_bytes(piece.group, piece.want.key.part)
        place = load.into.place(piece.block, piece.group, rect)
        view = self._beside(nbytes) if place is None else place
        got = 0
        while True:
            with load.transfer.gate():
                if not self._wanted(item, layer):
                    return False
                got += data.read_into(view[got:])
                if got < nbytes:
                    matches = None
                else:
                    matches = checksum.first_mismatch(identity, layer, sums, view) is None
                    if matches and place is None:
                        load.into.put(piece.block, piece.group, rect, view)
                    self._note(item, layer, stop, nbytes, matches=matches)
            if matches is not None:
                break
            data.wait()
        if matches:
            load.transfer.arrived(piece.model_layers(load.spec, layer, stop))
        return True

    def _wanted(self, item: int, layer: int) -> bool:
        """Is it still this sink that brings those layers? Under the gate. Raises GivenUp where nobody wants any."""
        self._load.transfer.check()
        if self.closed:
            raise GivenUp(Miss(MissReason.DEADLINE, "read from elsewhere"))
        self.heard_ns = time.monotonic_ns()
        if item in self.dropped:
            return False
        if layer != self._next[item]:
            raise ProtocolError(f"layer {layer} of a page came where {self._next[item]} belongs")
        return True

    def _note(self, item: int, start: int, stop: int, nbytes: int, *, matches: bool) -> None:
        if matches:
            self._load.board.came(self._pieces[item], stop - start, nbytes)
        else:
            self.corrupt.setdefault(item, []).append((start, stop))
        self._next[item] = stop

    def _beside(self, nbytes: int) -> memoryview:
        if self._staging.nbytes < nbytes:
            self._staging = memoryview(bytearray(nbytes))
        return self._staging[:nbytes]

    def rests(self, item: int) -> Iterator[Piece]:
        """What has not come of an item. Under the gate while its shard may still send."""
        piece = self._pieces[item]
        if item in self.dropped:
            return
        for start, stop in [*self.corrupt.get(item, ()), (self._next[item], piece.want.layer_stop)]:
            if start < stop:
                yield piece.cut(start, stop)

    def drop(self, item: int) -> None:
        """Other pieces stand for what is left of it."""
        self.dropped[item] = None


@dataclass(eq=False, slots=True)
class _Read:
    """One shard being read, and how that ended: an outcome for each piece, or an error."""

    shard: ShardAddress
    pieces: Sequence[Piece]
    sink: _Sink
    looked_elsewhere: bool = False
    abandoned: bool = False  # others bring all that it has not brought
    outcome: list[Miss | None] = field(default_factory=list)
    error: BaseException | None = None

    def why(self, item: int) -> Miss:
        """Why what is left of an item has not come."""
        if item in self.sink.corrupt:
            return _CORRUPT
        if isinstance(self.error, Trouble):
            return self.error.miss
        return self.outcome[item] or Miss(MissReason.SHARD_LOST, "the shard sent less than it promised")


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
        self.spec = spec
        self.body = body
        self.into = into
        self.board = board
        self.transfer = transfer
        self._control = control
        self._shards = shards
        self._readers = readers
        self._next_attempt = next_attempt
        self._deadline = deadline
        self._plan = RetryPlan(body.hashes, parts, body.need.accept)
        self._reads: list[_Read] = []
        self._ended: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()  # None: look at the transfer

    def run(self, pieces: Pieces) -> Loaded:
        """Reads all of it, or what can be had, and says how far the prefix is valid.

        Raises Trouble where nobody waits any more, and what a shard's answer showed to be a mistake.
        """
        patience_ns = int(self._deadline.remaining_s() * 1e9) // PATIENCE
        self.transfer.on_cancel(lambda: self._ended.put(None))
        try:
            self._start(pieces)
            while self._reads:
                read = self._wait(patience_ns)
                if read is None:
                    self.transfer.check()
                    for silent in self._silent(patience_ns):
                        self._hurry(silent)
                elif read in self._reads:
                    self._reads.remove(read)
                    self._settle(read)
        finally:
            self.transfer.on_cancel(lambda: None)  # so that nothing of this job is kept by what it made
            with self.transfer.gate():
                for left in self._reads:
                    left.sink.closed = True
            for left in self._reads:
                self._report(left)
            self._reads.clear()
        return self.board.loaded(Miss(MissReason.SHARD_LOST))

    # ----------------------------------------------------------------------------------------- reading

    def _start(self, pieces: Pieces) -> None:
        attempt = self._next_attempt()
        for shard, of_shard in pieces.items():
            read = _Read(shard, of_shard, _Sink(self, of_shard))
            self._reads.append(read)
            self._readers.submit(self._drive, read, attempt)

    def _drive(self, read: _Read, attempt: Attempt) -> None:
        """On a reader's thread: one shard, from its pin to its last byte."""
        wants = tuple(piece.want for piece in read.pieces)
        request = ReadRequest(self.body.namespace, attempt, read.shard.epoch, wants)
        try:
            progress = self._shards.read(
                read.shard, self.spec, request, read.sink, self._deadline, abandoned=lambda: read.abandoned
            )
            read.outcome = _to_its_end(progress)
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
            self.transfer.check()
        if read.error is not None and not isinstance(read.error, Trouble):
            raise read.error
        self._report(read)
        missing = [(item, rest) for item in range(len(read.pieces)) for rest in read.sink.rests(item)]
        for item, rest in missing:
            self.board.why.setdefault(rest.block, read.why(item))
        rests = [rest for _, rest in missing]
        found = self._look(read.shard, rests)
        moved: Pieces = {}
        with self.transfer.gate():
            for rest in rests:
                self._move(rest, found, moved)
        self._start(moved)

    def _hurry(self, read: _Read) -> None:
        """Of a silent shard's pieces others bring what they have. What nobody else has is still waited for."""
        read.looked_elsewhere = True
        with self.transfer.gate():
            rests = [rest for item in range(len(read.pieces)) for rest in read.sink.rests(item)]
        found = self._look(read.shard, rests)
        moved: Pieces = {}
        with self.transfer.gate():
            waiting = False
            for item in range(len(read.pieces)):
                rests = list(read.sink.rests(item))
                if rests and all(self._plan.elsewhere(rest, found) for rest in rests):
                    read.sink.drop(item)
                    for rest in rests:
                        self._move(rest, found, moved)
                        silent = Miss(MissReason.DEADLINE, f"{read.shard.shard} is silent")
                        self.board.why.setdefault(rest.block, silent)
                waiting = waiting or bool(rests and item not in read.sink.dropped)
            read.abandoned = read.sink.closed = not waiting
        if read.abandoned:
            self._reads.remove(read)
            self._shards.blame(read.shard, Miss(MissReason.DEADLINE, f"{read.shard.shard} is silent"))
            self._report(read)
        self._start(moved)

    def _look(self, shard: ShardAddress, rests: Sequence[Piece]) -> Found:
        """Where else these lie. Nobody who could be asked, or no time to: nowhere."""
        self._plan.failed(shard.shard, rests)
        found: Found = {}
        deadline = self._deadline.share(ASKING)
        for question in self._plan.questions(rests):
            explain = Explain(NO_CALL, NOBODY, _UNNAMED, question.hashes, question.need)
            try:
                explained = self._control.ask(Explained, self.spec, explain, deadline)
            except KVClusterError:  # what has come stays known, and so does why the rest has not
                break
            found |= self._plan.found(question, explained.fates)
        return found

    def _move(self, rest: Piece, found: Found, moved: Pieces) -> None:
        """Puts other pieces in place of this one, if there are any. Under the gate."""
        placed = self._plan.elsewhere(rest, found)
        if placed is None:
            return
        more = layer_counts((piece for _, piece in placed), self.spec)
        more = {layer: count - 1 for layer, count in more.items()}  # one is `rest` itself
        self.board.moved(rest.block, sum(piece.layers for _, piece in placed) - rest.layers)
        self.transfer.expect(more.items())
        for shard, piece in placed:
            moved.setdefault(shard, []).append(piece)

    def _report(self, read: _Read) -> None:
        """Tells a shard which of its pages did not match here. Nobody waits for that."""
        keys = dict.fromkeys(read.pieces[item].want.key for item in read.sink.corrupt)
        if keys:
            suspects: list[PageKey] = list(keys)[: limits.SUSPECTS_PER_CALL]
            shard, namespace = read.shard, self.body.namespace
            self._readers.submit(self._shards.suspect, shard, self.spec, namespace, suspects, self._deadline)


def _to_its_end(progress: Generator[None, None, list[Miss | None]]) -> list[Miss | None]:
    while True:
        try:
            next(progress)
        except StopIteration as end:
            outcome: list[Miss | None] = end.value
            return outcome
