"""Asking how far a prompt is cached, so that the engine's scheduler never waits for an answer.

A lookup is begun on a thread of its own and looked at with every step. A request waits for its own so long as somebody
answers; after a failure requests are answered "nothing" at once, and a lookup is only begun now and then to see whether
the cluster is back, which keeps nobody waiting either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from kvcluster.client.breaker import FREE_DOUBLINGS, Breaker, Leave, State
from kvcluster.client.client import Client
from kvcluster.client.ticket import Ticket
from kvcluster.core.ids import BlockHash
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.transport.seam import Trouble

_UNASKED = (MissReason.DEADLINE, MissReason.SHARD_LOST)
"""Misses that say that the coordinator did not answer."""

_FAILURES = 2
"""In a row, until requests are no longer kept waiting: one may be the engine's own, that had no time to hear."""

_OPEN_NS = 500_000_000
MOST = 64
"""Lookups under way, and answers that nobody has taken yet. A ticket each, so a part of limits.TICKETS_PER_HOLDER."""

Ask = Callable[[], tuple[Client, Sequence[BlockHash], str]]
"""Makes the hashes to be asked for, on the lookup's thread: which client asks, what, and for which adapter."""


class Outcome(Enum):
    """How a lookup stands."""

    PENDING = "pending"
    ANSWERED = "answered"
    NOTHING = "nothing"  # and nobody waits for more


class Lookup:
    """One request's question. `hashes`, `ticket` and `miss` are there once it is answered."""

    def __init__(self, began_ns: int, leave: Leave, patience_ns: int) -> None:
        self.hashes: Sequence[BlockHash] = ()
        self.ticket: Ticket | None = None
        self.miss: Miss | None = None
        self.until_ns = began_ns + patience_ns
        self.leave = leave
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._left = False

    def answer(self, hashes: Sequence[BlockHash], ticket: Ticket | None, miss: Miss | None) -> None:
        """On the lookup's thread."""
        with self._lock:
            self.hashes, self.miss = hashes, miss
            if self._left:
                if ticket is not None:
                    ticket.release()
            else:
                self.ticket = ticket
        self._answered.set()

    @property
    def answered(self) -> bool:
        return self._answered.is_set()

    def leave_it(self) -> None:
        """Nobody takes what it answers any more. May be called again."""
        with self._lock:
            self._left = True
            ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.release()


class Lookups:
    """Of one scheduler. `begin` and `look` belong to its thread; none of them waits."""

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._breaker = Breaker(failures=_FAILURES, open_ns=_OPEN_NS, doublings=FREE_DOUBLINGS)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvcluster-lookup")
        self._open: set[Lookup] = set()

    @property
    def healthy(self) -> bool:
        """Did the coordinator answer when it was last asked?"""
        return self._breaker.state is State.CLOSED

    def begin(self, ask: Ask, now: int) -> Lookup | Miss | None:
        """A lookup, the miss in its place, or None where so many are under way that it has to wait for its turn."""
        if len(self._open) >= MOST:
            return None
        leave = self._breaker.ask(now)
        if isinstance(leave, Miss):
            return leave
        lookup = Lookup(now, leave, self._patience_ns if self.healthy else 0)
        self._open.add(lookup)
        self._threads.submit(self._run, lookup, ask)
        return lookup

    def look(self, lookup: Lookup, now: int) -> Outcome:
        """How it stands. Nobody need look again once it is answered or nothing comes."""
        if not lookup.answered:
            if now < lookup.until_ns:
                return Outcome.PENDING
            if self.healthy:
                self.failed(Miss(MissReason.DEADLINE, "the lookup took too long"), now)
            lookup.miss = Miss(MissReason.DEADLINE, "the lookup took too long")
            return Outcome.NOTHING
        self._judge(lookup, now)
        return Outcome.ANSWERED if lookup.ticket is not None else Outcome.NOTHING

    def end(self, lookup: Lookup) -> None:
        """Its request needs it no more."""
        lookup.leave_it()
        if lookup.answered:
            self._open.discard(lookup)

    def tend(self, now: int) -> None:
        """With every step: what was left and is answered tells whether the cluster is there."""
        for lookup in [one for one in self._open if one.answered]:
            self._judge(lookup, now)

    def failed(self, why: Miss, now: int) -> None:
        """Somebody else found that the coordinator does not answer."""
        leave = self._breaker.ask(now)
        if not isinstance(leave, Miss):
            self._breaker.failed(leave, why, now)

    def close(self) -> None:
        for lookup in list(self._open):
            lookup.leave_it()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _judge(self, lookup: Lookup, now: int) -> None:
        if lookup not in self._open:
            return
        self._open.discard(lookup)
        if lookup.miss is not None and lookup.miss.reason in _UNASKED and not lookup.hashes:
            self._breaker.failed(lookup.leave, lookup.miss, now)
        else:
            self._breaker.succeeded(lookup.leave)

    def _run(self, lookup: Lookup, ask: Ask) -> None:
        try:
            client, hashes, adapter = ask()
            deadline_ms = max(1.0, self._patience_ns / 1e6)
            ticket = client.prepare_load(hashes, whole=True, adapter=adapter, deadline_ms=deadline_ms)
        except Trouble as trouble:
            lookup.answer((), None, trouble.miss)
        except KVClusterError as error:
            lookup.answer((), None, Miss(MissReason.SHARD_LOST, str(error)))
        except Exception as error:  # it must be answered: its request would wait in vain
            lookup.answer((), None, Miss(MissReason.SHARD_LOST, f"{type(error).__name__}: {error}"))
        else:
            if ticket.blocks or ticket.miss is None or ticket.miss.reason not in _UNASKED:
                lookup.answer(hashes, ticket, ticket.miss)
            else:
                ticket.release()
                lookup.answer((), None, ticket.miss)
