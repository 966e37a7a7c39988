"""Temporary folders: each is removed with the process that it belongs to, or later, if that was killed.

A process holds the lock of its folder for as long as it runs; that of a Ray node is held by the process that leads the
node (actors/ray_node.py). The kernel releases the lock of a killed process, whatever killed it, so a folder whose lock
can be taken belongs to none. Process ids would not tell: they are used again, and containers that share /tmp do not see
one another's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LOCK = "lock"


class PrivateFolder(NamedTuple):
    """`path`: a folder that only this user can enter. `lock`: the descriptor that holds its lock, which another process
    may inherit."""

    path: Path
    lock: int


@contextlib.contextmanager
def private_folder(prefix: str, parent: Path | None = None) -> Iterator[PrivateFolder]:
    """A new folder within the block, whose name begins with `prefix`, in `parent` or where the system has temporary
    files. Removes those of the same prefix that killed processes of this user have left."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(prefix, parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # It gets its name when it is locked: a folder that is being made is never taken for an abandoned one.
            os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
            yield PrivateFolder(folder, lock)
        finally:
            os.close(lock)


def _remove_abandoned(prefix: str, parent: Path) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, locked by its process, or another user's
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.lstat().st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
