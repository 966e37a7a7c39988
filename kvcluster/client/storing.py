"""The store job: from the caller's memory to committed pages on the shards that the coordinator chose.

All shards are written at once, each by an exchange on a thread of its own, or by a few where its transport is faster
so; every exchange has whole blocks, gathers them into a buffer of its own, and says what became of them. The source is
free when the last exchange has taken its last byte or ended, long before the shards have committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress

from kvcluster.client.control import NO_CALL, Control
from kvcluster.client.memory import Bound, Staging
from kvcluster.client.results import Stored
from kvcluster.client.shards import Shards
from kvcluster.client.shares import share_out
from kvcluster.client.transfer import Transfer
from kvcluster.core.ids import Attempt, NamespaceId
from kvcluster.core.messages import (
    Decision,
    Done,
    EndTicket,
    NewPage,
    PageKey,
    PrepareStore,
    ShardAddress,
    StoreGrant,
    WriteRequest,
    Written,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.pages import checksum
from kvcluster.pages.codec import RAW
from kvcluster.transport.seam import Deadline, Trouble

WRITERS = 32
"""Exchanges by which a client writes at once: sixteen shards, by two streams each. Those beyond it wait for these."""

_FAREWELL_MS = 1_000
"""A store whose own time is up has all the more reason to say so; nobody waits for it but the next store."""

_MISSES = {
    Written.CORRUPT: Miss(MissReason.CORRUPT, "what arrived did not match its checksum"),
    Written.FULL: Miss(MissReason.FULL),
    Written.LOST: Miss(MissReason.SHARD_LOST, "the shard could not commit"),
}


class _Source:
    """Gathers the pages that one exchange takes, and their checksums: a PageSource."""

    def __init__(
        self,
        spec: KVSpec,
        namespace: NamespaceId,
        pages: Sequence[NewPage],
        blocks: Sequence[int],
        source: Bound,
        transfer: Transfer[Stored],
        on_drained: Callable[[_Source], None],
    ) -> None:
        self._spec = spec
        self._namespace = namespace
        self._pages = pages
        self._blocks = blocks
        self._source = source
        self._transfer = transfer
        self._gate = transfer.gate()
        self._on_drained = on_drained
        self._staging = Staging()
        self._identity = (-1, 0)  # of the last item, since its layers come one after the other
        self.nbytes = 0

    def layer_bytes(self, item: int) -> int:
        key = self._pages[item].key
        return self._spec.layer_bytes(key.group, key.part)

    def send(self, item: int, layer: int, layers: int) -> tuple[Sequence[int], memoryview]:
        with self._gate:
            data = self._get(item, layer, layers)
            return checksum.layer_sums(self._identity[1], layer, layers, data), data

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        with self._gate:
            data = self._get(item, layer, layers)
            return checksum.copy_sums(self._identity[1], layer, layers, into, data)

    def _get(self, item: int, layer: int, layers: int) -> memoryview:
        """Under the gate."""
        self._transfer.check()
        key = self._pages[item].key
        if self._identity[0] != item:
            self._identity = item, checksum.identity(self._namespace, key, RAW)
        first = key.part.layer_start + layer
        data = self._source.get(self._blocks[item], key.group, first, first + layers, self._staging)
        self.nbytes += data.nbytes
        return data

    def drained(self) -> None:
        self._on_drained(self)


class _Write:
    """One exchange with a shard: some blocks, and what gathers them."""

    __slots__ = ("blocks", "request", "shard", "source")

    def __init__(self, shard: ShardAddress, request: WriteRequest, blocks: Sequence[int], source: _Source) -> None:
        self.shard = shard
        self.request = request
        self.blocks = blocks  # for each page the block that it belongs to
        self.source = source


class Store:
    """One store. `run` and `end` belong to the client's storing thread, in this order.

    `prepare.attempt` names the ticket; each lease at a shard gets an attempt of its own. `tally` knows how far it is.
    """

    def __init__(
        self,
        control: Control,
        shards: Shards,
        writers: Executor,
        spec: KVSpec,
        source: Bound,
        tally: Tally,
        transfer: Transfer[Stored],
        next_attempt: Callable[[], Attempt],
        wait_ns: int,
        deadline: Deadline,
    ) -> None:
        self._control = control
        self._shards = shards
        self._writers = writers
        self._spec = spec
        self._source = source
        self._tally = tally
        self._transfer = transfer
        self._next_attempt = next_attempt
        self._wait_ns = wait_ns
        self._deadline = deadline
        self._lock = threading.Lock()
        self._undrained: dict[_Source, None] = {}
        self._ticket: Attempt | None = None  # what the coordinator has still to be told to end

    def run(self, prepare: PrepareStore) -> Stored:
        """Asks what to write, has it written, and says what became of each block. Raises Trouble where nobody could
        be asked, and what an answer showed to be a mistake."""
        namespace = self._control.namespace(self._spec, self._deadline)
        self._ticket = prepare.attempt  # from now on: a grant may be out there though its answer is lost
        everything_there = False
        try:
            by_shard = self._tally.sort(self._control.ask(StoreGrant, self._spec, prepare, self._deadline))
            if by_shard:
                everything_there = self._write_all(self._writes(namespace, prepare, by_shard))
            else:
                self._ticket = None  # there is none for nothing
        finally:
            # What was not written others may write, and this caller in another attempt, from the moment that they can
            # know of it. Where all is there nobody is kept from anything, so the caller does not wait for this.
            if not everything_there:
                self.end()
        return self._tally.stored()

    def end(self) -> None:
        """Ends the ticket, once the outcome is told: before the next store of this client, which may be of the same
        blocks and is not to be told that they are pending. Lost, it ends by time."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            with suppress(Trouble, KVClusterError):
                self._control.say(Done, EndTicket(NO_CALL, ticket), Deadline.after_ms(_FAREWELL_MS))

    # ------------------------------------------------------------------------------------------ writing

    def _writes(
        self, namespace: NamespaceId, prepare: PrepareStore, by_shard: dict[ShardAddress, list[int]]
    ) -> list[_Write]:
        """The exchanges. No two have pages of one block, so that each can say what became of its own."""
        block_bytes = sum(self._spec.page_bytes(group, part) for group, part in prepare.parts)
        writes: list[_Write] = []
        for shard, blocks in by_shard.items():
            most = min(self._shards.streams(shard).stores, WRITERS // len(by_shard))
            for run in share_out([block_bytes] * len(blocks), most):
                pages, of_block = _pages(prepare, blocks[run.start : run.stop])
                request = WriteRequest(namespace, self._next_attempt(), shard.epoch, pages, self._wait_ns)
                source = _Source(self._spec, namespace, pages, of_block, self._source, self._transfer, self._drained)
                self._undrained[source] = None
                writes.append(_Write(shard, request, of_block, source))
        return writes

    def _write_all(self, writes: Sequence[_Write]) -> bool:
        """Is everything there now? Raises what one of them showed to be a mistake, when all have ended: until then
        the source may be read. Each ends by the deadline."""
        mine, *others = writes
        running = [self._writers.submit(self._write, write) for write in others]
        try:
            there = self._write(mine)
        finally:
            wait(running)
        return all([there, *(future.result() for future in running)])

    def _write(self, write: _Write) -> bool:
        """On a writer's thread: one exchange, from its reservation to its outcome. Is all of it there?"""
        source = write.source
        try:
            outcome = self._shards.write(write.shard, self._spec, write.request, source, self._deadline)
        except Trouble as trouble:
            self._tally.missed(trouble.miss, source.nbytes)
            return False
        finally:
            self._drained(source)
        self._tally.count(write.blocks, outcome, source.nbytes)
        return all(written in (Written.COMMITTED, Written.DUPLICATE) for written in outcome)

    def _drained(self, source: _Source) -> None:
        """That exchange asks for no more bytes."""
        with self._lock:
            self._undrained.pop(source, None)
            if self._undrained:
                return
        self._transfer.drained()


class Tally:
    """What became of the blocks so far. Thread-safe; what stands there is true at every moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = self._deduplicated = self._pending = self._nbytes = 0
        self._miss: Miss | None = None

    def missed(self, miss: Miss, nbytes: int) -> None:
        """An exchange that moved so many bytes ended without an answer. The first reason is the one told."""
        with self._lock:
            self._nbytes += nbytes
            self._miss = self._miss or miss

    def count(self, of_block: Sequence[int], outcome: Sequence[Written], nbytes: int) -> None:
        """An exchange that moved so many bytes ended well. A block counts by the worst that happened to its pages."""
        fates: dict[int, set[Written]] = {}
        for block, written in zip(of_block, outcome, strict=True):
            fates.setdefault(block, set()).add(written)
        with self._lock:
            self._nbytes += nbytes
            for fate in fates.values():
                failed = next((written for written in _MISSES if written in fate), None)
                if failed is not None:
                    self._miss = self._miss or _MISSES[failed]
                elif Written.PENDING in fate:
                    self._pending += 1
                elif Written.COMMITTED in fate:
                    self._blocks += 1
                else:
                    self._deduplicated += 1

    def sort(self, grant: StoreGrant) -> dict[ShardAddress, list[int]]:
        """The blocks that each shard is to get. The others are counted."""
        by_shard: dict[ShardAddress, list[int]] = {}
        at = 0
        with self._lock:
            for run in grant.runs:
                if run.decision is Decision.WRITE:
                    assert run.shard is not None
                    by_shard.setdefault(run.shard, []).extend(range(at, at + run.count))
                elif run.decision is Decision.COMMITTED:
                    self._deduplicated += run.count
                elif run.decision is Decision.PENDING:
                    self._pending += run.count
                elif run.miss is not None:
                    self._miss = self._miss or run.miss
                at += run.count
        return by_shard

    def stored(self) -> Stored:
        """The outcome, where it has gone as far as it could."""
        with self._lock:
            return Stored(self._blocks, self._deduplicated, self._pending, self._nbytes, self._miss)

    def so_far(self, why: Miss) -> Stored:
        """The outcome where it goes no further for that reason."""
        with self._lock:
            return Stored(self._blocks, self._deduplicated, self._pending, self._nbytes, self._miss or why)


def _pages(prepare: PrepareStore, blocks: Sequence[int]) -> tuple[tuple[NewPage, ...], list[int]]:
    """The pages of these blocks, and for each the block that it belongs to."""
    pages: list[NewPage] = []
    of_block: list[int] = []
    for block in blocks:
        parent = prepare.hashes[block - 1] if block else prepare.parent
        for group, part in prepare.parts:
            key = PageKey(prepare.hashes[block], group, part)
            pages.append(NewPage(key, parent, prepare.first + block, prepare.loss))
            of_block.append(block)
    return tuple(pages), of_block
