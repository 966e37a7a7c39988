"""`kvcluster weights`: shows engines, and names the weights of those whose weights changed in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvcluster import Client
from kvcluster.cli import weights as shown
from kvcluster.cli.main import main
from kvcluster.cli.weights import alone
from kvcluster.core.messages import EngineInfo
from kvcluster.transfers.coordinator_client import GrpcPort
from tests.cli.front import Served

ONE = EngineInfo("1" * 16, "host:1", "tiny", "sha256:1", (("engine", "vllm 9.9"), ("dtype", "float32")))
PRIVATE = replace(ONE, weights="private:1", private=True, withdrawn=1)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_SAYS_S", 0.3)


@contextmanager
def living(client: Client, info: EngineInfo) -> Iterator[None]:
    """An engine that registers, and takes up the weights that it hears of, as vLLM's do."""
    over = threading.Event()

    def run() -> None:
        now = info
        while not over.wait(0.02):
            told = client.register(now)
            if told.weights:
                now = replace(now, weights=told.weights, private=False)

    client.register(info)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_without_engines_it_says_so(served: Served, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.run("weights") == 0
    assert "no engine has registered" in capsys.readouterr().out
    assert served.run("weights", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_engines_are_shown_with_what_they_tell(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.register(ONE)
    client.register(replace(PRIVATE, engine="2", name="host:2"))
    assert served.run("weights") == 0
    said = capsys.readouterr().out
    assert "engine vllm 9.9; dtype float32" in said
    assert "host:2 shares with no other engine since its weights changed in memory" in said
    assert served.run("weights", "--json") == 0
    [first, second] = json.loads(capsys.readouterr().out)
    assert (first["name"], first["private"], second["private"]) == ("host:1", False, True)
    assert first["facts"] == {"engine": "vllm 9.9", "dtype": "float32"}


def test_status_and_doctor_report_engines_that_share_with_no_other(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.register(replace(PRIVATE, ready=False))
    for command in ("status", "doctor"):
        served.run(command)  # doctor finds shards here that have no address
        assert "never shared: tiny: host:1 shares with no other engine: it was reset while requests ran" in (
            capsys.readouterr().out
        )
    assert served.run("status", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert [engine["name"] for engine in status["engines"]] == ["host:1"]
    assert served.run("status") == 0
    assert "1 engine: host:1 (tiny)" in capsys.readouterr().out


def test_weights_are_set_and_it_waits_until_the_engine_says_so(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with living(client, PRIVATE):
        assert served.run("weights", "set", "tiny", "sha256:new") == 0
        assert capsys.readouterr().out == "host:1: caches under these weights\n"
        assert served.run("weights", "--json") == 0
    [engine] = json.loads(capsys.readouterr().out)
    assert (engine["weights"], engine["private"]) == ("sha256:new", False)


def test_an_engine_that_was_reset_a_moment_ago_is_told_when_it_registers(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "_SAYS_S", 10.0)
    read = shown.read_engines
    asked = iter(range(1, 10**6))

    def read_and_register(port: GrpcPort, wait_ms: int) -> shown.Living:
        number = next(asked)
        if number == 2:
            client.register(PRIVATE)
        if number == 4:
            monkeypatch.setattr(shown, "_SAYS_S", 0.0)
            client.register(replace(PRIVATE, weights="sha256:new", private=False))
        return read(port, wait_ms)

    monkeypatch.setattr(shown, "read_engines", read_and_register)
    client.register(ONE)
    assert served.run("weights", "set", "tiny", "sha256:new") == 0
    assert capsys.readouterr().out == "host:1: caches under these weights\n"


def test_an_engine_that_does_not_take_them_up_is_named(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "_CONFIRM_S", 0.3)
    client.register(PRIVATE)
    assert served.run("weights", "set", "tiny", "sha256:new") == 1
    assert capsys.readouterr().out == "host:1: has not confirmed in time\n"


@pytest.mark.parametrize(
    ("engine", "arguments", "why"),
    [
        (ONE, ("other", "sha256:2"), "no engine of other has registered; there are engines of: tiny"),
        (ONE, ("tiny", "sha256:2"), "no engine of tiny is private"),
        (replace(PRIVATE, ready=False), ("tiny", "sha256:2"), "reset it again when it is idle"),
        (PRIVATE, ("tiny", "sha256:2", "--engine", "host:7"), "no private engine of tiny has that name"),
    ],
)
def test_if_no_engine_takes_the_name_it_says_why(
    served: Served,
    client: Client,
    capsys: pytest.CaptureFixture[str],
    engine: EngineInfo,
    arguments: tuple[str, ...],
    why: str,
) -> None:
    client.register(engine)
    assert served.run("weights", "set", *arguments) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["main", "latest", ""])
def test_a_name_that_pins_nothing_is_refused_before_any_question_is_sent(
    capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    assert main(["weights", "set", "tiny", weights, "--port", "1"]) == 1
    assert "does not pin the weights" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("set",), ("set", "tiny"), ("tiny",), ("set", "a", "b", "c")])
def test_half_a_command_says_how_it_is_written(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        main(["weights", *arguments])
    assert "MODEL" in capsys.readouterr().err


def test_engines_that_share_are_not_spoken_of() -> None:
    assert list(alone([(ONE, 0)])) == []
