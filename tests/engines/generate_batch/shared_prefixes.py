"""Prefixes that engines of transformers' continuous batching share through a cluster.

A request that arrives asks the cluster for the leading full blocks that the engine's own cache does not have, loads
them into blocks that it takes from that cache, and hands them to the engine as cached ones; the engine's own search,
which comes next, finds them by its own hashes. Blocks that a pass has completed are stored from where they lie.

Two rules keep the bytes right:
 - a block is known to the engine only when its load has said that it is complete; the others are given back;
 - a block that a store reads is not written before `source_free()`: the wait is where the block is handed out again,
   so that a store delays only a request that needs this block. It is bounded by WAIT_S; then the store is cancelled.

The engine's search is synchronous, and so is the load that comes before it. With `beside`, loads begin while a request
still waits: the scheduler passes it over and runs others until its load is over. What is in which batch depends on the
clock then. Only the first LOADS requests that wait have loads, and give their blocks back to requests that run out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import kvcluster
from kvcluster.client import Client
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded, Stored, Transfer
from tests.engines.generate_batch.audit import Audit
from tests.engines.generate_batch.paged_cache import Blocks

WAIT_S = 20.0
"""How long a block waits for the store that reads it, before that is cancelled; nothing is expected to take a tenth."""

LOADS = 2
"""How many waiting requests may have a load under way: each holds blocks that no request can use yet, and the loaded
ones are evicted if the request is not scheduled soon."""

_POLL_S = 0.0005


@dataclass
class Counts:
    """What happened. Tokens of prompts, in full blocks: `loaded` from the cluster; `matched` by the engine's own
    search, which finds the loaded ones, too; `recomputed`, although another engine had stored them before this one
    began. Blocks: `handed_out` by the engine's cache, and how stores ended. `waits`: blocks that were handed out only
    when a store had read them; `cancelled`: stores that took too long for that. `restarted`: requests that lost their
    blocks before their end, and arrived again; `passed_over`: how often a request waited for its load while others
    ran; `given_back`: loads that were ended because a request needed their blocks."""

    loaded: int = 0
    matched: int = 0
    recomputed: int = 0
    handed_out: int = 0
    stored: int = 0
    deduplicated: int = 0
    waits: int = 0
    cancelled: int = 0
    restarted: int = 0
    passed_over: int = 0
    given_back: int = 0
    misses: list[str] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """The tokens that another engine had stored and this one did not have: loaded, or computed once more."""
        return self.loaded + self.recomputed


@dataclass
class PendingLoad:
    """A load under way: `taken` are the blocks that it fills, from the prompt's block `first` on."""

    prompt_ids: list[int]
    first: int
    taken: list[int]
    ticket: Ticket
    transfer: Transfer[Loaded]


