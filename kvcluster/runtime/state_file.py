"""Small files that hold state for the next incarnation of a process, each replaced as a whole.

A new file is written beside the old one, synced and renamed, and the folder is synced; so after a power loss it is
either the old file or the new one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(folder: Path, *, make: bool) -> Iterator[int]:
    """Locks the folder against all other processes: what is read stays true until it is replaced. Yields the opened
    folder. Raises OSError, also if the folder is missing and is not to be made with `make`: a folder that was there
    before may be on a drive that is not mounted now."""
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)


def replace_file(path: Path, data: bytes, folder: int) -> None:
    """Replaces the content of a file in that opened folder. When it returns, the content is on disk. Raises OSError;
    the old file then stays."""
    new = f"{path.name}.new"
    with suppress(FileNotFoundError):  # of a process that was killed, or a link that another user has left
        os.unlink(new, dir_fd=folder)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
