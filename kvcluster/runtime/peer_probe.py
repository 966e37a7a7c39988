"""A shard tries the other shards of its cluster: over gRPC, and over TCP where they offer it (core/doctor_probes.py).

Each try is a whole round trip through the path, as `kvcluster doctor` makes it from where it runs. It dials nothing but
the addresses in the order, which the coordinator knows from its members, and those that such a member then offers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial

from kvcluster.core.ids import Attempt
from kvcluster.core.messages import Findings, Link, ProbeOrder, ProcessFacts, ShardAddress
from kvcluster.core.miss import MissReason
from kvcluster.errors import KVClusterError
from kvcluster.transport.auto import OPENERS, own_attempts
from kvcluster.transport.base import DataPath, Deadline, RefusedByShard, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.path_selector import not_offered, opened, said, try_path
from kvcluster.transport.process_location import ProcessLocation
from kvcluster.transport.rpc import ClockDifference

PATIENCE_MS = 2_000
"""For one try: what takes longer is of no use to a reader."""

_ALL_S = 12.0
"""For all of them, which is well within the time of a run. Peers that have not been tried by then are reported as not
tried."""

_TRIPS = 3
"""Round trips of a try after the first, which connects; the fastest counts."""

_THREADS = 16
_WHY_CHARS = 256
_TCP = "tcp"


class PeerProbe:
    """Carries out probes for one shard. `facts`: what its process reports about itself. `clock`: how its clock differs
    from the coordinator's, None if it is not known. `credentials_for`: what this shard shows to another."""

    def __init__(
        self,
        facts: Callable[[], ProcessFacts],
        clock: Callable[[], ClockDifference | None],
        credentials_for: Callable[[ShardAddress], Credentials],
        location: ProcessLocation,
    ) -> None:
        self._facts, self._clock, self._location = facts, clock, location
        self._credentials_for = credentials_for
        self._next_attempt = own_attempts()
        self._closing = False

    def carry_out(self, order: ProbeOrder) -> Findings:
        """Tries the peers, and returns what was found. Takes at most `_ALL_S` plus PATIENCE_MS."""
        links = self._try_all(order)
        ahead, error = self._clock() or (0, 0)
        return Findings(order.number, self._facts(), ahead, error, tuple(links))

    def close(self) -> None:
        """Makes a probe that is under way end within PATIENCE_MS."""
        self._closing = True

    def _try_all(self, order: ProbeOrder) -> list[Link]:
        until = Deadline.after_ms(_ALL_S * 1e3)
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvcluster-probe")
        try:
            tries = [(peer, threads.submit(self._try, peer, until)) for peer in order.peers]
            wait([future for _, future in tries], until.remaining_s())
            late = "not tried: the time of the probe was over"
            return [
                link
                for peer, future in tries
                for link in (future.result() if future.done() else [Link(peer.shard, "grpc", 0, late)])
            ]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, peer: ShardAddress, until: Deadline) -> list[Link]:
        if self._closing or not until.remaining_s():
            return [Link(peer.shard, "grpc", 0, "not tried: this shard ends, or the time was over")]
        try:
            return list(self._links(peer))
        except Exception as error:  # whatever a strange peer causes: a diagnosis does not end a shard
            return [_failed(peer, "grpc", repr(error))]

    def _links(self, peer: ShardAddress) -> Iterator[Link]:
        """Yields the try over gRPC, and over TCP if the answer over gRPC names its address."""
        try:
            shows = self._credentials_for(peer)
        except KVClusterError as error:
            yield _failed(peer, "grpc", f"the coordinator gives no credential for it: {said(error)}")
            return
        grpc = self._timed(peer, "grpc", partial(GrpcPages, peer.address, shows))
        yield grpc
        if grpc.why:
            return
        try:
            with closing(GrpcPages(peer.address, shows)) as control:
                offers = control.offers(Deadline.after_ms(PATIENCE_MS))
        except (KVClusterError, RefusedByShard) as error:
            yield _failed(peer, _TCP, f"it does not tell its transports: {said(error)}")
            return
        if _TCP in OPENERS and not_offered(_TCP, offers, peer.host, self._location) is None:
            yield self._timed(peer, _TCP, partial(opened, _TCP, offers, self._location, shows, OPENERS))

    def _timed(self, peer: ShardAddress, transport: str, open_path: Callable[[], DataPath]) -> Link:
        try:
            with closing(open_path()) as path:
                trips = [_trip(path, peer, self._next_attempt()) for _ in range(1 + _TRIPS)]
        except KVClusterError as error:
            late = isinstance(error, Unavailable) and error.miss.reason is MissReason.DEADLINE
            return _failed(peer, transport, f"no answer within {PATIENCE_MS / 1e3:g} s" if late else said(error))
        return Link(peer.shard, transport, max(1, min(trips[1:])))


def _trip(path: DataPath, peer: ShardAddress, attempt: Attempt) -> int:
    began = time.monotonic_ns()
    try_path(path, peer.epoch, attempt, Deadline.after_ms(PATIENCE_MS))
    return time.monotonic_ns() - began


def _failed(peer: ShardAddress, transport: str, why: str) -> Link:
    return Link(peer.shard, transport, 0, why[:_WHY_CHARS] or "it failed")
