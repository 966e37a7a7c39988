"""Fetching pages from another shard: how replicas are made, and how a draining shard is emptied.

The coordinator has chosen the source and the pages; the core of this shard has reserved room for them under a write
lease of its own. The bytes go straight into the arena, where they are not visible to readers before they are committed,
and each layer is verified there against the identity of the reserved page: nothing that the source reports about itself
enters it. The pages that are complete and verified are committed, even if the rest failed; pages that arrived corrupt
are reported to the source, which verifies its own copies.

A fetch takes no longer than FETCH_S, and no frame of it longer than the lease lasts. When the lease is revoked, the
fetch is broken off, and the pages are given back only after the last write to them has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing, suppress
from types import TracebackType

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER
from kvcluster.core.messages import (
    Abort,
    Commit,
    Done,
    Fetch,
    PageWant,
    ReadRequest,
    Renew,
    Reply,
    Request,
    ShardAddress,
    Written,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.transport.auto import own_attempts
from kvcluster.transport.base import Deadline, PageHost, PathLost, Payload, RefusedByShard, Transport, Unavailable
from kvcluster.transport.exchange_summary import ExchangeResult, ExchangeSummary, Operation, written_bytes
from kvcluster.transport.page_writer import PageWriter
from kvcluster.transport.thread_start import start_thread
from kvcluster.transport.worker_exchange import RecordSink

log = logging.getLogger(__name__)

FETCH_S = 60.0
"""The limit for one order: limits.PULL_BYTES over a network of about a MiB a second. On a slower one the coordinator
should choose another shard."""

_PROMPT_S = 5.0
"""For questions that the core answers at once; the limit only matters if the process hangs."""

OpenSource = Callable[[ShardAddress], Transport]
"""Opens a transport to another shard that may read for every tenant (ids.CLUSTER)."""


class ReplicaPuller:
    """Fetches for one shard, one order after the other."""

    def __init__(self, host: PageHost, open_source: OpenSource) -> None:
        self._host = host
        self._open = open_source
        # To the source, this shard is an ordinary reader, whose attempts have random holders that no other reader can
        # guess and use first.
        self._next_attempt = own_attempts()
        self._closing = False
        self._current: _Breaker | None = None
        self._path = "grpc"  # that of the last fetch: its source is always reachable over this one

    def fetch(self, order: Fetch) -> None:
        """Carries out one order, and ends its lease."""
        began, why = time.monotonic(), ""
        arrivals = PageWriter(order.namespace, dict(enumerate(order.slots)), self._host)
        try:
            self._bring(order, arrivals)
        except (Unavailable, RefusedByShard, KVClusterError) as error:
            # The pages that arrived before are still good.
            log.info("a fetch from %s broke off: %s", order.source.shard, error)
            why = str(error) or type(error).__name__
        verified = arrivals.verified()
        self._report(order, verified, why, time.monotonic() - began)

        commit = Commit(order.attempt, tuple(verified), tuple(verified.values()))
        with suppress(Unavailable):  # this shard is ending
            self._ask(commit if verified else Abort(order.attempt))

    def _report(self, order: Fetch, verified: Collection[int], why: str, seconds: float) -> None:
        """Reports to the shard how the fetch ended. `verified`: the indices of the pages that arrived complete; `why`:
        what broke it off, "" for nothing."""
        named = Operation.REPLICATE_IN, self._path, CLUSTER, order.attempt
        if why:
            summary = ExchangeSummary(*named, ExchangeResult.FAILED, seconds, error=why)
        else:
            lost = len(order.slots) - len(verified)
            moved = written_bytes([order.slots[item] for item in verified])
            missed = {Written.LOST.value: lost} if lost else {}
            summary = ExchangeSummary(*named, ExchangeResult.DONE, seconds, len(verified), moved, missed)
        self._host.exchange_ended(summary)

    def close(self) -> None:
        """Breaks off the fetch under way, and lets no further one begin. Any thread may call it."""
        self._closing = True
        if self._current is not None:
            self._current.break_off()

    def _bring(self, order: Fetch, arrivals: PageWriter) -> None:
        deadline = Deadline.after_ms(FETCH_S * 1e3)
        with closing(self._open(order.source)) as source, _Breaker(source.close) as breaker:
            self._current = breaker
            with self._host.on_revoke(order.attempt, lambda _: breaker.break_off()):
                self._renew(order, breaker)  # the lease may have ended while the order was queued
                while self._path_lost(order, arrivals, source, breaker, deadline):
                    """Reads on over another path to the same shard."""
                self._path = source.name
                wrong = arrivals.wrong()[: limits.SUSPECTS_PER_CALL]
                if wrong:
                    prompt = Deadline.after_ms(_PROMPT_S * 1e3)
                    source.suspect(order.namespace, order.source.epoch, wrong, prompt)

    def _path_lost(
        self, order: Fetch, arrivals: PageWriter, source: Transport, breaker: _Breaker, deadline: Deadline
    ) -> bool:
        """Reads the layers that have not arrived. Returns True if the path broke."""
        left = arrivals.unfinished()
        keys = {item: order.slots[item].key for item in left}
        wants = tuple(PageWant(keys[item], layer, keys[item].part.layers) for item, layer in left.items())
        accept = max(slot.loss for slot in order.slots)
        request = ReadRequest(order.namespace, self._next_attempt(), order.source.epoch, wants, accept)
        try:
            with closing(source.read(request, _Renumbered(arrivals, list(left)), deadline)) as frames:
                for _ in frames:
                    self._renew(order, breaker)
        except PathLost:
            return True
        return False

    def _renew(self, order: Fetch, breaker: _Breaker) -> None:
        """Renews the lease, after each frame. Raises Unavailable if the fetch must end."""
        renewed = self._ask(Renew(order.attempt)) == Done(True)
        if self._closing or breaker.broken or not renewed:
            raise Unavailable(Miss(MissReason.DEADLINE, "the lease has ended"))

    def _ask(self, question: Commit | Abort | Renew) -> Reply:
        return self._host.ask(lambda call: Request(call, CLUSTER, None, question), _PROMPT_S)


class _Renumbered(RecordSink):
    """Passes items on to the writer of pages under their numbers there."""

    def __init__(self, arrivals: PageWriter, items: Sequence[int]) -> None:
        self._arrivals = arrivals
        self._items = items

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        self._arrivals.receive(self._items[item], layer, codec, sums, data)


class _Breaker(AbstractContextManager["_Breaker"]):
    """Breaks off an exchange, on a thread of its own: a lease is revoked under the driver's lock, while closing a
    connection can wait for its reader, which may itself wait for that lock."""

    def __init__(self, close: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=close, name="kvcluster-breaker", daemon=True)
        self._lock = threading.Lock()
        self._ended = False
        self.broken = False

    def break_off(self) -> None:
        """Does nothing the second time, or once the exchange has ended."""
        with self._lock:
            if not self.broken and not self._ended:
                self.broken = True
                with suppress(KVClusterError):  # without room for a thread the exchange ends by its deadline
                    start_thread(self._thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
        if self._thread.is_alive():
            self._thread.join()
