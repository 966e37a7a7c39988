"""A shard's folder on a drive, with real files: the next shard that opens it finds what was written, and no more."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvcluster.config import ShardConfig
from kvcluster.core.codecs import Codec, page_bytes
from kvcluster.core.file_allocator import HEAD_BYTES, SECTOR_BYTES, FileAllocator, Shape
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Holder, ShardId, Tenant
from kvcluster.core.messages import Erase, PageKey, PageMove, PageSlot, Stage, Staged, Tier, Tombstone
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPage, RecoveredPages
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ConfigError
from kvcluster.memory import checksum
from kvcluster.runtime import tier_store, tombstones
from kvcluster.runtime.disk import DiskFolder, open_disk
from kvcluster.runtime.volume import Identity, claim_volume, read_identity

SHARD = ShardId("shard-0")
OWNER = Identity("cluster", "group", SHARD)
RED, BLUE = Tenant("red"), Tenant("blue")
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=8
)
OTHER = replace(SPEC, model="other")
WHOLE, HALF = SPEC.whole(0), Part(0, 2, 1, 2)

SLOTS, FILES = 4, 3
FILE_BYTES = HEAD_BYTES + SECTOR_BYTES * (1 + SLOTS)
"""One sector for all records, and one for each page."""

ATTEMPT = Attempt(Holder(bytes(HOLDER_BYTES)), 1)


class Drive:
    """A shard's folder and who writes to it. `pages` is what lies there as it should be found, by offset, and `data`
    its bytes."""

    def __init__(self, folder: Path) -> None:
        self.config = ShardConfig(
            disk_bytes=FILES * FILE_BYTES, disk_dir=str(folder / "disk"), disk_file_bytes=FILE_BYTES
        )
        self.pages: dict[int, RecoveredPage] = {}
        self.data: dict[int, bytes] = {}
        self._folder: DiskFolder | None = None
        self._draw = Random(1)

    @property
    def path(self) -> Path:
        return Path(self.config.disk_dir) / SHARD

    @property
    def folder(self) -> DiskFolder:
        assert self._folder is not None, "the folder is not open"
        return self._folder

    def file(self, number: int) -> Path:
        return self.path / f"{number:04}.pages"

    def open(self) -> RecoveredPages:
        """By the next shard, where there was one."""
        self.close()
        self._folder, found = DiskFolder.open(self.config, SHARD)
        return found

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def found(self) -> list[RecoveredPage]:
        """What the next shard finds."""
        return list(self.open().pages)

    def all(self, *files: int) -> list[RecoveredPage]:
        """What should be found: in these files, where any are named."""
        pages = [self.pages[offset] for offset in sorted(self.pages)]
        return [page for page in pages if not files or page.offset // FILE_BYTES in files]

    def write(self, file: int, slot: int, **of: Any) -> RecoveredPage:
        """Another page, in that slot of that file; as `new` has it."""
        move, data = self.new(file, slot, **of)
        self.folder.write(move, memoryview(data))
        to = move.target
        page = RecoveredPage(
            *(move.namespace, to.key, move.parent, move.depth, to.loss, to.codec, to.nbytes),
            *(move.source.sums, to.offset),
        )
        self.pages[page.offset], self.data[page.offset] = page, data
        return page

    def new(
        self,
        file: int,
        slot: int,
        *,
        tenant: Tenant = RED,
        spec: KVSpec = SPEC,
        codec: Codec = Codec.Q8,
        part: Part = WHOLE,
        loss: Loss = Loss.Q4,
        depth: int = 7,
    ) -> tuple[PageMove, bytes]:
        """What is to be written there, and its bytes."""
        draw = self._draw.randbytes
        key = PageKey(BlockHash(draw(HASH_BYTES)), 0, part)
        data = draw(page_bytes(codec, spec, 0, part))
        space = spec.namespace(tenant)
        sums = checksum.layer_sums(checksum.identity(space, key, codec), 0, part.layers, memoryview(data))
        source = PageSlot(key, 64, len(data), 1, loss, checksum.pack_sums(sums), codec, Tier.HOST)
        shape = Shape(len(data), part.layers)
        offset = file * FILE_BYTES + shape.first_slot(shape.slots(FILE_BYTES)) + slot * shape.slot_bytes
        target = source._replace(offset=offset, generation=2, sums=b"", tier=Tier.DISK)
        return PageMove(space, tenant, spec, BlockHash(draw(HASH_BYTES)), depth, source, target), data

    def read(self, page: RecoveredPage) -> bytes:
        into = bytearray(page.nbytes)
        self.folder.read_into(slot_of(page), memoryview(into))
        return bytes(into)

    def stage(self, *pages: RecoveredPage) -> Staged:
        """As a shard reads them for a client that waits."""
        moves = tuple(
            PageMove(page.namespace, RED, SPEC, page.parent, page.depth, slot_of(page), into(page)) for page in pages
        )
        return tier_store.stage(Stage(ATTEMPT, moves), Places(self.folder))


class Places:
    """Where pages lie: in memory that is as large as they are, and in the folder."""

    def __init__(self, folder: DiskFolder) -> None:
        self.read, self.read_into = folder.read, folder.read_into
        self.write = folder.write

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        assert slot.tier is Tier.HOST
        return nullcontext(memoryview(bytearray(slot.nbytes)))


def slot_of(page: RecoveredPage) -> PageSlot:
    return PageSlot(page.key, page.offset, page.nbytes, 1, page.loss, page.sums, page.codec, Tier.DISK)


def into(page: RecoveredPage) -> PageSlot:
    return slot_of(page)._replace(tier=Tier.HOST, sums=b"")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    drive = Drive(tmp_path)
    yield drive
    drive.close()


@pytest.fixture
def full(drive: Drive) -> Drive:
    """One whose files all hold pages of one kind, as many as they can."""
    drive.open()
    for file in range(FILES):
        for slot in range(SLOTS):
            drive.write(file, slot)
    return drive


# ----------------------------------------------------------------------------------------- what is found


def test_a_new_folder_holds_nothing(drive: Drive) -> None:
    assert drive.open() == RecoveredPages(FILES * FILE_BYTES, FILE_BYTES)


def test_what_was_written_is_found_again_when_the_folder_is_opened_next(drive: Drive) -> None:
    drive.open()
    drive.write(0, 0, depth=0)
    drive.write(0, 3, loss=Loss.Q8)
    drive.write(1, 1, tenant=BLUE, codec=Codec.RAW, loss=Loss.EXACT)
    drive.write(2, 2, spec=OTHER, codec=Codec.Q4, part=HALF)
    for _ in range(2):  # finding it leaves it there
        found = drive.open()
        assert list(found.pages) == drive.all()
        assert sorted(found.specs, key=repr) == sorted([(RED, SPEC), (BLUE, SPEC), (RED, OTHER)], key=repr)
        assert (found.capacity_bytes, found.file_bytes) == (FILES * FILE_BYTES, FILE_BYTES)
        assert (found.tombstones, found.trouble) == ((), "")
        assert {page.offset: drive.read(page) for page in found.pages} == drive.data


def test_what_was_found_lies_where_the_allocator_of_the_next_shard_has_slots(full: Drive) -> None:
    found = full.open()
    files = FileAllocator(found.capacity_bytes, found.file_bytes)
    assert all(files.adopt(page.offset, page.nbytes, (page.namespace, page.key)) for page in found.pages)
    assert len(found.pages) == FILES * SLOTS
    assert files.reserve(found.pages[0].nbytes, (SPEC.namespace(RED), found.pages[0].key)) is None
    files.check()


def test_what_is_written_where_an_allocator_says_is_found_where_it_said(drive: Drive) -> None:
    drive.open()
    files = FileAllocator(drive.config.disk_bytes, drive.config.disk_file_bytes)
    for number in range(FILES * SLOTS):
        move, data = drive.new(0, 0)
        offset = files.reserve(len(data), (move.namespace, move.target.key))
        assert offset is not None
        drive.folder.write(move._replace(target=move.target._replace(offset=offset)), memoryview(data))
        assert len(drive.found()) == number + 1


def test_pages_are_written_into_a_file_that_was_found_beside_those_that_lie_there(drive: Drive) -> None:
    drive.open()
    for slot in range(SLOTS):
        drive.write(0, slot)
        assert drive.found() == drive.all()


def test_a_page_that_takes_the_slot_of_another_is_found_alone(full: Drive) -> None:
    full.write(0, 1)
    full.write(0, 1)
    assert full.found() == full.all()
    assert full.read(full.all()[1]) == full.data[full.all()[1].offset]


def test_a_file_that_begins_another_life_forgets_its_pages_and_does_not_find_them_in_its_third(full: Drive) -> None:
    lives: list[Callable[[], RecoveredPage]] = [
        lambda: full.write(0, 1, tenant=BLUE),
        lambda: full.write(0, 1, spec=OTHER),
        lambda: full.write(0, 1, part=HALF),
        lambda: full.write(0, 1, codec=Codec.Q4),
    ]
    for other in lives:
        for again in (other, lambda: full.write(0, 2)):
            full.pages = {page.offset: page for page in full.all(1, 2)}
            again()
            assert full.found() == full.all(), "those of before are of another life"


def fail_writing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The drive takes so many writes, of a page that takes three, and no more."""
    pwrite = os.pwrite
    left = iter(range(number))

    def failing(file: int, data: bytes, at: int) -> int:
        if next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", failing)


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_what_could_not_be_written_is_not_found_and_the_others_are(
    full: Drive, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    move, data = full.new(0, 1)
    with monkeypatch.context() as patched:
        fail_writing(patched, writes)
        with pytest.raises(OSError, match="Input/output error"):
            full.folder.write(move, memoryview(data))
    if writes:
        del full.pages[move.target.offset]
    assert full.found() == full.all(), "undamaged pages are still there"
    full.write(0, 1)
    assert full.found() == full.all()


def test_a_drive_that_takes_little_at_a_time_takes_it_all(full: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:700], at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:500]], at))
    page = full.write(0, 1, tenant=BLUE)
    assert full.read(page) == full.data[page.offset]
    monkeypatch.undo()
    assert full.found() == [page, *full.all(1, 2)]


