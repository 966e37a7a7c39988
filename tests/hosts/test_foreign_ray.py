"""A cluster on a Ray that is there already: `kvcluster up --address`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcluster.actors.node_memory import OBJECT_STORE_BYTES
from kvcluster.runtime.auth import new_token, token_line
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
TOKEN = secrets.token_urlsafe(32)


class Foreign:
    """A Ray on loopback that is not ours, with or without a token, and the commands of an operator who uses it."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.env = os.environ | {
            "RAY_AUTH_MODE": mode,
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        offers = json.dumps({"kvcluster_shard": 4})
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--port={self.address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1", "--num-cpus=0"]
        command += ["--include-dashboard=false", "--include-log-monitor=false", f"--temp-dir={folder}/ray"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--memory={2**30}", f"--resources={offers}"]
        command += [f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        head, log = self._run(command, "ray.log"), folder / "ray.log"
        eventually(lambda: "Ray runtime started" in log.read_text(encoding="utf-8") or head.poll() is not None)
        assert head.poll() is None, log.read_text(encoding="utf-8")

    def config(self, name: str, **changes: object) -> Path:
        """Writes the settings of a cluster of two shards."""
        secret, tokens, path = (self.folder / f"{name}{end}" for end in (".secret", ".tokens", ".toml"))
        if not secret.exists():
            secret.write_text(new_token(), encoding="ascii")
            secret.chmod(0o600)
            tokens.write_text(token_line(new_token(), "team") + "\n", encoding="ascii")
        values = {"shards": 2, "port": free_port(), "extra": "", **changes}
        path.write_text(
            f'name = "{name}"\nshards = {values["shards"]}\n[shard]\nram_bytes = "64MiB"\n[server]\n'
            f'port = {values["port"]}\ntoken_file = "{tokens}"\nsecret_file = "{secret}"\n{values["extra"]}',
            encoding="utf-8",
        )
        return path

    def kvcluster(self, *arguments: object, status: int = 0) -> str:
        command = [sys.executable, "-m", "kvcluster.cli.main", *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=self.env, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *arguments: object) -> tuple[subprocess.Popen[bytes], Path]:
        """Runs a command that stays; returns it and its log."""
        log = f"log{len(self.processes)}"
        return self._run([sys.executable, "-m", "kvcluster.cli.main", *map(str, arguments)], log), self.folder / log

    def close(self) -> None:
        for process in reversed(self.processes):
            os.killpg(process.pid, signal.SIGTERM) if process.poll() is None else None
            process.wait(60)

    def _run(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=self.env, start_new_session=True)
        self.processes.append(process)
        return process


@pytest.fixture(scope="module")
def ray() -> Iterator[Foreign]:
    with tempfile.TemporaryDirectory(prefix="kvray-", dir="/tmp") as folder:
        foreign = Foreign(Path(folder), "token")
        try:
            yield foreign
        finally:
            foreign.close()


def test_two_clusters_of_one_ray_are_told_apart_by_name(ray: Foreign) -> None:
    one, two = ray.config("one"), ray.config("two", shards=1)
    assert ": 2 shard(s)" in ray.kvcluster("up", "--address", ray.address, "--config", one)
    assert ": 1 shard(s)" in ray.kvcluster("up", "--address", ray.address, "--config", two)
    assert ": 2 shard(s)" in ray.kvcluster("up", "--address", ray.address, "--config", one)  # it is there already
    assert "down" in ray.kvcluster("down", "--address", ray.address, "--name", "two")
    assert "nothing" in ray.kvcluster("down", "--address", ray.address, "--name", "two", status=1)


def test_a_second_up_with_other_settings_names_them(ray: Foreign) -> None:
    path = ray.folder / "one.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("64MiB", "128MiB"), encoding="utf-8")
    said = ray.kvcluster("up", "--address", ray.address, "--config", path, status=1)
    assert "shard.ram_bytes is 67108864, not 134217728" in said
    path.write_text(text, encoding="utf-8")


def test_in_the_foreground_it_follows_the_file_and_leaves_the_cluster_when_it_ends(ray: Foreign) -> None:
    path = ray.folder / "one.toml"
    process, log = ray.start("up", "--address", ray.address, "--config", path, "--foreground")
    eventually(lambda: "up at " in log.read_text(encoding="utf-8"))
    path.write_text(path.read_text(encoding="utf-8").replace("shards = 2", "shards = 3"), encoding="utf-8")
    eventually(lambda: "starting shard-2" in log.read_text(encoding="utf-8"))
    process.terminate()
    assert process.wait(60) == 0
    assert ": 3 shard(s)" in ray.kvcluster("up", "--address", ray.address, "--config", path)
    assert "down" in ray.kvcluster("down", "--address", ray.address, "--name", "one")


def test_what_does_not_fit_is_refused_and_nothing_stays(ray: Foreign) -> None:
    path = ray.config("large", shards=40)
    said = ray.kvcluster("up", "--address", ray.address, "--config", path, status=1)
    assert "wait for a node with kvcluster_shard 1" in said
    assert "nothing" in ray.kvcluster("down", "--address", ray.address, "--name", "large", status=1)


def test_the_volume_of_another_cluster_is_refused_by_name(ray: Foreign) -> None:
    disk = '[groups.shard]\n[groups.shard.shard]\nhost_bytes = "64MiB"\ndisk_bytes = "64MiB"\n'
    disk += f'disk_dir = "{ray.folder}/disk"\n'
    mine = ray.config("mine", shards=1, extra=disk)
    ray.kvcluster("up", "--address", ray.address, "--config", mine)
    other = ray.config("other", shards=1, extra=disk)
    said = ray.kvcluster("up", "--address", ray.address, "--config", other, status=1)
    assert (
        "is the volume of shard-0 in group shard of cluster 'mine', not of shard-0 in group shard of cluster 'other'"
        in said
    )
    assert "down" in ray.kvcluster("down", "--address", ray.address, "--name", "mine")
    assert "nothing" in ray.kvcluster("down", "--address", ray.address, "--name", "other", status=1)


def test_several_tenants_on_a_ray_of_others_must_be_allowed_by_name(ray: Foreign) -> None:
    path = ray.config("tenants", shards=1)
    with (ray.folder / "tenants.tokens").open("a", encoding="ascii") as file:
        file.write(token_line(new_token(), "second") + "\n")
    said = ray.kvcluster("up", "--address", ray.address, "--config", path, status=1)
    assert "--allow several-tenants" in said
    allowed = ("--allow", "several-tenants")
    assert "up at" in ray.kvcluster("up", "--address", ray.address, "--config", path, *allowed)
    ray.kvcluster("down", "--address", ray.address, "--name", "tenants")


def test_a_ray_without_a_token_is_refused_and_so_is_what_is_no_ray(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvray-", dir="/tmp") as folder:
        foreign = Foreign(Path(folder), "disabled")
        try:
            path = foreign.config("open", shards=1)
            said = foreign.kvcluster("up", "--address", foreign.address, "--config", path, status=1)
            assert "asks for no token" in said and "--allow unauthenticated-ray" in said
            allowed = ("--allow", "unauthenticated-ray")
            assert "up at" in foreign.kvcluster("up", "--address", foreign.address, "--config", path, *allowed)
            foreign.kvcluster("down", "--address", foreign.address, "--name", "open")
            nowhere = f"127.0.0.1:{free_port()}"
            assert "no Ray answers" in foreign.kvcluster("up", "--address", nowhere, "--config", path, status=1)
        finally:
            foreign.close()
