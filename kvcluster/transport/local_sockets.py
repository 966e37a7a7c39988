"""The unix sockets over which shm hands memory: by an abstract name, which the processes of one network namespace see;
or as a file in a *socket directory*, which the pods of one node mount.

Anyone may take an abstract name. So each side checks that the other runs as its own user, before it sends anything.

In a socket directory permissions decide instead, because the two sides may run as different users, in user and process
namespaces in which neither sees the other's user. Who may connect is decided by the directory's mode and the socket's,
which is 0660 with the directory's group if that is setgid. Who may listen is decided by who can write to the directory,
which is its owner alone: neither side uses one to which a group or everyone may write, nor does a shard use one that
belongs to another user than itself or root. A worker keeps the directory open from the moment at which it found that it
is the one that the shard uses; a path may lead elsewhere later. Neither permission is an identity: the shard asks for a
token all the same.

A socket appears in the directory only when its server listens, by a rename. So one that refuses connections was left by
a server of this machine that has ended, and the next server to start removes it.

A shard receives no descriptors: closing one of a socket could take as long as its sender has chosen.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import time
import weakref
from functools import cache
from itertools import islice
from pathlib import Path, PurePosixPath

from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ConfigError
from kvcluster.transport.base import Deadline, Unavailable

_BACKLOG = 128
_MODE = 0o660
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME_BYTES = 16
_LEFT_BEHIND = 4_096
"""The most entries of a directory that a starting server looks at."""

_HIDDEN_S = 60.0
"""A socket that is so old and still hidden is of a server that has ended before it listened."""

_BUSY_S = 0.005
"""The pause before another attempt to connect to a server whose queue of connections is full."""

_SO_PASSRIGHTS = 83  # Linux 6.16; Python does not name it

_CREDENTIALS = struct.Struct("3i")
"""Credentials of a unix socket's other side: process, user, group."""


