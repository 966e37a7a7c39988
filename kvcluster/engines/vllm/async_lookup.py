"""Asks the coordinator how far a prompt is cached, without ever blocking the engine's scheduler.

A lookup runs on its own thread, and the scheduler polls it in every step. While the coordinator answers, a request
waits for its lookup, at most for the patience. After consecutive failures (bounded_calls.py) requests continue without
the cluster at once, until a probe that no request waits for finds that the coordinator answers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcluster.client.bounded_calls import BoundedCalls, Call, CallPolicy
from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Miss, MissReason
from kvcluster.engines.texts import miss_of
from kvcluster.errors import KVClusterError
from kvcluster.transfers.tickets import Ticket
from kvcluster.transport.base import Unavailable

_THREADS = 2
"""One makes a prompt's hashes while the other waits for the coordinator."""


@dataclass(frozen=True, slots=True)
class PrefixQuestion:
    """A lookup of `hashes` under an adapter. `awaited`: the number of blocks that the request waits for (prepare_load).
    `also`: a client of the tenant that the engine also reads, and a function that makes the hashes there; None if there
    is none."""

    client: Client
    hashes: Sequence[BlockHash]
    adapter: str
    awaited: int | None = None
    also: tuple[Client, Callable[[], Sequence[BlockHash]]] | None = None


Ask = Callable[[], PrefixQuestion]
"""Called on the lookup's thread."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The result of a lookup. Without a ticket there is nothing to load, and `miss` is the reason. `hashes` are those
    of the engine's own tenant, which has the first `own_blocks`; the ticket may be for more blocks `of_another`."""

    hashes: Sequence[BlockHash] = ()
    ticket: Ticket | None = None
    miss: Miss | None = None
    own_blocks: int = 0
    of_another: bool = False


PendingLookup = Call[LookupAnswer]
"""One request's lookup. The request calls `leave` when it no longer needs it, which releases the ticket."""


class AsyncLookups:
    """The lookups of one scheduler. Every method is called on the scheduler's thread and returns at once."""

    def __init__(self, patience_ns: int) -> None:
        self._patience_ns = patience_ns
        self._calls: BoundedCalls[LookupAnswer] = BoundedCalls(
            "kvcluster-lookup", CallPolicy(patience_ns=patience_ns), threads=_THREADS, release=_release
        )

    @property
    def healthy(self) -> bool:
        """Whether the coordinator answers, according to the lookups that the last calls of `tend` saw."""
        return self._calls.healthy

    def begin(self, ask: Ask, now: int) -> PendingLookup | Miss | None:
        """Starts a lookup. Returns a Miss instead while the coordinator does not answer, and None while too many
        lookups are in progress: the caller asks again in the next step."""
        return self._calls.start(lambda call: self._run(call, ask), now)

    def look(self, lookup: PendingLookup, now: int) -> LookupAnswer | None:
        """Returns the answer; None while the request must wait for it. After the patience, an answer without ticket."""
        if lookup.done.done():
            self._calls.tend(now)
            return lookup.result or LookupAnswer()
        if now < lookup.admission.until_ns:
            return None
        self._calls.late(lookup, now)
        return LookupAnswer(miss=Miss(MissReason.DEADLINE, "the lookup took too long"))

    def tend(self, now: int) -> None:
        """Called in every step: records from the finished lookups whether the coordinator answers."""
        self._calls.tend(now)

    def close(self) -> None:
        self._calls.close()

    def _run(self, call: PendingLookup, ask: Ask) -> LookupAnswer:
        """Runs on the lookup's thread. Catches every exception, because the request waits for the result. Only silence
        of the coordinator is a failure of the call: a refusal, or a lost shard that the coordinator names, is an answer
        about one prompt, and other prompts are still asked for."""
        call.asking = True
        try:
            asked = ask()
            deadline_ms = max(1.0, self._patience_ns / 1e6)
            ticket = _prepare(asked.client, asked.hashes, asked, deadline_ms)
        except Exception as error:
            miss = miss_of(error)
            call.failure = miss if isinstance(error, Unavailable) else None
            return LookupAnswer(miss=miss)
        if ticket.from_coordinator:
            call.answered()
            return _longer(asked, ticket, deadline_ms)
        call.failure = ticket.miss
        return LookupAnswer(miss=ticket.miss)


def _prepare(client: Client, hashes: Sequence[BlockHash], asked: PrefixQuestion, deadline_ms: float) -> Ticket:
    return client.prepare_load(
        hashes, whole=True, adapter=asked.adapter, awaited=asked.awaited, deadline_ms=deadline_ms
    )


def _longer(asked: PrefixQuestion, ticket: Ticket, deadline_ms: float) -> LookupAnswer:
    """Returns the answer by this ticket of the engine's own tenant, or by one of the tenant that it also reads if that
    has more blocks. What goes wrong there leaves the first."""
    own = LookupAnswer(asked.hashes, ticket, ticket.miss, ticket.blocks)
    if asked.also is None or ticket.blocks == len(asked.hashes):
        return own
    reader, hashes_there = asked.also
    try:
        there = _prepare(reader, hashes_there(), asked, deadline_ms)
    except KVClusterError:
        return own
    if there.blocks <= ticket.blocks:
        there.release()
        return own
    ticket.release()
    return LookupAnswer(asked.hashes, there, there.miss, ticket.blocks, of_another=True)


def _release(answer: LookupAnswer) -> None:
    if answer.ticket is not None:
        answer.ticket.release()
