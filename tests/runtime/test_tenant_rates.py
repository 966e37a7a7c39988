"""Rates of tenants at a server and at a shard: what is refused, how a worker takes it, and that no other waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcluster.core.ids import CLUSTER, Attempt, Caller, CallId, Epoch, Holder, ShardId, Tenant
from kvcluster.core.messages import (
    Answer,
    Done,
    Effect,
    GetStatus,
    NewPage,
    PageKey,
    Pin,
    PinGrant,
    Request,
    Reserve,
    ShardAddress,
    Unpin,
    WriteGrant,
    Written,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.tiers import Tier
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.metric_samples import CallMetrics, Refusal, Sample
from kvcluster.runtime.quota_file import QuotaFile
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.tenant_rates import TOO_FAST, Rated, RateLimiter
from kvcluster.transfers.coordinator_client import GrpcPort, WatchedPort
from kvcluster.transfers.shard_health import Permit, ShardHealth
from kvcluster.transport.base import Deadline, RateLimited
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.exchange_summary import ExchangeResult, ExchangeSummary, Operation
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR
from tests.core.samples import SPEC, WHOLE, chain

ME, YOU = Tenant("me"), Tenant("you")
ATTEMPT = Attempt(Holder(b"h" * 16), 1)
SECOND = 1_000_000_000
BLOCK = chain(1)[0]


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def limited(tmp_path: Path) -> tuple[RateLimiter, Clock, CallMetrics]:
    """Of me two calls and a thousand bytes a second."""
    path = tmp_path / "quotas"
    path.write_text("[tenants.me]\nrequests_per_second = 2\nbytes_per_second = 1000\n")
    path.chmod(0o600)
    clock, calls = Clock(), CallMetrics(COORDINATOR)
    return RateLimiter(QuotaFile(str(path)), calls, clock), clock, calls


def refused(calls: CallMetrics) -> float:
    named = ("kvcluster_refused_calls_total", (Refusal.RATE.value,))
    return sum(one.value for one in calls.samples() if isinstance(one, Sample) and one[:2] == named)


Limited = tuple[RateLimiter, Clock, CallMetrics]


def test_calls_beyond_the_rate_are_refused_but_those_that_keep_what_it_has(limited: Limited) -> None:
    rates, clock, _ = limited
    me, ops = Caller(ME), Caller(ME, operator=True)
    assert [rates.admits(me, "PrepareLoad") for _ in range(3)] == [True, True, False]
    assert rates.admits(me, "EndTicket") and rates.admits(me, "SyncTables") and not rates.admits(me, "GetStatus")
    assert rates.admits(ops, "GetStatus") and not rates.admits(ops, "PrepareLoad"), "its commands are served"
    assert all(rates.admits(Caller(YOU), "PrepareLoad") for _ in range(100))
    assert all(rates.admits(Caller(CLUSTER, internal=True), "Report") for _ in range(100))
    clock.now = SECOND
    assert rates.admits(me, "PrepareLoad")


def test_a_worker_takes_a_refused_call_for_no_fault_of_the_server(
    limited: Limited, caplog: pytest.LogCaptureFixture
) -> None:
    rates, _, calls = limited
    auth = Authenticator({digest("mine"): ME, digest("yours"): YOU}, "secret")
    handlers = unary_handlers(COORDINATOR, lambda build, wait_s, tenant: Done())
    server = GrpcServer(handlers, auth, "127.0.0.1", 0, 2, metrics=calls, rates=rates)
    server.start()
    mine, yours = (Connection(server.address, Credentials(token)) for token in ("mine", "yours"))
    port = WatchedPort(GrpcPort(mine))
    try:
        for _ in range(2):
            mine.ask(COORDINATOR["Ping"], None, Deadline.after_ms(5_000))
        for _ in range(100):  # also beyond the number of refusals of strangers that are answered in a second
            with pytest.raises(RateLimited, match="more calls a second than its quota allows"):
                mine.ask(COORDINATOR["Ping"], None, Deadline.after_ms(5_000))
        with pytest.raises(RateLimited) as error:
            port.ask(GetStatus(), Deadline.after_ms(5_000))
        assert error.value.miss.reason is MissReason.FULL
        assert not caplog.records, "it is told as no outage"
        yours.ask(COORDINATOR["Ping"], None, Deadline.after_ms(5_000))
    finally:
        mine.close()
        yours.close()
        server.close(0)
    assert refused(calls) == 101


def test_a_refused_call_opens_no_breaker(limited: Limited) -> None:
    health = ShardHealth(breaker_failures=1, breaker_ms=1_000)
    shard = ShardAddress(ShardId("s"), Epoch(1), "a:1", "")
    permit = health.permit(shard, 0)
    assert isinstance(permit, Permit)
    assert health.ended(permit, RateLimited(TOO_FAST), 1) == TOO_FAST
    assert health.serves(shard)


class Core:
    """A core that grants everything."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def step(self, message: Any, now: int) -> list[Effect]:
        self.asked.append(message.question)
        return [Answer(message.call, Done())]

    def next_deadline(self) -> int | None:
        return 7


def moved(tenant: Tenant, nbytes: int) -> ExchangeSummary:
    return ExchangeSummary(Operation.STORE, "tcp", tenant, ATTEMPT, ExchangeResult.DONE, 0.1, 1, {Tier.RAM: nbytes})


def test_exchanges_beyond_the_rate_of_bytes_are_a_miss_and_full(limited: Limited) -> None:
    rates, clock, calls = limited
    core = Core()
    rated: Rated[Any] = Rated(core, rates)
    key = PageKey(BLOCK, 0, WHOLE)
    pin = Pin(ATTEMPT, Epoch(1), (key, key))
    reserve = Reserve(ATTEMPT, Epoch(1), (NewPage(key, BLOCK, 0),))
    space = SPEC.namespace(ME)

    def answer(question: object, tenant: Tenant = ME) -> object:
        (effect,) = rated.step(Request(CallId(1), tenant, space, question), clock.now)
        assert isinstance(effect, Answer)
        return effect.reply

    assert answer(pin) == answer(reserve) == Done(), "bytes are owed when they have moved"
    rates.moved(moved(ME, 3_000))
    grant = answer(pin)
    assert isinstance(grant, PinGrant)
    assert grant.pages == (TOO_FAST, TOO_FAST)
    assert answer(reserve) == WriteGrant((Written.FULL,))
    assert answer(Unpin(ATTEMPT)) == Done(), "what returns something is stepped"
    assert answer(pin, YOU) == answer(pin, CLUSTER) == Done(), "and so are others"
    assert refused(calls) == 2
    clock.now = 2 * SECOND + 2
    assert answer(pin) == Done()
    assert rated.next_deadline() == 7


def test_without_a_quota_nothing_is_counted() -> None:
    rates = RateLimiter(QuotaFile(""))
    rates.moved(moved(ME, 10**15))
    assert rates.may_move(ME) and rates.admits(Caller(ME), "PrepareLoad")
