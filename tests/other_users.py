"""Processes of this machine that run as another user, and in a pod's user and process namespaces.

In a pod with a user namespace every user and group of the machine has another number, but for the files of its volumes:
those show the numbers that they have on their disk, since their mounts are mapped. Here the one group that may reach a
directory has the same number inside and outside instead, which permissions treat alike.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = 200_000
"""The number that user 0 of a pod with a user namespace has on the machine."""

_USERS = 65_536
_NEW_USERS, _NEW_PROCESSES = 0x1000_0000, 0x2000_0000
"""Flags of the system call unshare, which Python names from 3.12 on."""


def become(user: int, group: int, *, in_pod: bool) -> None:
    """Becomes that user and a member of that group alone; in new namespaces if `in_pod`, whose numbers an OtherUser
    gives. For the process of an OtherUser, before it does anything else. No program is executed in between, which would
    take its rights there away."""
    if in_pod:
        assert ctypes.CDLL(None, use_errno=True).unshare(_NEW_USERS | _NEW_PROCESSES) == 0
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(2 * in_pod):  # the first of the namespace cannot stop itself
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.setgroups([group])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


class OtherUser:
    """A process that begins with `become`. Use as a context manager. `command`: only programs that execute the next one
    may come before Python."""

    def __init__(
        self, command: Sequence[str], group: int, *, in_pod: bool, env: Mapping[str, str] | None = None
    ) -> None:
        self._command, self._group, self._in_pod, self._env = command, group, in_pod, env

    def __enter__(self) -> OtherUser:
        env = None if self._env is None else os.environ | self._env
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, text=True, cwd=ROOT, env=env, **pipes)  # type: ignore[call-overload]
        assert self.says() == "ready"
        if self._in_pod:
            self._map("uid_map", f"0 {FIRST} {_USERS}")
            above = self._group + 1
            groups = f"0 {FIRST} {self._group}", f"{self._group} {self._group} 1"
            self._map("gid_map", *groups, f"{above} {FIRST + above} {_USERS - above}")
        self.tell("go on")
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def says(self) -> str:
        """Returns the next line."""
        return str(self._process.stdout.readline()).strip()

    def tell(self, line: str) -> None:
        """Gives it a line."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Ends it at once, with the processes that it has started. May be called again."""
        if self._process.returncode is not None:
            return
        for process in reversed(self._processes()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def is_stopped(self) -> bool:
        """Whether it has stopped itself."""
        stats = [Path(f"/proc/{process}/stat").read_text(encoding="ascii") for process in self._processes()]
        return any(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def _map(self, kind: str, *lines: str) -> None:
        Path(f"/proc/{self._process.pid}/{kind}").write_text("\n".join(lines) + "\n", encoding="ascii")

    def _processes(self) -> list[int]:
        """It, its child, and so on."""
        found = [self._process.pid]
        while children := Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text(encoding="ascii").split():
            found.append(int(children[0]))
        return found
