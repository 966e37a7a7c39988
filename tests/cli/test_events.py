"""`kvcluster events` prints each event on a line until it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import pytest

from kvcluster.cli import main as cli
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import BlocksRemoved, Publish
from kvcluster.runtime import event_publisher
from kvcluster.runtime.event_publisher import EventPublisher
from tests.ports import free_port
from tests.runtime.events import block, effect, published, stored, stream
from tests.waiting import eventually


def run(publisher: EventPublisher, *arguments: str) -> int:
    return cli.main(["events", "--endpoint", publisher.endpoint, "--replay", publisher.replay_endpoint, *arguments])


def fill(publisher: EventPublisher) -> None:
    publisher.publish(effect(0))
    publisher.publish(effect(1))
    publisher.publish(Publish(stream(), (BlocksRemoved(Tier.DISK, (block(0), block(1))),)))
    eventually(lambda: publisher.counters()["batches"] == 4)


def test_each_event_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with published() as publisher:
        fill(publisher)
        assert run(publisher, "--count", "4") == 0
    assert capsys.readouterr().out.splitlines() == [
        "cleared  'llama' [0000000000000000]",
        "stored   'llama' [0000000000000000]  host: 1 block from 000000000000",
        "stored   'llama' [0000000000000000]  host: 1 block from 000000000000 behind 000000000000",
        "removed  'llama' [0000000000000000]  disk: 2 blocks from 000000000000",
    ]


def test_for_machines_each_event_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    with published() as publisher:
        fill(publisher)
        assert run(publisher, "--count", "4", "--json") == 0
    of = {"topic": "kv@0000000000000000@llama", "namespace": "0" * 16, "model": "llama"}
    first, second = (block(number).hex() for number in range(2))
    stored = of | {"event": "stored", "tier": "host"}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        of | {"event": "cleared", "why": ""},
        stored | {"hashes": [first], "parent": None, "tokens": [0, 0]},
        stored | {"hashes": [second], "parent": first, "tokens": [1, 1]},
        of | {"event": "removed", "tier": "disk", "hashes": [first, second]},
    ]


def test_it_ends_after_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    with published() as publisher:
        assert run(publisher, "--for", "0.1") == 0
    assert capsys.readouterr().out == ""


@pytest.fixture
def silent() -> str:
    """An endpoint at which nothing listens."""
    return f"tcp://127.0.0.1:{free_port()}"


def test_a_publisher_that_is_not_there_is_said_and_a_failure(silent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", "--endpoint", silent, "--for", "0.2"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"kvcluster: nothing publishes events at {silent} yet (Connection refused); waiting")
    assert "events.endpoint" in said.err


def test_a_publisher_that_comes_late_is_heard(silent: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    command = threading.Thread(target=lambda: ended.append(cli.main(["events", "--endpoint", silent, "--count", "1"])))
    command.start()
    said = ""

    def waits() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "nothing publishes" in said

    eventually(waits)
    with published(endpoint=silent) as publisher:
        numbers = iter(range(10_000))

        def heard() -> bool:  # it subscribes some time after it has connected
            publisher.publish(effect(next(numbers)))
            return bool(ended)

        eventually(heard)
    command.join()
    assert ended == [0]
    assert f"{silent} listens now" in said + capsys.readouterr().err


def test_it_says_what_was_missed_and_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "QUEUED_WEIGHT", 10)
    with published() as publisher:
        publisher.publish(effect(0))
        eventually(lambda: publisher.counters()["batches"] == 2)
        publisher.publish(Publish(stream(), tuple(map(stored, range(10)))))  # more than there is room for
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 4)
        command = [sys.executable, "-m", "kvcluster.cli.main", "events", "--endpoint", publisher.endpoint]
        command += ["--replay", publisher.replay_endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
            try:
                assert listening.stdout is not None
                lines = [listening.stdout.readline().split("]")[0:2] for _ in range(5)]
                listening.send_signal(signal.SIGINT)
                assert listening.stdout.read() == ""
                assert listening.wait(60) == 0, "it is the usual end"
            finally:
                listening.kill()  # or the end of this block would wait for ever where it did not end
    assert [(what.split()[0], rest) for what, rest in lines if what.startswith("cleared")] == [
        ("cleared", "\n"),
        ("cleared", ": missed 1 batch\n"),
        ("cleared", "\n"),
    ]


def test_what_is_no_endpoint_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["events", "--endpoint", "here"]) == 1
    assert capsys.readouterr().err.startswith("kvcluster: 'here' is no endpoint")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("kvcluster.client.event_reader", "kvcluster.wire.kv_events"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert cli.main(["events"]) == 1
    assert "pip install 'kvcluster[events]'" in capsys.readouterr().err
