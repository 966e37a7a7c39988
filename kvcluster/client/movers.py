"""The threads that move a client's bytes: one for loads, one for stores, and readers that a load sets on its shards.

Loads never wait behind stores, loads are served in order, and so are stores. A reader waits for one shard's bytes and
nothing else, so that a shard which sends none keeps nobody but its reader (loading.py). Every thread ends its work by
the deadline of the call that it works for.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from kvcluster.client.control import NO_CALL, NOBODY, Control
from kvcluster.client.loading import READERS, Board, Load
from kvcluster.client.pieces import plan_pieces
from kvcluster.client.results import Loaded, Stored
from kvcluster.client.shards import Shards
from kvcluster.client.storing import Tally, store
from kvcluster.client.transfer import Transfer
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import PrepareStore, TicketBody
from kvcluster.core.placement import run_start
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError
from kvcluster.transport.seam import Deadline

if TYPE_CHECKING:  # it imports torch, which a client without tensors need not have
    from kvcluster.client.memory import Bound

R = TypeVar("R")
_UNNAMED = NamespaceId(b"")  # filled in by Control


class Movers:
    """Begins loads and stores of one client. Raises CallerError once it is closed."""

    def __init__(
        self,
        control: Control,
        shards: Shards,
        parts: tuple[Part | None, ...],
        *,
        next_attempt: Callable[[], Attempt],
        store_wait_ms: int,
    ) -> None:
        self.rate: float | None = None
        """Bytes a second of recent loads; None before the first."""
        self._control = control
        self._shards = shards
        self._parts = parts
        self._next_attempt = next_attempt
        self._store_wait_ns = store_wait_ms * 1_000_000
        self._host = socket.gethostname()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-load")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kvcluster-read")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-store")
        self._running: dict[Transfer[Any], ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._closed = False

    def load(self, body: TicketBody, bound: Bound, spec: KVSpec, deadline: Deadline) -> Transfer[Loaded]:
        """As Client.begin_load, into checked memory."""
        pieces = plan_pieces(body, spec, self._parts)
        board = Board(body, spec, pieces)
        transfer: Transfer[Loaded] = Transfer(deadline, board.loaded, board.layers.items())
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
            self._learn_rate(loaded.nbytes, time.monotonic_ns() - began)
            return loaded

        self._begin(self._loader, transfer, work)
        return transfer

    def store(
        self, hashes: Sequence[BlockHash], first: int, bound: Bound, spec: KVSpec, deadline: Deadline
    ) -> Transfer[Stored]:
        """As Client.begin_store, out of checked memory."""
        new = tuple(hashes[first:])
        ticket_attempt, attempt = self._next_attempt(), self._next_attempt()
        tally = Tally()
        transfer: Transfer[Stored] = Transfer(deadline, tally.so_far)

        def work() -> Stored:
            if not new:
                return tally.stored()
            run_blocks = self._control.attach(spec, deadline).run_blocks
            prepare = PrepareStore(
                call=NO_CALL,
                tenant=NOBODY,
                namespace=_UNNAMED,
                attempt=ticket_attempt,
                first=first,
                parent=hashes[first - 1] if first else BlockHash(bytes(HASH_BYTES)),
                run=hashes[run_start(first, run_blocks)],
                hashes=new,
                parts=tuple((group, part) for group, part in enumerate(self._parts) if part is not None),
                host=self._host,
            )
            return store(
                self._control,
                self._shards,
                spec,
                prepare,
                bound,
                transfer,
                attempt,
                self._store_wait_ns,
                deadline,
                tally,
            )

        self._begin(self._storer, transfer, work)
        return transfer

    def wait_stored(self, deadline: Deadline) -> bool:
        """Waits for the stores that were begun so far; False where the deadline comes first."""
        with self._lock:
            stores = [transfer for transfer, executor in self._running.items() if executor is self._storer]
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
        for threads in (self._loader, self._storer, self._readers):
            threads.shutdown()

    def _begin(self, executor: ThreadPoolExecutor, transfer: Transfer[R], work: Callable[[], R]) -> None:
        with self._lock:
            if self._closed:
                raise CallerError("this client is closed; connect again")
            self._running[transfer] = executor
            future = executor.submit(transfer.run, work)
        future.add_done_callback(lambda _: self._forget(transfer))

    def _forget(self, transfer: Transfer[Any]) -> None:
        with self._lock:
            del self._running[transfer]

    def _learn_rate(self, nbytes: int, took_ns: int) -> None:
        if nbytes and took_ns:
            rate = nbytes * 1e9 / took_ns
            self.rate = rate if self.rate is None else 0.8 * self.rate + 0.2 * rate
