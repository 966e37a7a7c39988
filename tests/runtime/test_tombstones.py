"""A purge outlives the coordinator that recorded it, or its caller is told that it may not."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcluster.core.ids import CallId, Tenant
from kvcluster.core.messages import Answer, Done, Effect, Leave, Persist, Purged, Tombstone
from kvcluster.errors import ConfigError
from kvcluster.runtime.tombstones import NAME, Keeping, NotKept, TombstoneFile, parse, unparse

RED, BLUE = Tenant("red"), Tenant("blue")
CLEARED = Tombstone(7, RED)
STONES = (CLEARED, Tombstone(8, BLUE, model="m\n\u00e9\0", weights="sha256:1", adapter=""))


def opened(folder: Path) -> tuple[TombstoneFile, tuple[Tombstone, ...]]:
    file = TombstoneFile(str(folder))
    return file, file.take_over()


# ---------------------------------------------------------------------------------------------- the file


def test_the_next_coordinator_finds_what_the_last_one_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    first, nothing = opened(folder)
    assert nothing == ()
    first.write(STONES)
    second, found = opened(folder)
    assert found == STONES
    second.write(STONES[1:])
    assert opened(folder)[1] == STONES[1:]


def test_no_other_user_may_read_what_tenants_purged(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    opened(folder)[0].write(STONES)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600


def test_a_coordinator_that_was_replaced_cannot_overwrite_its_successor(tmp_path: Path) -> None:
    old, _ = opened(tmp_path)
    new, _ = opened(tmp_path)
    new.write(STONES)
    with pytest.raises(ConfigError, match="belongs to a newer coordinator"):
        old.write((CLEARED,))
    assert opened(tmp_path)[1] == STONES


def test_a_write_is_whole_or_has_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step fails, the file is there and is the old one; and what is left over does no harm."""
    file, _ = opened(tmp_path)
    file.write((CLEARED,))

    def full(*arguments: object, **folders: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner, step in ((os, "fsync"), (os, "rename")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, full)
            with pytest.raises(ConfigError, match=r"No space left on device.*Make room there, or name another folder"):
                file.write(STONES)
        assert parse((tmp_path / NAME).read_bytes())[1] == (CLEARED,)
    file.write(STONES)
    assert opened(tmp_path)[1] == STONES


def test_it_is_on_disk_before_it_takes_its_name_and_its_name_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        steps.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def renamed(*arguments: Any, **folders: int) -> None:
        steps.append("rename")
        rename(*arguments, **folders)

    file, _ = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    file.write(STONES)
    assert steps == ["sync file", "rename", "sync folder"]


def test_two_that_write_at_once_take_turns(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    failed: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(10):
                file.write((Tombstone(number, RED),))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert opened(tmp_path)[1] in ((Tombstone(1, RED),), (Tombstone(2, RED),))


@pytest.mark.parametrize("name", ["file/below", "file"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"coordinator.state_dir .*{name} cannot keep what is purged"):
        opened(tmp_path / name)


def test_a_folder_that_another_setting_named_is_blamed_on_that(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^the drive's folder .*file cannot keep what is purged"):
        TombstoneFile(str(tmp_path / "file"), "the drive's folder").take_over()


def test_after_forget_there_are_no_tombstones_even_if_there_were_none_before(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    file.write(STONES)
    file.forget()
    assert not (tmp_path / NAME).exists()
    file.forget()
    again, found = opened(tmp_path)
    assert found == ()
    again.write((CLEARED,))
    assert opened(tmp_path)[1] == (CLEARED,)


def test_what_cannot_be_understood_can_be_forgotten(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"kvcluster-tombstones 1 and nothing else")
    file = TombstoneFile(str(tmp_path))
    with pytest.raises(ConfigError):
        file.take_over()
    file.forget()
    assert file.take_over() == ()
    file.write(STONES)
    assert opened(tmp_path)[1] == STONES


# ------------------------------------------------------------------------------------------- its content


@pytest.mark.parametrize("stones", [(), (CLEARED,), STONES])
def test_what_is_written_is_what_is_read(stones: tuple[Tombstone, ...]) -> None:
    assert parse(unparse(3, stones)) == (3, stones)


def test_every_bit_of_the_file_counts(tmp_path: Path) -> None:
    data = bytearray(unparse(3, STONES))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"it does not begin|its content is not"):
            parse(bytes(data))
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("cut", range(0, len(unparse(3, STONES)), 7))
def test_a_file_that_was_cut_off_is_not_believed(cut: int) -> None:
    with pytest.raises(ValueError, match=r"it does not begin|its content is not"):
        parse(unparse(3, STONES)[:cut])


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[1]",
        b"[{}]",
        b"[",
        b"[" * 100_000,
        b"\xff",
        b'[{"number": 0, "tenant": "t", "model": null, "weights": null, "adapter": null}]',
        b'[{"number": true, "tenant": "t", "model": null, "weights": null, "adapter": null}]',
        b'[{"number": 1, "tenant": null, "model": null, "weights": null, "adapter": null}]',
        b'[{"number": 1, "tenant": "t", "model": 1, "weights": null, "adapter": null}]',
        b'[{"number": 1, "tenant": "t", "model": null, "weights": null}]',
        b'[{"number": 1, "tenant": "t", "model": null, "weights": null, "adapter": null, "more": 1}]',
    ],
)
def test_a_file_that_another_program_made_is_not_believed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcluster.runtime.tombstones._digest", lambda owner, body: "0" * 64)
    with pytest.raises(ValueError):
        parse(b"kvcluster-tombstones 1 1 " + b"0" * 64 + b"\n" + body)


@pytest.mark.parametrize("content", [b"", b"kvcluster-tombstones 2 1 ", unparse(1, STONES)[:-1], b"\0" * 100])
def test_a_file_that_cannot_be_understood_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read.*Restore it from a copy.*`kvcluster clear`"):
        opened(tmp_path)
    assert (tmp_path / NAME).read_bytes() == content, "it is left for the operator"


# ------------------------------------------------------------------------------------------------ the promise


class Scripted:
    """A core that answers whatever it is asked with these effects."""

    def __init__(self, *effects: Effect) -> None:
        self._effects = effects

    def step(self, message: object, now: int) -> list[Effect]:
        return list(self._effects)

    def next_deadline(self) -> int:
        return 42


class Disk:
    """Keeps what it is given, while it has room."""

    def __init__(self) -> None:
        self.kept: list[Sequence[Tombstone]] = []
        self.full = False

    def write(self, stones: tuple[Tombstone, ...]) -> None:
        if self.full:
            raise ConfigError("the disk is full")
        self.kept.append(stones)


PROMISE = Answer(CallId(2), Purged(5))


def unasked(settings: object) -> None:
    raise AssertionError("nothing was set")


def test_what_is_promised_after_is_on_disk_by_then() -> None:
    disk = Disk()
    keeping = Keeping(Scripted(Persist(STONES), PROMISE), disk.write, unasked)
    assert keeping.step(None, 0) == [PROMISE]
    assert disk.kept == [STONES]
    assert keeping.next_deadline() == 42


def test_a_promise_that_cannot_be_kept_is_not_given() -> None:
    disk = Disk()
    disk.full = True
    before, after = Answer(CallId(1), Done()), Leave("over")
    keeping = Keeping(Scripted(before, Persist(STONES), PROMISE, after), disk.write, unasked)
    first, instead, last = keeping.step(None, 0)
    assert (first, last) == (before, after), "other effects are passed on unchanged"
    assert isinstance(instead, Answer)
    assert instead.call == PROMISE.call
    assert isinstance(instead.reply, NotKept)
    assert instead.reply.detail == "the disk is full"

    disk.full = False
    assert keeping.step(None, 0) == [before, PROMISE, after], "the next one is kept again"
    assert disk.kept == [STONES]
