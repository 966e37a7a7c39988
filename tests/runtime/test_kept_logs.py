"""The logs of the last runs of a cluster: bounded, named by process, and there when its processes are not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from kvcluster.cli.main import main
from kvcluster.runtime import kept_logs
from kvcluster.runtime.kept_logs import ALL_RUNS, FILE_BYTES, RUN_BYTES, RUNS, begin, keep, logs_of, runs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """What Ray and the actors have written."""
    session = tmp_path / "session" / "logs"
    session.mkdir(parents=True)
    for number, name in enumerate(("coordinator", "shard-0")):
        text = f":job_id:01\n:actor_name:SomeActor\n:kvcluster:{name}\n{name} is lost\n"
        (session / f"worker-{number}.err").write_text(text, encoding="utf-8")
    (session / "raylet.out").write_text("raylet\n", encoding="utf-8")
    (session / "raylet.err").touch()
    return session


def ended(session: Path) -> None:
    shutil.rmtree(session.parent)


def processes(run: Path) -> list[str]:
    return [each.process for each in logs_of(run)]


def test_the_logs_of_a_run_outlive_its_processes_by_the_names_of_these(session: Path) -> None:
    run = begin("7070", session)
    (run / "ray.log").write_text("started\n", encoding="utf-8")
    live = processes(run)
    assert live == ["ray", "raylet.out", "coordinator", "shard-0"]
    keep(run)
    ended(session)
    assert processes(run) == live
    assert all(each.path.parent == run for each in logs_of(run))


def test_a_run_that_was_killed_is_kept_by_the_next(session: Path) -> None:
    first = begin("7070", session)
    second = begin("7070", session.parent / "another")
    ended(session)
    assert runs("7070") == [second, first]
    assert "shard-0" in processes(first)
    assert processes(second) == []


def test_the_last_runs_of_each_owner_stay(session: Path) -> None:
    other = begin("node-10.0.0.5", session)
    made = [begin("7070", session) for _ in range(RUNS + 2)]
    assert runs("7070") == made[: -RUNS - 1 : -1]
    assert runs("node-10.0.0.5") == [other]
    assert kept_logs.owners() == ["7070", "node-10.0.0.5"]


def test_the_last_runs_of_all_owners_stay_and_those_that_have_not_ended(session: Path) -> None:
    alive = begin("7070", session)
    made = [begin(str(port), session.parent / "ended") for port in range(ALL_RUNS + 3)]
    assert {run for owner in kept_logs.owners() for run in runs(owner)} == {alive, *made[-ALL_RUNS:]}


def test_what_is_kept_of_a_run_is_bounded_and_the_ends_stay(session: Path) -> None:
    for number in range(RUN_BYTES // FILE_BYTES + 3):
        (session / f"long-{number}.log").write_bytes(b"x" * FILE_BYTES + b"the end")
    run = begin("7070", session)
    (run / "ray.log").write_bytes(b"x" * FILE_BYTES + b"ray's end")
    keep(run)
    kept = [path for path in run.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= RUN_BYTES + FILE_BYTES
    assert max(path.stat().st_size for path in kept) == FILE_BYTES
    assert (run / "ray.log").read_bytes().endswith(b"ray's end")


def test_a_link_among_the_logs_is_not_followed(session: Path, folder: Path) -> None:
    (folder / "secret").write_text("secret", encoding="utf-8")
    (session / "worker-9.err").symlink_to(folder / "secret")
    run = begin("7070", session)
    keep(run)
    ended(session)
    assert not (run / "worker-9.err").exists()


# ---------------------------------------------------------------------------------------- the command


def test_the_command_prints_the_logs_of_coordinator_and_shards(
    session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin("7070", session)
    keep(run)
    ended(session)
    assert main(["logs", "--lines", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"==> coordinator: {run}/worker-0.err <==",
        "coordinator is lost",
        f"==> shard-0: {run}/worker-1.err <==",
        "shard-0 is lost",
    ]
    assert main(["logs", "shard-0"]) == 0
    assert "coordinator is lost" not in capsys.readouterr().out
    assert main(["logs", "raylet.out"]) == 0
    assert "raylet\n" in capsys.readouterr().out
    assert main(["logs", "--list"]) == 0
    assert capsys.readouterr().out == f"7070  {run}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["shard-7"], "there is no log of 'shard-7'; there are logs of: coordinator, raylet.out, shard-0"),
        (["--run", "2"], "this machine has logs of 1 runs of 7070. It has logs of: 7070 (1)"),
        (["--port", "1"], "this machine has logs of 0 runs of 1. It has logs of: 7070 (1)"),
        (["--port", "1", "--of", "embedded"], "give --port or --of, not both"),
    ],
)
def test_the_command_says_which_logs_there_are(
    session: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin("7070", session)
    assert main(["logs", *arguments]) == 1
    assert sentence in capsys.readouterr().err