# ------------------------------------------------------------------------------------------------ the files


def test_files_are_preallocated_in_full_and_readable_by_the_owner_alone(drive: Drive) -> None:
    drive.open()
    files = sorted(drive.path.glob("*.pages"))
    assert files == [drive.file(number) for number in range(FILES)]
    for file in files:
        found = file.stat()
        assert found.st_size == FILE_BYTES
        assert found.st_blocks * 512 >= FILE_BYTES, "a drive that fills up later takes nothing from it"
        assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(drive.path.stat().st_mode) == 0o700


def test_no_more_is_taken_than_was_given(full: Drive) -> None:
    for number in range(20):
        full.write(number % FILES, number % SLOTS, tenant=(RED, BLUE)[number % 2])
    full.close()
    taken = {path.name: path.stat().st_size for path in full.path.iterdir()}
    assert taken.pop("lock") == 0
    assert taken.pop(tombstones.NAME) < 1_024
    assert taken == {f"{number:04}.pages": FILE_BYTES for number in range(FILES)}


def test_files_beyond_the_limit_go_and_what_is_not_ours_stays(full: Drive) -> None:
    foreign = ["0002.pages.bak", "00002.pages", "2.pages", "x0009.pages", "notes.txt", "abcd.pages"]
    for name in [*foreign, "0009.pages", "9999.pages"]:
        (full.path / name).write_bytes(b"something")
    (full.path / "folder").mkdir()
    full.config = replace(full.config, disk_bytes=2 * FILE_BYTES)
    assert full.found() == full.all(0, 1)
    names = {path.name for path in full.path.iterdir()}
    assert names == {"0000.pages", "0001.pages", "lock", tombstones.NAME, "folder", *foreign}
    assert all((full.path / name).read_bytes() == b"something" for name in foreign)


