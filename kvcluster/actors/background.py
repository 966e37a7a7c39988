"""A cluster that keeps running: `up` starts it, `find` finds it again, `down` ends it.

`up` starts a Ray head of its own, on loopback, as a session of processes, and records its address and process id in a
folder that only this user can write to. `down` ends that session and nothing else: it does not touch other Rays of the
machine, and since this one keeps its files in that folder, other Rays and `ray stop` never take it for theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import ray

from kvcluster.actors import cluster
from kvcluster.actors.coordinator import with_state_dir
from kvcluster.actors.own_ray import OBJECT_STORE_BYTES, own_ray, pools_bytes
from kvcluster.actors.stopping import end_shards, save_ms
from kvcluster.config import Config
from kvcluster.errors import ConfigError, KVClusterError

_START_S = 60.0
_GRACE_S = 1.0
_STOP_S = 20.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Running:
    """The record of a running cluster. `pid`: of its session's leader. `started`: when that process began, in clock
    ticks since boot, which tells it from a later process of the same id. `stop_ms`: how long its shards may save pages
    when they are stopped; 0 if they do not."""

    address: str
    shards: int
    pid: int
    started: int
    stop_ms: int = 0

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def up(config: Config, *, starting: Callable[[], object] = lambda: None) -> tuple[Running, bool]:
    """Starts a cluster in the background and returns it with True; returns the cluster that already runs on that port
    with False.

    `starting` is called when the settings have been checked and the slow part begins. Raises ConfigError for settings
    that cannot be used, such as a port in use.
    """
    port = config.server.port
    if port == 0:
        raise ConfigError("a cluster in the background needs a fixed port, so that later commands find it: give --port")
    with _alone():
        known = find(port)
        if known is not None:
            return known, False
        # The settings are checked before anything is started.
        cluster.check(config)
        _forget(port)
        starting()
        with own_ray():
            return _start(with_state_dir(config, _state_dir(port))), True


def find(port: int) -> Running | None:
    """Returns the cluster that `up` started on that port, if it still runs."""
    try:
        running = Running(**json.loads(_state(port).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return running if _started(running.pid) == running.started else None


def down(port: int) -> bool:
    """Ends the cluster that `up` started on that port; its shards save their pages before, if they have a disk tier.
    Returns False if there is none."""
    with _alone():
        running = find(port)
        if running is not None:
            end_shards(_session(running.pid), running.stop_ms)
            _end_session(running.pid)
        _forget(port)
        return running is not None


def _start(config: Config) -> Running:
    ray_port, folder = _free_port(), _ray_folder(config.server.port)
    head: int | None = None
    try:
        with _uninterrupted():
            head = _start_head(ray_port, folder, pools_bytes(config))
        _wait_for_head(head, ray_port, folder)
        ray.init(
            address=f"127.0.0.1:{ray_port}",
            namespace=cluster.NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        try:
            started = cluster.start(config, detached=True)
        finally:
            ray.shutdown()
        running = Running(started.address, config.shards, head, _started(head) or 0, save_ms(config.shard))
        _state(config.server.port).write_text(json.dumps(asdict(running)), encoding="utf-8")
    except BaseException:
        if head is not None:
            _end_session(head)
        _forget(config.server.port)
        raise
    return running


def _start_head(port: int, folder: Path, memory: int) -> int:
    """Starts a Ray head that leads a session of its own. Returns its process id."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    # Only what the actors need. They take none of Ray's CPUs; for each CPU Ray would keep a process ready.
    command += ["--num-cpus=0", "--include-log-monitor=false", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    command += [f"--memory={memory}"]
    # By default this is a fixed port, on which the second Ray of a machine would fail.
    command += [f"--ray-client-server-port={_free_port()}"]
    folder.mkdir(exist_ok=True)
    # Not subprocess, whose objects expect to wait for the process that they started.
    return os.posix_spawn(
        sys.executable,
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(_log(folder)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the block: a process that is started in it is known by then, and can
    be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    came: list[int] = []
    handlers = [(sig, signal.signal(sig, lambda number, _: came.append(number))) for sig in _ENDING]
    try:
        yield
    finally:
        for sig, handler in handlers:
            signal.signal(sig, handler)
        for number in came:
            signal.raise_signal(number)


def _wait_for_head(head: int, port: int, folder: Path) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        if _started(head) is None:
            said = _log(folder).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            raise KVClusterError(f"Ray ended while it started; the last line of its log {_log(folder)}: {said}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise KVClusterError(f"Ray did not start within {_START_S:.0f} s; its log is {_log(folder)}")


def _end_session(leader: int) -> None:
    """Sends SIGTERM to all processes of a session, and SIGKILL soon after: they hold nothing but memory, and Ray's head
    is slow to end. Returns when they are gone, or after _STOP_S."""
    for sig, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _STOP_S)):
        for pid in _session(leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(leader, os.WNOHANG)  # it may be a child of this process
            if not _session(leader):
                return
            time.sleep(0.05)


def _session(leader: int) -> list[int]:
    """Returns the living processes of a session. Ray gives its workers process groups of their own, but no sessions."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) is not None and int(fields[3]) == leader]


def _started(pid: int) -> int | None:
    """Returns when a process began, in clock ticks since boot; None if it does not exist."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat after the name, from the state on; None if the process does not run (any
    more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Lets one `up` or `down` of this user run at a time: a second one waits, and sees the result of the first."""
    folder = os.open(_folder(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _state(port: int) -> Path:
    return _folder() / f"{port}.json"


def _state_dir(port: int) -> Path:
    """Returns the folder in which its coordinator keeps state for the next one. It is removed with the shards that it
    describes."""
    return _folder() / f"{port}.state"


def _ray_folder(port: int) -> Path:
    """Returns the folder in which that cluster's Ray keeps its sockets and logs."""
    return _folder() / str(port)


def _log(folder: Path) -> Path:
    return folder / "head.log"


def _forget(port: int) -> None:
    """Removes all files of a cluster that no longer runs."""
    _state(port).unlink(missing_ok=True)
    for folder in (_ray_folder(port), _state_dir(port)):
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    """Returns the folder of this user's clusters. Its files say which processes to end, so only this user may write to
    it. Raises ConfigError if others may."""
    folder = Path(tempfile.gettempdir()) / f"kvcluster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise ConfigError(f"others may write to {folder}; remove it, or set TMPDIR to a folder of your own")
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
