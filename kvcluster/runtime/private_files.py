"""Files that only this user's processes may have written: what a shard keeps on a drive, where other users may have
been first.

A folder must be this user's own, and not writable by others. A file in it must be a regular file of this user with one
name: neither a link to another file nor a pipe, for which an `open` would wait. A mode that lets others read or write
one is set back. Every function raises OSError that says what is wrong.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_OTHERS = 0o077


def open_folder(path: Path, *, make: bool) -> int:
    """Returns a descriptor of the folder, which is made if it is missing and `make` says so."""
    if make:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    if path.is_symlink():
        raise PermissionError(errno.EPERM, "it is a symbolic link, which this process does not follow")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        _check_owner(found)
        # Its group may be the pod's own: Kubernetes makes volumes writable for it.
        shared = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != os.getegid() else 0)
        if found.st_mode & shared:
            raise PermissionError(errno.EPERM, "other users may write to it: remove it, as they may have done so")
        _set_back(folder, found, _FOLDER_MODE)
    except BaseException:
        os.close(folder)
        raise
    return folder


def open_file(folder: int, name: str, flags: int) -> int:
    """Returns a descriptor of this file of an opened folder, opened as `os.open` does with `flags`."""
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, _FILE_MODE, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise PermissionError(errno.EPERM, f"{name} is no regular file with one name: remove it")
        _check_owner(found, f"{name} ")
        _set_back(file, found, _FILE_MODE)
    except BaseException:
        os.close(file)
        raise
    return file


def read_file(folder: int, name: str, most_bytes: int) -> bytes:
    """Returns the first `most_bytes` bytes of this file of an opened folder."""
    with open(open_file(folder, name, os.O_RDONLY), "rb") as file:
        return file.read(most_bytes)


def _check_owner(found: os.stat_result, name: str = "it ") -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{name}belongs to user {found.st_uid}, not to user {os.geteuid()}")


def _set_back(opened: int, found: os.stat_result, mode: int) -> None:
    if found.st_mode & _OTHERS:
        os.fchmod(opened, mode)
