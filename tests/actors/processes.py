"""Other processes, as /proc shows them: which live and which listen; and starting workers."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LISTENING = "0A"


def start_worker(job: str, *arguments: object) -> subprocess.Popen[str]:
    """A job of tests/actors/worker.py, in a process and a session of its own, which knows of no Ray of this process."""
    command = [sys.executable, "-m", "tests.actors.worker", job, *map(str, arguments)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, start_new_session=True)


def said(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the next line that a worker prints."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line, f"the worker ended with status {worker.wait()} and said nothing"
    answer: dict[str, Any] = json.loads(line)
    return answer


def outcome(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a worker that ends with it."""
    with worker:
        answer = said(worker)
        assert worker.wait() == 0
    return answer


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    return [pid for pid in processes() if (stat := _stat(pid)) and int(stat[3]) == leader]


def descendants(ancestor: int) -> list[int]:
    """The living children of a process, their children, and so on."""
    parents = {pid: int(stat[1]) for pid in processes() if (stat := _stat(pid))}
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def listening(pids: Iterable[int]) -> dict[int, set[str]]:
    """The addresses that each of these processes listens on; those that listen nowhere are left out."""
    return {pid: {address for address, _ in heard} for pid, heard in _listening(pids).items()}


def ports(pids: Iterable[int]) -> list[int]:
    """The TCP ports that these processes listen on."""
    return sorted({port for heard in _listening(pids).values() for _, port in heard})


def _listening(pids: Iterable[int]) -> dict[int, set[tuple[str, int]]]:
    inodes: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                inodes[f"socket:[{fields[9]}]"] = _address(address), int(port, 16)
    found: dict[int, set[tuple[str, int]]] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):  # closed meanwhile
                heard = inodes.get(os.readlink(descriptor))
                if heard is not None:
                    found.setdefault(pid, set()).add(heard)
    return found


def title(pid: int) -> str:
    """Returns the title of a process; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def unused_of_ray(pids: Iterable[int]) -> list[str]:
    """The titles of those that belong to a Ray and that no cluster uses (actors/lean_ray.py)."""
    programs = ("dashboard/dashboard.py", "/monitor.py", "/log_monitor.py", "ray.util.client.server")
    return [shown for pid in pids if any(program in (shown := title(pid)) for program in programs)]


def _address(words: str) -> str:
    """ "0100007F" -> "127.0.0.1": the kernel prints words of four bytes in the machine's own order."""
    packed = b"".join(socket.htonl(int(words[at : at + 8], 16)).to_bytes(4, "big") for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def processes() -> list[int]:
    """All processes of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """What /proc/PID/stat says behind the name: state, parent, group, session... None for the dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields
