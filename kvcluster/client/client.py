"""The client: the object that an engine holds. Three levels, each built on the one before.

    1  blocks     prepare_load, redeem, begin_load, begin_store,      for engines that hash for themselves
                  borrow
    2  prompts    lookup, load, store, flush, explain, pin, unpin,    blocking; async versions of all of
                  pins, clear, purge                                  them on `client.aio`
    3  sequence   append, advance, read, truncate, fork, close        KV that grows token by token

Every call has one deadline, which all its parts share. Misuse raises CallerError before any bytes move; a failure in
the cluster is a miss with a reason. The client's own threads move bytes and renew tickets: no event loop is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvcluster.client.aio import awaitable
from kvcluster.client.client_parts import ClientParts
from kvcluster.client.explain import explain
from kvcluster.client.pinning import PinCalls
from kvcluster.client.status import status_dict
from kvcluster.config import ClientConfig, client_config, size
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    EngineInfo,
    GetStatus,
    Need,
    Purge,
    Purged,
    Registered,
    RegisterEngine,
    Status,
)
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec
from kvcluster.device.devices import DEVICES
from kvcluster.errors import CallerError
from kvcluster.memory.codec import implementation
from kvcluster.runtime.uninterrupted import MainCall, uninterrupted
from kvcluster.sequences.client_calls import SequenceCalls
from kvcluster.sequences.opener import SequenceOpener
from kvcluster.sequences.resources import sequence_resources, unused_set
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.coordinator_client import CoordinatorClient, CoordinatorPort, NothingStored
from kvcluster.transfers.deadlines import OTHER_MS, QUESTION_MS, call_deadline, load_ms
from kvcluster.transfers.layouts import (
    check_connect,
    check_filters,
    check_first,
    check_hashes,
    check_loss,
    check_open,
    check_tokens_of,
    kind_of,
    parts_given,
    parts_of,
)
from kvcluster.transfers.long_chains import Prompt, TokenIds, as_prompt, known_hashes, listed
from kvcluster.transfers.shard_connections import OpenTransport, ShardConnections, warm_up
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transfers.tickets import Ticket, Tickets, TicketSeal
from kvcluster.transfers.transfer import BlockExplanation, Loaded, Lookup, Stored, Transfer
from kvcluster.transfers.transfer_queue import TransferQueue
from kvcluster.transfers.unpicklable import Unpicklable
from kvcluster.transfers.zero_copy import BorrowedBlocks, Borrower
from kvcluster.transport.auto import own_attempts
from kvcluster.transport.base import Deadline
from kvcluster.transport.forks import OwnProcess


class Client(Unpicklable, SequenceCalls, PinCalls):
    """One worker's view of the cache for one spec. Made by `kvcluster.connect`; thread-safe; a context manager.

        client.store(token_ids, kv)                          # [blocks, layers, planes, block_tokens, heads, dim]
        client.flush()                                       # now every client finds it
        client.load(token_ids, out)                          # how many tokens are valid in `out`
        print(*client.explain(token_ids), sep="\\n")         # where each block is, or why it is not there

    A failure of the cluster is a miss with a reason; misuse raises CallerError before anything moves. A forked child
    cannot use it, and connects again. One that is collected without `close` is closed then, with a ResourceWarning; its
    tickets, transfers, sequences and borrowed blocks keep it.

    `part` is what this worker holds of every group: None for all of it, one Part for every group alike, or a
    mapping from group to Part if groups differ (groups left out are not moved).
    """

    on_close: Callable[[Client], object] | None = None
    """Called with it when it has been closed."""

    def __init__(
        self,
        port: CoordinatorPort,
        open_transport: OpenTransport,
        spec: KVSpec,
        *,
        part: Part | Mapping[int, Part] | None = None,
        config: ClientConfig | None = None,
        token: str | None = None,
        reads: str | None = None,
        address: str = "",
    ) -> None:
        """`token`: the credential by which tickets are sealed; the same that `port` and transports use. `reads`: as in
        `connect`. `address`: that of the cluster, to be shown."""
        self._config, owner = client_config(config), check_connect(spec, token, reads)
        self._process, self.spec, self.parts = OwnProcess(), spec, parts_of(spec, part)
        self._control = CoordinatorClient(port, owner)
        lock = threading.RLock()  # guards the decisions of plans and health: never held during I/O or copies
        health = ShardHealth(breaker_failures=self._config.breaker_failures, breaker_ms=self._config.breaker_ms)
        self._shards, self._attempt = ShardConnections(open_transport, health, lock, owner=owner), own_attempts()
        self._tickets = Tickets(self._control, self._attempt, TicketSeal(token))
        asked = self._control, self._shards, health, lock, self.parts
        self._transfers = TransferQueue(*asked, next_attempt=self._attempt, config=self._config)
        deadline = partial(call_deadline, self._config.deadline_ms)  # without this client, which nothing below may keep
        ask_by = partial(deadline, default_ms=QUESTION_MS)
        self._borrower = Borrower(self._shards, self.parts, next_attempt=self._attempt, deadline=ask_by)
        # Without a decoder, the coordinator must not promise this client an encoded page.
        self._accept = Loss[self._config.accept.upper()] if implementation() is not None else Loss.EXACT
        resources = partial(
            sequence_resources,
            spec=spec,
            parts=self.parts,
            control=self._control,
            tickets=self._tickets,
            transfers=self._transfers,
            borrower=self._borrower,
            accept=self._accept,
            shards=self._shards,
            next_attempt=self._attempt,
            config=self._config,
            deadline=deadline,
        )
        DEVICES.expect(size(self._config.device_staging_bytes))
        unused = unused_set(spec, self.parts, self._config.resident_bytes)
        self._sequences = SequenceOpener(spec, self._control, resources, unused)
        self.shipped_counter = self._sequences.counter
        self._address, self._closed = address, False
        closed_first = self._sequences, self._control, self._transfers, self._shards
        self._parts = ClientParts(*closed_first, self._borrower, self._tickets)
        self._unclosed = self._parts.close_with(self, self._process)

    def __repr__(self) -> str:
        at = f" at {self._address}" if self._address else ""
        return f"<Client of {self.spec.model}{at}{', closed' if self._closed else ''}>"

    def attach(self, deadline: Deadline) -> None:
        """Registers the spec with the coordinator. Otherwise the first call does so; `connect` does it to fail early.
        Raises Unavailable (an Unreachable) if the coordinator does not answer."""
        with suppress(NothingStored):
            self._control.attach(self.spec, deadline)

    def warm_up(self, *, deadline_ms: float | None = None) -> None:
        """Opens the connection to every shard that is up before the first load or store. Failures are ignored."""
        warm_up(self._control, self._shards, self.spec, self.parts, self._attempt, self._call(deadline_ms))

    def register(self, engine: EngineInfo, *, deadline_ms: float | None = None) -> Registered:
        """Registers this engine with the cluster; the answer names its weights. Raises Unavailable."""
        return self._control.request(Registered, RegisterEngine(engine), self._call(deadline_ms))

    # ------------------------------------------------------------------------------------ level 1: blocks

    def hashes(self, prompt: Prompt | TokenIds, *, deadline_ms: float | None = None) -> list[BlockHash]:
        """Returns the hashes of the full blocks of a prompt (core/hashing.py). Pure, except that the first call for a
        spec asks the coordinator for the namespace, and raises Unavailable (an Unreachable) if it does not answer."""
        prompt = as_prompt(prompt)
        spec, deadline = self._spec(prompt.adapter), self._call(deadline_ms, QUESTION_MS)
        return prompt.hashes(self._control.namespace(spec, deadline), spec.block_tokens)

    def prepare_load(
        self,
        hashes: Sequence[BlockHash],
        *,
        whole: bool = False,
        accept: Loss | None = None,
        adapter: str | None = None,
        awaited: int | None = None,
        again: bool = False,
        deadline_ms: float | None = None,
    ) -> Ticket:
        """Returns a ticket for the leading blocks that can be loaded; they are not evicted until it is released.

        `hashes` is the chain from the sequence's first block. With `whole`, the ticket covers all layers and heads, so
        that other processes can redeem it. A block with more loss than `accept` (None: as configured) is a miss.
        `awaited` and `again` are for questions that do not count as lookups; see PrepareLoad in core/messages."""
        check_hashes(hashes)
        spec, deadline = self._spec(adapter), self._call(deadline_ms, QUESTION_MS)
        need = self._need(accept, spec.whole_parts() if whole else self.parts)
        ticket = self._tickets.prepare(spec, hashes, need, deadline, hold=True, awaited=awaited, again=again)
        ticket.keeps = self
        return ticket

    def redeem(self, data: bytes) -> Ticket:
        """Returns the ticket that another process with the same credential prepared. Raises ProtocolError if `data` is
        not a ticket."""
        if not isinstance(data, bytes):
            raise CallerError(f"a ticket is redeemed from bytes(ticket), not from {kind_of(data)}")
        return self._tickets.redeem(data)

    def begin_load(
        self, ticket: Ticket, into: Any, *, first: int = 0, adapter: str | None = None, deadline_ms: float | None = None
    ) -> Transfer[Loaded]:
        """Begins to load the ticket's blocks from `first` on into the leading blocks of `into`. The caller already has
        the blocks before `first`: they are not read, and Loaded counts them as loaded.

        `into` is a dense tensor `[blocks, layers, planes, block_tokens, kv_heads, head_dim]`, Paged or Buffers (see
        transfers/layouts.py), of this client's part; a list with one entry per group if the spec has several. It must
        not be used until the transfer reports it complete. On a GPU it is written after all that the calling thread has
        enqueued on its current stream. The ticket names its adapter; `adapter` is needed only by a client that redeems
        a ticket of an adapter that it has never used. Raises CallerError if an argument does not fit.
        """
        self._check_usable()
        spec = self._tickets.spec_of(ticket, self._spec(adapter), adapter)
        check_first(first, ticket.hashes)
        deadline = self._call(deadline_ms, self._load_ms(ticket.blocks - first, spec))
        bound = bind(into, spec, self.parts, ticket.blocks - first, first=first, writable=True)
        transfer = self._transfers.load(ticket.body, first, bound, spec, deadline)
        transfer.keeps = self, ticket  # which is released when it is collected
        return transfer

    def borrow(self, ticket: Ticket, *, adapter: str | None = None, deadline_ms: float | None = None) -> BorrowedBlocks:
        """Returns views of the ticket's blocks in shared memory, without a copy, for shards that are reached over
        shared memory. The caller must close the BorrowedBlocks. `adapter` as in begin_load."""
        self._check_usable()
        spec = self._tickets.spec_of(ticket, self._spec(adapter), adapter)
        deadline = self._call(deadline_ms, self._load_ms(ticket.blocks, spec))
        blocks = self._borrower.borrow(ticket.body, spec, deadline)
        blocks.keeps = self
        return blocks

    @property
    def takes_device_tensors(self) -> bool:
        """Whether loads and stores take tensors on a CUDA device (`ClientConfig.device_staging_bytes`)."""
        return size(self._config.device_staging_bytes) > 0

    @property
    def read_only(self) -> bool:
        """Whether it only looks up and loads, because its token is read-only or it `reads` the KV of another tenant. A
        call that would change something raises CallerError then. False until the cluster has answered."""
        return self._control.read_only

    @property
    def wants_tokens(self) -> bool:
        """Whether the cluster publishes KV events, for which stores should pass token ids. False until it is known."""
        return self._control.wants_tokens

    def begin_store(
        self,
        hashes: Sequence[BlockHash],
        source: Any,
        *,
        first: int = 0,
        loss: Loss = Loss.EXACT,
        token_ids: TokenIds = (),
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> Transfer[Stored]:
        """Begins to store `hashes[first:]`, whose KV lies in `source` (as `into` of begin_load). Returns at once.

        `hashes` is the chain from the first block of the sequence. `source` may be None for some groups of the client's
        part: then nothing of them is stored, as of blocks behind which a recurrent state was not kept. It must not
        change until `source_free()`; on a GPU it is read after all that the calling thread has enqueued on its current
        stream. `loss` is the loss of the
        prefix over which the KV was computed (Loaded.loss). Blocks that others have stored with no more loss, or are
        storing, are not moved. If this client already has limits.STORES_QUEUED stores waiting, the returned transfer
        has already ended, with a miss `full`. `token_ids` are the tokens of `hashes[first:]`, for KV events; they are
        sent only if the cluster `wants_tokens`. Raises CallerError if an argument does not fit.
        """
        check_hashes(hashes)
        check_first(first, hashes)
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        ids = listed(token_ids)
        check_tokens_of(ids, len(hashes) - first, spec.block_tokens)
        parts = parts_given(source, self.parts)
        bound = bind(source, spec, parts, len(hashes) - first, writable=False)
        transfer = self._transfers.store(hashes, first, check_loss(loss), bound, ids, spec, deadline, parts=parts)
        transfer.keeps = self
        return transfer

    # ------------------------------------------------------------------------------------ level 2: prompts

    def lookup(
        self, prompt: Prompt | TokenIds, *, accept: Loss | None = None, deadline_ms: float | None = None
    ) -> Lookup:
        """Returns how much of this prompt is cached, with no more loss than `accept` (as in prepare_load). It pins
        nothing: the blocks may be evicted before a load."""
        deadline = self._call(deadline_ms, QUESTION_MS)
        spec, hashes, miss = self._hash(prompt, deadline)
        if not hashes:
            return Lookup(0, 0, None, miss)
        ticket = self._tickets.prepare(spec, hashes, self._need(accept), deadline, hold=False)
        seconds = self._transfers.load_seconds(ticket.blocks, spec)
        return Lookup(ticket.blocks * spec.block_tokens, ticket.blocks, seconds, ticket.miss, ticket.loss)

    def load(
        self,
        prompt: Prompt | TokenIds,
        out: Any,
        *,
        accept: Loss | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """Loads the cached prefix into the leading blocks of `out` (as `into` of begin_load, with room for every full
        block of the prompt and no placeholders), up to the first block with more loss than `accept` (as in
        prepare_load). Returns the number of tokens loaded; the content of `out` after them is undefined."""
        deadline = self._call(deadline_ms, QUESTION_MS)
        spec, hashes, _ = self._hash(prompt, deadline)
        if not hashes:
            return 0
        # Checked before the coordinator is asked: otherwise a mistake in `out` would show only at the first hit.
        bound = bind(out, spec, self.parts, len(hashes), writable=True, any_end=True)
        need = self._need(accept)

        def load(call: MainCall[int]) -> int:
            with self._tickets.prepare(spec, hashes, need, deadline, hold=True) as ticket:
                if not ticket.blocks:
                    return 0
                until = deadline
                if deadline_ms is None and not self._config.deadline_ms:
                    until = self._call(None, self._load_ms(ticket.blocks, spec))
                begin = partial(self._transfers.load, ticket.body, 0, bound, spec, until)
                loaded: Loaded = call.finish(begin, Transfer.cancel, lambda transfer: transfer.result())
                return loaded.blocks * spec.block_tokens

        return uninterrupted(load)

    def store(
        self,
        prompt: Prompt | TokenIds,
        blocks: Any,
        *,
        loss: Loss = Loss.EXACT,
        deadline_ms: float | None = None,
    ) -> Stored:
        """Stores the full blocks of a prompt, whose KV lies in `blocks`. `blocks` and `loss` as `source` and `loss` of
        begin_store."""
        prompt, deadline = as_prompt(prompt), self._call(deadline_ms)
        spec, hashes, miss = self._hash(prompt, deadline)
        if not hashes:
            return Stored(0, 0, 0, 0, miss)
        bound = bind(blocks, spec, self.parts, len(hashes), writable=False)
        tokens = prompt.token_ids[: len(hashes) * spec.block_tokens]
        begin = partial(self._transfers.store, hashes, 0, check_loss(loss), bound, tokens, spec, deadline)

        def store(call: MainCall[Stored]) -> Stored:
            stored: Stored = call.finish(begin, Transfer.cancel, lambda transfer: transfer.result())
            return stored

        return uninterrupted(store)

    def flush(self, *, deadline_ms: float | None = None) -> bool:
        """Waits until every store so far has ended and its committed blocks are visible to every client. Returns False
        if the deadline passed first, a shard could not be asked, or a store since the last flush has missed."""
        deadline = self._call(deadline_ms)

        def flush(call: object) -> bool:
            ended = self._transfers.wait_stored(deadline)
            return self._shards.flush(deadline) and ended

        return uninterrupted(flush)

    def explain(
        self, prompt: Prompt | TokenIds, *, accept: Loss | None = None, deadline_ms: float | None = None
    ) -> list[BlockExplanation]:
        """Returns for every block of a prompt where it is, or why it cannot be loaded with a loss up to `accept`."""
        prompt, deadline = as_prompt(prompt), self._call(deadline_ms)
        return explain(self._control, self._spec(prompt.adapter), self._need(accept), prompt, deadline)

    def clear(self, *, deadline_ms: float | None = None) -> int:
        """Removes every block of this credential's tenant, of every spec, permanently. Returns how many were known.

        After it returns, no lookup finds a block that was stored before the call, even if processes restart or were
        partitioned. Raises Unreachable if that is not known to hold: call it again."""
        return self._purge(Purge(), deadline_ms)

    def purge(
        self,
        *,
        model: str | None = None,
        weights: str | None = None,
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """As `clear`, only for the specs that match every argument given: this model, these weights, this adapter (""
        for none). Use it after weights or an adapter were replaced under the same name."""
        check_filters(model=model, weights=weights, adapter=adapter)
        return self._purge(Purge(model, weights, adapter), deadline_ms)

    def status(self, *, deadline_ms: float | None = None) -> dict[str, Any]:
        """Returns the coordinator's status of the cluster as plain values, and this client's `transports` in use and
        `breakers`, by shard. Raises Unreachable if the coordinator does not answer."""
        deadline = self._call(deadline_ms)

        def ask(call: object) -> dict[str, Any]:
            status = self._control.require(Status, GetStatus(), deadline, "is the cluster up?")
            return status_dict(status) | {"transports": self._shards.names(), "breakers": self._shards.breakers()}

        return uninterrupted(ask)

    @property
    def shard_connections(self) -> ShardConnections:
        """The connections to shards with their breakers, for metrics."""
        return self._shards

    @property
    def aio(self) -> AsyncClient:
        """Async versions of the calls of level 2."""
        return AsyncClient(self)

    def close(self) -> None:
        """Ends running calls and transfers and releases every resource. A call that it ends returns a miss, or raises
        Unreachable if it has none. A coordinator that does not answer keeps it for two seconds at most. May be called
        again. In a forked child it leaves the parent's client as it is."""
        if not self._process.forked:
            uninterrupted(lambda call: self._close())

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unclosed.detach()
        try:
            self._parts.close()
        finally:
            if self.on_close is not None:
                self.on_close(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _need(self, accept: Loss | None, parts: Sequence[Part | None] | None = None) -> Need:
        accept = self._accept if accept is None else check_loss(accept)
        return Need(self.parts if parts is None else tuple(parts), accept)

    def _purge(self, message: Purge, deadline_ms: float | None) -> int:
        self._control.check_may_store()
        return self._control.require(Purged, message, self._call(deadline_ms), "blocks may remain; call again").blocks

    def _hash(self, prompt: Prompt | TokenIds, deadline: Deadline) -> tuple[KVSpec, list[BlockHash], Miss | None]:
        """Returns the prompt's spec and hashes; or no hashes, and the miss that says why."""
        prompt = as_prompt(prompt)
        spec = self._spec(prompt.adapter)
        return spec, *known_hashes(prompt, spec, lambda: self._control.namespace(spec, deadline))

    def _spec(self, adapter: str | None) -> KVSpec:
        return self.spec if adapter is None or adapter == self.spec.adapter else replace(self.spec, adapter=adapter)

    def _load_ms(self, blocks: int, spec: KVSpec) -> float:
        return load_ms(self._transfers.nbytes(blocks, spec), blocks)

    def _check_usable(self) -> None:
        """Raises CallerError if the client is closed, or is that of the process from which this one was forked."""
        self._process.check("client")
        check_open(self._closed)

    def _call(self, deadline_ms: float | None, default_ms: float = OTHER_MS) -> Deadline:
        """Returns the deadline of a call that begins now. Raises CallerError as `_check_usable`."""
        self._check_usable()
        return self._deadline(deadline_ms, default_ms)

    def _deadline(self, deadline_ms: float | None, default_ms: float = OTHER_MS) -> Deadline:
        return call_deadline(self._config.deadline_ms, deadline_ms, default_ms)


class AsyncClient:
    """`client.aio`: each blocking call of level 2 as an awaitable, with the same arguments and result."""

    def __init__(self, client: Client) -> None:
        self.lookup = awaitable(client.lookup)
        self.load = awaitable(client.load)
        self.store = awaitable(client.store)
        self.flush = awaitable(client.flush)
        self.explain = awaitable(client.explain)
        self.pin = awaitable(client.pin)
        self.unpin = awaitable(client.unpin)
        self.pins = awaitable(client.pins)
        self.clear = awaitable(client.clear)
        self.purge = awaitable(client.purge)