class LocalListener:
    """A listening socket, from construction to `close`. `address` is "@NAME" of an abstract name, or the name of the
    file in `socket_dir`, which each side mounts where it likes.

    Raises ConfigError if the directory cannot be used: it is not there and cannot be made, others may write to it, or
    this process may not."""

    def __init__(self, socket_dir: str = "") -> None:
        self.address = ""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._directory: int | None = None
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        try:
            self.address = self._listen_in(socket_dir) if socket_dir else self._listen_by_name()
        except BaseException:
            self.close()
            raise

    @property
    def in_directory(self) -> bool:
        return self._directory is not None

    def close(self) -> None:
        """Ends listening, and removes the file. May be called again."""
        self.socket.close()
        directory, self._directory = self._directory, None
        if directory is not None:
            if self.address:
                _unlink(directory, self.address)
            os.close(directory)

    def _listen_by_name(self) -> str:
        name = f"kvcluster-{secrets.token_hex(_NAME_BYTES)}"
        self.socket.bind(f"\0{name}")
        self.socket.listen(_BACKLOG)
        return f"@{name}"

    def _listen_in(self, socket_dir: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            os.mkdir(socket_dir, 0o750)
        self._directory = directory = open_directory(socket_dir, serving=True)
        name = f"kv-{machine()}-{secrets.token_hex(_NAME_BYTES)}.sock"
        hidden = f".{name}"
        try:
            _remove_left_behind(directory)
            self.socket.bind(_path_in(directory, hidden))
            os.chmod(_path_in(directory, hidden), _MODE)
            self.socket.listen(_BACKLOG)
            os.rename(hidden, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            _unlink(directory, hidden)
            raise ConfigError(
                f"no socket can be made in the socket directory {socket_dir}: {error.strerror}; this process runs as "
                f"user {os.geteuid()}, and must be able to write there"
            ) from None
        return name


class SocketDirectory:
    """A socket directory, which stays open as long as this object lives: what its path leads to may change. Raises
    ConfigError as `open_directory`."""

    def __init__(self, path: str, *, serving: bool = False) -> None:
        self._descriptor = descriptor = open_directory(path, serving=serving)
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.identity = directory_identity(descriptor)

    def path_of(self, name: str) -> str:
        """Returns a path of a file in this directory, as long as this object lives."""
        return _path_in(self._descriptor, name)


def open_directory(path: str, *, serving: bool = False) -> int:
    """Returns a descriptor of a socket directory, which the caller closes. Raises ConfigError if there is none, or if
    others than its owner may write to it; `serving`: if it belongs to another user than this process or root."""
    if not os.path.isabs(path):
        raise ConfigError(f"the socket directory {path!r} must be an absolute path")
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        directory = _open_without_listing(path)
    except OSError as error:
        raise ConfigError(f"the socket directory {path} cannot be opened: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"the socket directory {path!r} is not the name of a file") from None
    why = _distrusted(os.fstat(directory), serving)
    if why is not None:
        os.close(directory)
        raise ConfigError(f"the socket directory {path} is not used: {why}")
    return directory


def directory_identity(directory: int) -> str:
    """Returns what is the same in all mount namespaces of a machine that have this directory, and in no others."""
    status = os.fstat(directory)
    return f"{status.st_dev:x}.{status.st_ino:x}"


def connect(address: str, deadline: Deadline) -> socket.socket:
    """Connects to the socket of a shard, "@NAME" or the path of its file, that may be sent a token. Raises Unavailable
    if none listens there, or it is not certain whose it is."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "SO_PEERCRED"):
        raise _lost(address, "this platform lacks unix sockets with SO_PEERCRED, which shared memory needs")
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if address.startswith("@"):
            _connect_by_name(connected, address, deadline)
        else:
            _connect_in_directory(connected, PurePosixPath(address), deadline)
        return connected
    except BaseException as error:
        connected.close()
        if isinstance(error, (TimeoutError, BlockingIOError)):
            raise Unavailable(Miss(MissReason.DEADLINE, f"{address}: it does not answer")) from None
        if isinstance(error, ConfigError):
            raise _lost(address, str(error)) from None
        if isinstance(error, OSError):
            raise _lost(address, error.strerror or str(error)) from None
        raise


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Returns process and user at the other side of a unix socket, as of its connecting. The process is 0 if it is not
    visible from here, and the user the system's overflow user if that has no number here."""
    process, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return process, user


def _connect(connected: socket.socket, address: str, deadline: Deadline) -> None:
    """Connects by the deadline. A server whose queue is full refuses at once, and is asked again."""
    while True:
        connected.settimeout(deadline.remaining_s() or 1e-3)
        try:
            connected.connect(address)
            return
        except BlockingIOError:
            if deadline.remaining_s() < _BUSY_S:
                raise
            time.sleep(_BUSY_S)


def _connect_by_name(connected: socket.socket, address: str, deadline: Deadline) -> None:
    try:
        _connect(connected, "\0" + address[1:], deadline)
    except ConnectionRefusedError:
        raise _lost(
            address,
            "no process listens: the shard has ended, or runs on another host or in another network namespace",
        ) from None
    # Checked before the token is sent: any process may bind an unused name, and wait there for tokens.
    _, user = peer_of(connected)
    if user != os.getuid():
        raise _lost(address, f"the shard runs as user {user}, this process as user {os.getuid()}")


def _connect_in_directory(connected: socket.socket, path: PurePosixPath, deadline: Deadline) -> None:
    directory = open_directory(str(path.parent))
    try:
        _connect(connected, _path_in(directory, path.name), deadline)
    except (FileNotFoundError, ConnectionRefusedError):
        raise _lost(path.name, "no process listens: the shard has ended") from None
    except PermissionError:
        raise _lost(path.name, _not_permitted(directory, path.name)) from None
    finally:
        os.close(directory)


def _not_permitted(directory: int, name: str) -> str:
    """Returns why this process may not connect to a socket, and what to do."""
    groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    try:
        status = os.stat(name, dir_fd=directory)
    except OSError:
        status = os.fstat(directory)
    return (
        f"user {os.geteuid()} with the groups {groups} may not connect: it takes the group {status.st_gid} (in "
        "Kubernetes: supplementalGroups of the pod)"
    )


def _open_without_listing(path: str) -> int:
    """Opens a directory that this process may search and not list."""
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"the socket directory {path} cannot be opened: {error.strerror}") from None


def _distrusted(status: os.stat_result, serving: bool) -> str | None:
    """Returns why a directory is not used, None if it may be."""
    if status.st_mode & stat.S_IWOTH:
        return "everyone may write to it, and take the place of a shard to read tokens; take that away (chmod o-w)"
    if status.st_mode & stat.S_IWGRP:  # or a user or group of an access control list, whose mask this shows
        return (
            f"the group {status.st_gid} may write to it, or others that its access control list names, and take the "
            "place of a shard to read tokens; take that away (chmod g-w)"
        )
    if serving and status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, who could take the place of a shard; this is user {os.geteuid()}"
    return None


def _remove_left_behind(directory: int) -> None:
    """Removes the sockets of servers that have ended. Those of other machines refuse connections from here, too, where
    a file system is shared; their names have another mark."""
    name_of_ours = re.compile(rf"\.?kv-{machine()}-[0-9a-f]{{{2 * _NAME_BYTES}}}\.sock")
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, _LEFT_BEHIND) if name_of_ours.fullmatch(entry.name)]
    for name in names:
        if name.startswith("."):
            with contextlib.suppress(OSError):
                if time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime > _HIDDEN_S:
                    _unlink(directory, name)
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            try:
                probe.connect(_path_in(directory, name))
            except ConnectionRefusedError:
                _unlink(directory, name)


@cache
def machine() -> str:
    """Returns what identifies this machine as long as it runs, which containers share: the beginning of the kernel's
    boot id; "" where that cannot be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip().replace("-", "")[:12]
    except (OSError, ValueError):
        return ""


def _unlink(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _path_in(directory: int, name: str) -> str:
    """Returns a path of a file in an open directory that is short enough for a unix socket, however deep it lies."""
    return f"/proc/self/fd/{directory}/{name}"


def _lost(address: str, why: str) -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, f"{address}: {why}"))
