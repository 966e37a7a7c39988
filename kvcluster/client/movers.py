"""The threads that move a client's bytes: one for loads, one for stores, and the readers and writers of their shards.

Loads never wait behind stores, loads are served in order, and so are stores. A reader waits for one shard's bytes and
nothing else, so that a shard which sends none keeps nobody but its reader (loading.py); a writer likewise (storing.py).
Every thread ends its work by the deadline of the call that it works for.

Whoever begins a transfer waits for nothing. Stores that wait in line are bounded in number and bytes: one more ends at
once with a miss, since an engine must get its memory back and has nothing to gain from waiting.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvcluster.client.board import Board
from kvcluster.client.control import NO_CALL, NOBODY, Control
from kvcluster.client.loading import READERS, Load
from kvcluster.client.memory import Bound
from kvcluster.client.pieces import plan_pieces
from kvcluster.client.rates import LearnedRate
from kvcluster.client.results import Loaded, Stored
from kvcluster.client.shards import Shards
from kvcluster.client.storing import WRITERS, Store, Tally
from kvcluster.client.transfer import Transfer
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import PrepareStore, TicketBody
from kvcluster.core.placement import run_start
from kvcluster.core.reasons import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError
from kvcluster.runtime.threads import be_nice
from kvcluster.transport.seam import Deadline

_UNNAMED = NamespaceId(b"")  # filled in by Control


@dataclass(frozen=True, slots=True)
class _Job:
    """What is under way or waits: on which thread, and how many bytes it is to move at most."""

    executor: ThreadPoolExecutor
    nbytes: int


class Movers:
    """Begins loads and stores of one client. Raises CallerError once it is closed."""

    def __init__(
        self,
        control: Control,
        shards: Shards,
        parts: tuple[Part | None, ...],
        *,
        next_attempt: Callable[[], Attempt],
        config: ClientConfig,
    ) -> None:
        self.learned = LearnedRate()
        """Of recent loads, of which one ends at a time."""
        self._control = control
        self._shards = shards
        self._parts = parts
        self._next_attempt = next_attempt
        self._store_wait_ns = config.store_wait_ms * 1_000_000
        self._host = socket.gethostname()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-load")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kvcluster-read")
        yields = partial(be_nice, config.store_niceness)
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-store", initializer=yields)
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="kvcluster-write", initializer=yields)
        self._running: dict[Transfer[Any], _Job] = {}
        self._lock = threading.Lock()
        self._closed = False

    def load(self, body: TicketBody, first: int, bound: Bound, spec: KVSpec, deadline: Deadline) -> Transfer[Loaded]:
        """As Client.begin_load, into checked memory."""
        pieces = plan_pieces(body, spec, self._parts, first)
        board = Board(body, spec, pieces, first)
        transfer: Transfer[Loaded] = Transfer(deadline, board.loaded, board.layer_left)
        load = Load(
            control=self._control,
            shards=self._shards,
            readers=self._readers,
            spec=spec,
            body=body,
            parts=self._parts,
            into=bound,
            board=board,
            transfer=transfer,
            next_attempt=self._next_attempt,
            deadline=deadline,
        )

        def work() -> Loaded:
            began = time.monotonic_ns()
            loaded = load.run(pieces)
            ended = time.monotonic_ns()
            self.learned.learn(loaded.nbytes, ended - began, ended)
            return replace(loaded, took_ns=ended - began)

        with self._lock:
            self._begin(self._loader, transfer, lambda: transfer.run(work))
        return transfer

    def store(
        self,
        hashes: Sequence[BlockHash],
        first: int,
        loss: Loss,
        bound: Bound,
        tokens: Sequence[int],
        spec: KVSpec,
        deadline: Deadline,
    ) -> Transfer[Stored]:
        """As Client.begin_store, out of checked memory."""
        new = tuple(hashes[first:])
        ticket_attempt = self._next_attempt()
        parts = tuple((group, part) for group, part in enumerate(self._parts) if part is not None)
        nbytes = len(new) * sum(spec.page_bytes(group, part) for group, part in parts)
        tally = Tally()
        transfer: Transfer[Stored] = Transfer(deadline, tally.so_far)
        job = Store(
            control=self._control,
            shards=self._shards,
            writers=self._writers,
            spec=spec,
            source=bound,
            tally=tally,
            transfer=transfer,
            next_attempt=self._next_attempt,
            wait_ns=self._store_wait_ns,
            deadline=deadline,
        )

        def work() -> Stored:
            if not new:
                return tally.stored()
            attached = self._control.attach(spec, deadline)
            prepare = PrepareStore(
                call=NO_CALL,
                tenant=NOBODY,
                namespace=_UNNAMED,
                attempt=ticket_attempt,
                first=first,
                parent=hashes[first - 1] if first else BlockHash(bytes(HASH_BYTES)),
                run=hashes[run_start(first, attached.run_blocks)],
                hashes=new,
                parts=parts,
                loss=loss,
                host=self._host,
                tokens=tuple(tokens) if attached.wants_tokens else (),
            )
            return job.run(prepare)

        def run() -> None:
            transfer.run(work)
            job.end()

        with self._lock:
            full = self._why_full(nbytes)
            if full is None:
                self._begin(self._storer, transfer, run, nbytes)
        if full is not None:
            transfer.run(lambda: tally.so_far(full))
        return transfer

    def wait_stored(self, deadline: Deadline) -> bool:
        """Waits for the stores that were begun so far; False where the deadline comes first."""
        with self._lock:
            stores = [transfer for transfer, job in self._running.items() if job.executor is self._storer]
        return all(transfer.wait_ended(deadline) for transfer in stores)

    def close(self, break_off: Callable[[], object]) -> None:
        """Ends what is under way, and the threads. `break_off` ends exchanges that hang."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for transfer in running:
            transfer.cancel()
        break_off()
        # Futures are not cancelled: each transfer has to run to its end, or whoever waits for it would wait in vain.
        for threads in (self._loader, self._storer, self._readers, self._writers):
            threads.shutdown()

    def _begin(
        self, executor: ThreadPoolExecutor, transfer: Transfer[Any], run: Callable[[], None], nbytes: int = 0
    ) -> None:
        """Under the lock."""
        if self._closed:
            raise CallerError("this client is closed; connect again")
        self._running[transfer] = _Job(executor, nbytes)
        executor.submit(self._run, transfer, run)

    def _run(self, transfer: Transfer[Any], run: Callable[[], None]) -> None:
        try:
            run()
        finally:
            with self._lock:
                del self._running[transfer]

    def _why_full(self, nbytes: int) -> Miss | None:
        """Why no store of that size may be begun now. Under the lock."""
        waiting = [job.nbytes for job in self._running.values() if job.executor is self._storer]
        if not waiting:
            return None
        if len(waiting) >= limits.STORES_QUEUED:
            return Miss(MissReason.FULL, f"{len(waiting)} stores of this client wait already; store less often")
        if sum(waiting) + nbytes > limits.STORES_QUEUED_BYTES:
            detail = f"stores of {sum(waiting) >> 20} MiB of this client wait already; store less, or less often"
            return Miss(MissReason.FULL, detail)
        return None
