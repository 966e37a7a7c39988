"""Choice: a worker's way to one shard incarnation, by the fastest data path that both ends have.

Control goes over gRPC; pages go over the first of shm, tcp, grpc that serves (paths.py). Where that one fails in the
middle of an exchange, the rest of it goes on over the next, within the same call (handover.py), and the caller sees
nothing but the time that it took. A shard that is really gone fails over gRPC as well, and that is the Trouble that is
raised. Two things end a call over any path: what the caller's own sink or source raises, and having been too slow.

Each try has an attempt of its own, under a holder that no one else has: at the shard it is a lease like any other.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name

from kvcluster.config import TRANSPORTS
from kvcluster.core.ids import HOLDER_BYTES, Attempt, Epoch, Holder, NamespaceId
from kvcluster.core.messages import AttachedShard, Offer, PageKey, ReadRequest, ShardAddress, WriteRequest, Written
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.transport.borrowed import Borrowed, Lends, NotLent
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.handover import FAILURES, Gone, Held, Record, RestOfLoad, RestOfStore
from kvcluster.transport.paths import Control, Opener, Paths, said
from kvcluster.transport.seam import DataPath, Deadline, PageSink, PageSource, RefusedByShard, Trouble, to_its_end
from kvcluster.transports import BESIDE_GRPC, TransportSpec


def _opener(spec: TransportSpec) -> Opener:
    def opened(offer: Offer, token: str | None) -> DataPath:
        open_path: Opener = resolve_name(f"{spec.module}:open_path")
        return open_path(offer, token)

    return opened


OPENERS: Mapping[str, Opener] = {spec.name: _opener(spec) for spec in BESIDE_GRPC}
"""The data paths that there are beside gRPC. Their code is loaded when one is opened."""

PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Before asking again for a page that a try of ours still holds: its shard aborts it when it sees the connection close,
and a shard that takes longer than all of these is one whose answer nobody should wait for."""


