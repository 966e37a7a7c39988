"""Pages within one process: the transport of `kvcluster.local(ray=False)`, and of most tests.

It uses the same sessions as the servers, so leases, checksums and outcomes behave the same here as there.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack

from kvcluster.copies.batch import HOST
from kvcluster.core import limits
from kvcluster.core.ids import Caller, NamespaceId
from kvcluster.core.messages import (
    AttendRequest,
    PageSlot,
    PageWant,
    ReadRequest,
    Reply,
    ShardQuestion,
    WriteRequest,
    Written,
    request_of,
)
from kvcluster.core.miss import Miss
from kvcluster.memory import checksum
from kvcluster.memory.region import address_of
from kvcluster.transport.attend_session import SpanResults, serve_attend
from kvcluster.transport.base import ONE_STREAM, Deadline, PageHost, PageSink, PageSource
from kvcluster.transport.sessions import ReadSession, ShardQuestions, WriteSession
from kvcluster.transport.worker_exchange import granted_records, open_store, reserved_records
from kvcluster.wire.shm_frames import Places, wanted_sums


class MemoryTransport(ShardQuestions):
    """A worker's transport to a shard of the same process."""

    name = "memory"
    streams = ONE_STREAM

    def __init__(self, host: PageHost, caller: Caller) -> None:
        self._host = host
        self._caller = caller

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        deadline.check()
        with ReadSession(self._host, self._caller, request, deadline=deadline, path=self.name) as session:
            views = {item: self._host.read(slot) for item, slot in session.granted.items()}
            records = granted_records(request.wants, _places(session.granted, views, request.wants))
            copies = sink.copies(records, HOST, views)
            for start, stop in records.slices(limits.FRAME_BYTES):
                session.alive()
                deadline.check()
                copies.run(start, stop)
                yield
            return session.outcome

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        deadline.check()
        with WriteSession(self._host, self._caller, request, deadline=deadline, path=self.name) as session:
            with ExitStack() as house:
                views = {item: house.enter_context(self._host.fill(slot)) for item, slot in session.granted.items()}
                records = reserved_records(request.pages, _places(session.granted, views))
                copies = open_store(source, records, HOST, views)
                for start, stop in records.slices(limits.FRAME_BYTES):
                    deadline.check()
                    session.alive()
                    copies.run(start, stop)
            session.written(*records.ended_items(0, len(records)))
            source.drained()
            deadline.check()
            return session.finish()

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        """As Attends."""
        deadline.check()
        return serve_attend(self._host, self._caller, request, query, deadline, path=self.name)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _ask(self, question: ShardQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        deadline.check()
        return self._host.ask(lambda call: request_of(self._caller, call, namespace, question), deadline.remaining_s())


def _places(granted: Mapping[int, PageSlot], views: Mapping[int, memoryview], wants: Sequence[PageWant] = ()) -> Places:
    """Returns where granted pages lie, as addresses; those of a read with codecs and sums."""
    slots = list(granted.values())
    layers = {part: part.layers for part in dict.fromkeys([slot.key.part for slot in slots])}
    sums = wanted_sums(wants, granted) if wants else []
    return Places(
        list(granted),
        [address_of(views[item]) for item in granted],
        [slot.nbytes // layers[slot.key.part] for slot in slots],
        [slot.codec for slot in slots],
        checksum.unpack_sums(b"".join(sums)),
    )
