"""A shard's folder on a local drive: files of encoded pages, preallocated, which outlive the shard.

Where which page goes the core decides (core/file_allocator.py); what a file says of itself is wire/page_files.py. One
shard at a time has a folder, as long as it lives: it holds a lock in it. Nothing here waits for the drive to have
written anything down: a page whose record is there and whose bytes are not does not match its checksums, and is a miss.
What must not come back is overwritten, synced, and only then taken for gone (`erase`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

from kvcluster.config import ShardConfig
from kvcluster.core.file_allocator import HEAD_BYTES, FileAllocator, Shape
from kvcluster.core.found import NO_DISK, Found, FoundPage
from kvcluster.core.ids import NamespaceId, ShardId, Tenant
from kvcluster.core.messages import Erase, PageMove, PageSlot, Tombstone
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.tombstones import NotUnderstood, TombstoneFile
from kvcluster.wire import page_files
from kvcluster.wire.page_files import Head

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9]{4}\.pages")
_OWNER_ONLY = 0o600


class _Known(NamedTuple):
    """A file that holds something, or has: its head, and whose namespace that makes it. `nbytes`: how long it was when
    it was opened."""

    head: Head
    namespace: NamespaceId
    nbytes: int


def open_disk(config: ShardConfig, shard: ShardId) -> tuple[DiskFolder | None, Found]:
    """The folder that this configuration names and what lies in it; or none, and why not."""
    if not config.disk_bytes:
        return None, NO_DISK
    try:
        folder = DiskFolder(config, shard)
    except ConfigError as error:
        why = f"it runs without its disk tier: {error}"
        log.warning("%s: %s", shard, why)
        return None, Found(why_none=why)
    return folder, folder.found


class DiskFolder:
    """The files of one shard, below `config.disk_dir`. `found` is what was there. Writes and erasures come from one
    thread; reads from any.

    Raises ConfigError where the folder cannot be used, or another process does.
    """

    def __init__(self, config: ShardConfig, shard: ShardId) -> None:
        plan = FileAllocator(config.disk_bytes, config.disk_file_bytes)
        self._file_bytes = plan.file_bytes
        self._folder = Path(config.disk_dir) / shard
        self._known: dict[int, _Known] = {}
        self._unsynced: dict[int, None] = {}  # files whose last head may be back when the power goes
        self._behind = False  # with what is to be purged, since that failed
        self._lock = self._locked()
        try:
            files = self._preallocated(plan.files)
            self._stones = TombstoneFile(str(self._folder), "the disk tier's folder")
            tombstones = self._kept_tombstones(files)
            self.found = self._scanned(files, tombstones)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise self._unusable(error) from None
            raise

    def close(self) -> None:
        """Lets another process have the folder."""
        os.close(self._lock)

    def read(self, slot: PageSlot, into: memoryview) -> None:
        """The bytes of a page as they lie there, right or wrong. Raises OSError where there are not as many."""
        number, at = divmod(slot.offset, self._file_bytes)
        file = os.open(self._path(number), os.O_RDONLY)
        try:
            while into.nbytes:
                count = os.preadv(file, [into], at)
                if not count:
                    raise OSError(errno.EIO, "a file of pages is cut off")
                into, at = into[count:], at + count
        finally:
            os.close(file)

    def write(self, move: PageMove, data: memoryview) -> None:
        """Puts a page, of the checksums of its source, where its target says, and then its record. Raises OSError; the
        page is not found there then."""
        slot = move.target
        number, at = divmod(slot.offset, self._file_bytes)
        file = os.open(self._path(number), os.O_RDWR)
        try:
            head = self._head_for(file, number, move)
            index, record_at = _index(head, at), _record_at(head, at)
            page = FoundPage(
                *(move.namespace, slot.key, move.parent, move.depth, slot.loss, slot.codec, slot.nbytes),
                sums=move.source.sums,
                offset=slot.offset,
            )
            _write(file, memoryview(bytes(head.shape.record_bytes)), record_at)  # of what lay here before
            _write(file, data, at)
            _write(file, memoryview(page_files.encode_record(head, index, page)), record_at)
        finally:
            os.close(file)

    def erase(self, order: Erase) -> None:
        """Carries it out. Where that fails the tombstones are not kept: it is tried again with the next, and whoever
        starts here before is told of them again by the coordinator."""
        stones = order.tombstones if self._behind else order.purged  # rather too many than too few
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

    def _locked(self) -> int:
        """A descriptor that holds the folder."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"another process uses {self._folder}; give each cluster a disk_dir of its own, "
                    "or restart this shard when that has ended"
                ) from None
            raise self._unusable(error) from None
        return lock

    def _preallocated(self, files: int) -> int:
        """How many of so many files there is room for; at least one. What is beyond them goes."""
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) and int(path.stem) >= files:
                path.unlink()
        dropped: list[KVClusterError] = []
        for number in range(files):
            file = os.open(self._path(number), os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
            try:
                why = self._why_dropped(file, number)
                dropped += [why] if why is not None else []
                if os.fstat(file).st_size != self._file_bytes:
                    os.truncate(file, min(os.fstat(file).st_size, self._file_bytes))
                    os.posix_fallocate(file, 0, self._file_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not number:
                    raise
                self._known.pop(number, None)
                for beyond in range(number, files):
                    self._path(beyond).unlink(missing_ok=True)
                log.warning("%s has room for %d files of %d only", self._folder, number, files)
                return number
            finally:
                os.close(file)
        if dropped:
            log.warning("%s: %d files are dropped; of the first: %s", self._folder, len(dropped), dropped[0])
        return files

    def _why_dropped(self, file: int, number: int) -> KVClusterError | None:
        """Keeps what a file says of itself, if that can be understood and is still so; else it says nothing more."""
        data = os.pread(file, HEAD_BYTES, 0)
        if not any(data):
            return None
        try:
            head = page_files.decode_head(data)
            if head.file_bytes != self._file_bytes:
                raise ConfigError(f"it is of a tier with files of {head.file_bytes} bytes")
        except KVClusterError as error:
            self._unsynced[number] = None
            _write(file, memoryview(page_files.NO_HEAD), 0)
            return error
        self._known[number] = _Known(head, head.namespace, os.fstat(file).st_size)
        return None

    def _kept_tombstones(self, files: int) -> tuple[Tombstone, ...]:
        """What has been purged here. If that cannot be read any more, nothing here is believed."""
        try:
            return self._stones.take_over()
        except NotUnderstood as error:
            log.warning("%s is emptied: %s", self._folder, error)
            for number in range(files):
                self._behead(number)
                self._sync(number)
            self._stones.forget()
            return self._stones.take_over()

    def _scanned(self, files: int, tombstones: tuple[Tombstone, ...]) -> Found:
        specs: dict[NamespaceId, tuple[Tenant, KVSpec]] = {}
        pages: list[FoundPage] = []
        for number, (head, namespace, nbytes) in self._known.items():
            begins = number * self._file_bytes
            file = os.open(self._path(number), os.O_RDWR)
            try:
                records = os.pread(file, head.records_bytes, HEAD_BYTES)
                found = page_files.decode_records(head, namespace, records, begins)
                for page in found:
                    if page.offset + page.nbytes <= begins + nbytes:
                        pages.append(page)
                    else:  # it was cut off, and has been filled up with nothing since
                        _write(file, memoryview(bytes(head.shape.record_bytes)), _record_at(head, page.offset - begins))
            finally:
                os.close(file)
            specs[namespace] = head.tenant, head.spec
        capacity = files * self._file_bytes
        return Found(capacity, self._file_bytes, tuple(specs.values()), tuple(pages), tombstones)

    # -------------------------------------------------------------------------------------------- writing

    def _head_for(self, file: int, number: int, move: PageMove) -> Head:
        """The head under which that page can lie in this file: the one it has, or a new one."""
        known = self._known.get(number)
        shape = Shape(move.target.nbytes, move.target.key.part.layers)
        if known is not None and known.namespace == move.namespace and known.head.shape == shape:
            return known.head
        head = Head(os.urandom(page_files.LIFE_BYTES), self._file_bytes, shape, move.tenant, move.spec)
        self._unsynced[number] = None
        _write(file, memoryview(page_files.encode_head(head)), 0)
        self._known[number] = _Known(head, move.namespace, self._file_bytes)
        return head

    def _behead(self, number: int) -> None:
        """Nothing is found in this file any more, once it is synced."""
        file = os.open(self._path(number), os.O_RDWR)
        try:
            self._unsynced[number] = None
            _write(file, memoryview(page_files.NO_HEAD), 0)
        finally:
            os.close(file)
        self._known.pop(number, None)

    def _sync(self, number: int) -> None:
        """What was written to this file is there, whenever the power goes."""
        file = os.open(self._path(number), os.O_RDWR)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)
        del self._unsynced[number]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04}.pages"

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"shard.disk_dir: {self._folder} cannot be used: {error.strerror or error}")


def _index(head: Head, at: int) -> int:
    """The number of the slot that begins there in its file."""
    return (at - head.shape.first_slot(head.slots)) // head.shape.slot_bytes


def _record_at(head: Head, at: int) -> int:
    """Where in the file the record of the slot lies that begins there."""
    return HEAD_BYTES + _index(head, at) * head.shape.record_bytes


def _write(file: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count
