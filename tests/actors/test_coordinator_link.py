"""How a shard keeps to its coordinator, and how it gets the credentials with which it reports and asks other shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from kvcluster.actors import coordinator, coordinator_link
from kvcluster.actors.coordinator_link import CoordinatorLink
from kvcluster.core import limits
from kvcluster.core.ids import Caller, CallId, Epoch, ShardId
from kvcluster.core.messages import (
    IssueCredential,
    IssuedCredential,
    Refused,
    Reply,
    Report,
    ReportAck,
    Request,
    ShardAddress,
    ShardInfo,
)
from kvcluster.errors import CredentialError, Unreachable
from kvcluster.runtime.auth import Authenticator
from kvcluster.runtime.metric_samples import CallMetrics, Sample
from kvcluster.runtime.server import GrpcServer
from kvcluster.runtime.shard_credentials import VALID_S, CredentialIssuer, ShardCredentials
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.credentials import Credentials

SECRET = "of the cluster"
BOUND_MS = 20_000
_REFUSED = "kvcluster_refused_calls_total"


class Coordinator:
    """A coordinator's port for shards, which acknowledges every report."""

    def __init__(self) -> None:
        self.reported: list[Any] = []
        self.issuer = CredentialIssuer()
        _, handlers = coordinator.handlers_of(self._ask, self.issuer)
        auth = Authenticator({}, SECRET, epoch_of=self.issuer.epoch_of)
        self.calls = CallMetrics(())
        self.server = GrpcServer(handlers, auth, "127.0.0.1", 0, 2, metrics=self.calls)
        self.server.start()

    def _ask(self, build: Callable[[CallId], Request[Any]], wait_s: float, tenant: str) -> Reply:
        self.reported.append(build(CallId(1)).question)
        return ReportAck(Epoch(1), 0, 0, ())

    def close(self) -> None:
        self.server.close(grace_s=0)


@pytest.fixture
def served() -> Iterator[Coordinator]:
    with closing(Coordinator()) as one:
        yield one


def report(epoch: int) -> Report:
    info = ShardInfo(ShardId("shard-0"), Epoch(epoch), "127.0.0.1:1", "", 0, 0, 0, 0)
    return Report(info, Epoch(0), 1)


def credentials_of(epoch: int, secret: str = SECRET) -> ShardCredentials:
    return ShardCredentials(Epoch(epoch), Credentials(secret))


def link_of(epoch: int, secret: str = SECRET, credentials: ShardCredentials | None = None) -> CoordinatorLink:
    return CoordinatorLink("kvcluster", credentials or credentials_of(epoch, secret))


def announce(monkeypatch: pytest.MonkeyPatch, *address: str) -> None:
    monkeypatch.setattr(coordinator_link, "report_address", lambda cluster: (address[0], ""))


def soon() -> Deadline:
    return Deadline.after_ms(BOUND_MS)


def test_a_shard_reports_with_a_credential_of_its_incarnation(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, served.server.address)
    with closing(link_of(7)) as link:
        assert isinstance(link.report(report(7), soon()), ReportAck)
        with pytest.raises(CredentialError, match="of incarnation 7, not 8"):
            link.report(report(8), soon())
        assert isinstance(link.report(report(7), soon()), ReportAck), "and goes on"
    assert [message.info.epoch for message in served.reported] == [7, 7]


