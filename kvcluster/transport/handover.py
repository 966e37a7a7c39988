"""Handing an exchange over: what is left of a load or a store when the path that carried it broke.

The caller's sink gets every layer once and in order, whichever paths bring them, and the caller's source is asked for
whole pages by each path anew. A record that broke in the middle is the hard case: nobody but the sink knows how much of
it the sink has made use of. So the sink never learns of it: the record is brought whole over the next path, beside the
sink, which then reads on where it was. What the sink or the source itself raises is no failure of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvcluster.core.ids import Attempt
from kvcluster.core.messages import PageWant, ReadRequest, WriteRequest, Written
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.errors import CredentialError, ProtocolError
from kvcluster.transport.arrivals import read_whole
from kvcluster.transport.seam import PageSink, PageSource, Payload, Present, Trouble

FAILURES = (Trouble, ProtocolError, CredentialError)
"""What a path fails by. What a shard refuses, and what is wrong with a request, are the same over every path."""

Rescue = Callable[["Record"], memoryview]
"""Brings a record whole by another path. Raises Gone where the shard has it no more, or why there is no other path."""


class Gone(Trouble):
    """The shard no longer has the page of a record that broke. The pages beside it are none the worse."""


class Record:
    """One record of a load on its way to a sink: a Payload that outlives its path."""

    def __init__(self, want: PageWant, codec: int, sums: Sequence[int], data: Payload, rescue: Rescue) -> None:
        self.want = want
        self.codec = codec
        self.sums = sums
        self.nbytes = data.nbytes
        self.broken_by: Exception | None = None
        self._data = data
        self._taken = 0
        self._rescue = rescue

    @property
    def present(self) -> memoryview | None:
        return self._data.present if not self._taken and self.broken_by is None else None

    def read_into(self, view: memoryview) -> int:
        if self.broken_by is not None:
            return 0
        try:
            got = self._data.read_into(view)
        except FAILURES as error:
            self.broken_by = error  # the rest takes time to bring, and must not be waited for here
            return 0
        self._taken += got
        return got

    def wait(self) -> None:
        if self.broken_by is None:
            try:
                self._data.wait()
                return
            except FAILURES as error:
                self.broken_by = error
        self._data = Present(self._rescue(self)[self._taken :])
        self.broken_by = None


class RestOfLoad:
    """A load's wants that have not come, and the sink to give to the path that brings them."""

    def __init__(self, request: ReadRequest, sink: PageSink, rescue: Rescue) -> None:
        self.request = request
        """What is to be asked next."""
        self.begun = False
        """Has anything come?"""
        self.is_over = False
        """Has the sink raised something? Then the call ends by it: no other path could do better."""
        self._asked = request
        self._sink = sink
        self._rescue = rescue
        self._items: Sequence[int] = range(len(request.wants))  # of `request`, as the caller counts them
        self._stands = [want.layer_start for want in request.wants]
        self._outcome: list[Miss | None] = [None] * len(request.wants)

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        """As PageSink."""
        self.begun = True
        own, stop = self._items[item], layer + len(sums)
        want = self._asked.wants[own]
        record = Record(PageWant(want.key, layer, stop), codec, sums, data, self._rescue)
        try:
            self._sink.receive(own, layer, codec, sums, record)
        except Gone as gone:
            self._outcome[own] = gone.miss
            raise
        except BaseException:
            self.is_over = True
            raise
        self._stands[own] = stop

    def ended(self, outcome: Sequence[Miss | None]) -> list[Miss | None]:
        """The outcome of the whole, where this is that of the last request."""
        for own, miss in zip(self._items, outcome, strict=True):
            self._outcome[own] = miss
        return self._outcome

    def ask_again(self, attempt: Attempt) -> list[Miss | None] | None:
        """Makes a request of what is left; or where nothing is, the outcome."""
        wants = self._asked.wants
        self._items = [
            own for own, want in enumerate(wants) if self._stands[own] < want.layer_stop and self._outcome[own] is None
        ]
        rest = (PageWant(wants[own].key, self._stands[own], wants[own].layer_stop) for own in self._items)
        self.request = replace(self._asked, attempt=attempt, wants=tuple(rest))
        return None if self._items else self._outcome


