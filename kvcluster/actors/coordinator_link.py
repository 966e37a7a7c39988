"""A shard's connection to its coordinator, and the credentials that it gets there (runtime/shard_credentials.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple

import ray

from kvcluster.actors.settings import report_address
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import (
    Inventory,
    IssueCredential,
    IssuedCredential,
    Refused,
    Reply,
    Report,
    ShardAddress,
)
from kvcluster.core.messages.reports import TO_COORDINATOR
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CredentialError, ProtocolError, Unreachable
from kvcluster.runtime.shard_credentials import RENEW_S, ShardProof
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import ClockDifference, Connection
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.methods import COORDINATOR

_LOOK_UP_S = 2.0
_ASK_MS = 2_000
"""How long a shard waits for a credential."""

_PEERS = 256
"""Shards whose credentials are kept."""

_ISSUE = COORDINATOR["IssueCredential"]


class _Announced(NamedTuple):
    """Where shards report now, and the name that the certificate of that server has, "" for the address itself."""

    address: str = ""
    server_name: str = ""


def _does_nothing() -> None:
    """As CoordinatorLink's `renewed`."""


class CoordinatorLink:
    """A shard's connection to its coordinator, which may start again elsewhere: the address is looked up again when the
    connection fails. One thread reports; any may ask for credentials, and close.

    `proves`: what this shard shows to get a credential of its own. All else is done with that."""

    def __init__(
        self,
        cluster: str,
        proves: Credentials,
        epoch: Epoch,
        proof: ShardProof,
        renewed: Callable[[], object] = _does_nothing,
    ) -> None:
        """`renewed` is called with each new credential, before the first report with it."""
        self._cluster, self._renewed = cluster, renewed
        self._proves, self._epoch, self._proof = proves, epoch, proof
        self._at = self._announced = _Announced()
        self._lookup: threading.Thread | None = None
        self._connection: Connection | None = None
        self._renew_at = 0.0
        self._peers: dict[Epoch, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def report(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        """Sends a report and returns its answer. Raises Unavailable or KVClusterError."""
        try:
            if self._connection is None or time.monotonic() >= self._renew_at:
                self._connect(deadline)
            assert self._connection is not None
            return self._connection.ask(COORDINATOR[type(message).__name__], message, deadline)
        except (Unavailable, Unreachable):
            self._look_again()
            raise
        except CredentialError:  # a coordinator that has restarted does not know it; the next report asks for another
            self.close()
            raise

    def credentials_for(self, shard: ShardAddress) -> Credentials:
        """Returns what this shard shows to another one. Raises Unavailable or KVClusterError."""
        with self._lock:
            token, until = self._peers.get(shard.epoch, ("", 0.0))
        if time.monotonic() >= until:
            token, valid_s = self._issued(shard.epoch, Deadline.after_ms(_ASK_MS))
            with self._lock:
                while len(self._peers) >= _PEERS:
                    del self._peers[next(iter(self._peers))]
                self._peers[shard.epoch] = token, time.monotonic() + valid_s / 2
        return Credentials(token, self._proves.certificates, shard.server_name)

    @property
    def clock(self) -> ClockDifference | None:
        """How this clock differs from the coordinator's, by the last report that was answered."""
        connection = self._connection
        return connection.clock if connection is not None else None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self, deadline: Deadline) -> None:
        """Connects with a new credential. Raises Unreachable while no coordinator has announced itself."""
        if not self._at.address:
            self._look_again()
        if not self._at.address:
            raise Unreachable(f"no coordinator of cluster {self._cluster!r} has announced itself yet")
        token, _ = self._issued(TO_COORDINATOR, deadline)
        self.close()
        self._connection = Connection(
            self._at.address, Credentials(token, self._proves.certificates, self._at.server_name)
        )
        self._renew_at = time.monotonic() + RENEW_S
        self._renewed()

    def _issued(self, audience: Epoch, deadline: Deadline) -> tuple[str, float]:
        """Returns a token for that audience, and for how many seconds it holds. Raises Unavailable or
        KVClusterError."""
        own = audience == TO_COORDINATOR
        generation = self._proof.generation + 1 if own else 0
        question = IssueCredential(self._epoch, self._proof.proof, generation, audience)
        shows = Credentials(self._proves.token, self._proves.certificates, self._at.server_name)
        with closing(Connection(self._at.address, shows)) as connection:
            try:
                answer = connection.ask(_ISSUE, question, deadline)
            except ProtocolError:
                if not self._proves.token:
                    raise
                return self._proves.token, RENEW_S  # a coordinator of the release before, which issues none
        if isinstance(answer, IssuedCredential):
            if own:
                self._proof.generation = generation
            return answer.token, answer.valid_ns / 1e9
        detail = answer.detail if isinstance(answer, Refused) else "the coordinator issues no credential"
        if own or not self._proves.token:
            raise Unavailable(Miss(MissReason.SHARD_LOST, detail))
        return self._proves.token, RENEW_S  # for a shard of the release before, which has asked for none

    def _look_again(self) -> None:
        """Finds out where the coordinator is now, and gives up the connection if it is elsewhere."""
        at = self._looked_up()
        if at != self._at:
            self.close()
            self._at = at

    def _looked_up(self) -> _Announced:
        """Returns what was announced; what was known last if Ray's head does not answer soon, as while it is away or
        cut off. Its answer may then take minutes, and the coordinator may be heard long before."""
        if self._lookup is None or not self._lookup.is_alive():
            self._lookup = threading.Thread(target=self._look_up, name="kvcluster-coordinator", daemon=True)
            start_thread(self._lookup)
        self._lookup.join(_LOOK_UP_S)
        return self._announced

    def _look_up(self) -> None:
        with suppress(ray.exceptions.RayError):  # it is asked again after the next report that fails
            self._announced = _Announced(*report_address(self._cluster))
