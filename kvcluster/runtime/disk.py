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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvcluster.config import ShardConfig
from kvcluster.core.disk_recovery import NO_STORE, RecoveredPage, RecoveredPages
from kvcluster.core.file_allocator import HEAD_BYTES, FileAllocator, Shape
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


class _KnownFile(NamedTuple):
    """A file that holds something, or has: its head, and whose namespace that makes it. `nbytes`: how long it was when
    it was opened."""

    head: Head
    namespace: NamespaceId
    nbytes: int


def open_disk(config: ShardConfig, shard: ShardId) -> tuple[DiskFolder | None, RecoveredPages]:
    """The folder that this configuration names and what lies in it; or none, and why not."""
    if not config.disk_bytes:
        return None, NO_STORE
    try:
        return DiskFolder.open(config, shard)
    except ConfigError as error:
        why = f"it runs without its disk tier: {error}"
        log.warning("%s: %s", shard, why)
        return None, RecoveredPages(why_none=why)


class DiskFolder:
    """The store of the disk tier (tier_store.TierStore): the files of one shard, below `config.disk_dir`. Writes and
    erasures come from one thread; reads from any."""

    def __init__(self, config: ShardConfig, shard: ShardId) -> None:
        plan = FileAllocator(config.disk_bytes, config.disk_file_bytes)
        self._file_bytes = plan.file_bytes
        self._files = plan.files
        self._folder = Path(config.disk_dir) / shard
        self._stones = TombstoneFile(str(self._folder), "the disk tier's folder")
        self._known: dict[int, _KnownFile] = {}
        self._unsynced: dict[int, None] = {}  # files whose last head may be back when the power goes
        self._behind = False  # with what is to be purged, since that failed
        self._lock = self._locked()

    @classmethod
    def open(cls, config: ShardConfig, shard: ShardId) -> tuple[DiskFolder, RecoveredPages]:
        """The folder, held from now on, and what was there. Raises ConfigError where it cannot be used, or another
        process does."""
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
        """Lets another process have the folder."""
        os.close(self._lock)

    def view(self, slot: PageSlot) -> None:
        """A page in a file lies nowhere that a reader could be shown."""

    def read(self, slot: PageSlot, into: memoryview) -> None:
        """The bytes of a page as they lie there, right or wrong. Raises OSError where there are not as many."""
        number, at = divmod(slot.offset, self._file_bytes)
        with self._opened(number, os.O_RDONLY) as file:
            while into.nbytes:
                count = os.preadv(file, [into], at)
                if not count:
                    raise OSError(errno.EIO, "a file of pages is cut off")
                into, at = into[count:], at + count

    def write(self, move: PageMove, data: memoryview) -> None:
        """Puts a page, of the checksums of its source, where its target says, and then its record. Raises OSError; the
        page is not found there then."""
        number, at = divmod(move.target.offset, self._file_bytes)
        with self._opened(number) as file:
            head = self._head_for(file, number, move)
            slot = head.slot_at(at)
            _write(file, bytes(head.shape.record_bytes), head.record_at(slot))  # of what lay here before
            _write(file, data, at)
            _write(file, page_files.encode_record(head, slot, RecoveredPage.of(move)), head.record_at(slot))

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

    def _preallocate(self) -> None:
        """As many of its files as there is room for; at least one. What is beyond them goes."""
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
                        os.posix_fallocate(file, 0, self._file_bytes)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not number:
                        raise
                    self._known.pop(number, None)
                    for beyond in range(number, self._files):
                        self._path(beyond).unlink(missing_ok=True)
                    log.warning("%s has room for %d files of %d only", self._folder, number, self._files)
                    self._files = number
                    return
        if dropped:
            log.warning("%s: %d files are dropped; of the first: %s", self._folder, len(dropped), dropped[0])

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
            _write(file, page_files.NO_HEAD, 0)
            return error
        self._known[number] = _KnownFile(head, head.namespace, os.fstat(file).st_size)
        return None

    def _kept_tombstones(self) -> tuple[Tombstone, ...]:
        """What has been purged here. If that cannot be read any more, nothing here is believed."""
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
                    else:  # it was cut off, and has been filled up with nothing since
                        slot = head.slot_at(page.offset - begins)
                        _write(file, bytes(head.shape.record_bytes), head.record_at(slot))
            specs[namespace] = head.tenant, head.spec
        capacity = self._files * self._file_bytes
        return RecoveredPages(capacity, self._file_bytes, tuple(specs.values()), tuple(pages), tombstones)

    # -------------------------------------------------------------------------------------------- writing

    def _head_for(self, file: int, number: int, move: PageMove) -> Head:
        """The head under which that page can lie in this file: the one it has, or a new one."""
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
        """Nothing is found in this file any more, once it is synced."""
        with self._opened(number) as file:
            self._unsynced[number] = None
            _write(file, page_files.NO_HEAD, 0)
        self._known.pop(number, None)

    def _sync(self, number: int) -> None:
        """What was written to this file is there, whenever the power goes."""
        with self._opened(number) as file:
            os.fdatasync(file)
        del self._unsynced[number]

    @contextmanager
    def _opened(self, number: int, flags: int = os.O_RDWR) -> Iterator[int]:
        file = os.open(self._path(number), flags, _OWNER_ONLY)
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
