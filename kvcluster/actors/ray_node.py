"""A node of Ray as a session of processes: started, watched and ended as a whole.

`ray start --block` (lean_ray.py) leads the session. Ending it ends these processes and nothing else: it does not touch
other Rays of the machine, and since each node keeps its files in a folder of its own, other Rays and `ray stop` never
take it for theirs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcluster.actors.node_memory import OBJECT_STORE_BYTES
from kvcluster.actors.ray_view import with_errors
from kvcluster.actors.stopping import end_shards
from kvcluster.child_python import absolute_python_path, module_command
from kvcluster.config import LogConfig, RayConfig
from kvcluster.config.ports import parse_ports
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime import kept_logs
from kvcluster.runtime.log_follower import logs_followed
from kvcluster.runtime.private_files import private_folder
from kvcluster.transport.listener import bound_socket

_PARENT = Path("/tmp")  # Linux takes paths of sockets up to 107 bytes
_PREFIX = "kvcluster-node-"
START_S = 150.0  # two tries of actors/lean_ray.py, each of twice 30 s, and more
_GRACE_S = 1.0
_STOP_S = 20.0
_ENDING = (signal.SIGINT, signal.SIGTERM)
_STARTED = "Ray runtime started"
_FRAME = re.compile(r"\[0x[0-9a-f]+\]|StackTrace")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RayNode(NamedTuple):
    """A node that was started. `pid`: of its session's leader. `folder`: holds its sockets. `log`: what that process
    writes."""

    pid: int
    folder: Path
    log: Path = Path(os.devnull)

    def runs(self) -> bool:
        return started(self.pid) is not None

    def option(self, name: str) -> str:
        """Returns the value of an option such as "--port" that it was started with; "" if it has none or has ended."""
        return dict(_named(self.pid, "cmdline")).get(name, "")

    def variable(self, name: str) -> str:
        """Returns a variable of its environment, which only this user can read; "" if it has none or has ended."""
        return dict(_named(self.pid, "environ")).get(name, "")

    def last_words(self) -> str:
        """Returns the last line of its log that is not of a stack trace; "" if there is none."""
        lines = [line for line in self._said().splitlines() if line.strip() and not _FRAME.search(line)]
        return lines[-1].strip() if lines else ""

    def wait_until_up(self) -> None:
        """Raises KVClusterError if it ends, or does not come up within START_S."""
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            if not self.runs():
                words = f"the last line of its log {self.log}: {self.last_words()}"
                raise KVClusterError(with_errors(f"Ray ended while it started; {words}", self.folder))
            if _STARTED in self._said():
                return
            time.sleep(0.1)
        late = f"Ray did not start within {START_S:.0f} s; the last line of its log {self.log}: {self.last_words()}"
        raise KVClusterError(with_errors(late, self.folder))

    def _said(self) -> str:
        try:
            return without_colours(self.log.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""

    def end(self, stop_ms: int = 0) -> None:
        """Ends it. Its shards may save their pages before, for `stop_ms`."""
        end_shards(session_of(self.pid), stop_ms)
        end_session(self.pid)


def following_logs(node: RayNode, log: LogConfig) -> contextlib.AbstractContextManager[None]:
    """Has what the node's actors log in JSON written to standard output within the block."""
    if log.format != "json":
        return contextlib.nullcontext()
    return logs_followed(session_logs(node.folder))


