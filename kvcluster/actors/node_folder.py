"""The folder of a Ray node: its sockets and logs, removed with it, or by a later node if it was killed.

A node holds the lock of its folder for as long as the process that leads it runs (ray_node.py). The kernel releases the
lock of a killed process, whatever killed it, so a folder whose lock can be taken has no node. Process ids would not
tell: they are used again, and containers that share /tmp do not see one another's.
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

_PREFIX = "kvcluster-node-"
_LOCK = "lock"


class NodeFolder(NamedTuple):
    """`path`: a folder that only this user can enter. `lock`: the descriptor that holds its lock, for the process that
    leads the node to inherit."""

    path: Path
    lock: int


@contextlib.contextmanager
def node_folder(parent: Path = Path("/tmp")) -> Iterator[NodeFolder]:
    """A new folder within the block. /tmp, since Linux takes paths of sockets up to 107 bytes. Removes the folders in
    `parent` that this user's killed nodes have left."""
    _remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # It gets its name when it is locked: a folder that is being made is never taken for an abandoned one.
            os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
            yield NodeFolder(folder, lock)
        finally:
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, locked by its node, or another user's
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.lstat().st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
