"""Files of an operator that are read again when they change: tokens, quotas, certificates.

They are looked at when their value is wanted, at most once in LOOK_S. Files that have become unusable change nothing:
the last good value holds until they can be used again, and `trouble` says why. Processes that share the files thus
agree within LOOK_S after each change.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcluster.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 1.0

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """The value of one file, or of several that belong together. Thread-safe."""

    def __init__(
        self,
        paths: tuple[str, ...],
        read: Callable[[T | None], T],
        *,
        stays: str,
        again: Callable[[T], str],
        must_exist: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` gets the value that holds, None at first, and returns that of the files as they are now; it raises
        ConfigError if they cannot be used. `stays`: what holds on then, for `trouble`. `again` describes a value that
        was read again, for the log.

        Raises ConfigError if the files cannot be used now, unless it is False that they `must_exist`: then there is no
        value until they can be."""
        self._paths = paths
        self._read = read
        self._stays = stays
        self._again = again
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: object = None
        self._next_look = clock() + LOOK_S
        self._value: T | None = None
        self.why = ""
        """Why the newest version of the files is not in use; "" if it is."""
        self._look()
        if self.why and must_exist:
            raise ConfigError(self.why)

    def value(self) -> T | None:
        """Returns the value of the last version of the files that could be used; None if none could."""
        if self._clock() >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._next_look = self._clock() + LOOK_S
                self._look()
            finally:
                self._lock.release()
        return self._value

    def trouble(self) -> str:
        """Returns why the newest version of the files is not in use, and what holds instead; "" if it is."""
        self.value()
        return self._trouble()

    def _trouble(self) -> str:
        return f"{self.why}. {self._stays}" if self.why and self._value is not None else self.why

    def _look(self) -> None:
        """Reads the files if one changed since the last look, and also if that look failed: it may have come between
        the replacement of one file and of the next."""
        seen = self._state()
        if seen == self._seen and not self.why:
            return
        self._seen, before = seen, self._value
        try:
            value = self._read(before)
        except ConfigError as error:
            previous_why, self.why = self.why, str(error)
            if before is not None and self.why != previous_why:
                log.error("%s", self._trouble())
            return
        if before is not None:
            if seen != self._state():  # replaced while they were read: the next look reads them again
                return
            log.info("%s", self._again(value))
        self._value, self.why = value, ""

    def _state(self) -> object:
        return tuple(map(_state_of, self._paths))


def _state_of(path: str) -> object:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        return str(error)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_bounded(path: str, most_bytes: int, *, devices: bool = False) -> tuple[bytes, os.stat_result]:
    """Returns at most `most_bytes` + 1 bytes of a file, and what the file was when it was opened. Raises OSError or
    ValueError if it cannot be read, or is no file; with `devices` pipes and devices are read as well."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe, `open` would wait for a writer
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) and (not devices or stat.S_ISDIR(found.st_mode)):
            raise OSError("it is no file")
        with open(opened, "rb", closefd=False) as file:
            return file.read(most_bytes + 1) or b"", found
    finally:
        os.close(opened)


def read_guarded(path: str, what: str, most_bytes: int, danger: str) -> str:
    """Returns the text of a file that only root and the user of this process may write, as it decides who may do what.
    Raises ConfigError if it cannot be read, is longer, or could have been written by another user. `what` the file is,
    such as "token file", and what another user could do, the `danger`, are for the error."""
    try:
        data, found = read_bounded(path, most_bytes, devices=True)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None
    if len(data) > most_bytes:
        raise ConfigError(f"{what} {path} is larger than {most_bytes} bytes")
    if not found.st_nlink:  # a file in memory, which no other process can open by name
        return text
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{what} {path} belongs to user {found.st_uid}, who could {danger}: `chown` it")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise ConfigError(f"{what} {path} can be written by other users, who could {danger}: `chmod go-w` it")
    return text
