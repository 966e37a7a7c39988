"""A worker's transport to one shard incarnation: gRPC for control, and the fastest data path that both ends support.

Pages go over the first of shm, tcp, grpc that works (path_selector.py). If that path fails in the middle of an
exchange, PathLost says that there is another: the caller asks for the rest again (transfers/load_plan.py,
transfers/store_plan.py), and that goes over the next path. A shard that has really ended fails over gRPC as well, and
that Unavailable is raised. Two things end a call over any path: its caller cancels it, or it is too slow.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name

from kvcluster.config import TRANSPORTS
from kvcluster.core.ids import HOLDER_BYTES, Attempt, Epoch, Holder, NamespaceId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    AttendRequest,
    Offer,
    PageKey,
    ReadRequest,
    RegisterSpans,
    ShardAddress,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CredentialError, ProtocolError
from kvcluster.transport.attend_session import Attends, NotAttending, RegistersSpans, SpanResults
from kvcluster.transport.base import (
    Cancelled,
    DataPath,
    Deadline,
    PageSink,
    PageSource,
    PathLost,
    Unavailable,
)
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.path_selector import ControlPath, Opener, PathSelector, said
from kvcluster.transport.process_location import ProcessLocation, locate
from kvcluster.transport.shm_views import BorrowedPages, Lends, NotLent
from kvcluster.transports import BESIDE_GRPC, TransportSpec


def _opener(spec: TransportSpec) -> Opener:
    def opened(offer: Offer, credentials: Credentials) -> DataPath:
        open_path: Opener = resolve_name(f"{spec.module}:open_path")
        return open_path(offer, credentials)

    return opened


FAILURES = (Unavailable, ProtocolError, CredentialError)
"""The errors by which a path fails. A refusal of the shard, or a wrong request, would be the same over every path."""

OPENERS: Mapping[str, Opener] = {spec.name: _opener(spec) for spec in BESIDE_GRPC}
"""The data paths other than gRPC. Their code is loaded when one is opened."""


class AutoTransport:
    """A Transport (transport/base.py). `name` and `streams` are those of the path in use."""

    def __init__(
        self,
        shard: ShardAddress,
        control: ControlPath,
        openers: Mapping[str, Opener],
        *,
        credentials: Credentials,
        next_attempt: Callable[[], Attempt],
        takes: Sequence[str] = TRANSPORTS,
        location: ProcessLocation | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._control = control
        self._paths = PathSelector(
            shard,
            control,
            openers,
            credentials=credentials,
            takes=takes,
            location=location or locate(),
            next_attempt=next_attempt,
            clock=clock,
        )
        self.name, self.streams = self._paths.in_use

    def refused(self) -> dict[str, str]:
        """Returns why each path preferred to the one in use is not used, for those that were tried."""
        return self._paths.refused()

    # ------------------------------------------------------------------------------------------- control

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        return self._control.attach(spec, deadline, owner)

    def flush(self, deadline: Deadline) -> bool:
        return self._control.flush(deadline)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        self._control.suspect(namespace, epoch, keys, deadline)

    def close(self) -> None:
        """Ends exchanges that are under way. May be called from any thread, and again."""
        self._paths.close()

    # ---------------------------------------------------------------------------------------------- data

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        with self._path(deadline) as path:
            try:
                return (yield from path.read(request, sink, deadline))
            except FAILURES as error:
                raise self._failed(path, error, deadline) from None

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        with self._path(deadline) as path:
            try:
                return path.write(request, source, deadline)
            except FAILURES as error:
                raise self._failed(path, error, deadline) from None

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        """As RegistersSpans."""
        if not isinstance(self._control, RegistersSpans):
            raise NotAttending(f"{self._control.name} registers no spans")
        self._control.register_spans(namespace, message, deadline)

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        """As Attends."""
        with self._path(deadline) as path:
            if not isinstance(path, Attends):
                raise NotAttending(f"the transport in use is {path.name}, which carries no queries{self._why_not()}")
            try:
                return path.attend(request, query, deadline)
            except FAILURES as error:
                raise self._failed(path, error, deadline) from None

    @contextmanager
    def borrow(self, request: ReadRequest, deadline: Deadline) -> Iterator[BorrowedPages]:
        """As Lends (shm_views.py). Raises NotLent if the path in use does not lend, or fails while another is left: no
        other path could continue what this one began."""
        with self._path(deadline) as path:
            if not isinstance(path, Lends):
                raise NotLent(f"the transport in use is {path.name}, which cannot lend pages{self._why_not()}")
            try:
                lent = path.borrow(request, deadline)
            except FAILURES as error:
                if not self._goes_on(path, error, deadline):
                    raise
                raise NotLent(f"{path.name}: {said(error)}") from None  # it says nothing about the shard itself
            with lent as borrowed:
                yield borrowed

    @contextmanager
    def _path(self, deadline: Deadline) -> Iterator[DataPath]:
        with self._paths.use(deadline) as path:
            self._show()
            yield path

    def _failed(self, path: DataPath, error: Exception, deadline: Deadline) -> Exception:
        """Returns the error to raise at the caller when a path failed with `error`."""
        if isinstance(error, Cancelled) or not self._goes_on(path, error, deadline):
            return error
        return PathLost(error.miss if isinstance(error, Unavailable) else Miss(MissReason.SHARD_LOST, str(error)))

    def _goes_on(self, path: DataPath, error: Exception, deadline: Deadline) -> bool:
        """Retires a failed path. Returns whether there is another path, and time left to use it."""
        if self._paths.is_last(path):
            return False
        # Another path cannot bring back an ended lease, or the time of the call.
        late = isinstance(error, Unavailable) and error.miss.reason is MissReason.DEADLINE
        if late or not deadline.remaining_s():
            self._paths.doubt(path)
        else:
            self._paths.failed(path, said(error))
        self._show()
        return not late and deadline.remaining_s() > 0

    def _why_not(self) -> str:
        """Returns why no better path is in use, to follow other words."""
        return "".join(f"; {name}: {reason}" for name, reason in self.refused().items())

    def _show(self) -> None:
        self.name, self.streams = self._paths.in_use


def choose(
    shard: ShardAddress,
    credentials: Credentials,
    next_attempt: Callable[[], Attempt],
    location: ProcessLocation | None = None,
    *,
    takes: Sequence[str] = TRANSPORTS,
) -> AutoTransport:
    """Returns a transport to a shard over the paths of this platform that `takes` names. `location`: of this process,
    None for one without settings."""
    credentials = credentials.for_shard(shard)
    control = GrpcPages(shard.address, credentials)
    return AutoTransport(
        *(shard, control, OPENERS), credentials=credentials, next_attempt=next_attempt, takes=takes, location=location
    )


def own_attempts() -> Callable[[], Attempt]:
    """Returns a source of attempts under a new random holder, which other processes cannot guess; thread-safe."""
    holder, counter = Holder(os.urandom(HOLDER_BYTES)), itertools.count(1)
    return lambda: Attempt(holder, next(counter))
