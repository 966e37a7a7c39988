"""`kvcluster drain --local` as a script meets it: what it does, says and exits with."""

from __future__ import annotations

import io
import socket
import sys
from typing import Any

import pytest

from kvcluster.cli import confirmation, drain_local
from kvcluster.cli.drain_local import DrainExit, DrainStep, next_step
from kvcluster.cli.main import main
from kvcluster.client import Client
from tests.cli.front import Served
from tests.cli.test_admin import Terminal, blocks

HERE, ELSEWHERE, BESIDE = "a@m1/1", "b@m2/1", "a@m1/2"


def status(*shards: tuple[str, str, str], serving: bool = True, lost: tuple[str, ...] = ()) -> dict[str, Any]:
    """Shards by name, place and state."""
    rows = [
        {"shard": name, "host": place, "state": state, "pages": 2_000, "above": [], "below": [{"pages": 5}]}
        for name, place, state in shards
    ]
    return {"state": "serving" if serving else "rebuilding", "shards": rows, "lost_shards": list(lost)}


@pytest.mark.parametrize(
    ("seen", "asked", "step"),
    [
        (
            status(("s0", HERE, "up"), ("s1", ELSEWHERE, "up"), ("s2", BESIDE, "up")),
            [],
            DrainStep(("s0",), "left here: s0 with 2,005 page(s)"),
        ),
        (
            status(("s0", HERE, "draining"), ("s3", HERE, "joining")),
            ["s0"],
            DrainStep(("s3",), "left here: s0 with 2,005 page(s), s3 with 2,005 page(s)"),
        ),
        (status(("s0", HERE, "stopping")), ["s0"], DrainStep((), "left here: s0 with 2,005 page(s)")),
        (
            status(("s1", ELSEWHERE, "up")),
            [],
            DrainStep((), f"no shard runs on this machine ({HERE}): there is nothing to drain", DrainExit.DRAINED),
        ),
        (status(("s1", ELSEWHERE, "up")), ["s0", "s3", "s0"], DrainStep((), "drained: s0, s3", DrainExit.DRAINED)),
        (
            status(serving=False),
            ["s0"],
            DrainStep((), "the coordinator is rebuilding and does not know all shards yet"),
        ),
        (
            status(("s0", HERE, "lost"), lost=("s0",)),
            ["s0"],
            DrainStep((), "lost before it was drained: s0", DrainExit.NOT_DRAINED),
        ),
    ],
)
def test_what_follows_from_a_status(seen: dict[str, Any], asked: list[str], step: DrainStep) -> None:
    assert next_step(seen, HERE, asked) == step


@pytest.fixture
def on_the_shards_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_local, "_POLL_S", 0.001)
    monkeypatch.setattr(drain_local, "here", lambda: "memory")


@pytest.mark.usefixtures("on_the_shards_machine")
def test_every_shard_of_this_machine_drains_and_its_node_leaves(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("drain", "--local", "--yes", token="operator") == DrainExit.DRAINED
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("left here: shard-0 with ")
    assert said[-1] == "drained: shard-0, shard-1"
    assert sorted(served.cluster.drained) == ["shard-0", "shard-1"]
    assert set(served.cluster.coordinator_core().state.members.leaving) == {"shard-0", "shard-1"}


@pytest.mark.usefixtures("on_the_shards_machine")
def test_without_a_terminal_the_last_shards_are_not_drained_unless_yes_is_said(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert served.run("drain", "--local", token="operator") == DrainExit.NOT_DRAINED
    said = capsys.readouterr().err
    assert "give --yes. It asks: shard-0, shard-1 are all shards: 80 pages will be lost, and nothing can be" in said
    assert blocks(client) == 80
    assert served.run("drain", "--local", "--yes", token="operator") == DrainExit.DRAINED


@pytest.mark.usefixtures("on_the_shards_machine")
def test_at_a_terminal_the_last_shards_are_not_drained_unasked(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert served.run("drain", "--local", token="operator") == DrainExit.NOT_DRAINED
    assert "Drain them? [y/N]" in capsys.readouterr().out
    assert blocks(client) == 80


@pytest.mark.usefixtures("on_the_shards_machine")
def test_a_deadline_that_is_over_says_what_is_left(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcluster.core.coordinator.report_handler.ReportHandler._may_go", lambda *_: False)
    ended = served.run("drain", "--local", "--yes", "--deadline", "0.3", token="operator")
    assert ended == DrainExit.DEADLINE_OVER == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("the deadline is over; left here: shard-0 with ")
    assert "page(s), shard-1 with " in said


def test_a_machine_without_a_shard_has_nothing_to_drain(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("drain", "--local", token="operator") == 0
    assert "no shard runs on this machine" in capsys.readouterr().out
    assert blocks(client) == 80


def test_where_no_coordinator_answers_it_ends_with_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["drain", "--local", "--deadline", "0.2", "--port", str(port)]) == DrainExit.NO_COORDINATOR == 4
    said = capsys.readouterr().err
    assert f"the coordinator at 127.0.0.1:{port} does not answer, so nothing was drained" in said


@pytest.mark.usefixtures("on_the_shards_machine")
def test_a_coordinator_that_ends_meanwhile_is_not_waited_for(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(confirmation, "PATIENCE_S", 0.1)
    monkeypatch.setattr("kvcluster.core.coordinator.report_handler.ReportHandler._may_go", lambda *_: False)

    def end_after_the_question(*_: object) -> bool:
        served.cluster.stop_coordinator()
        return True

    monkeypatch.setattr(confirmation, "confirm_drain", end_after_the_question)
    try:
        ended = served.run("drain", "--local", "--deadline", "30", token="operator")
    finally:
        served.cluster.start_coordinator()
    assert ended == DrainExit.NO_COORDINATOR
    assert "does not answer" in capsys.readouterr().err


def test_a_shard_or_this_machine_is_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["drain"], ["drain", "shard-0", "--local"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