class Held:
    """A sink that keeps one record, of so many bytes in that codec."""

    def __init__(self, nbytes: int, codec: int) -> None:
        self._nbytes = nbytes
        self._codec = codec
        self.sums: list[int] = []
        self.data = bytearray()

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        if codec != self._codec:  # as right as the other, and yet the two make no whole
            raise Gone(Miss(MissReason.EVICTED, "it has changed its tier"))
        if len(self.data) + data.nbytes > self._nbytes:
            raise ProtocolError("a record came that is larger than it was before")
        self.sums += sums
        part = bytearray(data.nbytes)
        read_whole(data, memoryview(part))
        self.data += part


class RestOfStore:
    """A store's pages of which nothing is known, and the source to give to the path that takes them."""

    def __init__(self, request: WriteRequest, source: PageSource) -> None:
        self.request = request
        """What is to be asked next."""
        self.is_over = False
        """Can the source not be asked any more? It raised something, or was told that it is free. Then the call ends
        with this path."""
        self._asked = request
        self._source = source
        self._items: Sequence[int] = range(len(request.pages))  # of `request`, as the caller counts them
        self._outcome: list[Written | None] = [None] * len(request.pages)
        self._sent: dict[int, None] = {}
        self._doubtful: dict[int, None] = {}  # a try that broke off may hold the page still
        self._perhaps: dict[int, None] = {}  # ... or may have committed it
        self._drained = False

    def layer_bytes(self, item: int) -> int:
        """As PageSource."""
        return self._source.layer_bytes(self._items[item])

    def send(self, item: int, layer: int, layers: int) -> tuple[Sequence[int], memoryview]:
        """As PageSource."""
        with self._asking(item) as own:
            return self._source.send(own, layer, layers)

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        """As PageSource."""
        with self._asking(item) as own:
            return self._source.copy(own, layer, layers, into)

    @contextmanager
    def _asking(self, item: int) -> Iterator[int]:
        """The item as the caller counts it, whose source is asked within."""
        own = self._items[item]
        self._sent[own] = None
        try:
            yield own
        except BaseException:
            self.is_over = True
            raise

    def drained(self) -> None:
        """As PageSource. Whoever waits to overwrite the source waits for this, and a path seldom takes every byte and
        then breaks: its store is not made again. One that was made again already may have to be once more."""
        if not self._doubtful:
            self._drained = self.is_over = True
            self._source.drained()

    def broke_off(self) -> None:
        """What was asked last has no outcome."""
        self._doubtful.update(dict.fromkeys(self._items))
        self._perhaps.update(self._sent)

    def ended(self, outcome: Sequence[Written]) -> None:
        """What was asked last has this outcome."""
        for own, written in zip(self._items, outcome, strict=True):
            ours = written is Written.DUPLICATE and own in self._perhaps
            self._outcome[own] = Written.COMMITTED if ours else written

    @property
    def answered(self) -> bool:
        """Has every page an outcome, be it that it is pending?"""
        return None not in self._outcome

    def ask_again(self, attempt: Attempt, wait_ns: int) -> bool:
        """Makes a request of what has no outcome, and of what is pending where that may be a try of ours that has yet
        to be aborted. False where nothing is left."""
        self._items = [
            own
            for own, written in enumerate(self._outcome)
            if written is None or (written is Written.PENDING and own in self._doubtful)
        ]
        pages = tuple(self._asked.pages[own] for own in self._items)
        self.request = replace(self._asked, attempt=attempt, pages=pages, wait_ns=min(self._asked.wait_ns, wait_ns))
        return bool(self._items)

    def outcome(self) -> list[Written]:
        """Of the whole. The source is not asked again."""
        if not self._drained:
            self._source.drained()
        return [written for written in self._outcome if written is not None]