def test_the_secret_alone_reports_nothing(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcluster.transport.rpc import Connection
    from kvcluster.wire.methods import COORDINATOR

    with (
        closing(Connection(served.server.address, Credentials(SECRET))) as insider,
        pytest.raises(CredentialError, match="IssueCredential"),
    ):
        insider.ask(COORDINATOR["Report"], report(7), soon())
    assert not served.reported


def test_no_other_process_gets_the_credential_of_an_incarnation(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, served.server.address)
    with closing(link_of(7)) as mine, closing(link_of(7)) as impostor:
        mine.report(report(7), soon())
        with pytest.raises(Unavailable, match="another process has the credentials"):
            impostor.report(report(7), soon())
    with closing(link_of(9, "guessed")) as stranger, pytest.raises(CredentialError):
        stranger.report(report(9), soon())


def test_no_number_of_incarnations_takes_the_place_of_one_whose_credential_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SHARD_CREDENTIALS", 3)
    now = 0.0
    issuer = CredentialIssuer(lambda: now)
    first = issuer.issue(IssueCredential(Epoch(1), b"1" * 32, 1))
    assert isinstance(first, IssuedCredential)
    made_up = [issuer.issue(IssueCredential(Epoch(epoch), b"x" * 32, 1)) for epoch in range(2, 9)]
    assert [isinstance(one, Refused) for one in made_up] == [False] * 2 + [True] * 5
    assert issuer.epoch_of(first.token) == 1
    assert isinstance(issuer.issue(IssueCredential(Epoch(1), b"x" * 32, 1)), Refused)
    now = VALID_S
    assert issuer.epoch_of(first.token) is None
    assert isinstance(issuer.issue(IssueCredential(Epoch(9), b"9" * 32, 1)), IssuedCredential)


def test_a_shard_shows_another_what_only_that_one_accepts(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, served.server.address)
    proofs = {epoch: credentials_of(epoch) for epoch in (7, 8, 9)}
    links = {epoch: link_of(epoch, credentials=proof) for epoch, proof in proofs.items()}
    for epoch, link in links.items():
        link.report(report(epoch), soon())
    shown = proofs[7].to_shard(ShardAddress(ShardId("shard-1"), Epoch(8), "127.0.0.1:1", "", "its.name"))
    assert shown.token is not None and shown.token == proofs[7].to_shard(_shard(8)).token, "kept"
    assert proofs[8].epoch_of(shown.token) == 7 and proofs[9].epoch_of(shown.token) is None
    assert Authenticator({}, "", epoch_of=proofs[8].epoch_of).caller(shown.token) == Caller(*("", True), epoch=Epoch(7))
    assert proofs[8].epoch_of(shown.token.replace("shard.7.", "shard.9.")) is None, "of no other incarnation"
    for link in links.values():
        link.close()


def test_what_was_shown_ends_when_the_other_shard_has_had_two_new_credentials(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, served.server.address)
    mine, proof = credentials_of(7), credentials_of(8)
    with closing(link_of(7, credentials=mine)) as asks, closing(link_of(8, credentials=proof)) as accepts:
        accepts.report(report(8), soon())
        asks.report(report(7), soon())
        token = mine.to_shard(_shard(8)).token
        held = []
        for _ in range(3):
            accepts._renew_at = 0.0
            accepts.report(report(8), soon())
            held.append(proof.epoch_of(str(token)) == 7)
    assert held == [True, False, False]


def test_a_coordinator_that_has_restarted_issues_again(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, served.server.address)
    with closing(link_of(7)) as link:
        link.report(report(7), soon())
        served.issuer._known.clear()
        with pytest.raises(CredentialError):
            link.report(report(7), soon())
        assert isinstance(link.report(report(7), soon()), ReportAck)


def test_a_shard_shows_no_credential_of_the_coordinator_before_to_the_next(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, served.server.address)
    with closing(link_of(7)) as link:
        link.report(report(7), soon())
        served.server.close(grace_s=0)
        with pytest.raises(Unavailable):
            link.report(report(7), soon())
        with closing(Coordinator()) as following:
            announce(monkeypatch, following.server.address)
            with pytest.raises((Unavailable, Unreachable)):
                link.report(report(7), soon())
            assert isinstance(link.report(report(7), soon()), ReportAck)
            assert not refused_by(following), "so no alert of a stranger fires"


def refused_by(served: Coordinator) -> list[tuple[str, ...]]:
    """The reasons for which it has refused calls."""
    samples = [one for one in served.calls.samples() if isinstance(one, Sample)]
    return [one.labels for one in samples if one.name == _REFUSED and one.value]


def test_a_shard_that_was_stopped_while_its_coordinator_restarted_shows_no_credential_of_before(
    served: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(coordinator_link, "time", SimpleNamespace(monotonic=lambda: now))
    announce(monkeypatch, served.server.address)
    with closing(link_of(7)) as link:
        link.report(report(7), soon())
        served.issuer._known.clear()
        now += 5.0
        assert isinstance(link.report(report(7), soon()), ReportAck)
    assert not refused_by(served)


def test_a_shard_that_reports_often_keeps_its_credential(served: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    now, issued = time.monotonic(), []
    monkeypatch.setattr(coordinator_link, "time", SimpleNamespace(monotonic=lambda: now))
    announce(monkeypatch, served.server.address)
    with closing(CoordinatorLink("kvcluster", credentials_of(7), lambda: issued.append(now))) as link:
        for _ in range(5):
            link.report(report(7), soon())
            now += 0.5
    assert len(issued) == 1


def test_a_shard_keeps_its_coordinator_while_the_head_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    announced, away = ["127.0.0.1:1"], threading.Event()

    def look_up(cluster: str) -> tuple[str, str]:
        if announced[0] == "away":
            away.wait(30)
            return "127.0.0.1:2", ""
        if announced[0] == "ended":
            raise ray.exceptions.RpcError("the head has ended")
        return announced[0], ""

    monkeypatch.setattr(coordinator_link, "report_address", look_up)
    monkeypatch.setattr(coordinator_link, "_LOOK_UP_S", 0.2)
    link = link_of(7)
    link._look_again()
    before = link._at
    for announced[0] in ("ended", "away", "away"):
        began = time.monotonic()
        link._look_again()
        assert link._at == before and time.monotonic() - began < 5
    away.set()
    link._look_again()
    assert link._at.address == "127.0.0.1:2"
    link.close()


def test_a_shard_that_knows_no_coordinator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, "")
    with pytest.raises(Unreachable, match="no coordinator of cluster 'kvcluster' has announced itself yet"):
        link_of(7).report(report(7), soon())


def _shard(epoch: int) -> ShardAddress:
    return ShardAddress(ShardId("shard-1"), Epoch(epoch), "127.0.0.1:1")
