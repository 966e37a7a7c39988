from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest

from kvcluster.core.ids import CallId
from kvcluster.replay.core_stepper import Build
from kvcluster.replay.kernel import MS, Clock, Kernel, Process, Promise
from tests.sim.network import BROKEN, Line, Network, Server


class Echo(Server):
    """Answers with the number of the call."""

    def __init__(self, network: Network, node: int) -> None:
        super().__init__(network.kernel, "echo", node, Clock(0, 0))
        self.network = network
        self.calls = 0

    def receive(self, build: Build, asker: Process, promise: Promise) -> None:
        self.calls += 1
        self.network.answer(self, asker, promise, build(CallId(self.calls)))


class Bench:
    """A server on node 0, a client on node 1, and what the client's connection brought."""

    def __init__(self, loss: float = 0.0, twice: float = 0.0) -> None:
        self.kernel = Kernel()
        self.counts: Counter[str] = Counter()
        self.network = Network(self.kernel, random.Random(1), self.counts, delay_ns=MS, loss=loss, twice=twice)
        self.server = Echo(self.network, 0)
        self.client = Process(self.kernel, "client", 1, Clock(0, 0))

    def ask(self) -> Promise:
        return self.network.ask(self.client, self.server, lambda call: call)

    def connect(self) -> tuple[Line, list[Any]]:
        opened: list[Any] = []
        line = self.network.connect(self.client, self.server, lambda request, up, down: opened.append(request), "read")
        return line, opened


def drain(bench: Bench, line: Line) -> list[Any]:
    """All that has come out at the client's end."""
    bench.kernel.run(bench.kernel.now + 1_000 * MS)
    out = []
    while (promise := line.down.next()).ready:
        out.append(promise.value)
    return out


def test_a_question_is_answered_after_a_way_there_and_back() -> None:
    bench = Bench()
    promise = bench.ask()
    bench.kernel.run(MS // 2)
    assert not promise.ready
    bench.kernel.run(100 * MS)
    assert promise.value == 1


def test_a_message_that_comes_twice_is_answered_twice_and_counts_once() -> None:
    bench = Bench(twice=1.0)
    promise = bench.ask()
    bench.kernel.run(1_000 * MS)
    assert (bench.server.calls, promise.value) == (2, 1)


def test_nothing_passes_a_cut_until_as_many_mend_as_have_cut() -> None:
    bench = Bench()
    for _ in range(2):
        bench.network.cut([(1, 0)])
    bench.network.mend([(1, 0)])
    assert not bench.network.reaches(1, 0) and bench.network.reaches(0, 1)
    asked = [bench.ask() for _ in range(20)]
    bench.kernel.run(1_000 * MS)
    assert bench.server.calls == 0
    assert {promise.value for promise in asked} == {None, BROKEN}, "some are told, and some find out by a deadline"
    bench.network.mend([(1, 0)])
    promise = bench.ask()
    bench.kernel.run(2_000 * MS)
    assert promise.value == 1


def test_questions_overtake_one_another_and_what_is_on_a_pipe_does_not() -> None:
    bench = Bench()
    order: list[int] = []

    def noted(number: int, call: CallId) -> None:
        order.append(number)

    for number in range(300):
        bench.network.ask(bench.client, bench.server, partial(noted, number))
    bench.kernel.run(1_000 * MS)
    assert sorted(order) == list(range(300)) != order
    line, opened = bench.connect()
    for number in range(300):
        line.down.put(number)
    assert drain(bench, line) == list(range(300))
    assert opened == ["read"]


def test_after_a_loss_nothing_more_comes_out_of_a_pipe() -> None:
    for seed in range(20):
        bench = Bench()
        bench.network._random = random.Random(seed).random
        line, _ = bench.connect()
        line.down.put("before")
        bench.network.cut([(0, 1)])
        line.down.put("lost")
        bench.network.mend([(0, 1)])
        line.down.put("after")
        assert drain(bench, line) in (["before"], ["before", BROKEN])


def test_what_is_sent_on_a_clogged_link_arrives_when_it_clears() -> None:
    bench = Bench()
    bench.network.clog([(1, 0)], 500 * MS)
    bench.ask()
    bench.kernel.run(499 * MS)
    assert bench.server.calls == 0
    bench.kernel.run(600 * MS)
    assert bench.server.calls == 1


def test_a_process_that_is_gone_breaks_its_connections() -> None:
    bench = Bench()
    line, _ = bench.connect()
    bench.network.reset(bench.server)
    bench.server.kill()
    assert drain(bench, line) == [BROKEN]
    assert not bench.client.lines and not bench.server.lines


def test_a_healed_network_stays_healed() -> None:
    bench = Bench(loss=0.5)
    bench.network.cut([(1, 0)])
    bench.network.heal()
    bench.network.set_quality(0.5, 0.5)
    asked = [bench.ask() for _ in range(50)]
    bench.kernel.run(10_000 * MS)
    assert all(promise.ready and promise.value is not BROKEN for promise in asked)


def test_loopback_knows_no_trouble() -> None:
    bench = Bench(loss=1.0, twice=1.0)
    bench.client.node = 0
    promise = bench.ask()
    bench.kernel.run(MS)
    assert promise.value == 1


@pytest.mark.parametrize("server", [None, "dead"])
def test_a_process_that_is_not_there_does_not_answer(server: str | None) -> None:
    bench = Bench()
    bench.server.kill()
    asked = [bench.network.ask(bench.client, bench.server if server else None, lambda call: call) for _ in range(20)]
    bench.kernel.run(1_000 * MS)
    assert {promise.value for promise in asked} == {None, BROKEN}
