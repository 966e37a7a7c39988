"""The shard's side of an exchange, for all transports: carries out page sessions on a transport's thread.

page_session.py decides; `ExchangeSession`, `ReadSession` and `WriteSession` wait for the core, read frames from the
arena, and receive layers. worker_exchange.py is the other side.

`ShardQuestions` has the questions that all workers' transports ask a shard in the same way: to attach, for its offers,
to flush, and so on. A transport supplies `_ask`; loads, stores and Attends are its own.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Generic, TypeVar

from kvcluster.core.ids import SUM_BYTES, Attempt, Caller, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    AttachShard,
    Done,
    Flush,
    GetOffers,
    Offers,
    PageKey,
    PageSlot,
    PageWants,
    ReadRequest,
    Refused,
    RefusedKind,
    RegisterSpans,
    Reply,
    ShardQuestion,
    Suspect,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.memory import checksum, codec
from kvcluster.transport.base import Deadline, PageHost, Payload, RefusedByShard, Unavailable
from kvcluster.transport.exchange_summary import (
    ExchangeResult,
    ExchangeSummary,
    GrantedItem,
    Operation,
    missed_reads,
    missed_writes,
    read_bytes,
    written_bytes,
)
from kvcluster.transport.page_session import (
    LONGEST_NS,
    AskCore,
    Committed,
    CoreAnswered,
    Fail,
    Finished,
    Granted,
    MoveNext,
    Open,
    PageSession,
    Refuse,
    Revoked,
    SessionEffect,
    SessionEvent,
    SessionRequest,
    Stopped,
)
from kvcluster.transport.page_writer import PageWriter
from kvcluster.transport.worker_exchange import in_order_of_use
from kvcluster.wire.frames import Record

RequestT = TypeVar("RequestT", bound=SessionRequest)


_TOO_LONG = "the exchange took until then"


def _nothing() -> None:
    """Does nothing: for transports that cannot be stopped from outside."""


class ExchangeSession(Generic[RequestT]):
    """Carries out a page session (page_session.py) on its transport's thread. Use as a context manager: when it ends,
    no byte of the exchange moves any more. `granted`: the pages of a load or store, by the index of their want."""

    def __init__(
        self,
        host: PageHost,
        caller: Caller,
        request: RequestT,
        stop: Callable[[], object] = _nothing,
        deadline: Deadline | None = None,
        *,
        path: str,
    ) -> None:
        """`path`: the transport that moves the bytes, for what is counted of the exchange."""
        self._host = host
        self._caller = caller
        self._path = path
        self._began = time.monotonic()
        self._request = request
        self._session = PageSession(caller, request)
        self._stop = stop
        self._deadline = deadline
        self._watch = ExitStack()
        self._lock = threading.Lock()  # guards the session: a lease is revoked from another thread
        self._pages: Sequence[GrantedItem] = ()
        self.granted: dict[int, PageSlot] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            self._report_end(error)

    def _open(self) -> None:
        try:
            self._watch.enter_context(self._host.on_revoke(self._request.attempt, self._revoked))
            self._drive(Open())
            self.granted = {item: page for item, page in enumerate(self._pages) if isinstance(page, PageSlot)}
        except BaseException as error:
            self._watch.close()
            self._report_end(error)
            raise

    def alive(self) -> None:
        """The worker has shown that it is alive: renews its lease. Raises Unavailable if the lease has ended, or the
        time of the exchange is over: a worker that takes a frame now and then would keep its pages for ever."""
        if self._deadline is not None:
            self._deadline.check(_TOO_LONG)
        self._drive(MoveNext())

    def _end(self, *, for_good: bool = True) -> None:
        """Returns the lease. The core steps this message even if no time is left, unless the shard has ended."""
        self._watch.close()
        self._drive(Stopped(for_good))

    def _report_end(self, error: BaseException | None) -> None:
        """Reports to the shard how the exchange ended. `error`: what ended it, None if its transport completed it.
        Reports nothing for a caller that was not attached yet: it tries a path like this, and attaches before it asks
        again."""
        seconds = time.monotonic() - self._began
        named = self._operation(), self._path, self._caller.tenant, self._request.attempt
        if isinstance(error, RefusedByShard):
            if error.refused.kind is RefusedKind.UNKNOWN_NAMESPACE:
                return
            summary = ExchangeSummary(*named, ExchangeResult.REFUSED, seconds, error=str(error))
        elif error is not None:
            why = "the reader stopped" if isinstance(error, GeneratorExit) else str(error) or type(error).__name__
            summary = ExchangeSummary(*named, ExchangeResult.FAILED, seconds, error=why)
        else:
            summary = self._summary(named, seconds)
        self._host.exchange_ended(summary)

    def _operation(self) -> Operation:
        raise AssertionError("of a load or a store")

    def _summary(self, named: tuple[Operation, str, Tenant, Attempt], seconds: float) -> ExchangeSummary:
        """Returns the summary of an exchange that ended without an error."""
        raise AssertionError("of a load or a store")

    def _drive(self, event: SessionEvent) -> SessionEffect | None:
        """Steps an event, and asks the core the questions that follow. Returns the last effect; raises RefusedByShard,
        or the error by which the exchange fails."""
        effects = self._step(event)
        while effects and isinstance(effects[0], AskCore):
            effects = self._step(CoreAnswered(self._ask(effects[0])))
        effect = effects[0] if effects else None
        if isinstance(effect, Granted):
            self._pages = effect.pages
        elif isinstance(effect, Refuse):
            raise RefusedByShard(effect.refused)
        elif isinstance(effect, Fail):
            raise effect.error
        return effect

    def _step(self, event: SessionEvent) -> list[SessionEffect]:
        with self._lock:
            return self._session.step(event)

    def _revoked(self, why: Miss) -> None:
        if self._step(Revoked(why)):
            self._stop()

    def _ask(self, ask: AskCore) -> Reply | Miss:
        """Asks the core, and waits as long as the caller of this session. The core steps the question even if the wait
        ends before."""
        wait_s = LONGEST_NS / 1e9 if self._deadline is None else self._deadline.remaining_s()
        try:
            return self._host.ask(ask.build, wait_s)
        except Unavailable as trouble:
            return trouble.miss


class ReadSession(ExchangeSession[ReadRequest]):
    """One load. `outcome` is for each want None or its miss. Pages of a pool on a device are granted only over a path
    by which the worker can have opened that pool (`opens_pools`)."""

    def __init__(
        self,
        host: PageHost,
        caller: Caller,
        request: ReadRequest,
        stop: Callable[[], object] = _nothing,
        deadline: Deadline | None = None,
        *,
        path: str,
        opens_pools: bool = False,
    ) -> None:
        if request.on_device and not opens_pools:
            request = replace(request, on_device=False)
        super().__init__(host, caller, request, stop, deadline, path=path)

    def __enter__(self) -> ReadSession:
        self._open()
        return self

    def _operation(self) -> Operation:
        return Operation.REPLICATE_OUT if self._caller.internal else Operation.LOAD

    def _summary(self, named: tuple[Operation, str, Tenant, Attempt], seconds: float) -> ExchangeSummary:
        missed = missed_reads(self._pages) if len(self.granted) < len(self._pages) else {}
        moved = read_bytes(PageWants.of(self._request.wants), self.granted)
        return ExchangeSummary(*named, ExchangeResult.DONE, seconds, len(self.granted), moved, missed)

    @property
    def outcome(self) -> list[Miss | None]:
        return [page if isinstance(page, Miss) else None for page in self._pages]

    def frames(self, nbytes: int) -> Iterator[list[Record]]:
        """Yields all wanted layers in the order of their use, in batches of about `nbytes`. The records are views of
        the arena.

        The first layers of every page come before the second of any, so that a worker that waits for a layer does not
        wait for later ones.
        """
        batch: list[Record] = []
        room = nbytes
        sums = {item: checksum.unpack_sums(slot.sums) for item, slot in self.granted.items()}
        items, layer_bytes = list(self.granted), [slot.nbytes // slot.key.part.layers for slot in self.granted.values()]
        for layer, count, pages in in_order_of_use([self._request.wants[item] for item in items], layer_bytes):
            for at in pages:
                item, each = items[at], layer_bytes[at]
                slot = self.granted[item]
                size = count * max(each, 2 * SUM_BYTES)
                if batch and room < size:
                    self.alive()
                    yield batch
                    batch, room = [], nbytes
                data = self._host.read(slot, layer * each, (layer + count) * each)
                batch.append(Record(item, layer, slot.codec, sums[item][layer : layer + count], data))
                room -= size
        if batch:
            self.alive()
            yield batch


class WriteSession(ExchangeSession[WriteRequest]):
    """One store; pages that `finish` did not commit are aborted at its end."""

    def __init__(
        self,
        host: PageHost,
        caller: Caller,
        request: WriteRequest,
        stop: Callable[[], object] = _nothing,
        deadline: Deadline | None = None,
        *,
        path: str,
    ) -> None:
        if deadline is not None:  # waiting for room longer than the worker would keep a thread busy for nothing
            request = replace(request, wait_ns=min(request.wait_ns, deadline.remaining_ns()))
        super().__init__(host, caller, request, stop, deadline, path=path)
        self._arrivals = PageWriter(request.namespace, {}, host)
        self._left = False
        self._written: list[Written] | None = None  # once all is committed

    def __enter__(self) -> WriteSession:
        self._open()
        self._arrivals = PageWriter(self._request.namespace, self.granted, self._host)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(for_good=not self._left)
        finally:
            # Once all is committed, a worker that has its answer may end the stream before the server does.
            self._report_end(error if self._written is None else None)

    def _operation(self) -> Operation:
        return Operation.STORE

    def _summary(self, named: tuple[Operation, str, Tenant, Attempt], seconds: float) -> ExchangeSummary:
        if self._written is None:
            return ExchangeSummary(*named, ExchangeResult.FAILED, seconds, error="the worker has aborted it")
        missed = missed_writes(self._written)
        pages = len(self._written) - sum(missed.values())
        moved = written_bytes(self.granted.values())
        return ExchangeSummary(*named, ExchangeResult.DONE, seconds, pages, moved, missed)

    @property
    def outcome(self) -> list[Written | None]:
        """For each page None if it is to be sent, otherwise why not."""
        return [page if isinstance(page, Written) else None for page in self._pages]

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        """Receives layers into their page. Raises ProtocolError for layers that were not requested."""
        if codec_id != codec.RAW:
            raise ProtocolError(f"page {item} arrived in codec {codec_id:#06x}, but stores must be raw")
        self._arrivals.receive(item, layer, codec_id, sums, data)

    def written(self, items: Sequence[int], sums: Sequence[int]) -> None:
        """The worker has written these whole pages in place, and no longer writes them. `sums` are those of all their
        layers, one page after the other. Raises as `receive`."""
        at = 0
        for item in items:
            stop = at + self._request.pages[item].key.part.layers
            self._arrivals.written(item, sums[at:stop])
            at = stop

    def leave(self) -> None:
        """The worker has not stopped, and the shard will not see it stop: its pages stay leased until the arena is
        closed."""
        self._left = True

    def finish(self) -> list[Written]:
        """Commits the pages that matched the writer's checksums, and returns the outcome of each page.

        Raises ProtocolError, and commits nothing, if a page is incomplete.
        """
        missing = self._arrivals.missing()
        done = Finished({} if missing is not None else self._arrivals.verified(), missing)
        committed = self._drive(done)
        assert isinstance(committed, Committed)
        self._written = committed.outcome
        return committed.outcome


R = TypeVar("R", bound=Reply)


class ShardQuestions(ABC):
    """The control questions of a Transport, over `_ask` of the class that inherits them."""

    @abstractmethod
    def _ask(self, question: ShardQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        """Returns the shard's answer. Raises Unavailable if none arrives by the deadline."""

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        return _expected(AttachedShard, self._ask(AttachShard(spec, owner), deadline))

    def offers(self, deadline: Deadline) -> Offers:
        """Which data paths the shard serves beside this one. Raises Unavailable, or RefusedByShard."""
        return _expected(Offers, self._ask(GetOffers(), deadline))

    def flush(self, deadline: Deadline) -> bool:
        wait_ns = int(deadline.remaining_s() * 0.9e9)  # leaves time for the shard's answer if it waits in vain
        return self._ask(Flush(wait_ns), deadline) == Done(True)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        _expected(Done, self._ask(Suspect(epoch, tuple(keys)), deadline, namespace))

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        """As RegistersSpans."""
        _expected(Done, self._ask(message, deadline, namespace))


def _expected(kind: type[R], answer: Reply) -> R:
    """Returns an answer of this type. Raises RefusedByShard."""
    if isinstance(answer, Refused):
        raise RefusedByShard(answer)
    assert isinstance(answer, kind)
    return answer
