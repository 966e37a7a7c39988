from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvcluster.core.allocator import ALIGN_BYTES
from kvcluster.errors import ConfigError
from kvcluster.memory import arena
from kvcluster.memory.arena import Arena


def test_memory_begins_as_zeros_and_keeps_what_is_written() -> None:
    with Arena(10_000) as memory:
        assert memory.nbytes == 10_000
        assert bytes(memory.view(0, 10_000)) == bytes(10_000)
        memory.view(100, 4)[:] = b"page"
        assert bytes(memory.view(98, 8)) == b"\0\0page\0\0"


def test_every_page_is_resident_before_it_is_used() -> None:
    pages = 512
    with Arena(pages * mmap.PAGESIZE) as memory:
        resident = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory.view(0, 1)))
        assert start % ALIGN_BYTES == 0
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(memory.nbytes), resident) == 0
        assert all(flag & 1 for flag in resident)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 65), (64, 1), (60, 5), (0, -1)])
def test_a_view_lies_within_the_arena(offset: int, nbytes: int) -> None:
    with Arena(64) as memory, pytest.raises(AssertionError):
        memory.view(offset, nbytes)


def test_views_outlive_the_close_and_none_is_given_after_it() -> None:
    with Arena(64) as memory:
        view = memory.view(0, 4)
        view[:] = b"kept"
    assert bytes(view) == b"kept"
    with pytest.raises(ValueError, match="released"):
        memory.view(0, 4)


def test_closing_twice_is_closing_once() -> None:
    memory = Arena(64)
    memory.close()
    memory.close()


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match="ram_bytes a size"):
        Arena(0)


def test_more_than_the_machine_has_is_refused_before_it_kills() -> None:
    with pytest.raises(ConfigError, match="in all\\); lower ram_bytes"):
        Arena(2**60)


def test_what_the_system_refuses_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "memory_limit_bytes", lambda: 2**62)
    with pytest.raises(ConfigError, match="Cannot allocate memory"):
        Arena(2**61)


# ------------------------------------------------------------------------------------------ as a memory file


def test_its_size_is_sealed() -> None:
    with Arena(10_000) as memory:
        descriptor = memory.open(writable=True)
        assert os.fstat(descriptor).st_size == 10_000
        for nbytes in (9_999, 10_001):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, nbytes)
        os.close(descriptor)


@pytest.mark.parametrize("user", [4_321] if os.geteuid() == 0 else [])
def test_another_user_with_a_descriptor_for_reading_gets_none_for_writing(user: int) -> None:
    with Arena(64) as memory:
        descriptor = memory.open(writable=False)
        os.seteuid(user)
        try:
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        finally:
            os.seteuid(0)
            os.close(descriptor)


def test_it_lies_in_no_directory_and_what_is_handed_out_is_not_inherited() -> None:
    with Arena(64) as memory:
        descriptor = memory.open(writable=False)
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{arena.FILE_NAME}")
        assert not os.get_inheritable(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        os.close(descriptor)


def test_a_descriptor_keeps_the_memory_after_the_close_and_none_is_given_after_it() -> None:
    with Arena(64) as memory:
        memory.view(0, 4)[:] = b"kept"
        descriptor = memory.open(writable=False)
    assert os.pread(descriptor, 4, 0) == b"kept"
    os.close(descriptor)
    with pytest.raises(ConfigError, match="cannot be shared"):
        memory.open(writable=False)


def refuse(*arguments: object) -> int:
    raise OSError(38, "Function not implemented")


def test_where_the_system_has_no_memory_files_the_memory_is_this_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for hide in (
        lambda: monkeypatch.setattr(os, "memfd_create", refuse),
        lambda: monkeypatch.delattr(os, "memfd_create"),
    ):
        hide()
        with Arena(10_000) as memory:
            memory.view(9_996, 4)[:] = b"page"
            assert bytes(memory.view(9_994, 6)) == b"\0\0page"
            with pytest.raises(ConfigError, match="cannot be shared"):
                memory.open(writable=False)


def test_memory_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="Function not implemented\\); lower ram_bytes"):
        Arena(10_000)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_without_proc_it_cannot_be_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with Arena(64) as memory:
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(ConfigError, match="is /proc mounted"):
            memory.open(writable=False)
