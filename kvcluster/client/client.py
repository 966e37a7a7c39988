"""The client: what an engine holds. Three levels, each built on the one before; this module has the first two.

    1  blocks     prepare_load, redeem, begin_load, begin_store,      for engines that hash for themselves
                  borrow
    2  tokens     lookup, load, store, flush, explain, pin, unpin     blocking; async twins on `client.aio`,
                  clear, purge                                        as of these two

Every call has one deadline, which all its parts share. Misuse raises CallerError before anything moves; trouble in the
cluster is a miss with a reason, and the engine recomputes. All that is raised is of the tree in errors.py. Bytes are
moved by threads of the client's own (transfer_queue.py), and tickets renewed by another: no event loop is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvcluster.client.coordinator_client import CoordinatorClient, CoordinatorPort
from kvcluster.client.explain import explain
from kvcluster.client.policy import ShardPolicy
from kvcluster.client.results import BlockExplanation, Loaded, Lookup, Pinned, Stored
from kvcluster.client.shard_connections import OpenTransport, ShardConnections
from kvcluster.client.status import status_dict
from kvcluster.client.ticket import Ticket
from kvcluster.client.tickets import Tickets
from kvcluster.client.transfer import Transfer
from kvcluster.client.transfer_queue import TransferQueue
from kvcluster.client.validation import (
    check_deadline_ms,
    check_filters,
    check_first,
    check_hashes,
    check_loss,
    check_prompt,
    check_tokens_of,
    parts_of,
    pin_terms,
    prompt_hashes,
)
from kvcluster.client.warm_up import warm_up
from kvcluster.client.zero_copy import BorrowedBlocks, Borrower
from kvcluster.config import ClientConfig
from kvcluster.core import messages
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import (
    EngineInfo,
    GetStatus,
    Need,
    PinBlocks,
    Purge,
    Purged,
    Registered,
    RegisterEngine,
    Status,
    UnpinBlocks,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError, Unreachable
from kvcluster.pages.codec import implementation
from kvcluster.transport.auto import own_attempts
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.wire.frames import decode_ticket

if TYPE_CHECKING:
    from kvcluster.client.aio import AsyncClient

R = TypeVar("R")


class Client:
    """One worker's view of the cache for one spec. Made by `kvcluster.connect`; thread-safe; a context manager.

    `part` is what this worker holds of every group: None for all of it, one Part for each group alike, or a
    mapping from group to Part where groups differ (groups left out are not moved).
    """

    def __init__(
        self,
        port: CoordinatorPort,
        open_transport: OpenTransport,
        spec: KVSpec,
        *,
        part: Part | Mapping[int, Part] | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        self.spec = spec
        self.parts = parts_of(spec, part)
        self._config = config or ClientConfig()
        self._control = CoordinatorClient(port)
        lock = threading.RLock()  # of what plans and policy decide: never held while anything takes time
        policy = ShardPolicy(breaker_failures=self._config.breaker_failures, breaker_ms=self._config.breaker_ms)
        self._shards = ShardConnections(open_transport, policy, lock)
        self._attempt = own_attempts()
        self._tickets = Tickets(self._control, self._attempt)
        self._movers = TransferQueue(
            self._control, self._shards, policy, lock, self.parts, next_attempt=self._attempt, config=self._config
        )
        self._borrower = Borrower(self._shards, self.parts, next_attempt=self._attempt, deadline=self._deadline)
        # Without anything to decode it with, a page that is encoded had better not be promised.
        self._accept = Loss[self._config.accept.upper()] if implementation() is not None else Loss.EXACT
        self._closed = False

    def attach(self, deadline: Deadline) -> None:
        """Names the spec to the coordinator. Done by the first call otherwise; `connect` does it to fail early.
        Raises Unavailable (an Unreachable) where it does not answer."""
        self._control.attach(self.spec, deadline)

    def warm_up(self, *, deadline_ms: float | None = None) -> None:
        """Finds the way to every shard that is up, so that the first load or store need not. Nothing is raised."""
        warm_up(self._control, self._shards, self.spec, self.parts, self._attempt, self._call(deadline_ms))

    def register(self, engine: EngineInfo, *, deadline_ms: float | None = None) -> Registered:
        """Tells the cluster that this engine lives, and hears what its weights are to be called. Raises Unavailable."""
        return self._control.request(Registered, RegisterEngine(engine), self._call(deadline_ms))

    # ------------------------------------------------------------------------------------ level 1: blocks

    def hashes(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> list[BlockHash]:
        """Hashes of the full blocks of a token sequence (core/hashing.py). Pure but for the first call of a spec,
        which asks the cluster for the namespace; raises Unavailable (an Unreachable) where there is none to ask."""
        check_prompt(token_ids, salt, extra_keys)
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        namespace = self._control.namespace(spec, deadline)
        return prompt_hashes(namespace, token_ids, spec.block_tokens, salt, extra_keys)

    def prepare_load(
        self,
        hashes: Sequence[BlockHash],
        *,
        whole: bool = False,
        accept: Loss | None = None,
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> Ticket:
        """How many of the leading blocks can be loaded; they are spared until the ticket is released.

        `hashes` is the chain from the first block of the sequence. With `whole`, all layers and heads are prepared
        for and not this client's part alone, for other processes to redeem. What has lost more than `accept` is a miss;
        None stands for what the configuration says.
        """
        check_hashes(hashes)
        spec = self._spec(adapter)
        parts = tuple(spec.whole(g) for g in range(len(spec.groups))) if whole else self.parts
        return self._tickets.prepare(spec, hashes, self._need(accept, parts), self._call(deadline_ms), hold=True)

    def redeem(self, data: bytes) -> Ticket:
        """The ticket that another process of the same credential prepared. Raises ProtocolError if it is none."""
        if not isinstance(data, bytes):
            raise CallerError(f"a ticket is redeemed from bytes(ticket), not from a {type(data).__name__}")
        return Ticket(decode_ticket(data), None, lambda: None)

    def begin_load(
        self, ticket: Ticket, into: Any, *, first: int = 0, adapter: str | None = None, deadline_ms: float | None = None
    ) -> Transfer[Loaded]:
        """Begins to load the ticket's blocks from `first` on into the leading blocks of `into`. Those before it the
        caller has: they are not read, and Loaded counts them as there.

        `into` is a dense tensor `[blocks, layers, planes, block_tokens, kv_heads, head_dim]`, Paged or Buffers (see
        client/layouts.py), of this client's part; a list of one a group where the spec has several. It must not be
        used until the transfer says so. The ticket says for which adapter; only a client that redeems one which it
        has never used names it here. Raises CallerError where something does not fit.
        """
        from kvcluster.client.memory import bind

        spec, deadline = self._spec_of(ticket, adapter), self._call(deadline_ms)
        check_first(first, ticket.hashes)
        bound = bind(into, spec, self.parts, ticket.blocks - first, first=first, writable=True)
        return self._movers.load(ticket.body, first, bound, spec, deadline)

    def borrow(self, ticket: Ticket, *, adapter: str | None = None, deadline_ms: float | None = None) -> BorrowedBlocks:
        """The ticket's blocks where they lie, without a copy, as far as their shards are reached over shared memory:
        see BorrowedBlocks, which is to be closed. `adapter` as in begin_load."""
        spec, deadline = self._spec_of(ticket, adapter, by="borrow"), self._call(deadline_ms)
        return self._borrower.borrow(ticket.body, spec, deadline)

    @property
    def wants_tokens(self) -> bool:
        """Does the cluster publish KV events, for which stores are to tell token ids? False while it is not known."""
        return self._control.wants_tokens

    def begin_store(
        self,
        hashes: Sequence[BlockHash],
        source: Any,
        *,
        first: int = 0,
        loss: Loss = Loss.EXACT,
        token_ids: Sequence[int] = (),
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> Transfer[Stored]:
        """Begins to store `hashes[first:]`, whose KV lies in `source` (as `into` of begin_load). Returns at once.

        `hashes` is the chain from the first block of the sequence. `source` must stay as it is until
        `source_free()`. `loss` is that of the prefix which it was computed over (Loaded.loss). What others have stored,
        with no more loss, or are storing is not moved. Where more stores of this client wait than may
        (limits.STORES_QUEUED), this one has ended already, with a miss `full`. `token_ids` are those of
        `hashes[first:]`, for KV events; they go nowhere unless the cluster `wants_tokens`. Raises CallerError where
        something does not fit.
        """
        check_hashes(hashes)
        check_first(first, hashes)
        spec = self._spec(adapter)
        check_tokens_of(token_ids, len(hashes) - first, spec.block_tokens)
        return self._store(hashes, source, first, loss, token_ids, spec, self._call(deadline_ms))

    def _store(
        self,
        hashes: Sequence[BlockHash],
        source: Any,
        first: int,
        loss: Loss,
        tokens: Sequence[int],
        spec: KVSpec,
        deadline: Deadline,
    ) -> Transfer[Stored]:
        from kvcluster.client.memory import bind

        loss = check_loss(loss)
        bound = bind(source, spec, self.parts, len(hashes) - first, writable=False)
        return self._movers.store(hashes, first, loss, bound, tokens, spec, deadline)

    # ------------------------------------------------------------------------------------ level 2: tokens

    def lookup(
        self,
        token_ids: Sequence[int],
        *,
        accept: Loss | None = None,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> Lookup:
        """How far this prompt is cached, with no more loss than `accept` (as in prepare_load). Promises nothing."""
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        hashes, trouble = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return Lookup(0, 0, None, trouble)
        ticket = self._tickets.prepare(spec, hashes, self._need(accept), deadline, hold=False)
        link = self._movers.learned.known()
        page_bytes = sum(spec.page_bytes(g, p) for g, p in enumerate(self.parts) if p is not None)
        seconds = None
        if link is not None:
            seconds = link.load_ns(ticket.blocks * page_bytes) / 1e9 if ticket.blocks else 0.0
        return Lookup(ticket.blocks * spec.block_tokens, ticket.blocks, seconds, ticket.miss, ticket.loss)

    def load(
        self,
        token_ids: Sequence[int],
        out: Any,
        *,
        accept: Loss | None = None,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """Loads the cached prefix into the leading blocks of `out` (as `into` of begin_load; it has room for every
        full block of `token_ids`), as far as it has lost no more than `accept` (as in prepare_load). Returns the tokens
        loaded; what lies behind them in `out` is undefined."""
        from kvcluster.client.memory import bind

        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        hashes, _ = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return 0
        # Checked before anything is asked: a mistake must not wait for the first hit to show.
        bound = bind(out, spec, self.parts, len(hashes), writable=True)
        with self._tickets.prepare(spec, hashes, self._need(accept), deadline, hold=True) as ticket:
            if not ticket.blocks:
                return 0
            return self._movers.load(ticket.body, 0, bound, spec, deadline).result().blocks * spec.block_tokens

    def store(
        self,
        token_ids: Sequence[int],
        blocks: Any,
        *,
        loss: Loss = Loss.EXACT,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> Stored:
        """Stores the full blocks of `token_ids`, whose KV lies in `blocks` (as `source` of begin_store, and `loss`)."""
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        hashes, trouble = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return Stored(0, 0, 0, 0, trouble)
        tokens = token_ids[: len(hashes) * spec.block_tokens]
        return self._store(hashes, blocks, 0, loss, tokens, spec, deadline).result()

    def flush(self, *, deadline_ms: float | None = None) -> bool:
        """Waits until every store so far has ended and what it committed is visible to all. False where the
        deadline came first or a shard could not be asked."""
        deadline = self._call(deadline_ms)
        ended = self._movers.wait_stored(deadline)
        return self._shards.flush(deadline) and ended

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        accept: Loss | None = None,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> list[BlockExplanation]:
        """For every block of a prompt where it is, or why it cannot be had with no more loss than `accept`."""
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        return explain(self._control, spec, self._need(accept), token_ids, salt, extra_keys, deadline)

    def pin(
        self,
        token_ids: Sequence[int],
        ttl_s: float,
        *,
        replicas: int = 1,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> Pinned:
        """Spares the cached prefix of a prompt from eviction for `ttl_s`, within the share that pins may take, and
        keeps it on `replicas` shards as far as there are as many with room."""
        ttl_ns, replicas = pin_terms(ttl_s, replicas)
        message = PinBlocks((), ttl_ns, replicas)
        return self._pin(message, token_ids, self._spec(adapter), salt, extra_keys, self._call(deadline_ms))

    def unpin(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> Pinned:
        """Lets a pinned prompt be evicted again."""
        message = UnpinBlocks(())
        return self._pin(message, token_ids, self._spec(adapter), salt, extra_keys, self._call(deadline_ms))

    def clear(self, *, deadline_ms: float | None = None) -> int:
        """Forgets, for good, every block of this credential's tenant, whatever its spec: how many were known.

        Once it returns no lookup finds what was stored before it was called, whichever process restarts or was cut
        off. Raises Unreachable where that is not known to hold: call it again.
        """
        return self._purge(Purge(), deadline_ms)

    def purge(
        self,
        *,
        model: str | None = None,
        weights: str | None = None,
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """As `clear`, of the specs alone that have this model, these weights, this adapter ("" for none), as far as
        they are given: what is to be done when weights or an adapter were replaced under the same name."""
        check_filters(model=model, weights=weights, adapter=adapter)
        return self._purge(Purge(model, weights, adapter), deadline_ms)

    def status(self, *, deadline_ms: float | None = None) -> dict[str, Any]:
        """The cluster as the coordinator sees it, as plain values; and as this client does: `transports` in use and
        `breakers`, by shard. Raises Unreachable where the coordinator does not answer."""
        status = self._must_hear(Status, GetStatus(), deadline_ms, "is the cluster up?")
        return status_dict(status) | {"transports": self._shards.names(), "breakers": self._shards.breakers()}

    @property
    def aio(self) -> AsyncClient:
        """Async twins of the calls of level 2."""
        from kvcluster.client.aio import AsyncClient

        return AsyncClient(self)

    def close(self) -> None:
        """Ends running transfers and gives everything back. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._movers.close(self._shards.close)
        self._borrower.close()  # after whoever hangs in asking a shard was broken off
        self._tickets.close()
        self._control.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _need(self, accept: Loss | None, parts: Sequence[Part | None] | None = None) -> Need:
        accept = self._accept if accept is None else check_loss(accept)
        return Need(self.parts if parts is None else tuple(parts), accept)

    def _pin(
        self,
        message: PinBlocks | UnpinBlocks,
        token_ids: Sequence[int],
        spec: KVSpec,
        salt: bytes,
        extra_keys: Mapping[int, bytes] | None,
        deadline: Deadline,
    ) -> Pinned:
        hashes, trouble = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return Pinned(0, 0, trouble)
        try:
            pinned = self._control.ask(messages.BlocksPinned, spec, replace(message, hashes=tuple(hashes)), deadline)
        except Unavailable as trouble:
            return Pinned(0, 0, trouble.miss)
        return Pinned(pinned.blocks * spec.block_tokens, pinned.blocks)

    def _purge(self, message: Purge, deadline_ms: float | None) -> int:
        return self._must_hear(Purged, message, deadline_ms, "nothing is known to be forgotten; call it again").blocks

    def _must_hear(self, kind: type[R], message: GetStatus | Purge, deadline_ms: float | None, advice: str) -> R:
        """Asks what no miss could answer."""
        try:
            return self._control.request(kind, message, self._call(deadline_ms))
        except Unavailable as trouble:
            raise Unreachable(f"the coordinator does not answer: {trouble.miss}; {advice}") from None

    def _hash(
        self,
        token_ids: Sequence[int],
        spec: KVSpec,
        salt: bytes,
        extra_keys: Mapping[int, bytes] | None,
        deadline: Deadline,
    ) -> tuple[list[BlockHash], Miss | None]:
        """The prompt's hashes, or why there are none to ask for."""
        check_prompt(token_ids, salt, extra_keys)
        if len(token_ids) < spec.block_tokens:
            detail = f"{len(token_ids)} tokens fill no block of {spec.block_tokens}"
            return [], Miss(MissReason.BELOW_BLOCK, detail)
        try:
            namespace = self._control.namespace(spec, deadline)
        except Unavailable as trouble:
            return [], trouble.miss
        hashes = prompt_hashes(namespace, token_ids, spec.block_tokens, salt, extra_keys)
        check_hashes(hashes)
        return hashes, None

    def _spec(self, adapter: str | None) -> KVSpec:
        return self.spec if adapter is None or adapter == self.spec.adapter else replace(self.spec, adapter=adapter)

    def _spec_of(self, ticket: Ticket, adapter: str | None, *, by: str = "begin_load") -> KVSpec:
        """The spec that a ticket was prepared for. Raises CallerError where another is named."""
        if not isinstance(ticket, Ticket):
            raise CallerError(f"{by} takes a ticket of prepare_load or redeem, not a {type(ticket).__name__}")
        known = self._control.spec_of(ticket.body.namespace)
        if known is None:
            spec = self._spec(adapter)
            if ticket.blocks and self._control.is_attached(spec):
                raise CallerError(
                    "this ticket is of another namespace: give the spec and adapter that the ticket was prepared with, "
                    "and the same credential"
                )
            return spec
        if adapter is not None and adapter != known.adapter:
            raise CallerError(
                f"this ticket was prepared for adapter {known.adapter!r}, not {adapter!r}; "
                "leave it out, since the ticket says it"
            )
        return known

    def _call(self, deadline_ms: float | None) -> Deadline:
        """The deadline of a call that begins now. Raises CallerError where the client is closed."""
        if self._closed:
            raise CallerError("this client is closed; connect again")
        return self._deadline(deadline_ms)

    def _deadline(self, deadline_ms: float | None) -> Deadline:
        if deadline_ms is None:
            return Deadline.after_ms(self._config.deadline_ms)
        return Deadline.after_ms(check_deadline_ms(deadline_ms))
