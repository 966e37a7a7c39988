"""Credentials of shards: short-lived, bound to an incarnation, and issued by the coordinator.

A shard proves once in RENEW_S that it is one of the cluster: by its certificate or, in a cluster without certificates,
by the cluster's secret, which is good for nothing else. Whoever asks first for the credential of an incarnation binds
it to a proof, so that no other process gets one.

    shard -> coordinator   IssueCredential   <- a token for its reports
    shard -> coordinator   IssueCredential, for another shard   <- a token that this one accepts
    shard -> that shard    the token: which incarnation shows it, and a digest by the proof of the one that accepts it

So a shard verifies what it is shown without asking anybody, and can make up nothing that another accepts. The digest
has the generation in it that the accepting shard named last, which takes those next to its own: a token for a shard
ends one to three times RENEW_S after it was issued.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from kvcluster.core import limits
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import IssueCredential, IssuedCredential, Refused, RefusedKind, ShardAddress
from kvcluster.core.messages.reports import PROOF_BYTES, TO_COORDINATOR
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ProtocolError, VersionError
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR

VALID_S = 600.0
RENEW_S = VALID_S / 2

PREFIX = "shard."
"""With which the tokens of shards begin. Those of `kvcluster token` have no dot."""

_PEERS = 256
"""Other shards whose credentials are kept."""

_ASK_MS = 2_000
"""How long a shard waits for a credential for another one."""

_DIGITS = 20
_TOKENS = 4
"""Of an incarnation: one that got no answer asks again."""


def token_for(proof: bytes, generation: int, epoch: Epoch) -> str:
    """Returns the token that the incarnation `epoch` shows to the shard that has the proof."""
    shown = b"kvcluster shard %d %d" % (epoch, generation)
    return f"{PREFIX}{epoch}.{generation}.{hmac.new(proof, shown, hashlib.sha256).hexdigest()}"


def epoch_in(token: str) -> Epoch | None:
    """Returns the incarnation that a token claims to be of; None if it is no token of a shard."""
    epoch, dot, _ = token[len(PREFIX) :].partition(".")
    claims = token.startswith(PREFIX) and dot and epoch.isascii() and epoch.isdecimal() and len(epoch) < _DIGITS
    return Epoch(int(epoch)) if claims else None


@dataclass(slots=True)
class _Incarnation:
    """What the coordinator knows of one. `tokens`: by digest, until when each holds."""

    proof: bytes
    generation: int = 0
    tokens: dict[bytes, float] = field(default_factory=dict)


class CredentialIssuer:
    """The coordinator's part; thread-safe. It keeps limits.SHARD_CREDENTIALS incarnations. A further one takes the
    place of one whose credentials have ended; while there is none it gets nothing, so that nobody loses a place."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[Epoch, _Incarnation] = {}  # the last that asked is the last

    def issue(self, question: IssueCredential) -> IssuedCredential | Refused:
        """Answers a shard that has proven to be one of this cluster."""
        with self._lock:
            asks = self._known.pop(question.epoch, None)
            if asks is None:
                if len(self._known) >= limits.SHARD_CREDENTIALS and not self._forget_one():
                    return Refused(RefusedKind.LIMIT, "too many incarnations have credentials; ask again later")
                asks = _Incarnation(question.proof)
            self._known[question.epoch] = asks
            if not hmac.compare_digest(question.proof, asks.proof):
                return Refused(RefusedKind.STALE, "another process has the credentials of this incarnation")
            if question.audience != TO_COORDINATOR:
                audience = self._known.get(question.audience)
                if audience is None or not audience.tokens:
                    return Refused(RefusedKind.STALE, "that incarnation has asked for no credential of its own yet")
                token = token_for(audience.proof, audience.generation, question.epoch)
                return IssuedCredential(token, int(RENEW_S * 1e9))
            now = self._clock()
            asks.tokens = {known: until for known, until in asks.tokens.items() if until > now}
            while len(asks.tokens) >= _TOKENS:
                del asks.tokens[next(iter(asks.tokens))]
            token = f"{PREFIX}{question.epoch}.{secrets.token_urlsafe(32)}"
            asks.tokens[_digest(token)], asks.generation = now + VALID_S, question.generation
            return IssuedCredential(token, int(VALID_S * 1e9))

    def _forget_one(self) -> bool:
        """Forgets the incarnation that has asked for nothing the longest, if its credentials have ended."""
        oldest = next(iter(self._known))
        if any(until > self._clock() for until in self._known[oldest].tokens.values()):
            return False
        del self._known[oldest]
        return True

    def epoch_of(self, token: str) -> Epoch | None:
        """Returns the incarnation that this token was issued to; None if it is of none, or its time is over."""
        epoch = epoch_in(token)
        with self._lock:
            known = self._known.get(epoch) if epoch is not None else None
            until = known.tokens.get(_digest(token)) if known is not None else None
        return epoch if until is not None and self._clock() < until else None