def test_a_tier_that_grows_keeps_what_it_has(full: Drive) -> None:
    full.config = replace(full.config, disk_bytes=(FILES + 2) * FILE_BYTES)
    found = full.open()
    assert (list(found.pages), found.capacity_bytes) == (full.all(), (FILES + 2) * FILE_BYTES)
    assert full.file(FILES + 1).stat().st_size == FILE_BYTES


@pytest.mark.parametrize("larger", [True, False])
def test_files_of_another_size_are_dropped_and_stay_so_when_that_size_comes_back(full: Drive, larger: bool) -> None:
    before = full.config
    size = FILE_BYTES + SECTOR_BYTES if larger else FILE_BYTES - SECTOR_BYTES
    full.config = replace(before, disk_file_bytes=size)
    found = full.open()
    assert (found.pages, found.specs, found.file_bytes) == ((), (), size)
    assert {file.stat().st_size for file in full.path.glob("*.pages")} == {size}
    full.config = before
    assert full.found() == [], "the purge could not erase pages that were not found then"


def test_shards_share_a_folder_s_parent_and_nothing_else(full: Drive) -> None:
    beside, found = DiskFolder.open(full.config, ShardId("shard-1"))
    assert found.pages == ()
    beside.close()
    assert full.found() == full.all()


# ------------------------------------------------------------------------------------ what became of them


