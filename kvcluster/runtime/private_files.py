"""Files that only this user's processes may have written, such as a shard's on a drive that other users can write to.

A folder must be this user's own, and not writable by others. A file in it must be a regular file of this user with one
name: neither a link to another file nor a pipe, for which an `open` would wait. A mode that lets others read or write
one is set back. Every function raises OSError that describes what is wrong.

`private_folder` makes temporary folders. Each is removed with the process that it belongs to, or later, if that process
was killed. A process holds the lock of its folder for as long as it runs; that of a Ray node is held by the process
that leads the node (actors/ray_node.py). The kernel releases the lock of a killed process, whatever killed it, so a
folder whose lock can be taken belongs to no process. Process ids would not prove that: they are used again, and
containers that share /tmp do not see one another's.

`user_folder` is the folder in which a user's commands keep what later commands find: records of clusters, Ray's
sockets, and logs.

`replace_file` replaces a small file that holds state for the next incarnation of a process. The new file is written
beside the old one, synced and renamed, and the folder is synced; so after a power loss it is either the old file or the
new one.

`derived_key` reads the secret of a cluster, a file that is the same on each of its nodes. Two keys are derived from it,
so that neither gives away the other: the token of the cluster's Ray, and the credential by which coordinator and shards
know one another. `derived_password` is a third, for the Redis of Ray's head: a digest that a shell can compute, since
an image of Redis has nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvcluster.errors import ConfigError

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_OTHERS = 0o077


def open_folder(path: Path, *, make: bool) -> int:
    """Returns a descriptor of the folder, which is made if it is missing and `make` is set."""
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


def user_folder() -> Path:
    """Returns the folder of this user's clusters. Its files name processes to end, so only this user may write to it.
    Raises ConfigError if others may."""
    folder = Path(tempfile.gettempdir()) / f"kvcluster-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise ConfigError(f"others may write to {folder}; remove it, or set TMPDIR to a folder of your own")
    return folder


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


_LEAST_CHARS = 32
_MOST_BYTES = 4_096
ACTORS, RAY = b"kvcluster actors", b"kvcluster ray"


def derived_key(path: str, purpose: bytes) -> str:
    """Returns the key for `purpose`, ACTORS or RAY, in hex. Raises ConfigError if the file cannot be read, is too short
    or can be read by every user of the machine."""
    return hmac.new(_read(path), purpose, hashlib.sha256).hexdigest()


_PASSWORD = b"kvcluster redis "


def derived_password(path: str) -> str:
    """Returns the password of the cluster's Redis, in hex: SHA-256 of a label and the secret without white space, as
    docs/operations.md computes it in a shell. Raises as `derived_key`."""
    return hashlib.sha256(_PASSWORD + b"".join(_read(path).split())).hexdigest()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read server.secret_file {path}: {error.strerror}. `kvcluster token --secret --to {path}` makes "
            "one; copy it to each node"
        ) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"every user of this machine can read or write {path}: `chmod o-rw {path}`")
    if not _LEAST_CHARS <= len(secret) <= _MOST_BYTES:
        raise ConfigError(f"the secret in {path} has {len(secret)} bytes; it needs {_LEAST_CHARS} to {_MOST_BYTES}")
    return secret
