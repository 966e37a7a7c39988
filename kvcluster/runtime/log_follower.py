"""Follows the logs of a node's actors: what they log is written to this process's standard output, and their files stay
small.

Ray has each process of an actor write into a file of its own. `kubectl logs` and the collectors of a platform see
standard output alone, and the files would fill the folder for temporary files. What has been passed on is given back to
the file system in place, as a hole (fallocate(2)): so no writer has to agree to a rotation, and no line is lost. The
first block stays, which names the process (kept_logs.py), and the newest KEPT_BYTES stay for `kvcluster logs` and for
errors that name a file. On a file system without holes nothing is given back.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvcluster.transport.thread_start import start_thread

KEPT_BYTES = 4 * 2**20
"""More than kept_logs.py copies of a file when its run ends."""

HOLE_BYTES = 4 * 2**20
"""A hole is made once so much can be given back."""

_FIRST_BYTES = 4_096
_READ_BYTES = 2**20
_LINE_BYTES = 64 * 2**10
"""A longer line is passed on in pieces."""

_LOOK_S = 0.5
_CLOSE_S = 2.0
_MARKS = b":"
"""Ray and kvcluster mark a log in lines that begin so."""

_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02


@dataclass(slots=True)
class _Followed:
    """A file: how far it was read, what of that is no whole line yet, and where its hole ends."""

    read: int = 0
    rest: bytes = b""
    hole: int = _FIRST_BYTES


class LogFollower:
    """Passes the whole lines of `worker-*.err` in `folder` to `write`, in the order in which each file has them. Used
    by one thread."""

    def __init__(self, folder: Path, write: Callable[[bytes], object]) -> None:
        self._folder = folder
        self._write = write
        self._files: dict[str, _Followed] = {}

    def look(self) -> None:
        """Passes on what was written since the last look."""
        for path in sorted(self._folder.glob("worker-*.err")):
            followed = self._files.setdefault(path.name, _Followed())
            with suppress(OSError), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "rb+", buffering=0) as file:
                self._pass_on(file.fileno(), followed)

    def _pass_on(self, file: int, followed: _Followed) -> None:
        while data := os.pread(file, _READ_BYTES, followed.read):
            followed.read += len(data)
            *lines, followed.rest = (followed.rest + data).split(b"\n")
            if len(followed.rest) > _LINE_BYTES:
                lines.append(followed.rest)
                followed.rest = b""
            self._write(b"".join(line + b"\n" for line in lines if not line.startswith(_MARKS)))
        stop = (followed.read - KEPT_BYTES) // _FIRST_BYTES * _FIRST_BYTES
        if stop - followed.hole >= HOLE_BYTES:
            _punch(file, followed.hole, stop - followed.hole)
            followed.hole = stop


def _punch(file: int, start: int, nbytes: int) -> None:
    """Gives these bytes of a file back; without effect where the file system has no holes."""
    offset = ctypes.c_int64
    ctypes.CDLL(None).fallocate(file, _KEEP_SIZE_PUNCH_HOLE, offset(start), offset(nbytes))


@contextmanager
def logs_followed(folder: Path) -> Iterator[None]:
    """Follows the logs in that folder within the block, on a thread, to this process's standard output."""
    stop, follower = threading.Event(), LogFollower(folder, _to_stdout)

    def run() -> None:
        while not stop.wait(_LOOK_S):
            follower.look()
        follower.look()

    thread = threading.Thread(target=run, name="kvcluster-logs", daemon=True)
    start_thread(thread)
    try:
        yield
    finally:
        stop.set()
        thread.join(_CLOSE_S)  # whoever reads standard output may have stopped


def _to_stdout(lines: bytes) -> None:
    with suppress(OSError, ValueError):  # it is closed
        sys.stdout.write(lines.decode("utf-8", errors="replace"))
        sys.stdout.flush()
