"""The logs of the last runs of a cluster on this machine, which outlive its processes: an error that names a log names
a file that is still there.

A run has a folder in the user's folder (private_files.py). Ray's first process writes `ray.log` there; `session` leads
to the folder in which Ray's other processes and the actors write while they run. When they end, `keep` copies the end
of each of these files beside `ray.log`: at most FILE_BYTES of a file and RUN_BYTES in all, those written last first.
The runs of one owner (a port of this machine, or a node) beyond the newest RUNS are removed, and of all owners those
beyond the newest ALL_RUNS.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvcluster.runtime.private_files import user_folder

RUNS = 3
ALL_RUNS = 24
FILE_BYTES = 2 * 2**20
RUN_BYTES = 16 * 2**20

RAY_LOG = "ray.log"
EMBEDDED = "embedded"
"""The owner of the runs of `kvcluster.local()`."""

_FOLDER, _SESSION = "logs", "session"
_MARK = ":kvcluster:"
_MARKED_BYTES = 4_096
"""An actor marks its log in its first lines."""


class ProcessLog(NamedTuple):
    """`process`: "coordinator", the name of a shard, "ray", or the file's own name for a process of Ray."""

    process: str
    path: Path


def begin(owner: str, session: Path) -> Path:
    """Returns the folder of a new run, whose actors will write to `session`. Keeps what runs that were killed have
    left, and removes the oldest. Raises ConfigError as `user_folder`."""
    for run in runs(owner):
        keep(run)
    every = sorted((run for each in owners() for run in runs(each)), key=_begun, reverse=True)
    ended = [run for run in every[ALL_RUNS - 1 :] if not (run / _SESSION).is_dir()]
    for run in (*runs(owner)[RUNS - 1 :], *ended):
        shutil.rmtree(run, ignore_errors=True)
        with suppress(OSError):  # its owner has others
            run.parent.rmdir()
    run = user_folder() / _FOLDER / owner / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{time.time_ns()}"
    run.mkdir(parents=True, mode=0o700)
    (run / _SESSION).symlink_to(session)
    return run


def keep(run: Path) -> None:
    """Copies the ends of the logs of a run that has ended or is about to. Raises nothing."""
    room = RUN_BYTES
    with suppress(OSError):
        files = [path for path in (run / _SESSION).iterdir() if path.is_file() and not path.is_symlink()]
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            kept = _end(path, min(FILE_BYTES, room))
            if kept:
                (run / path.name).write_bytes(kept)
                room -= len(kept)
    with suppress(OSError):
        ray = run / RAY_LOG
        if ray.stat().st_size > FILE_BYTES:
            ray.write_bytes(_end(ray, FILE_BYTES))


def runs(owner: str) -> list[Path]:
    """Returns the folders of the runs of an owner, newest first."""
    return sorted((user_folder() / _FOLDER / owner).glob("*"), key=_begun, reverse=True)


def owners() -> list[str]:
    """Returns all owners: ports of this machine, nodes, and EMBEDDED."""
    return sorted(path.name for path in (user_folder() / _FOLDER).glob("*"))


def logs_of(run: Path) -> Iterator[ProcessLog]:
    """Yields the logs of a run that are not empty, those that are written to now where it has not ended."""
    written = run / _SESSION if (run / _SESSION).is_dir() else run
    for path in dict.fromkeys((run / RAY_LOG, *sorted(written.iterdir()))):
        if path.is_file() and path.stat().st_size:
            yield ProcessLog("ray" if path.name == RAY_LOG else _marked(path) or path.name, path)


def mark(process: str) -> None:
    """Names this process in its log. Ray's own mark there is its class alone."""
    sys.stderr.write(f"{_MARK}{process}\n")
    sys.stderr.flush()


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last lines of a log, of its last FILE_BYTES."""
    return _end(path, FILE_BYTES).decode("utf-8", errors="replace").splitlines()[-count:]


def _begun(run: Path) -> int:
    return int(run.name.rpartition("-")[2])


def _marked(path: Path) -> str:
    with path.open("rb") as file:
        lines = file.read(_MARKED_BYTES).decode("utf-8", errors="replace").splitlines()
    return next((line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)), "")


def _end(path: Path, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read(nbytes)
