"""The server half that all transports share: one load or one store, from its lease to its end.

A session takes the lease, hands out or takes in frames, and always gives the lease back: its `with` block is
where pins live. Each frame shows that the worker is alive and renews the lease. When the shard revokes it, the
session stops at the next frame and the transport is told to break off, so that a page is freed only after the
last byte has been moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

from kvcluster.core import limits
from kvcluster.core.ids import CallId, Tenant
from kvcluster.core.messages import (
    Abort,
    Commit,
    CommitGrant,
    Done,
    PageSlot,
    PageWant,
    Pin,
    PinGrant,
    ReadRequest,
    Refused,
    Renew,
    Reply,
    Reserve,
    ShardMessage,
    Unpin,
    WriteGrant,
    WriteRequest,
    Written,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.pages import checksum, codec
from kvcluster.transport.arrivals import Arrivals
from kvcluster.transport.seam import Deadline, PageHost, PageSource, Payload, RefusedByShard, Trouble
from kvcluster.wire.frames import Record

_PROMPT_S = 5.0
"""Questions that the core answers at once; the wait only bounds a process that hangs."""

_DRIVE_S = 55.0
"""Beyond that, for pages that have to be read from disk first: likewise, and no longer than an exchange may take."""


def outgoing(request: WriteRequest, outcome: Sequence[Written | None], source: PageSource) -> Iterator[list[Record]]:
    """The worker's side of a store: the layers of every page that is to be sent, in batches of about FRAME_BYTES.

    A source's bytes are valid until it is asked again, so what shares a frame with others is copied; those are
    small pages, for which one frame each would cost far more.
    """
    batch: list[Record] = []
    room = limits.FRAME_BYTES
    for item, (page, refused) in enumerate(zip(request.pages, outcome, strict=True)):
        if refused is not None:
            continue
        layers, layer_bytes = page.key.part.layers, source.layer_bytes(item)
        layer = 0
        while layer < layers:
            count = min(layers - layer, max(1, room // layer_bytes))
            sums, data = source.send(item, layer, count)
            layer += count
            room -= data.nbytes
            full = room < layer_bytes
            batch.append(Record(item, layer - count, codec.RAW, tuple(sums), data if full else memoryview(bytes(data))))
            if full:
                yield batch
                batch, room = [], limits.FRAME_BYTES
    if batch:
        yield batch


class Asked:
    """What a load asked of a shard, to hold its answer to: layers that were asked for, in order, each once.

    A layer that came twice would hide one that did not come.
    """

    def __init__(self, request: ReadRequest, outcome: Sequence[Miss | None], address: str) -> None:
        self._wants = request.wants
        self._outcome = outcome
        self._address = address
        self._next = [want.layer_start for want in request.wants]

    def check(self, item: int, layer: int, layers: int) -> None:
        """Raises ProtocolError unless these layers of that item are the ones that come next of it."""
        stop = layer + layers
        if (
            item >= len(self._next)
            or self._outcome[item] is not None
            or layer != self._next[item]
            or stop > self._wants[item].layer_stop
        ):
            raise ProtocolError(f"{self._address} sent layers that were not asked for, or not in order")
        self._next[item] = stop


def check_length(outcome: Sequence[object], asked: Sequence[object], address: str) -> None:
    """Raises ProtocolError where a shard has not answered for exactly the pages that it was asked for."""
    if len(outcome) != len(asked):
        raise ProtocolError(f"{address} answered for {len(outcome)} pages of {len(asked)}")


def _nothing() -> None:
    """How to stop what cannot be stopped from outside."""


class _Session:
    """A lease with a beginning and an end."""

    _ending: type[Unpin] | type[Abort]

    def __init__(
        self, host: PageHost, request: ReadRequest | WriteRequest, stop: Callable[[], object], deadline: Deadline | None
    ) -> None:
        self._host = host
        self._attempt = request.attempt
        self._stop = stop
        self._deadline = deadline
        self._revoked = False
        self._watch = ExitStack()

    def _begin(self, question: Callable[[CallId], ShardMessage], wait_s: float = 0.0) -> Reply:
        self._watch.enter_context(self._host.on_revoke(self._attempt, self._break_off))
        try:
            answer = self._ask(question, _PROMPT_S + wait_s)
        except BaseException:
            self._end()  # what was granted too late to be heard of
            raise
        if isinstance(answer, Refused):  # nothing was granted; a lease of this attempt would be somebody else's
            self._watch.close()
            raise RefusedByShard(answer)
        return answer

    def alive(self) -> None:
        """The worker has shown that it lives. Raises Trouble where its lease has ended."""
        self._renew()

    def _break_off(self) -> None:
        self._revoked = True
        self._stop()

    def _renew(self) -> None:
        if not self._revoked:
            answer = self._ask(lambda call: Renew(call, self._attempt))
            self._revoked = answer == Done(False)
        if self._revoked:
            raise Trouble(Miss(MissReason.DEADLINE, "the lease ended: too slow"))

    def _end(self) -> None:
        """Gives the lease back. It is a message under way even where its answer is late; or the shard is over."""
        self._watch.close()
        with suppress(Trouble):
            self._ask(lambda call: self._ending(call, self._attempt))

    def _ask(self, question: Callable[[CallId], ShardMessage], wait_s: float = _PROMPT_S) -> Reply:
        """Waits no longer than whoever waits for this session. What was asked is stepped even where nobody waits."""
        return self._host.ask(question, wait_s if self._deadline is None else min(wait_s, self._deadline.remaining_s()))


class ReadSession(_Session):
    """One load. Use as a context manager; `outcome` is for each want None or its miss."""

    _ending = Unpin

    def __init__(
        self,
        host: PageHost,
        tenant: Tenant,
        request: ReadRequest,
        stop: Callable[[], object] = _nothing,
        deadline: Deadline | None = None,
    ) -> None:
        super().__init__(host, request, stop, deadline)
        self._request = request
        self._tenant = tenant
        self._wants = request.wants
        self._pages: tuple[PageSlot | Miss, ...] = ()
        self.granted: dict[int, PageSlot] = {}
        """The pages that are pinned, by their place among the wants."""

    def __enter__(self) -> ReadSession:
        r = self._request
        keys = tuple(want.key for want in self._wants)
        answer = self._begin(
            lambda call: Pin(call, self._tenant, r.namespace, r.attempt, r.epoch, keys, r.accept), _DRIVE_S
        )
        assert isinstance(answer, PinGrant)
        self._pages = answer.pages
        self.granted = {item: page for item, page in enumerate(self._pages) if isinstance(page, PageSlot)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def outcome(self) -> list[Miss | None]:
        return [page if isinstance(page, Miss) else None for page in self._pages]

    def frames(self) -> Iterator[list[Record]]:
        """All wanted layers in the order of their use, in batches of about FRAME_BYTES. The records view the arena.

        The first layers of every page come before the second of any, so that who waits for a layer waits for it alone.
        """
        batch: list[Record] = []
        room = limits.FRAME_BYTES
        sums = {item: checksum.unpack_sums(slot.sums) for item, slot in self.granted.items()}
        layer_bytes_of = {item: slot.nbytes // slot.key.part.layers for item, slot in self.granted.items()}
        for item, layer, count in in_order_of_use(self._wants, layer_bytes_of):
            slot = self.granted[item]
            layer_bytes = slot.nbytes // slot.key.part.layers
            if batch and room < count * layer_bytes:
                self._renew()
                yield batch
                batch, room = [], limits.FRAME_BYTES
            data = self._host.view(slot)[layer * layer_bytes : (layer + count) * layer_bytes]
            batch.append(Record(item, layer, slot.codec, sums[item][layer : layer + count], data))
            room -= count * layer_bytes
        if batch:
            self._renew()
            yield batch


def in_order_of_use(wants: Sequence[PageWant], layer_bytes: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(item, layer within its page, layers) of each record: what a load moves at a time.

    Of the items that `layer_bytes` names; the first layers of every page come before the second of any.
    """
    records = []
    for item, nbytes in layer_bytes.items():
        want = wants[item]
        first, step = want.key.part.layer_start, max(1, limits.RECORD_BYTES // nbytes)
        for layer in range(want.layer_start, want.layer_stop, step):
            records.append((first + layer, item, layer, min(step, want.layer_stop - layer)))
    return [(item, layer, count) for _, item, layer, count in sorted(records)]


class WriteSession(_Session):
    """One store. Use as a context manager; pages that `finish` did not commit are aborted at its end."""

    _ending = Abort

    def __init__(
        self,
        host: PageHost,
        tenant: Tenant,
        request: WriteRequest,
        stop: Callable[[], object] = _nothing,
        deadline: Deadline | None = None,
    ) -> None:
        super().__init__(host, request, stop, deadline)
        self._request = request
        self._tenant = tenant
        self._pages: tuple[PageSlot | Written, ...] = ()
        self._arrivals = Arrivals(request.namespace, {}, host.view)
        self._finished = False
        self.granted: dict[int, PageSlot] = {}
        """The pages that are to be written, by their place in the request."""

    def __enter__(self) -> WriteSession:
        r = self._request
        answer = self._begin(
            lambda call: Reserve(call, self._tenant, r.namespace, r.attempt, r.epoch, r.pages, r.wait_ns),
            wait_s=r.wait_ns / 1e9,
        )
        assert isinstance(answer, WriteGrant)
        self._pages = answer.pages
        self.granted = {item: page for item, page in enumerate(self._pages) if isinstance(page, PageSlot)}
        self._arrivals = Arrivals(r.namespace, self.granted, self._host.view)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._finished:
            self._watch.close()
        else:
            self._end()

    @property
    def outcome(self) -> list[Written | None]:
        """For each page None where it is to be sent, else why not."""
        return [page if isinstance(page, Written) else None for page in self._pages]

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: Payload) -> None:
        """Takes layers into their page, as a PageSink. Raises ProtocolError for what was not asked for."""
        if codec_id != codec.RAW:
            raise ProtocolError(f"page {item} came in codec {codec_id:#06x}; what is stored is raw")
        self._arrivals.receive(item, layer, codec_id, sums, data)

    def written(self, item: int, sums: Sequence[int]) -> None:
        """The worker has written the whole page in place, and writes it no more. Raises as `receive`."""
        self._arrivals.written(item, sums)

    def leave(self) -> None:
        """The worker has not stopped, and nobody will see it stop: its pages are nobody else's while the arena is."""
        self._finished = True

    def finish(self) -> list[Written]:
        """Commits what matched the writer's checksums.

        Raises ProtocolError, and commits nothing, where not all has come: the writer broke off, and the end of its
        stream cannot always be told from its being cut.
        """
        self._renew()
        missing = self._arrivals.missing()
        if missing is not None:
            raise ProtocolError(f"the store ended before page {missing} was whole")
        verified = self._arrivals.verified()
        self._finished = True
        answer = self._ask(lambda call: Commit(call, self._attempt, tuple(verified), tuple(verified.values())))
        assert isinstance(answer, CommitGrant)
        committed = dict(zip(verified, answer.pages, strict=True))
        return [
            page if isinstance(page, Written) else committed.get(item, Written.CORRUPT)
            for item, page in enumerate(self._pages)
        ]
