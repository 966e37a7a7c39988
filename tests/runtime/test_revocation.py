"""A token or a certificate that is revoked while its bearer works: every port refuses it within REVOKED_S, over a new
connection and over one that is open, and others are served all the time.

The cases are rows of the matrix of ports (test_port_matrix.py); the ports are those at which the row decides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcluster.core.ids import Epoch
from kvcluster.transport.credentials import Credentials
from tests.authority import Authority, Issued
from tests.runtime.listeners import Listeners
from tests.runtime.port_attempts import ATTEMPTS, Outcome, Shown, ZmtpPeer, connected, outcome_of, tried
from tests.runtime.test_port_matrix import (
    CERTIFICATES,
    CLEAR,
    OPERATORS,
    TENANTS,
    TO_REPORT,
    TO_SHARD,
    WITH_CERTIFICATES,
    WITHIN_TLS,
    Row,
    certificates_of,
)
from tests.waiting import eventually

REVOKED_S = 5.0
VICTIM, OTHER = Epoch(6), Epoch(8)


class Mode(NamedTuple):
    """How the ports listen, and the table of the matrix that says whom they serve then."""

    table: Mapping[str, Row]
    tls: bool = False
    client_certificates: bool = False


MODES = {
    "clear": Mode(CLEAR),
    "within TLS": Mode(WITHIN_TLS, tls=True),
    "with certificates": Mode(WITH_CERTIFICATES, tls=True, client_certificates=True),
}
CASES = [
    ("clear", "right"),
    ("clear", "operator"),
    ("within TLS", "operator"),
    ("within TLS", "certificate: operator"),
    ("within TLS", "certificate: events"),
    ("within TLS", "certificate: shard"),
    ("within TLS", "shard to coordinator"),
    ("with certificates", "right"),
    ("with certificates", "operator"),
    ("with certificates", "events"),
    ("with certificates", "shard"),
    ("with certificates", "shard to coordinator"),
    ("with certificates", "shard to shard"),
    ("with certificates", "no role, right token"),
]


def outcomes(row: Row) -> dict[str, str]:
    return dict(zip(ATTEMPTS, row.expected.replace("|", " ").split(), strict=True))


def decided(mode: str, name: str) -> list[str]:
    """What the bearer of that row is served, and a client that shows nothing is not."""
    table = MODES[mode].table
    of_nothing, of_bearer = outcomes(table["nothing"]), outcomes(table[name])
    return [asked for asked in ATTEMPTS if of_nothing[asked] == "no" and of_bearer[asked] == "yes"]


class World:
    """Listeners, and two clients that show what a row says: each has a token or a certificate of its own."""

    def __init__(self, house: ExitStack, folder: Path, mode: str, name: str) -> None:
        table, tls, client_certificates = MODES[mode]
        row = table[name]
        self._authority = Authority(folder / "authority")
        own = self._authority.issue("server", "coordinator", "shard") if tls else None
        self.listeners = Listeners(house, folder, own, client_certificates=client_certificates)
        self._tokens = {who: f"{who}'s" for who in ("victim", "other")}
        self._tenant = TENANTS.get(row.token or "", "nobody")
        self._operator = row.token in OPERATORS
        self._by_token = row.token in TENANTS
        roles = CERTIFICATES[row.certificate] if row.certificate is not None else None
        self._issued = {who: self._issue(who, roles) for who in self._tokens}
        self._admit("victim", "other")
        self.victim = self._shown("victim", row, VICTIM, tls=tls)
        self.other = self._shown("other", row, OTHER, tls=tls)

    def revoke(self) -> None:
        """Takes the victim's token out of the file or, if it has none there, its certificate."""
        issued = self._issued["victim"]
        if self._by_token:
            self._admit("other")
        else:
            assert issued is not None
            self._admit("victim", "other", revoked=(issued.fingerprint,))

    def _issue(self, who: str, roles: tuple[str, ...] | None) -> Issued | None:
        return self._authority.issue(who, *roles, names=("client.example",)) if roles is not None else None

    def _admit(self, *who: str, revoked: tuple[str, ...] = ()) -> None:
        tokens = [self._tokens[one] for one in who]
        self.listeners.admit(dict.fromkeys(tokens, self._tenant), tokens if self._operator else (), revoked)
        self.listeners.now += REVOKED_S

    def _shown(self, who: str, row: Row, epoch: Epoch, *, tls: bool) -> Shown:
        certificates = certificates_of(self._authority.ca, self._issued[who]) if tls else None
        token = self._tokens[who] if self._by_token else None
        if row.token in (TO_REPORT, TO_SHARD):
            to_report, to_shard = self.listeners.shard_tokens(epoch, Credentials(None, certificates))
            token = to_report if row.token == TO_REPORT else to_shard
        return Shown(Credentials(token, certificates), epoch)


