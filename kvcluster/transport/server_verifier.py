"""Verifies a server before gRPC connects to it: gRPC in Python compares the names of a certificate, and not its roles.

A handshake of our own has the server show its certificate, which must be of one of the authorities, have the server's
name and be for its role. gRPC is then given that certificate as the only one to trust, so that each of its connections
goes to a server that has the key of it. If a server shows another one later, as after a renewal, gRPC does not connect;
the caller has it `forget` what was verified, and the server is verified again.

Handshakes have threads of their own, since a name may take longer to resolve than a caller can wait. All callers wait
for the one that is under way, each until its own deadline.
"""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.certificates import Certificates, verified_certificate
from kvcluster.transport.thread_start import start_thread

_HANDSHAKE_MS = 5_000
"""The limit for one attempt to connect, as gRPC's own."""


class VerifiedServer(NamedTuple):
    """`certificate`: what the server has shown, in PEM. `version`: that of this process's certificates by which it was
    verified."""

    version: int
    certificate: bytes


class ServerVerifier:
    """Verifies the server at one address; thread-safe. `name` and `role`: what its certificate must have."""

    def __init__(self, address: str, name: str, role: str, certificates: Certificates) -> None:
        self._address, self._name, self._role, self._certificates = address, name, role, certificates
        self._lock = threading.Lock()
        self._version = 0
        self._outcome: Future[VerifiedServer | Unavailable] | None = None

    def verified(self, deadline: Deadline) -> VerifiedServer:
        """Returns the server as it was verified, which is done first if it has not been, or if this process's own
        certificates have changed since. Raises Unavailable if it cannot be verified by the deadline."""
        version = self._certificates.now().number
        with self._lock:
            outcome = self._outcome
            if outcome is None or version != self._version or (outcome.done() and _failed(outcome)):
                outcome, self._version = self._begin(version), version
                self._outcome = outcome
        try:
            found = outcome.result(deadline.remaining_s())
        except futures.TimeoutError:
            raise Unavailable(Miss(MissReason.DEADLINE, self._address)) from None
        if isinstance(found, Unavailable):
            raise type(found)(found.miss)  # each caller has a traceback of its own
        return found

    def forget(self, server: VerifiedServer) -> None:
        """Has the server verified again before the next call, if this is what was verified last."""
        with self._lock:
            if self._outcome is not None and self._outcome.done() and self._outcome.result() == server:
                self._outcome = None

    def end(self, why: Unavailable) -> None:
        """Has callers that wait raise this error."""
        with self._lock:
            if self._outcome is not None:
                _settle(self._outcome, why)

    def _begin(self, version: int) -> Future[VerifiedServer | Unavailable]:
        outcome: Future[VerifiedServer | Unavailable] = Future()
        thread = threading.Thread(
            target=self._verify, args=(version, outcome), name="kvcluster-server-verifier", daemon=True
        )
        start_thread(thread)
        return outcome

    def _verify(self, version: int, outcome: Future[VerifiedServer | Unavailable]) -> None:
        found: VerifiedServer | Unavailable
        try:
            deadline = Deadline.after_ms(_HANDSHAKE_MS)
            shown = verified_certificate(self._address, self._name, self._certificates, deadline, role=self._role)
            found = VerifiedServer(version, shown)
        except KVClusterError as error:
            why = error.miss.detail if isinstance(error, Unavailable) else str(error)
            found = Unavailable(Miss(MissReason.SHARD_LOST, f"{self._address}: {why}"))
        except BaseException as error:  # a mistake of ours: no caller may wait for it in vain
            _settle(outcome, Unavailable(Miss(MissReason.SHARD_LOST, f"{self._address}: {error!r}")))
            raise
        _settle(outcome, found)


def _failed(outcome: Future[VerifiedServer | Unavailable]) -> bool:
    return isinstance(outcome.result(), Unavailable)


def _settle(outcome: Future[VerifiedServer | Unavailable], found: VerifiedServer | Unavailable) -> None:
    with suppress(futures.InvalidStateError):  # it has ended already
        outcome.set_result(found)
