"""A cluster that keeps running: `up` starts it, `find` finds it again, `down` ends it.

`up` starts a Ray head of its own, on loopback, as one process group, and writes down where it is in a file that
only this user can read. `down` ends that process group and nothing else: other Ray clusters of the machine are
none of its business.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import ray

from kvcluster.actors import cluster
from kvcluster.config import Config
from kvcluster.errors import ConfigError, KVClusterError

_START_S = 60.0
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Running:
    """What is written down of a running cluster. `started` tells a reused process id from the real one."""

    address: str
    shards: int
    pid: int
    started: int
    ray_address: str


def up(config: Config) -> tuple[Running, bool]:
    """Starts a cluster in the background; or finds the one that listens on that port, and says so with False."""
    if config.server.port == 0:
        raise ConfigError("a cluster that keeps running needs a port to be found at; give --port")
    known = find(config.server.port)
    if known is not None:
        return known, False
    # Wrong settings are found out before anything is started.
    cluster.check(config)
    ray_port = _free_port()
    os.environ.update(cluster.own_ray())  # for the head, and for this process, which is about to end
    head = _start_head(ray_port)
    try:
        _wait_for_head(head, ray_port)
        ray.init(
            address=f"127.0.0.1:{ray_port}",
            namespace=cluster.NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
        )
        try:
            started = cluster.start(config, detached=True)
        finally:
            ray.shutdown()
        running = Running(started.address, config.shards, head.pid, _started(head.pid) or 0, f"127.0.0.1:{ray_port}")
        _write(config.server.port, running)
    except BaseException:
        _end_group(head.pid)
        head.wait()
        raise
    return running, True


def find(port: int) -> Running | None:
    """The cluster that `up` started on that port, if it still runs."""
    path = _path(port)
    try:
        running = Running(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if _started(running.pid) == running.started:
        return running
    path.unlink(missing_ok=True)  # it died by itself
    return None


def down(port: int) -> bool:
    """Ends the cluster that `up` started on that port. False where there is none."""
    running = find(port)
    if running is None:
        return False
    _end_group(running.pid)
    _path(port).unlink(missing_ok=True)
    return True


def _start_head(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false"]
    command += [f"--object-store-memory={cluster.OBJECT_STORE_BYTES}"]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for_head(head: subprocess.Popen[bytes], port: int) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        if head.poll() is not None:
            raise KVClusterError(f"Ray ended with status {head.returncode} while it started; try `ray start --head`")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise KVClusterError(f"Ray did not start within {_START_S:.0f} s")


def _end_group(pid: int) -> None:
    """Asks the head and all that it started to end, then insists."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(pid, sig)
        except ProcessLookupError:
            return
        give_up = time.monotonic() + _STOP_S
        while time.monotonic() < give_up:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            try:
                os.killpg(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"kvcluster-{os.getuid()}" / f"{port}.json"


def _write(port: int, running: Running) -> None:
    path = _path(port)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise ConfigError(f"{path.parent} belongs to somebody else; remove it or set TMPDIR")
    path.write_text(json.dumps(asdict(running)), encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