class Working:
    """A client that asks for all of this, over and over, on connections that are kept and on new ones."""

    def __init__(self, world: World, asked: list[str]) -> None:
        self.failed: list[object] = []
        self._rounds = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(world, asked))
        self._thread.start()

    def passes(self) -> None:
        """Waits until everything has been asked for twice more: once at least, all of it from now on."""
        until = self._rounds + 2
        eventually(lambda: self._rounds >= until or self.failed)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()

    def _work(self, world: World, asked: list[str]) -> None:
        try:
            with ExitStack() as house:
                opened = {name: house.enter_context(ATTEMPTS[name](world.listeners, world.other)) for name in asked}
                while not self._ends.is_set() and not self.failed:
                    for name, ask in opened.items():
                        found = outcome_of(ask), tried(ATTEMPTS[name], world.listeners, world.other)
                        if found != (Outcome.SERVED, Outcome.SERVED):
                            self.failed.append((name, *found))
                    self._rounds += 1
        except BaseException as error:
            self.failed.append(error)


@contextmanager
def working(world: World, asked: list[str]) -> Iterator[Working]:
    other = Working(world, asked)
    try:
        yield other
    finally:
        other.end()


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_whose_credential_is_revoked_is_served_no_more_and_others_are(mode: str, name: str, tmp_path: Path) -> None:
    asked = decided(mode, name)
    with ExitStack() as house:
        world = World(house, tmp_path, mode, name)
        opened = {port: house.enter_context(ATTEMPTS[port](world.listeners, world.victim)) for port in asked}
        other = house.enter_context(working(world, asked))
        other.passes()
        for _ in range(3):
            assert {outcome_of(ask) for ask in opened.values()} == {Outcome.SERVED}
        world.revoke()
        for port, ask in opened.items():
            # A call that comes while another's has the file read is answered by the tokens before; the publisher looks
            # by a clock of its own.
            eventually(lambda ask=ask: outcome_of(ask) is Outcome.REFUSED, REVOKED_S)  # type: ignore[misc]
            assert tried(ATTEMPTS[port], world.listeners, world.victim) is Outcome.REFUSED, (
                f"{port}, over a new connection"
            )
        other.passes()
        assert not other.failed


@pytest.mark.parametrize(("port", "kind"), [("events", b"SUB"), ("replay", b"DEALER")])
def test_a_revoked_reader_of_events_is_disconnected_although_it_asks_for_nothing(
    port: str, kind: bytes, tmp_path: Path
) -> None:
    with ExitStack() as house:
        world = World(house, tmp_path, "with certificates", "events")
        open_now = house.enter_context(connected(world.listeners.addresses[port], world.victim, "coordinator"))
        peer = ZmtpPeer(open_now, kind)
        assert tried(ATTEMPTS[port], world.listeners, world.victim) is Outcome.SERVED
        open_now.settimeout(REVOKED_S)
        world.revoke()
        assert outcome_of(lambda: Outcome.SERVED if peer.receive() else Outcome.OWN) is Outcome.REFUSED
        assert tried(ATTEMPTS[port], world.listeners, world.other) is Outcome.SERVED


def test_all_that_asks_for_a_credential_has_a_case() -> None:
    """All but what shards prove in the clear, by the secret of the cluster, which is in no file that is read again."""
    asked = {
        mode: {name for name in ATTEMPTS if outcomes(MODES[mode].table["nothing"])[name] == "no"} for mode in MODES
    }
    asked["clear"] -= {"issue", "report"}
    covered = {mode: {name for of, row in CASES if of == mode for name in decided(mode, row)} for mode in MODES}
    assert covered == asked
