"""Background work for the sequences of one client: it keeps the block tables at the coordinator up to date and stores
sealed blocks. Loads are made by the threads that need them (loads.py).

One thread, started with the first sequence, synchronises tables and stores, so no step of an engine waits for either.
`lock` guards the machine and the pages; it is never held during I/O, and is notified when a store has ended. Attention
reads pages without it (`reading`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvcluster.core import hashing
from kvcluster.core.groups import Part
from kvcluster.core.messages import SyncTables, TablesSynced
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, ResidentSetFull
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.open_sequences import OpenSequences
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.step_lock import StepLock, StepTurn
from kvcluster.sequences.store_queue import StoreBatch
from kvcluster.sequences.table_keeper import TableKeeper
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.layouts import check_open
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transport.base import Deadline
from kvcluster.transport.thread_start import start_thread

if TYPE_CHECKING:
    from kvcluster.sequences.resident_memory import ResidentMemory

R = TypeVar("R")

_RETRY_S = 0.5
"""The pause after a store that failed."""

_SYNC_MS = 2_000
"""The deadline of one synchronisation. It is repeated if it fails, so `close` waits no longer than this for it."""


class RunnerLoads(Protocol):
    """The loads of these sequences."""

    def settle(self) -> bool:
        """Puts what has been loaded into the resident set. Returns whether a load had ended. Called in the lock, while
        nothing reads."""

    def sweep(self) -> None:
        """Returns loans that are not used any more, and ends loads that have ended. Called by the thread."""


class SealedStores:
    """How sealed blocks of the resident set reach the cluster. A store may take `store_ms`."""

    def __init__(
        self,
        spec: KVSpec,
        parts: tuple[Part | None, ...],
        memory: ResidentMemory,
        *,
        control: CoordinatorClient,
        transfers: TransferQueue,
        store_ms: int,
    ) -> None:
        self._specs = {False: spec, True: replace(spec, private=True)}
        self._parts = parts
        self._memory = memory
        self._control = control
        self._transfers = transfers
        self._store_ms = store_ms

    def store(self, batch: StoreBatch) -> bool:
        """Stores a batch. Returns whether the cluster has all of it."""
        blocks, spec = batch.blocks, self._specs[batch.private]
        pages = [block.page for block in blocks if block.page is not None]
        assert len(pages) == len(blocks), "a block that was never stored has left the resident set"
        bound = bind(self._memory.paged(pages), spec, self._parts, len(blocks), writable=False)
        first = batch.start + len(batch.names) - len(blocks)
        wanted = self._control.wants_tokens and not batch.private
        tokens = hashing.token_ids(b"".join(block.tokens for block in blocks) if wanted else b"")
        deadline = Deadline.after_ms(self._store_ms)
        transfer = self._transfers.store(
            batch.names, first, batch.loss, bound, tokens, spec, deadline, start=batch.start
        )
        stored = transfer.result()
        return stored.blocks + stored.deduplicated == len(blocks)


class SequenceRunner:
    """The thread of one client's sequences."""

    def __init__(
        self,
        machine: OpenSequences,
        memory: ResidentMemory,
        keeper: TableKeeper,
        stores: SealedStores,
        *,
        sync: Callable[[SyncTables, Deadline], TablesSynced],
        flush_shards: Callable[[Deadline], bool],
        loads_of: Callable[[SequenceRunner], RunnerLoads],
        sweep: Callable[[], None],
    ) -> None:
        """`sync` sends changes of tables to the coordinator. `loads_of` makes the loads of these sequences. `sweep` is
        called by the thread after each synchronisation, without the lock."""
        self.machine = machine
        self.keeper = keeper
        self.memory = memory
        self.lock = StepLock()
        self._stores = stores
        self._ask_sync = sync
        self.flush_shards = flush_shards
        self.readers: dict[int, None] = {}
        """The threads whose calls of attention read the resident set now."""
        self._turn = StepTurn(self.lock, "another thread brings blocks into the resident set, and others wait for that")
        self._evicting = 0  # threads that wait until nothing reads
        self._storing = 0
        self._store_at = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._abandoned: deque[SequenceState] = deque()
        self._sweep = sweep
        self.loads = loads_of(self)

    # ------------------------------------------------------------------------------------------ called in the lock

    def start(self) -> None:
        """Starts the thread, before the first sequence is opened. Raises KVClusterError if there is no room for it."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._run, name="kvcluster-sequences", daemon=True)
            start_thread(thread)
            self._thread = thread

    def wake(self) -> None:
        """Has the thread look for work."""
        self.lock.notify_all()

    def close_sequences(self, states: Iterable[SequenceState]) -> None:
        """Ends those of these sequences that are open. If they are broken, the coordinator closes their tables
        itself, when the lease of this client ends."""
        for state in states:
            if self.lock.broken:
                state.closed = True
            elif not state.closed:
                self.keeper.closed(state)
                self.machine.close(state)
        self.wake()

    def close_abandoned(self) -> bool:
        """Ends the sequences that were abandoned. Returns whether there were any."""
        found: list[SequenceState] = []
        while self._abandoned:
            found.append(self._abandoned.popleft())
        if found:
            self.close_sequences(found)
        return bool(found)

    @property
    def stores_pending(self) -> int:
        """The number of blocks that wait to be stored or are being stored."""
        return len(self.machine.stores) + self._storing

    def wait_for_stores(self, enough: Callable[[], bool], deadline: Deadline) -> bool:
        """Waits until `enough()`, which is called after each store, or no store is pending. Returns `enough()`; False
        if the client is closed."""
        self.wake()
        self.lock.holds_by(lambda: enough() or not self.stores_pending or self._closed, deadline)
        return not self._closed and enough()

    def with_room(self, call: Callable[[], R], deadline: Deadline) -> R:
        """Returns `call()`. While the resident set is full, seals what can be sealed and waits for stores, after which
        pages may be used for others. Raises ResidentSetFull if no page becomes available by the deadline;
        CallerError if the client is closed."""
        while True:
            check_open(self._closed)
            try:
                return call()
            except ResidentSetFull:
                if self.close_abandoned() or self.machine.free_encoded():
                    continue
                if self.readers:
                    if self.wait_for_readers(deadline):
                        continue
                    raise
                if self.machine.pages.holding and not self._turn.mine:
                    if self.lock.holds_by(lambda: not self.machine.pages.holding, deadline):
                        continue
                    raise
                if self.loads.settle():  # their pages may be used for others now
                    continue
                for state in self.machine.seal_all():
                    self.keeper.sealed(state)
                before = self.machine.pages.available
                if not self.wait_for_stores(partial(self._more_pages, before), deadline):
                    check_open(self._closed)
                    raise

    def _more_pages(self, before: int) -> bool:
        return self.machine.pages.available > before

    # --------------------------------------------------------------------------------------------------- steps

    def advance(
        self, states: Sequence[SequenceState], tokens: Sequence[int | Sequence[int]], deadline: Deadline
    ) -> None:
        """Counts the tokens of a step of these sequences, and encodes what leaves their tails. Raises as
        OpenSequences.advance; ResidentSetFull as `with_room`."""
        with self.lock:
            sealed = self.with_room(lambda: self.machine.advance(states, tokens), deadline)
            for state in states:
                for encoding in self.machine.encode(state):
                    succeeded = self.memory.encode(encoding.page, encoding.into)
                    self.machine.encoded(state, encoding, succeeded=succeeded)
            for state in sealed:
                self.keeper.sealed(state)
            if sealed:
                self.wake()

    # ------------------------------------------------------------------------------------------------- reading

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[None]:
        """Within it no block gives up its page, so attention may read the resident set without the lock. A thread that
        waits for a page goes before new readers: raises ResidentSetFull if one still waits at the deadline."""
        try:
            with self.lock:
                if not self.lock.holds_by(lambda: not self._evicting or self._closed, deadline):
                    raise ResidentSetFull("other threads wait for pages of the resident set, and go before readers")
                check_open(self._closed)
                self.machine.pages.frozen = True
                self.readers[threading.get_ident()] = None
            yield
        finally:
            with self.lock:
                self.readers.pop(threading.get_ident(), None)
                self.machine.pages.frozen = bool(self.readers)
                self.lock.notify_all()

    @contextmanager
    def holding(self, blocks: Sequence[SequenceBlock], deadline: Deadline) -> Iterator[None]:
        """Within it these blocks keep the pages that they have and get, so that all of them can be loaded together. One
        thread at a time: two that each hold what the other needs would wait for ever. Others that need a page wait.
        Raises ResidentSetFull if another thread still has the turn at the deadline."""
        with self._turn.taken(deadline):
            with self.lock:
                self.machine.hold(blocks)
            try:
                yield
            finally:
                with self.lock:
                    if not self.lock.broken:
                        self.machine.let_go(blocks)
                    self.lock.notify_all()

    def wait_for_readers(self, deadline: Deadline) -> bool:
        """Waits until nothing reads. Returns False if the deadline passes first. Called in the lock."""
        self._evicting += 1
        try:
            return self.lock.holds_by(lambda: not self.readers, deadline)
        finally:
            self._evicting -= 1
            self.lock.notify_all()

    # ------------------------------------------------------------------------------------------- without the lock

    def failed(self, error: BaseException) -> None:
        """Records that a call of this thread has ended with this exception, perhaps before it could record that it no
        longer reads."""
        self.lock.failed(error, lambda: self.readers.pop(threading.get_ident(), None))

    def abandon(self, state: SequenceState) -> None:
        """Has a sequence closed that has no user any more. The garbage collector calls this in any thread, perhaps in
        one that holds the lock and is changing the machine: so the sequence is closed later, by the thread, or by a
        call that needs room."""
        self._abandoned.append(state)
        if self.lock.acquire(blocking=False):
            try:
                self.lock.notify_all()
            finally:
                self.lock.release()

    # ------------------------------------------------------------------------------------------------ the thread

    def end(self) -> None:
        """Closes all sequences, and has the thread end. Nothing reads or is given pages from now on."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self.close_sequences(self.machine.open_states())

    def close(self) -> None:
        """As `end`; waits for the thread, which has informed the coordinator of what is closed, if that answers soon,
        and for what reads. Then frees the memory."""
        self.end()
        if self._thread is not None:
            self._thread.join()
        with self.lock:
            self.lock.wait_for(lambda: not self.readers)  # each ends: a call that was interrupted is none any more
            self.memory.close()

    def _run(self) -> None:
        while True:
            with self.lock:
                now = time.monotonic_ns()
                if self._closed or self.lock.broken:
                    break
                self.close_abandoned()
                sync = self.keeper.next_sync(now)
                batch = self.machine.stores.next() if time.monotonic() >= self._store_at else None
                self._storing = len(batch.blocks) if batch is not None else 0
                if sync is None and batch is None:
                    self.lock.wait(self._idle_s(now))
                    continue
            if sync is not None:
                self._sync(sync)
                self.loads.sweep()
                self._sweep()
            if batch is not None:
                self._store(batch)
        while not self.lock.broken:
            sync = self.keeper.next_sync(time.monotonic_ns() + 10**12)
            if sync is None or not sync.changes or not self._sync(sync):
                break

    def _idle_s(self, now: int) -> float | None:
        """Returns for how long nothing is to be done; None for ever."""
        due = self.keeper.next_due()
        waits = [] if due is None else [max(0, due - now) / 1e9]
        if self.machine.stores:
            waits.append(max(0.0, self._store_at - time.monotonic()))
        return min(waits, default=None)

    def _sync(self, sync: SyncTables) -> bool:
        try:
            answer = self._ask_sync(sync, Deadline.after_ms(_SYNC_MS))
        except KVClusterError:
            with self.lock:
                self.keeper.failed(time.monotonic_ns())
            return False
        with self.lock:
            self.keeper.synced(answer, time.monotonic_ns())
        return True

    def _store(self, batch: StoreBatch) -> None:
        committed = False
        with suppress(KVClusterError):  # the blocks stay here, and are tried again
            committed = self._stores.store(batch)
        with self.lock:
            self.machine.stores.ended(batch, committed=committed)
            self._storing = 0
            self._store_at = 0.0 if committed else time.monotonic() + _RETRY_S
            self.lock.notify_all()
