"""The program that deploy/kubernetes/prove.sh runs in pods, run as there, `python3 - JOB ARGUMENT... < FILE`, against a
real cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcluster
from kvcluster.runtime.auth import new_token, token_line
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "deploy" / "kubernetes" / "prove_client.py"
WITHOUT_TORCH = (
    "import sys; sys.modules.update(torch=None, numpy=None, ray=None); exec(compile(sys.stdin.read(), '-', 'exec'))"
)
"""The image of a client may have kvcluster alone."""


class Cluster:
    """The cluster's address, its metrics and the files with its tokens: `known` and `other`."""

    def __init__(self, address: str, metrics: int, folder: Path) -> None:
        self.address, self.metrics, self.folder = address, f"127.0.0.1:{metrics}", folder

    def run(self, job: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        with PROGRAM.open(encoding="utf-8") as program:
            return subprocess.run(
                [sys.executable, "-c", WITHOUT_TORCH, job, *map(str, arguments)],
                stdin=program,
                capture_output=True,
                text=True,
                check=False,
                cwd=self.folder,
                timeout=120,
            )

    def says(self, job: str, *arguments: object) -> str:
        done = self.run(job, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def admit(self, *names: str) -> None:
        """Has the cluster know these tokens alone."""
        lines = [token_line((self.folder / name).read_text(encoding="ascii"), "prove") for name in names]
        (self.folder / "tokens").write_text("\n".join(lines) + "\n", encoding="ascii")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, metrics = tmp_path_factory.mktemp("prove"), free_port()
    made = Cluster("", metrics, folder)
    for name in ("known", "other"):
        (folder / name).write_text(new_token(), encoding="ascii")
    made.admit("known")
    config = {"server": {"token_file": str(folder / "tokens")}, "metrics": {"port": metrics}}
    with kvcluster.local(shards=2, ram_bytes="32MiB", config=config) as running:
        made.address = running.address
        yield made


def test_what_one_process_stores_another_loads_to_the_byte(cluster: Cluster) -> None:
    of = (cluster.address, cluster.folder / "known")
    assert cluster.says("load", *of, 2, 0) == "blocks=0 of=32 wrong=0"
    assert cluster.says("store", *of, 2) == "blocks=32 of=32 miss=none"
    assert cluster.says("load", *of, 2, 10) == "blocks=32 of=32 wrong=0"


def test_bytes_that_differ_are_counted(cluster: Cluster) -> None:
    changed = PROGRAM.read_text(encoding="utf-8").replace(
        "draw = random.Random(seed)", "draw = random.Random(seed + 1)"
    )
    (cluster.folder / "changed.py").write_text(changed, encoding="utf-8")
    of = (cluster.address, str(cluster.folder / "known"))
    assert cluster.says("store", *of, 1) == "blocks=16 of=16 miss=none"
    command = [sys.executable, str(cluster.folder / "changed.py"), "load", *of, "1", "10"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert said.strip() == "blocks=16 of=16 wrong=16"


def test_a_token_is_waited_for_until_it_holds_and_until_it_holds_no_more(cluster: Cluster) -> None:
    other = (cluster.address, cluster.folder / "other")
    waiting = cluster.run("admitted", *other, 0)
    assert (waiting.returncode, waiting.stdout) == (1, "") and "TimeoutError" in waiting.stderr
    assert "CredentialError" in cluster.run("load", *other, 1, 0).stderr
    cluster.admit("known", "other")
    assert cluster.says("admitted", *other, 60).startswith("seconds=")
    cluster.admit("known")
    assert cluster.says("refused", *other, 60).startswith("seconds=")
    assert cluster.run("refused", cluster.address, cluster.folder / "known", 0).returncode == 1


def test_open_ports_are_told_from_closed_ones(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        is_open = f"127.0.0.1:{listening.getsockname()[1]}"
        assert (
            cluster.says("reach", is_open, f"127.0.0.1:{free_port()}", "no.such.name.invalid:80") == f"open={is_open}"
        )


def test_metrics_and_health_are_read(cluster: Cluster) -> None:
    said = cluster.says("scrape", cluster.metrics)
    assert int(said.removeprefix("series=")) > 50
    nothing = cluster.run("scrape", f"127.0.0.1:{free_port()}")
    assert nothing.returncode == 1 and "URLError" in nothing.stderr