class ShardCredentials:
    """The part of one incarnation of a shard: the credentials that it gets, and what others show to it. One thread
    reports; any may ask for the rest.

    `proves`: what it shows to get a credential of its own, to a coordinator whose certificate it verifies by the same.
    A coordinator, or another shard, of the release before knows nothing of this and is shown `proves` itself."""

    def __init__(self, epoch: Epoch, proves: Credentials, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._epoch, self._proves, self._clock = epoch, proves, clock
        self._proof = secrets.token_bytes(PROOF_BYTES)
        self._generation = 0
        self._at = self._server_name = ""
        self.secret_suffices = False
        """Whether the coordinator is of the release before, so that all shards show one another the secret itself."""
        self._peers: dict[Epoch, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def epoch_of(self, token: str) -> Epoch | None:
        """Returns the incarnation that shows this token to this shard; None if it was not made for it, or its time is
        over."""
        epoch = epoch_in(token)
        if epoch is None:
            return None
        near = range(max(0, self._generation - 1), self._generation + 2)
        shown = token.encode()
        fits = [hmac.compare_digest(shown, token_for(self._proof, number, epoch).encode()) for number in near]
        return epoch if any(fits) else None

    def to_report(self, address: str, server_name: str, deadline: Deadline) -> Credentials:
        """Returns a new credential for reports, from the coordinator at that address, which `to_shard` asks from then
        on. Its certificate must have that name. Raises Unavailable or KVClusterError."""
        self._at, self._server_name = address, server_name
        answer = self._asked(IssueCredential(self._epoch, self._proof, self._generation + 1), deadline)
        if isinstance(answer, Refused):
            raise Unavailable(Miss(MissReason.SHARD_LOST, answer.detail))
        self._generation += 1
        self.secret_suffices = answer is None
        return self._with(answer.token if answer is not None else self._proves.token, server_name)

    def to_shard(self, shard: ShardAddress) -> Credentials:
        """Returns what this shard shows to another one. Raises Unavailable or KVClusterError."""
        with self._lock:
            token, until = self._peers.get(shard.epoch, ("", 0.0))
        if self._clock() < until:
            return self._with(token, shard.server_name)
        answer = self._asked(IssueCredential(self._epoch, self._proof, 0, shard.epoch), Deadline.after_ms(_ASK_MS))
        if not isinstance(answer, IssuedCredential):
            if answer is not None and not self._proves.token:
                raise Unavailable(Miss(MissReason.SHARD_LOST, answer.detail))
            return self._with(self._proves.token, shard.server_name)
        with self._lock:
            while len(self._peers) >= _PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[shard.epoch] = answer.token, self._clock() + answer.valid_ns / 2e9
        return self._with(answer.token, shard.server_name)

    def _with(self, token: str | None, server_name: str) -> Credentials:
        return Credentials(token, self._proves.certificates, server_name)

    def _asked(self, question: IssueCredential, deadline: Deadline) -> IssuedCredential | Refused | None:
        """Returns the coordinator's answer; None from one that issues no credentials."""
        shows = self._with(self._proves.token, self._server_name)
        with closing(Connection(self._at, shows)) as connection:
            try:
                answer = connection.ask(COORDINATOR["IssueCredential"], question, deadline)
            except VersionError:
                raise
            except ProtocolError:
                if not self._proves.token:
                    raise
                return None
        assert isinstance(answer, (IssuedCredential, Refused)), "the method has no other answer"
        return answer


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