class Choice:
    """A Transport (transport/seam.py). `name` and `streams` are those of the path in use."""

    def __init__(
        self,
        shard: ShardAddress,
        control: Control,
        openers: Mapping[str, Opener],
        *,
        token: str | None,
        next_attempt: Callable[[], Attempt],
        takes: Sequence[str] = TRANSPORTS,
        here: str | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._control = control
        self._next_attempt = next_attempt
        self._pause = pause
        self._paths = Paths(
            shard,
            control,
            openers,
            token=token,
            takes=takes,
            here=socket.gethostname() if here is None else here,
            next_attempt=next_attempt,
            clock=clock,
        )
        self.name, self.streams = self._paths.in_use

    def refused(self) -> dict[str, str]:
        """Why each path before the one in use is not used, as far as they were looked at."""
        return self._paths.refused()

    # ------------------------------------------------------------------------------------------- control

    def attach(self, spec: KVSpec, deadline: Deadline) -> AttachedShard:
        return self._control.attach(spec, deadline)

    def flush(self, deadline: Deadline) -> bool:
        return self._control.flush(deadline)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        self._control.suspect(namespace, epoch, keys, deadline)

    def close(self) -> None:
        """Ends what is under way. May be called from any thread, and again."""
        self._paths.close()

    # ---------------------------------------------------------------------------------------------- data

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        def rescue(record: Record) -> memoryview:
            assert record.broken_by is not None
            if not self._goes_on(path, record.broken_by, deadline):
                raise record.broken_by
            return self._whole(request, record, deadline)

        rest = RestOfLoad(request, sink, rescue)
        while True:
            with self._path(deadline) as path:
                try:
                    return rest.ended((yield from path.read(rest.request, rest, deadline)))
                except Gone:
                    pass  # this path has failed before it could be known
                except FAILURES as error:
                    if rest.is_over or not self._goes_on(path, error, deadline):
                        raise
                except RefusedByShard as refused:
                    if rest.begun:  # whoever begins anew, as one may who is refused, would send what has come already
                        raise _lost(refused) from None
                    raise
            outcome = rest.ask_again(self._next_attempt())
            if outcome is not None:
                return outcome

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        rest, pauses = RestOfStore(request, source), iter(PAUSES_S)
        while True:
            with self._path(deadline) as path:
                try:
                    rest.ended(path.write(rest.request, rest, deadline))
                except FAILURES as error:
                    if rest.is_over or not (self._goes_on(path, error, deadline) or rest.answered):
                        raise
                    rest.broke_off()
            if not rest.ask_again(self._next_attempt(), int(deadline.remaining_s() * 1e9)):
                break
            if rest.answered:  # what is left is pending
                pause_s = min(next(pauses, 0.0), deadline.remaining_s())
                if not pause_s:
                    break
                self._pause(pause_s)
        return rest.outcome()

    @contextmanager
    def borrow(self, request: ReadRequest, deadline: Deadline) -> Iterator[Borrowed]:
        """As Lends (borrowed.py), while the path in use lends: no other could go on with what this one began."""
        with self._path(deadline) as path:
            if not isinstance(path, Lends):
                why = "".join(f"; {name}: {reason}" for name, reason in self.refused().items())
                raise NotLent(f"its pages come over {path.name}{why}")
            try:
                lent = path.borrow(request, deadline)
            except FAILURES as error:
                if not self._goes_on(path, error, deadline):
                    raise
                raise NotLent(f"{path.name}: {said(error)}") from None  # of the shard itself it says nothing
            with lent as borrowed:
                yield borrowed

    def _whole(self, request: ReadRequest, record: Record, deadline: Deadline) -> memoryview:
        """A record that has broken, as it is over the next path; the time to copy it once is all that it costs."""
        held = Held(record.nbytes, record.codec)
        again = ReadRequest(request.namespace, self._next_attempt(), request.epoch, (record.want,), request.accept)
        try:
            (miss,) = to_its_end(self.read(again, held, deadline))
        except RefusedByShard as refused:
            raise _lost(refused) from None
        if miss is None and (held.sums, len(held.data)) != (list(record.sums), record.nbytes):
            # As right as the other, and yet the two make no whole.
            miss = Miss(MissReason.EVICTED, "another copy took its place")
        if miss is not None:
            raise Gone(miss)
        return memoryview(held.data)

    @contextmanager
    def _path(self, deadline: Deadline) -> Iterator[DataPath]:
        with self._paths.use(deadline) as path:
            self._show()
            yield path

    def _goes_on(self, path: DataPath, error: Exception, deadline: Deadline) -> bool:
        """Is there another path, and time to go on over it?"""
        if self._paths.is_last(path):
            return False
        # A lease that ended, like a call's own time, is nothing that another path could bring back.
        late = isinstance(error, Trouble) and error.miss.reason is MissReason.DEADLINE
        if late or not deadline.remaining_s():
            self._paths.doubt(path)
        else:
            self._paths.failed(path, said(error))
        self._show()
        return not late and deadline.remaining_s() > 0

    def _show(self) -> None:
        self.name, self.streams = self._paths.in_use


def choose(
    shard: ShardAddress,
    token: str | None,
    next_attempt: Callable[[], Attempt],
    *,
    takes: Sequence[str] = TRANSPORTS,
) -> Choice:
    """A way to a shard by whatever there is."""
    return Choice(shard, GrpcPages(shard.address, token), OPENERS, token=token, next_attempt=next_attempt, takes=takes)


def own_attempts() -> Callable[[], Attempt]:
    """Attempts under a holder of their own, which nobody can guess and take before; thread-safe."""
    holder, counter = Holder(os.urandom(HOLDER_BYTES)), itertools.count(1)
    return lambda: Attempt(holder, next(counter))


def _lost(refused: RefusedByShard) -> Trouble:
    return Trouble(Miss(MissReason.SHARD_LOST, f"the shard refuses to go on: {refused.refused.detail}"))
