"""A Redis for the state of Ray's head, on the worker's host, and the settings of a cluster that uses it."""

from __future__ import annotations

import shutil
import subprocess

from kvcluster.runtime.private_files import derived_password
from tests.hosts.hosts import Cluster
from tests.waiting import eventually

SETTINGS = """
[ray]
redis = "10.203.0.5:6379"
redis_password_from_secret = true
"""


def is_installed() -> bool:
    return shutil.which("redis-server") is not None


class Redis:
    """A Redis with a password on the worker's host, which is not lost, and its data on a disk. Use as a context
    manager."""

    def __init__(self, cluster: Cluster) -> None:
        password = derived_password(str(cluster.folder / "secret"))
        command = ["redis-server", "--bind", cluster.network.addresses["worker"], "--requirepass", password]
        command += ["--save", "", "--appendonly", "yes", "--dir", str(cluster.folder)]
        self._command = cluster.network.command("worker", command)
        self._log = cluster.folder / "redis.log"

    def __enter__(self) -> Redis:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it with the data that it had."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log)
        eventually(lambda: b"Ready to accept connections" in self._log.read_bytes())

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