def test_what_was_cut_off_cannot_be_read_and_what_lies_before_it_can(full: Drive) -> None:
    os.truncate(full.file(1), FILE_BYTES - 2 * SECTOR_BYTES + 10)
    whole, cut = full.all(0, 2) + full.all(1)[:2], full.all(1)[2:]
    assert [full.read(page) for page in whole] == [full.data[page.offset] for page in whole]
    for page in cut:
        with pytest.raises(OSError, match="truncated"):
            full.read(page)
    assert full.stage(*whole, *cut) == Staged(ATTEMPT, corrupt=(10, 11))


FIRST_SLOT = HEAD_BYTES + SECTOR_BYTES


@pytest.mark.parametrize(
    "left",
    [
        *(0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 150, FIRST_SLOT, FIRST_SLOT + 10),
        *(FIRST_SLOT + SECTOR_BYTES, FILE_BYTES - SECTOR_BYTES - 1, FILE_BYTES - 1),
    ],
)
def test_of_a_file_that_was_cut_off_the_next_shard_finds_what_is_whole_and_the_file_is_too(
    full: Drive, left: int
) -> None:
    full.close()
    os.truncate(full.file(1), left)
    ends = FILE_BYTES + left
    there = [page for page in full.all() if page in full.all(0, 2) or page.offset + page.nbytes <= ends]
    assert full.found() == there
    assert full.stage(*there) == Staged(ATTEMPT)
    assert full.file(1).stat().st_size == FILE_BYTES
    assert full.file(1).stat().st_blocks * 512 >= FILE_BYTES
    for page in [page for page in full.all() if page not in there]:
        del full.pages[page.offset]
    full.write(1, 3)
    again = full.open().pages
    assert all(page in again for page in full.all()), "and it takes pages again"
    assert full.stage(*full.all()) == Staged(ATTEMPT)


def test_a_file_that_is_longer_than_it_was_is_cut_to_its_size(full: Drive) -> None:
    full.close()
    with full.file(1).open("ab") as file:
        file.write(b"more")
    assert full.found() == full.all()
    assert full.file(1).stat().st_size == FILE_BYTES


def test_a_file_that_is_gone_is_made_again_and_holds_nothing(full: Drive) -> None:
    [page, *_] = full.all(1)
    full.file(1).unlink()
    with pytest.raises(FileNotFoundError):
        full.read(page)
    with pytest.raises(FileNotFoundError):
        full.write(1, 0)
    assert full.found() == full.all(0, 2)
    assert full.file(1).stat().st_size == FILE_BYTES


@pytest.mark.parametrize("byte", [0, 15, 16, 20, 24, 31, 32, 48, 70, 120])
def test_a_file_whose_head_has_rotted_is_dropped_and_the_others_are_not(
    full: Drive, caplog: pytest.LogCaptureFixture, byte: int
) -> None:
    full.close()
    flip(full.file(1), 8 * byte + byte % 8)
    assert full.found() == full.all(0, 2)
    assert "dropped 1 unusable files" in caplog.text
    for page in full.all(1):
        del full.pages[page.offset]
    full.write(1, 2)
    assert full.found() == full.all()


@pytest.mark.parametrize("bit", [0, 300, 8 * 104])
def test_a_page_whose_record_has_rotted_is_not_found_and_the_others_are(full: Drive, bit: int) -> None:
    full.close()
    flip(full.file(1), 8 * (HEAD_BYTES + 2 * 120) + bit)
    spoiled = full.all(1)[2]
    assert full.found() == [page for page in full.all() if page != spoiled]


@pytest.mark.parametrize("bit", [0, 5_000, -1])
def test_a_page_that_has_rotted_is_found_and_then_named(full: Drive, bit: int) -> None:
    full.close()
    spoiled = full.all(1)[2]
    within = spoiled.offset % FILE_BYTES
    flip(full.file(1), 8 * within + bit % (8 * spoiled.nbytes))
    assert full.found() == full.all(), "its bytes are verified when a client reads them"
    assert full.read(spoiled) != full.data[spoiled.offset]
    assert full.stage(*full.all()) == Staged(ATTEMPT, corrupt=(SLOTS + 2,))


def test_what_fills_a_slot_up_may_be_anything(full: Drive) -> None:
    full.close()
    page = full.all()[0]
    flip(full.file(0), 8 * (page.offset + page.nbytes))
    assert full.found() == full.all()
    assert full.stage(page) == Staged(ATTEMPT)


