"""The mapping of another process's arena."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcluster.errors import ProtocolError
from kvcluster.memory import region
from kvcluster.memory.arena import FILE_NAME, Arena
from kvcluster.memory.region import Mapping

NBYTES = 3 * 4_096 + 5
CHUNK = region._CHUNK_BYTES


def mapped(memory: Arena, *, writable: bool) -> Mapping:
    descriptor = memory.open(writable=writable)
    try:
        return Mapping(descriptor, memory.nbytes, writable=writable)
    finally:
        os.close(descriptor)


def times_mapped(memory: Arena) -> int:
    """By this process, the arena's own time included."""
    descriptor = memory.open(writable=False)
    file = str(os.fstat(descriptor).st_ino)
    os.close(descriptor)
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(FILE_NAME in line and line.split()[4] == file for line in lines)


def test_both_sides_see_the_same_bytes() -> None:
    with Arena(NBYTES) as memory:
        reading, writing = mapped(memory, writable=False), mapped(memory, writable=True)
        writing.view(NBYTES - 3, 3)[:] = b"end"
        memory.view(0, 5)[:] = b"begin"
        assert bytes(reading.view(0, 5)) == b"begin"
        assert bytes(memory.view(NBYTES - 3, 3)) == bytes(reading.view(NBYTES - 3, 3)) == b"end"


def test_what_is_mapped_for_reading_cannot_be_written() -> None:
    with Arena(NBYTES) as memory:
        view = mapped(memory, writable=False).view(0, 4)
        assert view.readonly
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1


def test_a_descriptor_for_reading_cannot_be_mapped_for_writing() -> None:
    with Arena(NBYTES) as memory:
        descriptor = memory.open(writable=False)
        with pytest.raises(PermissionError):
            Mapping(descriptor, NBYTES, writable=True)
        os.close(descriptor)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, NBYTES + 1), (NBYTES, 1), (0, -1)])
def test_a_view_lies_within_the_mapping(offset: int, nbytes: int) -> None:
    with Arena(NBYTES) as memory, pytest.raises(AssertionError):
        mapped(memory, writable=False).view(offset, nbytes)


def test_a_view_keeps_the_mapping_and_the_last_lets_it_go() -> None:
    with Arena(NBYTES) as memory:
        view = mapped(memory, writable=True).view(10, 4)
        part = view[1:].toreadonly()
        assert times_mapped(memory) == 2
        view[:] = b"page"
        del view
        assert bytes(part) == b"age"
        del part
        assert times_mapped(memory) == 1


def test_what_is_mapped_outlives_the_arena() -> None:
    with Arena(NBYTES) as memory:
        view = mapped(memory, writable=False).view(0, 4)
        memory.view(0, 4)[:] = b"kept"
    assert bytes(view) == b"kept"


def test_no_descriptor_is_kept() -> None:
    with Arena(NBYTES) as memory:
        before = len(os.listdir("/proc/self/fd"))
        reading, writing = mapped(memory, writable=False), mapped(memory, writable=True)
        assert len(os.listdir("/proc/self/fd")) == before
        assert reading.nbytes == writing.nbytes == NBYTES


def resident(memory: Mapping) -> int:
    """Returns the bytes of a mapping that are in this process's page tables."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"{memory.address:x}-"):
            return next(int(of.split()[1]) << 10 for of in lines if of.startswith("Rss:"))
    raise AssertionError("it is not mapped")


@pytest.mark.parametrize(
    "ranges", [[], [(0, 1)], [(3 * CHUNK - 1, 2)], [(CHUNK, 3 * CHUNK), (8 * CHUNK + 9, CHUNK - 9)]]
)
def test_what_is_to_be_written_is_populated_and_nothing_else(ranges: list[tuple[int, int]]) -> None:
    chunks = {at for offset, nbytes in ranges for at in range(offset // CHUNK, (offset + nbytes - 1) // CHUNK + 1)}
    with Arena(9 * CHUNK) as memory:
        there = mapped(memory, writable=True)
        assert resident(there) == 0
        for _ in range(2):
            there.populate([offset for offset, _ in ranges], [nbytes for _, nbytes in ranges])
            # the kernel may add some pages around
            assert len(chunks) * CHUNK <= resident(there) <= len(chunks) * (CHUNK + 2**17)
        there.view(0, 1)[:] = b"x"
        assert bytes(memory.view(0, 1)) == b"x"


def test_a_kernel_that_cannot_populate_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_MADV_POPULATE_READ", 99)
    with Arena(NBYTES) as memory:
        there = mapped(memory, writable=True)
        there.populate([0], [NBYTES])
        there.view(NBYTES - 4, 4)[:] = b"last"
        assert bytes(memory.view(NBYTES - 4, 4)) == b"last"


def test_what_is_no_arena_of_that_size_is_refused(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    os.ftruncate(loose, NBYTES)
    with Arena(NBYTES) as memory:
        descriptor = memory.open(writable=False)
        for fd, nbytes, says in [
            (file, 1, "not a memory file|not sealed"),
            (reading, 1, "not a memory file"),
            (loose, NBYTES, "not sealed"),
            (descriptor, NBYTES + 1, f"a memory file of {NBYTES}"),
            (descriptor, 2**40, f"a memory file of {NBYTES}"),
            (descriptor, 0, "of 0 bytes"),
        ]:
            with pytest.raises(ProtocolError, match=says):
                Mapping(fd, nbytes, writable=False)
    for fd in (file, loose, reading, writing, descriptor):
        os.close(fd)


def see_nothing_in_a_child() -> None:
    """Maps an arena twice and forks: the child lists its mappings, drops them, and has other memory where they were."""
    memory = Arena(NBYTES)
    maps = [mapped(memory, writable=writable) for writable in (False, True)]
    child = os.fork()
    if not child:
        print(times_mapped(memory) - 1, flush=True)
        maps.clear()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(status, times_mapped(memory) - 1, flush=True)


def test_a_forked_child_has_no_mapping_and_takes_none_from_its_parent() -> None:
    script = f"from {__name__} import see_nothing_in_a_child; see_nothing_in_a_child()"
    said = subprocess.check_output([sys.executable, "-c", script], text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert said.split() == ["0", "0", "2"]
