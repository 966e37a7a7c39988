"""A cluster of a head and three nodes that Prometheus scrapes, and what a test does to it.

Each node has a limit of memory that can be changed, as a container has one: by a mount that only the processes of that
host see.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tests.chaos.victims import COORDINATOR, SHARD, actors, flip_pages
from tests.hosts.hosts import ROOT, Cluster
from tests.hosts.scraping import printed_metrics_settings, scraping
from tests.hosts.worker import kv
from tests.waiting import eventually

NODES = ("one", "two", "spare")
RAM_BYTES = 16 * 2**20
_WORKER_PORT = 9500
_LIMIT_BYTES = 8 * 2**30
_SETTINGS = """\
host_bytes = "8MiB"
disk_bytes = "16MiB"
disk_dir = "/etc/kvcluster/disk"
report_interval_ms = 100

[coordinator]
drain_ms = 20_000
rebuild_grace_ms = 12_000
promote_loads = 2

"""
_SEES_ANOTHER_LIMIT = """
at=/sys/fs/cgroup # where a network namespace has nothing
if mount -t cgroup -o memory cgroup $at
then own=$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)/memory.limit_in_bytes
else mount -t cgroup2 cgroup2 $at && own=$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.max; fi
mount --bind "$1" $at$own && shift && exec "$@"
"""


_TOKENS = 'token_file = "/etc/kvcluster/tokens"'


class MeteredCluster:
    """Use as a context manager. `cluster` is the cluster, `prometheus` what scrapes it, and `worker` a worker on the
    host of Prometheus, which scrapes it too."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._open = ExitStack()
        self._settings = _SETTINGS + printed_metrics_settings() + "tenants = true\n"
        quotas = {_TOKENS: f'{_TOKENS}\nquota_file = "/etc/kvcluster/quotas"'}
        self.cluster = Cluster(self._settings, {"20GiB": f"{RAM_BYTES}", **quotas})

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            opened.enter_context(self.cluster)
            self.cluster.up()
            for host in NODES:
                self.join(host)
            self.wait_whole()
            self.worker = opened.enter_context(self.held_worker("worker"))
            self.prometheus = opened.enter_context(scraping(self._program, self.cluster, "worker", NODES))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    # ------------------------------------------------------------------------------------------- nodes

    def join(self, host: str) -> None:
        """Makes that host a node."""
        self.set_memory_limit(host)
        wrapper = ("sh", "-c", _SEES_ANOTHER_LIMIT, "sh", str(self._shown_limit(host)))
        self.cluster.join(host, wrapper=wrapper)

    def wait_whole(self) -> dict[str, str]:
        """Waits until every node has a shard that is up, and returns their hosts."""
        return self.cluster.wait_shards(lambda shards: sorted(shards.values()) == sorted(NODES), 150)

    def configure(self, ram_bytes: int = RAM_BYTES) -> None:
        """Changes the size of the pools of shards that start from then on."""
        self.cluster.configure(self._settings, {"20GiB": f"{ram_bytes}"})

    def shard_at(self, host: str) -> dict[str, Any]:
        """What the status says of the shard of that host; {} while it is not up."""
        own = self.cluster.network.addresses[host] + ":"
        shards = self.cluster.status().get("shards", ())
        up = [each for each in shards if each["address"].startswith(own) and each["state"] == "up"]
        return up[0] if up else {}

    def address_of(self, host: str) -> str:
        """Where the shard of that host serves gRPC."""
        return str(self.shard_at(host)["address"])

    def process_of(self, host: str) -> int:
        """The process of the coordinator, or of the shard of that host."""
        kind = COORDINATOR if host == "head" else SHARD
        (pid,) = eventually(lambda: actors(self.cluster.network.pids(host), kind))
        return pid

    def kill_process(self, host: str) -> None:
        os.kill(self.process_of(host), signal.SIGKILL)

    def restart(self, host: str) -> None:
        """Kills the process of the shard there, and waits for the next one."""
        epoch = self.shard_at(host)["epoch"]
        self.kill_process(host)
        eventually(lambda: self.shard_at(host).get("epoch", epoch) != epoch, 90)

    @contextmanager
    def stopped(self, host: str) -> Iterator[None]:
        """Stops the process of the shard there for a while."""
        pid = self.process_of(host)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def cut_off_from_nodes(self, host: str) -> Iterator[None]:
        """Cuts that node off from the other nodes, but not from the head."""
        pairs = [pair for other in NODES if other != host for pair in ((host, other), (other, host))]
        for pair in pairs:
            self.cluster.network.cut(*pair)
        try:
            yield
        finally:
            for pair in pairs:
                self.cluster.network.heal(*pair)

    # --------------------------------------------------------------------------------- memory and drives

    def set_memory_limit(self, host: str, nbytes: int = _LIMIT_BYTES) -> None:
        """Changes the limit of memory that the processes of that host see."""
        self._shown_limit(host).write_text(f"{nbytes}\n", encoding="ascii")

    def _shown_limit(self, host: str) -> Path:
        return self.cluster.folder / f"{host}.memory-limit"

    def remount(self, host: str, *, read_only: bool) -> None:
        """Makes the drive of that node read-only, as a system does with one that fails, as soon as no process has a
        file there open for writing; or writable again."""
        option = f"remount,bind,{'ro' if read_only else 'rw'}"
        enter = ["nsenter", "-m", "-t", str(self.cluster.processes[host].pid)]
        command = [*enter, "mount", "-o", option, str(self.cluster.folder / "disk")]
        eventually(lambda: subprocess.run(command, check=False, capture_output=True).returncode == 0, 5)

    def corrupt(self, seed: int) -> int:
        """Flips a bit in each page of a prompt in the memory of the shards; returns in how many."""
        pages = [block.numpy().tobytes()[:64] for block in kv(seed)]
        flipped = 0
        for host in NODES:
            flipped += flip_pages(self.process_of(host), pages, RAM_BYTES)
        return flipped

    # ------------------------------------------------------------------------------------------ workers

    @contextmanager
    def held_worker(self, host: str) -> Iterator[WorkerProcess]:
        """A worker there (held_worker.py)."""
        command = [sys.executable, "-m", "tests.hosts.held_worker", f"{self.cluster.address}:7070", str(_WORKER_PORT)]
        with subprocess.Popen(
            self.cluster.network.command(host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self.cluster.environment,
        ) as process:
            yield WorkerProcess(process)


class WorkerProcess:
    """Does a job of held_worker.py at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def __call__(self, job: str, *arguments: object) -> Any:
        """Returns what the job returned."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([job, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker has ended"
        return json.loads(line)