# ---------------------------------------------------------------------------------------------- whose it is


def test_a_folder_that_is_in_use_cannot_be_opened_by_another_until_it_is_closed(full: Drive) -> None:
    with pytest.raises(ConfigError, match=r"another process uses .*shard-0; give each cluster a disk_dir of its own"):
        DiskFolder.open(full.config, SHARD)
    folder, found = open_disk(full.config, SHARD)
    assert folder is None
    assert found == RecoveredPages(trouble=found.trouble)
    assert found.trouble.startswith("the shard runs without its disk tier: another process uses ")
    full.close()
    folder, found = open_disk(full.config, SHARD)
    assert folder is not None and list(found.pages) == full.all()
    folder.close()


def test_a_shard_that_is_refused_changes_nothing(full: Drive) -> None:
    smaller = replace(full.config, disk_bytes=FILE_BYTES)
    assert open_disk(smaller, SHARD)[0] is None
    assert full.found() == full.all()


def test_a_shard_without_a_disk_tier_has_no_folder(drive: Drive) -> None:
    assert open_disk(replace(drive.config, disk_bytes=0, disk_dir=""), SHARD) == (None, NO_STORE)
    assert not drive.path.parent.exists()


def put_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("not a folder")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda drive: put_file(drive.path.parent), "shard.disk_dir: .*shard-0 cannot be used: Not a directory"),
        (lambda drive: put_file(drive.path), "shard.disk_dir: .*shard-0 cannot be used: File exists"),
        (lambda drive: (drive.path / "lock").mkdir(parents=True), "shard.disk_dir: .* cannot be used: Is a directory"),
        (lambda drive: drive.file(1).mkdir(parents=True), "shard.disk_dir: .* cannot be used: Is a directory"),
        (lambda drive: drive.file(FILES).mkdir(parents=True), "shard.disk_dir: .* cannot be used: Is a directory"),
    ],
    ids=["no folder above it", "no folder", "no lock", "no file", "no file that could go"],
)
def test_a_folder_that_cannot_be_used_is_a_reason_to_run_without(
    drive: Drive, spoil: Callable[[Drive], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(drive)
    with pytest.raises(ConfigError, match=f"^{words}$"):
        drive.open()
    folder, found = open_disk(drive.config, SHARD)
    assert folder is None
    assert found.trouble in caplog.text, "its operator finds it in the log"
    with pytest.raises(ConfigError, match=f"^the shard runs without its disk tier: {words}$"):
        raise ConfigError(found.trouble)


def test_a_tier_that_cannot_be_divided_into_files_is_a_reason_to_run_without(drive: Drive) -> None:
    _, found = open_disk(replace(drive.config, disk_file_bytes=2 * FILES * FILE_BYTES), SHARD)
    assert "raise disk_bytes or lower disk_file_bytes" in found.trouble
    _, found = open_disk(replace(drive.config, disk_bytes=2**40, disk_file_bytes=FILE_BYTES), SHARD)
    assert "raise disk_file_bytes" in found.trouble
    assert not drive.path.exists()


def test_a_folder_that_could_not_be_used_can_be_when_that_is_mended(drive: Drive) -> None:
    drive.file(1).mkdir(parents=True)
    assert open_disk(drive.config, SHARD)[0] is None
    drive.file(1).rmdir()
    assert drive.open().capacity_bytes == FILES * FILE_BYTES


# ------------------------------------------------------------------------------------------------- its room


def fill_up(monkeypatch: pytest.MonkeyPatch, files: int, error: int = errno.ENOSPC) -> None:
    """There is room for so many more files."""
    fallocate = os.posix_fallocate
    left = iter(range(files))

    def limited(file: int, at: int, nbytes: int) -> None:
        if next(left, None) is None:
            raise OSError(error, os.strerror(error))
        fallocate(file, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT], ids=["full", "over its quota"])
@pytest.mark.parametrize("files", range(1, FILES))
def test_a_tier_for_which_there_is_too_little_room_is_as_small_as_that(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, files: int, error: int
) -> None:
    with monkeypatch.context() as patched:
        fill_up(patched, files, error)
        found = drive.open()
    assert found == RecoveredPages(files * FILE_BYTES, FILE_BYTES, trouble=found.trouble)
    assert f"has room for only {files} of {FILES} files" in found.trouble, "the status and the doctor show it"
    assert found.trouble in caplog.text
    assert sorted(drive.path.glob("*.pages")) == [drive.file(number) for number in range(files)]
    drive.write(files - 1, 0)
    found = drive.open()
    assert (list(found.pages), found.capacity_bytes) == (drive.all(), FILES * FILE_BYTES), "when there is room again"


def test_what_lies_in_the_files_that_there_is_room_for_is_found(full: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    full.close()
    os.truncate(full.file(2), FILE_BYTES - 1)
    with monkeypatch.context() as patched:
        fill_up(patched, 0)
        found = full.open()
    assert (list(found.pages), found.capacity_bytes) == (full.all(0, 1), 2 * FILE_BYTES)
    assert not full.file(2).exists()


def size_of_drive(monkeypatch: pytest.MonkeyPatch, *, blocks: int, free: int) -> None:
    """The drive has so many blocks of the length of a file, and so many of these are free before the first file."""
    statvfs = os.fstatvfs
    taken: dict[int, None] = {}

    def of_drive(file: int) -> os.statvfs_result:
        about = os.fstat(file)
        left = FILE_BYTES * (free - sum(1 for inode in taken if inode != about.st_ino))
        taken[about.st_ino] = None
        real = statvfs(file)
        fields = list(real)
        fields[0:5] = [1, 1, FILE_BYTES * blocks, left, left]  # f_bsize, f_frsize, f_blocks, f_bfree, f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", of_drive)


@pytest.mark.parametrize(("free", "files"), [(8, 3), (7, 2), (6, 1)])
def test_new_files_leave_a_share_of_the_drive_free(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, free: int, files: int
) -> None:
    size_of_drive(monkeypatch, blocks=100, free=free)
    found = drive.open()
    assert found.capacity_bytes == files * FILE_BYTES
    assert ("5% of the drive are kept free" in found.trouble) == (files < FILES)


def test_files_that_are_there_stay_on_a_drive_that_has_filled_up(full: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    full.close()
    size_of_drive(monkeypatch, blocks=100, free=0)
    found = full.open()
    assert (list(found.pages), found.capacity_bytes, found.trouble) == (full.all(), FILES * FILE_BYTES, "")


def test_a_drive_that_is_full_but_for_what_is_kept_free_is_a_reason_to_run_without(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_of_drive(monkeypatch, blocks=100, free=5)
    folder, found = open_disk(drive.config, SHARD)
    assert folder is None
    assert found.trouble.endswith("cannot be used: No space left on device: 5% of the drive are kept free")


def test_a_drive_without_room_for_one_file_is_a_reason_to_run_without(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_up(monkeypatch, 0)
    folder, found = open_disk(drive.config, SHARD)
    assert folder is None and found.capacity_bytes == 0
    assert found.trouble.endswith("shard-0 cannot be used: No space left on device")
    monkeypatch.undo()
    assert drive.open().capacity_bytes == FILES * FILE_BYTES, "the lock is free"


def test_a_drive_that_fails_is_not_taken_for_a_full_one(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_up(monkeypatch, 2, errno.EIO)
    _, found = open_disk(drive.config, SHARD)
    assert found.trouble.endswith("cannot be used: Input/output error")


# ------------------------------------------------------------------------------------------------- purges

CLEAR = Tombstone(5, RED)


@pytest.fixture
def shared(drive: Drive) -> Drive:
    """One in which each file is of another namespace: red's, blue's, and red's of another model."""
    drive.open()
    for slot in range(SLOTS):
        drive.write(0, slot)
        drive.write(1, slot, tenant=BLUE)
        drive.write(2, slot, spec=OTHER)
    return drive


@pytest.mark.parametrize(
    ("stone", "spared"),
    [
        (CLEAR, [1]),
        (Tombstone(5, BLUE), [0, 2]),
        (Tombstone(5, RED, model="m"), [1, 2]),
        (Tombstone(5, RED, model="other", weights="sha256:1"), [0, 1]),
        (Tombstone(5, RED, adapter="x"), [0, 1, 2]),
        (Tombstone(5, Tenant("green")), [0, 1, 2]),
    ],
)
def test_what_a_tombstone_names_is_found_no_more_and_all_else_is(
    shared: Drive, stone: Tombstone, spared: list[int]
) -> None:
    shared.folder.erase(Erase((stone,), (stone,)))
    for _ in range(2):
        found = shared.open()
        assert list(found.pages) == shared.all(*spared)
        assert found.tombstones == (stone,)


def test_an_erasure_takes_all_new_tombstones_and_keeps_all(shared: Drive) -> None:
    old, new = Tombstone(3, BLUE), (Tombstone(5, RED, model="m"), Tombstone(6, RED, model="other"))
    shared.folder.erase(Erase(new, (old, *new)))
    found = shared.open()
    assert found.tombstones == (old, *new)
    assert list(found.pages) == shared.all(1), "the pages that an old tombstone names were written after it"
    shared.folder.erase(Erase((Tombstone(7, BLUE),), (old, *new, Tombstone(7, BLUE))))
    assert shared.open() == RecoveredPages(FILES * FILE_BYTES, FILE_BYTES, tombstones=(old, *new, Tombstone(7, BLUE)))


def test_a_file_of_which_the_shard_has_given_up_all_pages_is_erased_too(shared: Drive) -> None:
    # The folder is not told of what was evicted: its records are there, and would be found again.
    assert shared.found() == shared.all()
    shared.folder.erase(Erase((CLEAR,), (CLEAR,)))
    for number in (0, 2):
        assert not any(shared.file(number).read_bytes()[:HEAD_BYTES])


def test_what_is_written_after_a_purge_is_found_and_nothing_that_lay_there_before(shared: Drive) -> None:
    shared.folder.erase(Erase((CLEAR,), (CLEAR,)))
    shared.pages = {page.offset: page for page in shared.all(1)}
    shared.write(0, 2)
    found = shared.open()
    assert list(found.pages) == shared.all()
    assert found.tombstones == (CLEAR,)


def test_what_is_purged_is_on_disk_before_its_tombstone_is(shared: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, write = os.fdatasync, tombstones.TombstoneFile.write

    def synced(file: int) -> None:
        begins = os.pread(file, HEAD_BYTES, 0)
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{file}')).stem} {any(begins)}")
        sync(file)

    def written(file: tombstones.TombstoneFile, stones: tuple[Tombstone, ...]) -> None:
        steps.append("tombstones")
        write(file, stones)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(tombstones.TombstoneFile, "write", written)
    shared.folder.erase(Erase((CLEAR,), (CLEAR,)))
    assert steps.pop() == "tombstones"
    assert dict.fromkeys(["sync 0000 False", "sync 0002 False"]).keys() <= dict.fromkeys(steps).keys()


def test_a_purge_that_fails_is_not_taken_for_done(
    shared: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        shared.folder.erase(Erase((CLEAR,), (CLEAR,)))
    assert "a purge is not on disk yet: " in caplog.text
    assert shared.open().tombstones == (), "the next shard that starts here is told of it again"


def test_where_the_tombstones_cannot_be_understood_nothing_is_believed(
    shared: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    shared.folder.erase(Erase((Tombstone(3, Tenant("green")),), (Tombstone(3, Tenant("green")),)))
    flip(shared.path / tombstones.NAME, 400)
    shared.close()
    before = shared.file(0).read_bytes()
    assert shared.open() == RecoveredPages(FILES * FILE_BYTES, FILE_BYTES)
    assert "shard-0 is emptied: " in caplog.text
    assert shared.found() == []
    assert shared.file(0).read_bytes() != before
    shared.pages.clear()
    shared.write(1, 1)
    shared.folder.erase(Erase((CLEAR,), (CLEAR,)))
    found = shared.open()
    assert (list(found.pages), found.tombstones) == ([], (CLEAR,))


# ---------------------------------------------------------------------- what a purge has to reach, whatever failed


def test_files_beyond_those_that_there_is_room_for_do_not_escape_a_purge(
    full: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.close()
    os.truncate(full.file(1), FILE_BYTES - 1)
    with monkeypatch.context() as patched:
        fill_up(patched, 0)  # no room to make file 1 whole
        full.open()
        full.folder.erase(Erase((CLEAR,), (CLEAR,)))
    found = full.open()
    assert (found.tombstones, found.pages) == ((CLEAR,), ())


def test_an_erasure_that_failed_is_carried_out_with_the_next(shared: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Tombstone(6, BLUE)
    with monkeypatch.context() as patched:
        fail_writing(patched, 0)
        shared.folder.erase(Erase((CLEAR,), (CLEAR,)))
    shared.folder.erase(Erase((other,), (CLEAR, other)))
    found = shared.open()
    assert (found.tombstones, found.pages) == ((CLEAR, other), ())


def test_a_file_whose_new_head_could_not_be_written_does_not_escape_a_purge(
    full: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, data = full.new(0, 1, tenant=BLUE)
    with monkeypatch.context() as patched:
        fail_writing(patched, 0)
        with pytest.raises(OSError, match="Input/output error"):
            full.folder.write(move, memoryview(data))
    full.folder.erase(Erase((CLEAR,), (CLEAR,)))
    found = full.open()
    assert (found.tombstones, found.pages) == ((CLEAR,), ())


def test_a_file_that_has_begun_another_life_is_synced_by_a_purge_of_the_old_one(
    full: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fdatasync

    def watched(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).stem)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", watched)
    full.write(0, 0, tenant=BLUE)
    full.folder.erase(Erase((CLEAR,), (CLEAR,)))
    assert "0000" in synced, "else its old head may be back when the power goes, beside a tombstone that says done"


def test_a_folder_whose_tombstones_cannot_be_rewritten_is_not_emptied(
    full: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any, **folders: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full.close()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        assert open_disk(full.config, SHARD)[0] is None
    assert full.found() == full.all()


def test_what_was_dropped_because_its_file_was_cut_off_is_not_found_by_the_shard_after(full: Drive) -> None:
    full.close()
    os.truncate(full.file(1), FILE_BYTES - SECTOR_BYTES)
    first = full.found()
    assert first != full.all() and full.found() == first


def test_a_foreign_file_named_in_other_digits_is_left_alone(full: Drive) -> None:
    name = full.path / "\u0669\u0669\u0669\u0669.pages"
    name.write_text("another program's")
    full.open()
    assert name.exists()


# ----------------------------------------------------------------------------- what other users may have left


def test_a_folder_of_another_user_is_refused(full: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    full.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"cannot be used: it belongs to user {os.getuid()}, not"):
        full.open()
    with pytest.raises(ConfigError, match=f"cannot be used: it belongs to user {os.getuid()}, not"):
        claim_volume(full.config.disk_dir, OWNER)


def test_a_folder_that_others_may_write_to_is_refused(full: Drive) -> None:
    full.close()
    full.path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to it"):
        full.open()
    with pytest.raises(ConfigError, match="other users may write to it"):
        claim_volume(full.config.disk_dir, OWNER)


def test_a_link_in_place_of_the_folder_is_not_followed(drive: Drive, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    drive.path.parent.mkdir()
    drive.path.symlink_to(elsewhere)
    for use in (drive.open, lambda: claim_volume(drive.config.disk_dir, OWNER)):
        with pytest.raises(ConfigError, match="symbolic link"):
            use()
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["0000.pages", "lock"])
def test_a_link_in_place_of_a_file_is_not_followed(
    drive: Drive, tmp_path: Path, link: Callable[[Path, Path], None], name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"of another")
    drive.path.mkdir(parents=True, mode=0o700)
    link(victim, drive.path / name)
    with pytest.raises(ConfigError, match="cannot be used"):
        drive.open()
    assert victim.read_bytes() == b"of another"


def test_no_link_takes_what_is_written_beside_a_file(drive: Drive, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"of another")
    drive.path.mkdir(parents=True, mode=0o700)
    (drive.path / "identity.json.new").symlink_to(victim)
    (drive.path / "tombstones.new").symlink_to(victim)
    claim_volume(drive.config.disk_dir, OWNER)
    drive.open()
    assert victim.read_bytes() == b"of another"
    assert read_identity(drive.path) == OWNER


def test_modes_by_which_others_could_read_or_write_are_set_back(full: Drive) -> None:
    full.close()
    full.file(0).chmod(0o666)
    full.path.chmod(0o755)
    assert full.found() == full.all()
    assert stat.S_IMODE(full.file(0).stat().st_mode) == 0o600
    assert stat.S_IMODE(full.path.stat().st_mode) == 0o700


def test_no_read_or_write_waits_for_a_pipe_in_place_of_a_file(full: Drive) -> None:
    page = full.all(0)[0]
    full.file(0).unlink()
    os.mkfifo(full.file(0))
    (full.path / "identity.json").unlink(missing_ok=True)
    os.mkfifo(full.path / "identity.json")
    ended: list[str] = []

    def use() -> None:
        with pytest.raises(OSError, match="no regular file"):
            full.read(page)
        move, data = full.new(0, 0)
        with pytest.raises(OSError, match="no regular file"):
            full.folder.write(move, memoryview(data))
        with pytest.raises(ConfigError, match="no regular file"):
            read_identity(full.path)
        ended.append("all")

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20.0)
    assert ended == ["all"]