class SharedPrefixes:
    """The hooks (paged_cache.py) of one engine after another, over one client."""

    def __init__(self, client: Client, audit: Audit, *, beside: bool = False) -> None:
        self._client, self._audit, self._beside = client, audit, beside
        self.counts = Counts()
        self._blocks: Blocks | None = None
        self._stores: list[Transfer[Stored]] = []
        self._readers: dict[int, list[Transfer[Stored]]] = {}
        """The stores that may still read a block."""
        self._done: dict[str, int] = {}
        """How many leading blocks of each request have been stored, or were found by the engine's search."""
        self._wanted: dict[str, int] = {}
        """How many leading blocks of each request could be loaded: at least one token is left to compute."""
        self._freed: set[str] = set()
        self._loads: dict[str, PendingLoad] = {}
        self._asked: set[str] = set()
        """Requests whose load has begun, or that had nothing to load."""

    @property
    def blocks(self) -> Blocks:
        assert self._blocks is not None, "no engine has made its cache yet"
        return self._blocks

    # ------------------------------------------------------------------------------------- called by the engine

    def opened(self, blocks: Blocks) -> None:
        assert blocks.block_tokens == self._client.spec.block_tokens, "a block of the engine is a block of the cluster"
        self._blocks = blocks
        self._readers.clear()
        self._done.clear()
        self._wanted.clear()
        self._freed.clear()
        self._asked.clear()
        assert not self._loads, "every load of the engine before has ended"
        self._audit.begin_engine()

    def ready(self, waiting: Sequence[tuple[str, list[int]]], idle: bool) -> list[str]:
        if not self._beside:
            return [request_id for request_id, _ in waiting]
        ready: list[str] = []
        for request_id, prompt_ids in waiting[:LOADS]:
            if request_id not in self._asked:
                self._asked.add(request_id)
                load = self._begin_load(prompt_ids)
                if load is not None:
                    self._loads[request_id] = load
            load = self._loads.get(request_id)
            if load is not None and not load.transfer.done() and (ready or not idle):
                self.counts.passed_over += 1
                continue
            if load is not None:
                self._finish_load(self._loads.pop(request_id))
            ready.append(request_id)
        return ready

    def pressed(self) -> bool:
        loads = list(self._loads.items())
        for request_id, load in loads:
            load.transfer.cancel()
            self._finish_load(self._loads.pop(request_id))
            self.counts.given_back += 1
        return bool(loads)

    def arriving(self, request_id: str, prompt_ids: list[int]) -> None:
        if request_id in self._freed:
            self._freed.remove(request_id)
            self.counts.restarted += 1
        self._wanted[request_id] = (len(prompt_ids) - 1) // self.blocks.block_tokens
        load = None if self._beside else self._begin_load(prompt_ids)
        if load is not None:
            self._finish_load(load)

    def matched(self, request_id: str, tokens: int) -> None:
        self._done[request_id] = tokens // self.blocks.block_tokens
        self.counts.matched += tokens

    def completed(self, request_id: str, token_ids: list[int], written_tokens: int) -> None:
        full, first = written_tokens // self.blocks.block_tokens, self._done.get(request_id, 0)
        block_ids = self.blocks.table(request_id)[first:full]
        if not block_ids:
            return
        self._done[request_id] = full
        for number in range(first, min(full, self._wanted.get(request_id, 0))):
            if self._audit.known_before(self.blocks, token_ids, number):
                self.counts.recomputed += self.blocks.block_tokens
        self._audit.stored(self.blocks, token_ids, first, block_ids)
        hashes = self._client.hashes(token_ids[: full * self.blocks.block_tokens])
        store = self._client.begin_store(hashes, kvcluster.Paged(self.blocks.layers, block_ids), first=first)
        self._stores.append(store)
        for block in block_ids:
            self._readers.setdefault(block, []).append(store)

    def freed(self, request_id: str) -> None:
        self._done.pop(request_id, None)
        self._asked.discard(request_id)
        self._freed.add(request_id)

    def reused(self, block_ids: Sequence[int]) -> None:
        self.counts.handed_out += len(block_ids)
        for block in block_ids:
            for store in self._readers.pop(block, ()):
                self._wait_source_free(store)

    # ------------------------------------------------------------------------------------------- loads, in two steps

    def _begin_load(self, prompt_ids: list[int]) -> PendingLoad | None:
        """Begins to load what the cluster has of a prompt and the engine does not. Returns None if that is nothing, or
        if the engine has no room for it."""
        tokens = self.blocks.block_tokens
        wanted = (len(prompt_ids) - 1) // tokens
        held = self.blocks.held(prompt_ids[: wanted * tokens])
        # A block is left for the tokens that are computed. The ticket must not cover more blocks than are taken.
        count = min(wanted - len(held), self.blocks.room(held) - 1)
        if count <= 0:
            return None
        ticket = self._client.prepare_load(self._client.hashes(prompt_ids[: (len(held) + count) * tokens]))
        if ticket.blocks <= len(held):
            ticket.release()
            return None
        taken = self.blocks.take(ticket.blocks - len(held), held)
        into = kvcluster.Paged(self.blocks.layers, taken)
        return PendingLoad(prompt_ids, len(held), taken, ticket, self._client.begin_load(ticket, into, first=len(held)))

    def _finish_load(self, load: PendingLoad) -> None:
        """Waits for a load, and hands the engine the blocks that are complete."""
        loaded = load.transfer.result()
        load.ticket.release()
        whole = load.taken[: loaded.blocks - load.first]
        if loaded.miss is not None:
            self.counts.misses.append(f"load: {loaded.miss}")
        self._audit.loaded(self.blocks, load.prompt_ids, load.first, whole)
        self.blocks.keep(load.prompt_ids, load.first, whole)
        self.blocks.give_back(load.taken[len(whole) :])
        self.counts.loaded += len(whole) * self.blocks.block_tokens

    # --------------------------------------------------------------------------------------------------------- stores

    def settle(self) -> None:
        """Waits until all stores have ended and every client finds what they stored."""
        for store in self._stores:
            outcome = store.result()
            self.counts.stored += outcome.blocks
            self.counts.deduplicated += outcome.deduplicated
            if outcome.miss is not None:
                self.counts.misses.append(f"store: {outcome.miss}")
        self._stores.clear()
        # A flush is False also where a store has missed since the one before.
        assert self._client.flush() or self._client.flush(), "the cluster has not reported all stores in time"

    def _wait_source_free(self, store: Transfer[Stored]) -> None:
        if store.source_free():
            return
        self.counts.waits += 1
        pause, give_up = threading.Event(), time.monotonic() + WAIT_S
        while not store.source_free():
            if time.monotonic() > give_up:
                store.cancel()
                self.counts.cancelled += 1
                return
            pause.wait(_POLL_S)
