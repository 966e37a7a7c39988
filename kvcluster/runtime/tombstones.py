"""Tombstones on disk: what was purged, kept by a coordinator for the next one; and the purges that a shard with a disk
tier has carried out there, kept for the shard after it.

It is one small file in `coordinator.state_dir` or beside the shard's pages (private_files.py). It carries a digest,
since a tombstone that bit rot turns into another one would bring back what was purged. For the same reason a file that
cannot be parsed is never skipped; an operator has to decide what to do about it, and the error lists the choices.

It also carries the number of its owner. Each coordinator takes the file over when it starts; a coordinator that was cut
off and does not know yet that it was replaced can then no longer overwrite what its successor wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Answer, Effect, KeepSettings, Persist, Refused, RefusedKind, Tombstone
from kvcluster.errors import ConfigError
from kvcluster.runtime.driver import StateMachine
from kvcluster.runtime.private_files import locked, replace_file

M = TypeVar("M")

NAME = "tombstones"
_HEAD = re.compile(rb"kvcluster-tombstones 1 (\d{1,18}) ([0-9a-f]{64})\n")
_FILTERS = ("model", "weights", "adapter")


class NotUnderstood(ConfigError):
    """The file exists but its content is damaged."""


class TombstoneFile:
    """The file of one coordinator, or of one shard with a disk tier. `setting` names the configuration key of the
    folder, for error messages. The folder is made if it is missing."""

    def __init__(self, folder: str, setting: str = "coordinator.state_dir") -> None:
        self._folder = Path(folder)
        self._setting = setting
        self._owner = 0

    def take_over(self) -> tuple[Tombstone, ...]:
        """Returns the kept tombstones, in order; from now on only this object can write. Raises ConfigError if the
        folder cannot be used or the file cannot be parsed."""
        with self._alone(make=True) as folder:
            owner, stones = self._read()
            self._owner = owner + 1
            replace_file(self._path, unparse(self._owner, stones), folder)
            return stones

    def forget(self) -> None:
        """Removes the file. The caller must hold no data that a purge could have named."""
        self._path.unlink(missing_ok=True)

    def write(self, stones: tuple[Tombstone, ...]) -> None:
        """Replaces the kept tombstones. When it returns they are on disk. Raises ConfigError if that fails or a newer
        coordinator owns the file; the old file then stays."""
        assert self._owner, "the file has to be taken over first"
        with self._alone() as folder:
            owner, _ = self._read()
            if owner > self._owner:
                raise ConfigError(f"{self._path} belongs to a newer coordinator; this coordinator must end")
            replace_file(self._path, unparse(self._owner, stones), folder)

    @property
    def _path(self) -> Path:
        return self._folder / NAME

    @contextmanager
    def _alone(self, *, make: bool = False) -> Iterator[int]:
        """Locks the folder and yields it opened. Raises ConfigError."""
        try:
            with locked(self._folder, make=make) as folder:
                yield folder
        except OSError as error:
            raise ConfigError(
                f"{self._setting} {self._folder} cannot keep what is purged: {error.strerror or error}. "
                "Make room there, or name another folder"
            ) from None

    def _read(self) -> tuple[int, tuple[Tombstone, ...]]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0, ()
        try:
            return parse(data)
        except ValueError as error:
            raise NotUnderstood(
                f"{self._path}, which keeps what was purged, cannot be read: {error}. Restore it from a copy; "
                "or remove it and run `kvcluster clear`, so that nothing that was purged comes back"
            ) from None


def unparse(owner: int, stones: tuple[Tombstone, ...]) -> bytes:
    """Returns the content of the file."""
    body = json.dumps([asdict(stone) for stone in stones], indent=1).encode() + b"\n"
    return f"kvcluster-tombstones 1 {owner} {_digest(owner, body)}\n".encode() + body


def parse(data: bytes) -> tuple[int, tuple[Tombstone, ...]]:
    """The inverse of `unparse`: returns owner and tombstones. Raises ValueError for anything that `unparse` did not
    write."""
    head = _HEAD.match(data)
    if head is None:
        raise ValueError("it does not begin with the header of version 1")
    owner, body = int(head[1]), data[head.end() :]
    if _digest(owner, body) != head[2].decode():
        raise ValueError("its content is not what its digest says")
    try:
        entries = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(entries, list):
        raise ValueError("it holds no list")
    return owner, tuple(_tombstone(entry) for entry in entries)


def _tombstone(entry: Any) -> Tombstone:
    if not isinstance(entry, dict) or set(entry) != {"number", "tenant", *_FILTERS}:
        raise ValueError("an entry is not a tombstone")
    filters = {name: entry[name] for name in _FILTERS}
    if (
        type(entry["number"]) is not int
        or entry["number"] < 1
        or not isinstance(entry["tenant"], str)
        or not all(value is None or isinstance(value, str) for value in filters.values())
    ):
        raise ValueError("an entry is not a tombstone")
    return Tombstone(entry["number"], Tenant(entry["tenant"]), **filters)


def _digest(owner: int, body: bytes) -> str:
    return hashlib.sha256(b"%d\n" % owner + body).hexdigest()


class NotKept(Refused):
    """The answer in place of a promise that could not be made durable."""


class Keeping:
    """A coordinator's core that writes what must be kept within the step, so that every later effect may rely on it.
    Other messages wait for as long as a disk takes to sync, which is acceptable because purges are rare.

    If `write` or `keep` raises ConfigError, later answers of that step are replaced by NotKept. The purge has taken
    place nevertheless, in the core and soon in the shards, and the settings are in effect; only durability is missing,
    and the next write that succeeds includes them.
    """

    def __init__(
        self,
        core: StateMachine[M],
        write: Callable[[tuple[Tombstone, ...]], None],
        keep: Callable[[tuple[tuple[str, str], ...]], None],
    ) -> None:
        self._core = core
        self._write = write
        self._keep = keep

    def step(self, message: Any, now: int) -> list[Effect]:
        out: list[Effect] = []
        failure: ConfigError | None = None
        for effect in self._core.step(message, now):
            if isinstance(effect, (Persist, KeepSettings)):
                try:
                    if isinstance(effect, Persist):
                        self._write(effect.tombstones)
                    else:
                        self._keep(effect.settings)
                except ConfigError as error:
                    failure = error
            elif failure is not None and isinstance(effect, Answer):
                out.append(Answer(effect.call, NotKept(RefusedKind.BAD, str(failure))))
            else:
                out.append(effect)
        return out

    def next_deadline(self) -> int | None:
        return self._core.next_deadline()
