"""A shard's folder on a local drive: preallocated files of encoded pages, which outlive the shard.

The core decides where each page goes (core/file_allocator.py); wire/page_files.py defines the headers and records of a
file. One shard at a time owns a folder, for as long as it lives: it holds a lock in it. Writing a page does not wait
for the drive to sync: a page whose record reached the drive while its bytes did not fails its checksums, and is a miss.
What must not come back is overwritten and synced before it counts as erased (`erase`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvcluster.config import ShardConfig
from kvcluster.core.file_allocator import HEAD_BYTES, FileAllocator, Shape
from kvcluster.core.ids import NamespaceId, ShardId, Tenant
from kvcluster.core.messages import Erase, PageMove, PageSlot, Tombstone
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPage, RecoveredPages
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.private_files import open_file, open_folder
from kvcluster.runtime.tier_store import without
from kvcluster.runtime.tombstones import NotUnderstood, TombstoneFile
from kvcluster.wire import page_files
from kvcluster.wire.page_files import Head

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9]{4}\.pages")
_KEPT_FREE = 0.05
"""The share of a drive that new files leave free: a full drive stops everything else on the machine."""


class _KnownFile(NamedTuple):
    """A file that holds pages or once did: its header, and the namespace that the header belongs to. `nbytes`: the
    length of the file when it was opened."""

    head: Head
    namespace: NamespaceId
    nbytes: int


def open_disk(config: ShardConfig, shard: ShardId) -> tuple[DiskFolder | None, RecoveredPages]:
    """Opens the folder that this configuration names and recovers its pages. Returns no folder if the disk tier is not
    configured or cannot be used; `trouble` then gives the reason."""
    if not config.disk_bytes:
        return None, NO_STORE
    try:
        return DiskFolder.open(config, shard)
    except ConfigError as error:
        return without(shard, f"the shard runs without its disk tier: {error}")


class DiskFolder:
    """The store of the disk tier (tier_store.TierStore): the files of one shard, below `config.disk_dir`. Writes and
    erasures come from one thread; reads may come from any thread."""

    pool, failed = None, ""

    def __init__(self, config: ShardConfig, shard: ShardId) -> None:
        plan = FileAllocator(config.disk_bytes, config.disk_file_bytes)
        self._file_bytes = plan.file_bytes
        self._files = plan.files
        self._folder = Path(config.disk_dir) / shard
        self._stones = TombstoneFile(str(self._folder), "the disk tier's folder")
        self._trouble = ""
        self._known: dict[int, _KnownFile] = {}
        self._unsynced: dict[int, None] = {}  # files whose previous header a power loss may bring back
        self._behind = False  # the last erasure failed, so earlier ones are due again
        self._opened_folder, self._lock = self._locked()

    @classmethod
    def open(cls, config: ShardConfig, shard: ShardId) -> tuple[DiskFolder, RecoveredPages]:
        """Locks the folder and returns it with the pages found there. Raises ConfigError if the folder cannot be used,
        or if another process uses it."""
        folder = cls(config, shard)
        try:
            folder._preallocate()
            return folder, folder._found(folder._kept_tombstones())
        except BaseException as error:
            folder.close()
            if isinstance(error, OSError):
                raise folder._unusable(error) from None
            raise

    def close(self) -> None:
        """Releases the folder for another process."""
        os.close(self._lock)
        os.close(self._opened_folder)

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        """As PageBytes: a copy."""
        last = slot.nbytes if stop is None else stop
        into = memoryview(bytearray(last - start))
        self.read_into(slot._replace(offset=slot.offset + start), into)
        return into

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        """Never called: pages of an addressable tier alone are filled."""
        raise AssertionError("a page in a file is written as a whole")

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        """Copies the bytes of a page as they are in the file, correct or not. Raises OSError if the file is too
        short."""
        number, at = divmod(slot.offset, self._file_bytes)
        with self._opened(number, os.O_RDONLY) as file:
            while into.nbytes:
                count = os.preadv(file, [into], at)
                if not count:
                    raise OSError(errno.EIO, "a page file is truncated")
                into, at = into[count:], at + count

    def write(self, move: PageMove, data: memoryview) -> None:
        """Writes a page to the move's target, then its record with the checksums of the move's source. If it raises
        OSError, the page is not found at the target."""
        number, at = divmod(move.target.offset, self._file_bytes)
        with self._opened(number) as file:
            head = self._head_for(file, number, move)
            slot = head.slot_at(at)
            _write(file, bytes(head.shape.record_bytes), head.record_at(slot))  # invalidates the old page
            _write(file, data, at)
            _write(file, page_files.encode_record(head, slot, RecoveredPage.of(move)), head.record_at(slot))

    def erase(self, order: Erase) -> None:
        """Carries out an erasure. If it fails, the tombstones are not kept: the next erasure tries again, and if a
        shard starts on this folder before that, the coordinator sends it the tombstones again."""
        stones = order.tombstones if self._behind else order.purged  # all of them after a failure, to miss none
        self._behind = True
        try:
            for number, known in list(self._known.items()):
                if any(stone.names(known.head.tenant, known.head.spec) for stone in stones):
                    self._behead(number)
            for number in list(self._unsynced):
                self._sync(number)
            self._stones.write(order.tombstones)
            self._behind = False
        except (OSError, ConfigError) as error:
            log.warning("%s: a purge is not on disk yet: %s", self._folder, error)

    # ------------------------------------------------------------------------------------------- opening

    def _locked(self) -> tuple[int, int]:
        """Returns descriptors of the folder and of its lock, which is held."""
        opened: list[int] = []
        try:
            opened.append(open_folder(self._folder, make=True))
            opened.append(open_file(opened[0], "lock", os.O_RDWR | os.O_CREAT))
            fcntl.flock(opened[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            if len(opened) == 2 and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"another process uses {self._folder}; give each cluster a disk_dir of its own, "
                    "or restart this shard when that process has ended"
                ) from None
            raise self._unusable(error) from None
        return opened[0], opened[1]

    def _preallocate(self) -> None:
        """Preallocates as many files as the drive has room for, at least one, and removes the files beyond them. New
        files leave _KEPT_FREE of the drive free; those that are there stay."""
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) and int(path.stem) >= self._files:
                path.unlink()
        dropped: list[KVClusterError] = []
        for number in range(self._files):
            with self._opened(number, os.O_RDWR | os.O_CREAT) as file:
                try:
                    why = self._why_dropped(file, number)
                    dropped += [why] if why is not None else []
                    if os.fstat(file).st_size != self._file_bytes:
                        os.truncate(file, min(os.fstat(file).st_size, self._file_bytes))
                        self._check_room(file)
                        os.posix_fallocate(file, 0, self._file_bytes)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not number:
                        raise
                    self._known.pop(number, None)
                    for beyond in range(number, self._files):
                        self._path(beyond).unlink(missing_ok=True)
                    self._trouble = self._smaller(number)
                    log.warning("%s", self._trouble)
                    self._files = number
                    return
        if dropped:
            log.warning("%s: dropped %d unusable files; the first: %s", self._folder, len(dropped), dropped[0])

    def _check_room(self, file: int) -> None:
        """Raises OSError, as a full drive does, if preallocating this file would leave too little of the drive free."""
        drive, allocated = os.fstatvfs(file), os.fstat(file).st_blocks * 512
        left = drive.f_bavail * drive.f_frsize - (self._file_bytes - allocated)
        if left < _KEPT_FREE * drive.f_blocks * drive.f_frsize:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {_KEPT_FREE:.0%} of the drive are kept free")

    def _smaller(self, files: int) -> str:
        room, wanted = (number * self._file_bytes / 2**30 for number in (files, self._files))
        return (
            f"the disk tier is smaller than configured: {self._folder} has room for only {files} of {self._files} "
            f"files, {room:.1f} of {wanted:.1f} GiB; {_KEPT_FREE:.0%} of the drive are kept free. Make room, or lower "
            "disk_bytes"
        )

    def _why_dropped(self, file: int, number: int) -> KVClusterError | None:
        """Keeps the header of a file if it can be decoded and matches the configured file size. Otherwise erases the
        header and returns the reason. Returns None for a kept or empty header."""
        data = os.pread(file, HEAD_BYTES, 0)
        if not any(data):
            return None
        try:
            head = page_files.decode_head(data)
            if head.file_bytes != self._file_bytes:
                raise ConfigError(f"it belongs to a tier with files of {head.file_bytes} bytes")
        except KVClusterError as error:
            self._unsynced[number] = None
            _write(file, page_files.NO_HEAD, 0)
            return error
        self._known[number] = _KnownFile(head, head.namespace, os.fstat(file).st_size)
        return None

    def _kept_tombstones(self) -> tuple[Tombstone, ...]:
        """Returns the tombstones that are carried out in this folder. If they cannot be read, no page here can be
        trusted, and the folder is emptied."""
        try:
            return self._stones.take_over()
        except NotUnderstood as error:
            log.warning("%s is emptied: %s", self._folder, error)
            for number in range(self._files):
                self._behead(number)
                self._sync(number)
            self._stones.forget()
            return self._stones.take_over()

    def _found(self, tombstones: tuple[Tombstone, ...]) -> RecoveredPages:
        specs: dict[NamespaceId, tuple[Tenant, KVSpec]] = {}
        pages: list[RecoveredPage] = []
        for number, (head, namespace, nbytes) in self._known.items():
            begins = number * self._file_bytes
            with self._opened(number) as file:
                records = os.pread(file, head.records_bytes, HEAD_BYTES)
                for page in page_files.decode_records(head, namespace, records, begins):
                    if page.offset + page.nbytes <= begins + nbytes:
                        pages.append(page)
                    else:  # the file was truncated, and has since been extended with zeros
                        slot = head.slot_at(page.offset - begins)
                        _write(file, bytes(head.shape.record_bytes), head.record_at(slot))
            specs[namespace] = head.tenant, head.spec
        capacity = self._files * self._file_bytes
        found = tuple(specs.values()), tuple(pages), tombstones
        return RecoveredPages(capacity, self._file_bytes, *found, trouble=self._trouble)

    # -------------------------------------------------------------------------------------------- writing

    def _head_for(self, file: int, number: int, move: PageMove) -> Head:
        """Returns the header under which that page can be stored in this file: the current one, or a new one."""
        known = self._known.get(number)
        shape = Shape(move.target.nbytes, move.target.key.part.layers)
        if known is not None and known.namespace == move.namespace and known.head.shape == shape:
            return known.head
        head = Head(os.urandom(page_files.LIFE_BYTES), self._file_bytes, shape, move.tenant, move.spec)
        self._unsynced[number] = None
        _write(file, page_files.encode_head(head), 0)
        self._known[number] = _KnownFile(head, move.namespace, self._file_bytes)
        return head

    def _behead(self, number: int) -> None:
        """Erases the header, so that no page of this file is found again once the file is synced."""
        with self._opened(number) as file:
            self._unsynced[number] = None
            _write(file, page_files.NO_HEAD, 0)
        self._known.pop(number, None)

    def _sync(self, number: int) -> None:
        """Syncs the file: what was written to it survives a power loss."""
        with self._opened(number) as file:
            os.fdatasync(file)
        del self._unsynced[number]

    @contextmanager
    def _opened(self, number: int, flags: int = os.O_RDWR) -> Iterator[int]:
        file = open_file(self._opened_folder, self._path(number).name, flags)
        try:
            yield file
        finally:
            os.close(file)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04}.pages"

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"shard.disk_dir: {self._folder} cannot be used: {error.strerror or error}")


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left.nbytes:
        count = os.pwrite(file, left, at)
        left, at = left[count:], at + count