def check_shown(gpus: int) -> None:
    """Raises ConfigError if this process shows Ray fewer GPUs than a node is to have in name: it would not start."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return
    count = len([each for each in shown.split(",") if each])
    if gpus > count:
        raise ConfigError(
            f"twins of shards claim {gpus} GPU(s) of Ray in name, but CUDA_VISIBLE_DEVICES={shown!r} shows it {count}: "
            "unset it for this command, or leave num_gpus out"
        )


def start_node(
    folder: Path,
    where: Sequence[str],
    memory: int,
    resources: Mapping[str, float] | None = None,
    *,
    log: Path,
    gpus: int = 0,
    lock: int = -1,
) -> RayNode:
    """Starts a node whose files lie in `folder`. `where`: the options of `ray start` that say where it listens and whom
    it joins. `memory`: bytes that actors may claim. `gpus`: how many GPUs it has in name, 0 for those that it finds.
    `log`: the file for what its leader writes. `lock`: a descriptor that its leader inherits
    (runtime/private_files.py). To be called within `signals_delayed`. Raises ConfigError as `check_shown`."""
    check_shown(gpus)
    # In its own folder: Ray starts further processes by `python -m`, which imports from the current directory.
    command = [*module_command("kvcluster.actors.lean_ray", "start", "--block", folder=str(folder))]
    command += ["--disable-usage-stats", *where, f"--temp-dir={folder}"]
    # Only what the actors need. They take none of Ray's CPUs; for each CPU Ray would keep a process ready.
    command += ["--num-cpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--memory={memory}"]
    if gpus:
        command.append(f"--num-gpus={gpus}")
    if resources:
        offered = ", ".join(f'"{name}": {amount}' for name, amount in resources.items())
        command += ["--resources={" + offered + "}"]
    folder.mkdir(exist_ok=True)
    return RayNode(_spawn(command, log, lock), folder, log)


@contextlib.contextmanager
def running_node(
    node_ip: str, where: Sequence[str], memory: int, resources: Mapping[str, float], stop_ms: int, gpus: int = 0
) -> Iterator[RayNode]:
    """A node of that address within the block, as of `start_node`, in a folder of its own. Ends it with the block; its
    shards may save their pages for `stop_ms` before. Raises as RayNode.wait_until_up."""
    where = [*where, f"--node-ip-address={node_ip}"]
    with private_folder(_PREFIX, _PARENT) as folder:
        node: RayNode | None = None
        run = kept_logs.begin(f"node-{node_ip}", session_logs(folder.path / "ray"))
        log = run / kept_logs.RAY_LOG
        try:
            with signals_delayed():
                node = start_node(folder.path / "ray", where, memory, resources, log=log, gpus=gpus, lock=folder.lock)
            node.wait_until_up()
            yield node
        finally:
            if node is not None:
                node.end(stop_ms)
            kept_logs.keep(run)


def fixed_ports(ray: RayConfig, node_ip: str) -> list[str]:
    """Returns the options of `ray start` by which a node at this address uses the configured ports only. Raises
    ConfigError if one is in use."""
    ports = dict(zip(_NODE_PORTS, parse_ports(ray.node_ports, "ray.node_ports"), strict=False))
    for port in ports.values():
        bound_socket(node_ip, port, "ray.node_ports").close()
    workers = parse_ports(ray.worker_ports, "ray.worker_ports")
    options = [f"--{name}-port={port}" for name, port in ports.items()]
    return [*options, f"--min-worker-port={workers.start}", f"--max-worker-port={workers.stop - 1}"]


_NODE_PORTS = (
    *("node-manager", "object-manager", "runtime-env-agent"),
    *("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export"),
)
HEAD_OPTIONS = ("--head", "--include-dashboard=false")


def free_port() -> int:
    """Returns a port of loopback that is free now."""
    with bound_socket("127.0.0.1", 0, "ray.port") as probe:
        port: int = probe.getsockname()[1]
        return port


def session_logs(folder: Path) -> Path:
    """Returns the folder of the logs of the actors, and of Ray's other processes, of the node whose files lie in this
    folder."""
    return folder / "session_latest" / "logs"


def without_colours(text: str) -> str:
    """Returns a text of Ray without the codes by which a terminal shows it in colours."""
    return _COLOUR.sub("", text)


def _spawn(command: list[str], log: Path, inherited: int) -> int:
    """Starts a process that leads a session of its own, and returns its id. It gets the descriptor `inherited`, unless
    that is -1."""
    # Not subprocess, whose objects expect to wait for the process that they started.
    return os.posix_spawn(
        command[0],
        command,
        absolute_python_path(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *([(os.POSIX_SPAWN_DUP2, inherited, 3)] if inherited >= 0 else []),
        ],
        setsid=True,
    )


@contextlib.contextmanager
def signals_delayed() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the block: a process that is started in it is known by then, and can
    be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    received: list[int] = []
    handlers = [(sig, signal.signal(sig, lambda number, _: received.append(number))) for sig in _ENDING]
    try:
        yield
    finally:
        for sig, handler in handlers:
            signal.signal(sig, handler)
        for number in received:
            signal.raise_signal(number)


def end_session(leader: int) -> None:
    """Sends SIGTERM to all processes of a session, and SIGKILL soon after: they hold nothing but memory, and Ray's head
    is slow to end. Returns when they have ended, or after _STOP_S."""
    for sig, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _STOP_S)):
        for pid in session_of(leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(leader, os.WNOHANG)  # it may be a child of this process
            if not session_of(leader):
                return
            time.sleep(0.05)


def started(pid: int) -> int | None:
    """Returns when a process began, in clock ticks since boot; None if it does not exist."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def session_of(leader: int) -> list[int]:
    """Returns the living processes of a session. Ray gives its workers process groups of their own, but no sessions."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) is not None and int(fields[3]) == leader]


def _named(pid: int, kind: str) -> Iterator[tuple[str, str]]:
    """Yields the NAME=VALUE pairs of /proc/PID/environ or cmdline."""
    try:
        data = Path(f"/proc/{pid}/{kind}").read_bytes()
    except OSError:
        return
    for entry in data.split(b"\0"):
        name, _, value = os.fsdecode(entry).partition("=")
        yield name, value


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat after the name, from the state on; None if the process does not run (any
    more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields
