"""A cluster that `up` leaves running: later commands and other processes find it, and `down` leaves no trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import kvcluster
from kvcluster.actors import background, cluster, foreground
from kvcluster.actors.background import Running, UpOutcome
from kvcluster.actors.reconciler import call
from kvcluster.cli.main import main
from kvcluster.config import Config, load
from kvcluster.errors import ConfigError
from tests.actors.processes import listening, outcome, session, start_worker, title, unused_of_ray
from tests.actors.worker import PATIENT, SPEC, digest, kv, tokens
from tests.ports import free_port
from tests.traps import Traps
from tests.waiting import eventually


def config_of(port: int) -> Config:
    return load(overrides={"shards": 2, "shard": {"ram_bytes": "64MiB"}, "server": {"port": port}})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the records of clusters. Its path is too long for Ray's sockets, so no real cluster starts
    there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kvcluster-{os.getuid()}"


def write_down(folder: Path, port: int, text: str) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder / f"{port}.json"
    state.write_text(text, encoding="utf-8")
    return state


def test_a_background_cluster_refuses_to_choose_its_port(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give --port"):
        background.up(config_of(0))


def test_a_port_in_use_is_refused_by_name(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            background.up(config_of(port))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"address": 1, "shards": 1, "pid": 1}', "\0"])
def test_a_torn_state_file_is_not_believed(folder: Path, text: str) -> None:
    write_down(folder, 7070, text)
    assert background.find(7070) is None


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_start_of_ray_ends_ray(folder: Path, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    heads: list[int] = []
    spawn = os.posix_spawn

    def interrupted(*about: Any, **options: Any) -> int:
        heads.append(spawn(*about, **options))
        signal.raise_signal(end)
        return heads[0]

    def told(number: int, _: object) -> None:
        raise InterruptedError(number)

    monkeypatch.setattr(os, "posix_spawn", interrupted)
    before = signal.signal(end, told)
    try:
        with pytest.raises(InterruptedError):
            background.up(config_of(free_port()))
        assert signal.getsignal(end) is told
    finally:
        signal.signal(end, before)
    (head,) = heads
    assert session(head) == []
    assert [path.name for path in folder.iterdir()] == ["logs"]


def test_a_state_file_whose_cluster_has_died_is_not_believed(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    state = write_down(folder, 7070, json.dumps(asdict(Running("127.0.0.1:7070", 1, dead.pid, 1))))
    assert background.find(7070) is None
    assert not background.down(7070)
    assert not state.exists()


def test_down_spares_a_process_that_took_the_id_of_a_dead_cluster(folder: Path) -> None:
    write_down(folder, 7070, json.dumps(asdict(Running("127.0.0.1:7070", 1, os.getpid(), 1))))
    assert background.find(7070) is None
    assert not background.down(7070)  # else this process would end here


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_not_trusted(folder: Path, mode: int) -> None:
    write_down(folder, 7070, "{}")
    folder.chmod(mode)
    for use in (background.find, background.down):
        with pytest.raises(ConfigError, match="others may write"):
            use(7070)


def test_a_link_to_a_folder_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="others may write"):
        background.find(7070)


def test_what_ray_says_when_it_cannot_start_is_passed_on_and_nothing_stays_but_its_log(folder: Path) -> None:
    deep = folder.parent / ("x" * 100)
    deep.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises(kvcluster.KVClusterError, match="AF_UNIX path length") as refused:
            background.up(config_of(free_port()))
    assert [path.name for path in (deep / folder.name).iterdir()] == ["logs"]
    (log,) = (deep / folder.name).glob("logs/*/*/ray.log")
    assert f"its log {log}: " in str(refused.value)
    assert "AF_UNIX path length" in log.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Traps:
    return Traps(tmp_path_factory.mktemp("traps"))


@pytest.fixture(scope="module")
def running(traps: Traps) -> Iterator[Running]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(traps.folder)
        found = background.up(config_of(port))
    try:
        assert found == UpOutcome(found.running, True)
        yield found.running
    finally:
        background.down(port)


@pytest.mark.cluster
def test_a_second_up_finds_the_running_one(running: Running) -> None:
    assert background.find(running.port) == running
    assert background.up(config_of(running.port)) == UpOutcome(running, False)


@pytest.mark.cluster
def test_none_of_its_processes_imports_from_the_folder_in_which_up_was_run(running: Running, traps: Traps) -> None:
    folders = {os.readlink(f"/proc/{pid}/cwd") for pid in session(running.pid)}
    assert str(traps.folder) not in folders
    assert traps.imported() == []


@pytest.mark.cluster
def test_any_process_of_the_machine_connects_by_host_and_port(running: Running) -> None:
    address = f"127.0.0.1:{running.port}"
    with kvcluster.connect(address, SPEC, config=PATIENT) as client:
        assert client.store(tokens(1), kv(1)).blocks == 8
        assert client.flush()
    assert outcome(start_worker("load", address, 1)) == {"tokens": 128, "digest": digest(kv(1))}


@pytest.mark.cluster
def test_status_shows_it_without_a_token(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--port", str(running.port), "--json"]) == 0
    assert [shard["state"] for shard in json.loads(capsys.readouterr().out)["shards"]] == ["up", "up"]


@pytest.mark.cluster
def test_nothing_of_it_listens_beyond_loopback(running: Running) -> None:
    heard = listening(session(running.pid))
    assert len(heard) > 3
    assert set().union(*heard.values()) <= {"127.0.0.1", "::1"}


@pytest.mark.cluster
def test_ray_has_no_process_that_nothing_uses(running: Running) -> None:
    started = session(running.pid)
    assert any("raylet" in title(pid) for pid in started)
    assert unused_of_ray(started) == []


@pytest.mark.cluster
def test_other_rays_of_this_user_do_not_take_it_for_theirs(running: Running) -> None:
    ours = Path(tempfile.gettempdir(), f"kvcluster-{os.getuid()}", str(running.port), "ray_current_cluster")
    theirs = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
    assert not theirs.exists() or theirs.read_text(encoding="utf-8") != ours.read_text(encoding="utf-8")


@pytest.mark.cluster
def test_its_actors_come_back_although_no_process_watches_them(running: Running) -> None:
    def actors() -> set[int]:
        return {pid for pid in session(running.pid) if "Actor" in title(pid)}

    before = actors()
    assert len(before) == 3
    with kvcluster.connect(running.address, SPEC, config=PATIENT) as client:
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: client.store(tokens(2), kv(2)).blocks == 8)
        eventually(lambda: [shard["state"] for shard in client.status()["shards"]] == ["up", "up"])
        assert not actors() & before


@pytest.mark.cluster
def test_up_starts_again_what_was_drained(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    port = ["--port", str(running.port)]
    for shard in ("shard-0", "shard-1"):
        assert main(["drain", shard, "--yes", *port]) == 0
    assert main(["status", *port]) == 1, "there is no shard"
    capsys.readouterr()
    assert main(["up", "--shards", "2", "--ram-bytes", "64MiB", *port]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said == f"already up at {running.address}: 2 shard(s), started again: shard-0, shard-1"
    assert main(["status", *port]) == 0
    with kvcluster.connect(running.address, SPEC, config=PATIENT) as client:
        assert client.store(tokens(3), kv(3)).blocks == 8


@pytest.mark.cluster
def test_a_shard_without_its_disk_tier_is_told_by_up_status_and_doctor_and_by_their_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shard-0" / "0000.pages").mkdir(parents=True)
    port = ["--port", str(free_port())]
    up = ["up", "--ram-bytes", "64MiB", "--host-bytes", "64MiB", "--disk-bytes", "256MiB", "--disk-dir"]
    try:
        assert main([*up, str(tmp_path), *port]) == 3
        trouble = "shard-0 is degraded: the shard runs without its disk tier: "
        assert f"kvcluster: {trouble}" in capsys.readouterr().err
        assert main([*up, str(tmp_path), *port]) == 3, "and again where it is up already"
        assert trouble in capsys.readouterr().err
        assert main(["status", *port]) == 3
        assert trouble in capsys.readouterr().out
        assert main(["doctor", *port]) == 1
        assert trouble in capsys.readouterr().out
    finally:
        assert main(["down", *port]) == 0


def test_up_in_the_foreground_says_which_shard_is_degraded_if_the_coordinator_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = SimpleNamespace(address=lambda: "here:7070")
    new = SimpleNamespace(address=lambda: "here:7070", trouble=lambda: {"shard-1": "no room"})
    for module in (cluster, foreground):
        monkeypatch.setattr(module, "call", lambda method: method())
    for coordinator, well, more in ((old, True, []), (new, False, ["shard-1 is degraded: no room"])):
        said: list[str] = []
        reconciler: Any = SimpleNamespace(coordinator=coordinator)
        assert foreground._say_up(reconciler, "2 shard(s)", said.append) is well
        assert said == ["up at here:7070: 2 shard(s)", *more]


def test_what_ray_says_of_an_actor_is_one_line_without_colours() -> None:
    said = "\x1b[36mray::ShardActor.__init__()\x1b[39m (pid=1)\n  File x.py, line 1\nMemoryError: no room\n"

    class Died(ray.exceptions.RayActorError):
        def __str__(self) -> str:
            return said

    def dies() -> None:
        raise Died

    with pytest.raises(kvcluster.KVClusterError) as refused:
        call(dies)
    assert str(refused.value) == "an actor of the cluster did not start: MemoryError: no room"


@pytest.mark.cluster
def test_down_leaves_no_process_and_no_file(running: Running) -> None:
    assert session(running.pid)
    assert background.down(running.port)
    assert session(running.pid) == []
    folder = Path(tempfile.gettempdir()) / f"kvcluster-{os.getuid()}"
    assert [path.name for path in folder.iterdir() if path.name.startswith(str(running.port))] == []
    assert background.find(running.port) is None
    assert not background.down(running.port)
