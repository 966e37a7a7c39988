"""A file of an operator that is read again when it changes: tokens (auth.py) and quotas (quota_file.py).

It is looked at when its value is wanted, at most once in LOOK_S. A file that has become unusable changes nothing: the
last good value holds until it can be used again, and `trouble` says why. Processes that share one file thus agree
within LOOK_S after each change. The file must belong to root or to the user of this process, and no other user may
write it: it decides who may do what.
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


class WatchedFile(Generic[T]):
    """The value of one file. Thread-safe."""

    def __init__(
        self,
        path: str,
        read: Callable[[str], T],
        *,
        stays: str,
        again: Callable[[T], str],
        must_exist: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns the value of the file at that path; it raises ConfigError if the file cannot be used. `stays`:
        what holds on then, for `trouble`. `again` describes a value that was read again, for the log.

        Raises ConfigError if the file cannot be used now, unless it is False that it `must_exist`: then there is no
        value until it can be."""
        self._path = path
        self._read = read
        self._stays = stays
        self._again = again
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: object = None
        self._next_look = clock() + LOOK_S
        self._value: T | None = None
        self.why = ""
        """Why the newest version of the file is not in use; "" if it is."""
        self._look()
        if self.why and must_exist:
            raise ConfigError(self.why)

    def value(self) -> T | None:
        """Returns the value of the last version of the file that could be used; None if none could."""
        if self._clock() >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._next_look = self._clock() + LOOK_S
                self._look()
            finally:
                self._lock.release()
        return self._value

    def trouble(self) -> str:
        """Returns why the newest version of the file is not in use, and what holds instead; "" if it is."""
        self.value()
        return self._trouble()

    def _trouble(self) -> str:
        return f"{self.why}. {self._stays}" if self.why and self._value is not None else self.why

    def _look(self) -> None:
        """Reads the file if it is another one than at the last look."""
        try:
            found = os.stat(self._path)
            seen: object = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except (OSError, ValueError) as error:
            seen = str(error)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            value = self._read(self._path)
        except ConfigError as error:
            self.why = str(error)
            if self._value is not None:
                log.error("%s", self._trouble())
        else:
            if self._value is not None:
                log.info("%s", self._again(value))
            self._value, self.why = value, ""


def read_guarded(path: str, what: str, most_bytes: int, danger: str) -> str:
    """Returns the text of a file that only root and the user of this process may write. Raises ConfigError if it cannot
    be read, is longer, or could have been written by another user. `what` the file is, such as "token file", and what
    another user could do, the `danger`, are for the error."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a pipe, `open` would wait for a writer
        try:
            found = os.fstat(opened)
            if stat.S_ISDIR(found.st_mode):
                raise OSError("it is a folder")
            with open(opened, "rb", closefd=False) as file:
                data = file.read(most_bytes + 1)
        finally:
            os.close(opened)
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
