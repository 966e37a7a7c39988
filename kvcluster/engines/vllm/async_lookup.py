"""Asks the coordinator how far a prompt is cached, without ever blocking the engine's scheduler.

A lookup runs on a thread of its own, and the scheduler looks at it with every step. While the coordinator answers, a
request waits for its lookup, at most for the patience. After failures in a row (bounded_calls.py) requests go on
without the cluster at once, and a probe that no request waits for finds out when the coordinator answers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcluster.client.bounded_calls import BoundedCalls, Call, CallPolicy
from kvcluster.client.client import Client
from kvcluster.client.ticket import Ticket
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Unavailable

_NO_ANSWER = (MissReason.DEADLINE, MissReason.SHARD_LOST)
"""Misses that say that the coordinator did not answer."""

_THREADS = 2
"""One makes a prompt's hashes while the other waits for the coordinator."""

Ask = Callable[[], tuple[Client, Sequence[BlockHash], str]]
"""Makes the hashes to be asked for, on the lookup's thread: which client asks, what, and for which adapter."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What a lookup came to. Without a ticket there is nothing to load, and `miss` says why."""

    hashes: Sequence[BlockHash] = ()
    ticket: Ticket | None = None
    miss: Miss | None = None


PendingLookup = Call[LookupAnswer]
"""One request's lookup. Its request calls `leave` when it needs it no more, which releases the ticket."""


class AsyncLookups:
    """Of one scheduler. Every method belongs to the scheduler's thread and returns at once."""

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._calls: BoundedCalls[LookupAnswer] = BoundedCalls(
            "kvcluster-lookup", CallPolicy(patience_ns=patience_ns), threads=_THREADS, release=_release
        )

    @property
    def healthy(self) -> bool:
        """Does the coordinator answer, by what the last calls of `tend` have heard?"""
        return self._calls.healthy

    def begin(self, ask: Ask, now: int) -> PendingLookup | Miss | None:
        """Starts a lookup. Returns the miss in its place while the coordinator does not answer, and None while too many
        lookups are under way: ask again with the next step."""
        return self._calls.start(lambda call: self._run(call, ask), now)

    def look(self, lookup: PendingLookup, now: int) -> LookupAnswer | None:
        """The answer; None while the request has to wait for it. After the patience, an answer without a ticket."""
        if lookup.done.done():
            self._calls.tend(now)
            return lookup.result or LookupAnswer()
        if now < lookup.admission.until_ns:
            return None
        self._calls.late(lookup, now)
        return LookupAnswer(miss=Miss(MissReason.DEADLINE, "the lookup took too long"))

    def tend(self, now: int) -> None:
        """To be called with every step: notes what lookups that are done say of the coordinator."""
        self._calls.tend(now)

    def close(self) -> None:
        self._calls.close()

    def _run(self, call: PendingLookup, ask: Ask) -> LookupAnswer:
        """On the lookup's thread. Catches everything: the request waits for an answer."""
        call.asking = True
        try:
            client, hashes, adapter = ask()
            deadline_ms = max(1.0, self._patience_ns / 1e6)
            ticket = client.prepare_load(hashes, whole=True, adapter=adapter, deadline_ms=deadline_ms)
        except Unavailable as trouble:
            call.failure = trouble.miss
        except KVClusterError as error:
            call.failure = Miss(MissReason.SHARD_LOST, str(error))
        except Exception as error:
            call.failure = Miss(MissReason.SHARD_LOST, f"{type(error).__name__}: {error}")
        else:
            if ticket.blocks or ticket.miss is None or ticket.miss.reason not in _NO_ANSWER:
                call.answered()
                return LookupAnswer(hashes, ticket, ticket.miss)
            ticket.release()
            call.failure = ticket.miss
        return LookupAnswer(miss=call.failure)


def _release(answer: LookupAnswer) -> None:
    if answer.ticket is not None:
        answer.ticket.release()
