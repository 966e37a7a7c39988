"""The client: what an engine holds. Three levels, each built on the one before; this module has the first two.

    1  blocks     prepare_load, redeem, begin_load, begin_store       for engines that hash for themselves
    2  tokens     lookup, load, store, flush, explain, pin, unpin     blocking; async twins on `client.aio`

Every call has one deadline. Misuse raises CallerError before anything moves; trouble in the cluster is a miss with a
reason, and the engine recomputes. Loads have a thread of their own and stores another, so that a load never waits
behind a store; no event loop is needed.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvcluster.client import loading, storing
from kvcluster.client.control import NO_CALL, NOBODY, Control, CoordinatorPort
from kvcluster.client.explaining import explain
from kvcluster.client.lease_keeper import LeaseKeeper
from kvcluster.client.results import BlockExplanation, Loaded, Lookup, Stored
from kvcluster.client.shards import OpenTransport, Shards
from kvcluster.client.status import status_dict
from kvcluster.client.ticket import Ticket
from kvcluster.client.transfer import Transfer
from kvcluster.config import ClientConfig
from kvcluster.core import hashing, limits
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Holder, NamespaceId
from kvcluster.core.messages import (
    Done,
    EndTicket,
    GetStatus,
    LoadGrant,
    Need,
    PinBlocks,
    Pinned,
    PrepareLoad,
    PrepareStore,
    RenewTicket,
    Status,
    TicketBody,
    UnpinBlocks,
)
from kvcluster.core.placement import run_start
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError, KVClusterError, LimitError, Unreachable
from kvcluster.transport.seam import Deadline, Trouble
from kvcluster.wire.frames import decode_ticket

if TYPE_CHECKING:
    from kvcluster.client.aio import AsyncClient
    from kvcluster.client.memory import Bound

R = TypeVar("R")
_UNNAMED = NamespaceId(b"")  # filled in by Control, which attaches first


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
        self.parts = _parts(spec, part)
        self._config = config or ClientConfig()
        self._control = Control(port)
        self._shards = Shards(open_transport)
        self._holder = Holder(os.urandom(HOLDER_BYTES))
        self._counter = itertools.count(1)
        self._host = socket.gethostname()
        self._keeper = LeaseKeeper(self._renew, self._end)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvcluster-store")
        self._running: dict[Transfer[Any], ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._rate: float | None = None  # bytes a second of recent loads
        self._closed = False

    def attach(self, deadline: Deadline) -> None:
        """Names the spec to the coordinator. Done by the first call otherwise; `connect` does it to fail early."""
        self._control.attach(self.spec, deadline)

    # ------------------------------------------------------------------------------------ level 1: blocks

    def hashes(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> list[BlockHash]:
        """Hashes of the full blocks of a token sequence (core/hashing.py). Pure but for the first call of a spec,
        which asks the cluster for the namespace; raises Trouble (transport/seam.py) where there is none to ask."""
        spec = self._spec(adapter)
        root = hashing.root(self._control.namespace(spec, self._call(None)), salt)
        return hashing.chain(root, token_ids, spec.block_tokens, extra_keys)

    def prepare_load(
        self,
        hashes: Sequence[BlockHash],
        *,
        whole: bool = False,
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> Ticket:
        """How many of the leading blocks can be loaded; they are spared until the ticket is released.

        `hashes` is the chain from the first block of the sequence. With `whole`, all layers and heads are prepared
        for and not this client's part alone, for other processes to redeem.
        """
        self._check_hashes(hashes)
        spec = self._spec(adapter)
        parts = tuple(spec.whole(g) for g in range(len(spec.groups))) if whole else self.parts
        return self._prepare(spec, hashes, Need(parts), self._call(deadline_ms), hold=True)

    def redeem(self, data: bytes) -> Ticket:
        """The ticket that another process of the same credential prepared. Raises ProtocolError if it is none."""
        return Ticket(decode_ticket(data), None, lambda: None)

    def begin_load(
        self, ticket: Ticket, into: Any, *, adapter: str | None = None, deadline_ms: float | None = None
    ) -> Transfer[Loaded]:
        """Begins to load the ticket's blocks into the leading blocks of `into`.

        `into` is a dense tensor `[blocks, layers, planes, block_tokens, kv_heads, head_dim]`, Paged or Buffers (see
        client/memory.py), of this client's part; a list of one a group where the spec has several. It must not be
        used until the transfer says so. Raises CallerError where it does not fit.
        """
        from kvcluster.client.memory import bind

        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        return self._load(ticket, bind(into, spec, self.parts, ticket.blocks, writable=True), spec, deadline)

    def _load(self, ticket: Ticket, bound: Bound, spec: KVSpec, deadline: Deadline) -> Transfer[Loaded]:
        pieces = loading.plan_pieces(ticket.body, spec, self.parts)
        attempt = self._attempt()
        transfer: Transfer[Loaded] = Transfer(
            deadline, lambda miss: Loaded(0, 0, miss), loading.layer_counts(pieces, spec).items()
        )

        def work() -> Loaded:
            began = time.monotonic_ns()
            loaded = loading.load(self._shards, spec, ticket.body, pieces, bound, transfer, attempt, deadline)
            self._learn_rate(loaded.nbytes, time.monotonic_ns() - began)
            return loaded

        self._begin(self._loader, transfer, work)
        return transfer

    def begin_store(
        self,
        hashes: Sequence[BlockHash],
        source: Any,
        *,
        first: int = 0,
        adapter: str | None = None,
        deadline_ms: float | None = None,
    ) -> Transfer[Stored]:
        """Begins to store `hashes[first:]`, whose KV lies in `source` (as `into` of begin_load).

        `hashes` is the chain from the first block of the sequence. `source` must stay as it is until
        `source_free()`. What others have stored or are storing is not moved. Raises CallerError where the source
        does not fit.
        """
        from kvcluster.client.memory import bind

        self._check_hashes(hashes)
        if not 0 <= first <= len(hashes):
            raise CallerError(f"first={first} does not lie within the {len(hashes)} hashes")
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        new = tuple(hashes[first:])
        bound = bind(source, spec, self.parts, len(new), writable=False)
        ticket_attempt, attempt = self._attempt(), self._attempt()
        wait_ns = self._config.store_wait_ms * 1_000_000
        transfer: Transfer[Stored] = Transfer(deadline, lambda miss: Stored(0, 0, 0, 0, miss))

        def work() -> Stored:
            if not new:
                return Stored(0, 0, 0, 0)
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
                parts=tuple((group, part) for group, part in enumerate(self.parts) if part is not None),
                host=self._host,
            )
            return storing.store(
                self._control, self._shards, spec, prepare, bound, transfer, attempt, wait_ns, deadline
            )

        self._begin(self._storer, transfer, work)
        return transfer

    # ------------------------------------------------------------------------------------ level 2: tokens

    def lookup(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> Lookup:
        """How far this prompt is cached. Promises nothing."""
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        hashes, trouble = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return Lookup(0, 0, None, trouble)
        ticket = self._prepare(spec, hashes, Need(self.parts), deadline, hold=False)
        seconds = None
        if self._rate is not None:
            page_bytes = sum(spec.page_bytes(g, p) for g, p in enumerate(self.parts) if p is not None)
            seconds = ticket.blocks * page_bytes / self._rate
        return Lookup(ticket.blocks * spec.block_tokens, ticket.blocks, seconds, ticket.miss)

    def load(
        self,
        token_ids: Sequence[int],
        out: Any,
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """Loads the cached prefix into the leading blocks of `out` (as `into` of begin_load; it has room for every
        full block of `token_ids`). Returns the tokens loaded; what lies behind them in `out` is undefined."""
        from kvcluster.client.memory import bind

        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        hashes, _ = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return 0
        # Checked before anything is asked: a mistake must not wait for the first hit to show.
        bound = bind(out, spec, self.parts, len(hashes), writable=True)
        with self._prepare(spec, hashes, Need(self.parts), deadline, hold=True) as ticket:
            if not ticket.blocks:
                return 0
            return self._load(ticket, bound, spec, deadline).result().blocks * spec.block_tokens

    def store(
        self,
        token_ids: Sequence[int],
        blocks: Any,
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> Stored:
        """Stores the full blocks of `token_ids`, whose KV lies in `blocks` (as `source` of begin_store)."""
        spec, deadline = self._spec(adapter), self._call(deadline_ms)
        hashes, trouble = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return Stored(0, 0, 0, 0, trouble)
        transfer = self.begin_store(hashes, blocks, adapter=adapter, deadline_ms=deadline.remaining_s() * 1e3)
        return transfer.result()

    def flush(self, *, deadline_ms: float | None = None) -> bool:
        """Waits until every store so far has ended and what it committed is visible to all. False where the
        deadline came first or a shard could not be asked."""
        deadline = self._call(deadline_ms)
        with self._lock:
            stores = [transfer for transfer, executor in self._running.items() if executor is self._storer]
        ended = [transfer.wait_ended(deadline) for transfer in stores]
        return self._shards.flush(deadline) and all(ended)

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> list[BlockExplanation]:
        """For every block of a prompt where it is, or why it cannot be had."""
        deadline = self._call(deadline_ms)
        return explain(self._control, self._spec(adapter), self.parts, token_ids, salt, extra_keys, deadline)

    def pin(
        self,
        token_ids: Sequence[int],
        ttl_s: float,
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """Spares the cached prefix of a prompt from eviction for `ttl_s`, within the share that pins may take.
        Returns the tokens pinned."""
        message = PinBlocks(NO_CALL, NOBODY, _UNNAMED, (), int(ttl_s * 1e9))
        return self._pin(message, token_ids, self._spec(adapter), salt, extra_keys, self._call(deadline_ms))

    def unpin(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        adapter: str | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        deadline_ms: float | None = None,
    ) -> int:
        """Lets a pinned prompt be evicted again. Returns the tokens unpinned."""
        message = UnpinBlocks(NO_CALL, NOBODY, _UNNAMED, ())
        return self._pin(message, token_ids, self._spec(adapter), salt, extra_keys, self._call(deadline_ms))

    def status(self, *, deadline_ms: float | None = None) -> dict[str, Any]:
        """The cluster as the coordinator sees it, as plain values. Raises Unreachable where it is not there."""
        try:
            status = self._control.say(Status, GetStatus(NO_CALL), self._call(deadline_ms))
        except Trouble as trouble:
            raise Unreachable(f"the coordinator does not answer: {trouble.miss}; is the cluster up?") from None
        return status_dict(status) | {"transports": self._shards.names()}

    @property
    def aio(self) -> AsyncClient:
        """Async twins of the calls of level 2."""
        from kvcluster.client.aio import AsyncClient

        return AsyncClient(self)

    def close(self) -> None:
        """Ends running transfers and gives everything back. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = list(self._running)
        for transfer in running:
            transfer.cancel()
        # Futures are not cancelled: each transfer has to run to its end, or whoever waits for it would wait in vain.
        self._loader.shutdown()
        self._storer.shutdown()
        self._keeper.close()
        self._shards.close()
        self._control.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _prepare(
        self, spec: KVSpec, hashes: Sequence[BlockHash], need: Need, deadline: Deadline, *, hold: bool
    ) -> Ticket:
        attempt = self._attempt()
        message = PrepareLoad(NO_CALL, NOBODY, _UNNAMED, attempt, tuple(hashes), need, hold)
        try:
            grant = self._control.ask(LoadGrant, spec, message, deadline)
            attached = self._control.attach(spec, deadline)
        except Trouble as trouble:
            return Ticket(TicketBody(NamespaceId(bytes(32)), attempt, (), need, ()), trouble.miss, lambda: None)
        body = TicketBody(attached.namespace, attempt, tuple(hashes[: grant.blocks]), need, grant.runs)
        if not grant.hold_ns:
            return Ticket(body, grant.miss, lambda: None)
        # The hold is shorter than the ticket: it is what has to be renewed in time.
        self._keeper.keep(attempt, min(attached.ticket_ttl_ns, grant.hold_ns))
        return Ticket(body, grant.miss, lambda: self._keeper.release(attempt))

    def _end(self, attempt: Attempt) -> bool:
        try:
            self._control.say(Done, EndTicket(NO_CALL, attempt), self._deadline(None))
        except (Trouble, KVClusterError):
            return False
        return True

    def _renew(self, attempt: Attempt) -> bool:
        try:
            return self._control.say(Done, RenewTicket(NO_CALL, attempt), self._deadline(None)).ok
        except Trouble:
            return True  # perhaps the next time
        except KVClusterError:
            return False

    def _pin(
        self,
        message: PinBlocks | UnpinBlocks,
        token_ids: Sequence[int],
        spec: KVSpec,
        salt: bytes,
        extra_keys: Mapping[int, bytes] | None,
        deadline: Deadline,
    ) -> int:
        hashes, _ = self._hash(token_ids, spec, salt, extra_keys, deadline)
        if not hashes:
            return 0
        try:
            pinned = self._control.ask(Pinned, spec, replace(message, hashes=tuple(hashes)), deadline)
        except Trouble:
            return 0
        return pinned.blocks * spec.block_tokens

    def _hash(
        self,
        token_ids: Sequence[int],
        spec: KVSpec,
        salt: bytes,
        extra_keys: Mapping[int, bytes] | None,
        deadline: Deadline,
    ) -> tuple[list[BlockHash], Miss | None]:
        """The prompt's hashes, or why there are none to ask for."""
        hashing.token_bytes(token_ids)  # a bad token is the caller's mistake, whether or not a cluster is there
        if len(token_ids) < spec.block_tokens:
            detail = f"{len(token_ids)} tokens fill no block of {spec.block_tokens}"
            return [], Miss(MissReason.BELOW_BLOCK, detail)
        try:
            root = hashing.root(self._control.namespace(spec, deadline), salt)
        except Trouble as trouble:
            return [], trouble.miss
        hashes = hashing.chain(root, token_ids, spec.block_tokens, extra_keys)
        self._check_hashes(hashes)
        return hashes, None

    def _begin(self, executor: ThreadPoolExecutor, transfer: Transfer[R], work: Callable[[], R]) -> None:
        with self._lock:
            self._check_open()
            self._running[transfer] = executor
            future = executor.submit(transfer.run, work)
        future.add_done_callback(lambda _: self._forget(transfer))

    def _forget(self, transfer: Transfer[Any]) -> None:
        with self._lock:
            del self._running[transfer]

    def _spec(self, adapter: str | None) -> KVSpec:
        return self.spec if adapter is None or adapter == self.spec.adapter else replace(self.spec, adapter=adapter)

    def _check_hashes(self, hashes: Sequence[BlockHash]) -> None:
        if len(hashes) > limits.BLOCKS_PER_CALL:
            raise LimitError(f"{len(hashes)} blocks in one call; at most {limits.BLOCKS_PER_CALL} go. Split it")
        if any(type(block) is not bytes or len(block) != HASH_BYTES for block in hashes):
            raise CallerError("block hashes are 32 bytes each; make them with client.hashes(...) or hashing.foreign")

    def _attempt(self) -> Attempt:
        return Attempt(self._holder, next(self._counter))

    def _call(self, deadline_ms: float | None) -> Deadline:
        """The deadline of a call that begins now. Raises CallerError where the client is closed."""
        self._check_open()
        return self._deadline(deadline_ms)

    def _check_open(self) -> None:
        if self._closed:
            raise CallerError("this client is closed; connect again")

    def _deadline(self, deadline_ms: float | None) -> Deadline:
        return Deadline.after_ms(self._config.deadline_ms if deadline_ms is None else deadline_ms)

    def _learn_rate(self, nbytes: int, took_ns: int) -> None:
        if nbytes and took_ns:
            rate = nbytes * 1e9 / took_ns
            self._rate = rate if self._rate is None else 0.8 * self._rate + 0.2 * rate


def _parts(spec: KVSpec, part: Part | Mapping[int, Part] | None) -> tuple[Part | None, ...]:
    if part is None:
        return tuple(spec.whole(group) for group in range(len(spec.groups)))
    by_group = part if isinstance(part, Mapping) else dict.fromkeys(range(len(spec.groups)), part)
    if not by_group:
        raise CallerError("part names no group; leave it out to hold everything")
    for group, of_group in by_group.items():
        spec.check_part(group, Part(*of_group))
    return tuple(Part(*by_group[group]) if group in by_group else None for group in range(len(spec.groups)))
