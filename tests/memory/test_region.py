from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvcluster.core.allocator import ALIGN_BYTES
from kvcluster.memory import arena
from kvcluster.memory.arena import Arena
from kvcluster.memory.region import HostRegion, Mapping, Region, RegionKind, address_of


def at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def test_an_arena_is_a_region_that_other_processes_may_map() -> None:
    with Arena(10_000) as memory:
        region: Region = memory
        assert (region.kind, region.nbytes) == (RegionKind.SHARED, 10_000)
        region.view(64, 4)[:] = b"page"
        assert at(region.address + 64, 4) == b"page"
        assert region.address % mmap.PAGESIZE == 0 and mmap.PAGESIZE % ALIGN_BYTES == 0


def test_an_arena_without_a_memory_file_belongs_to_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_memory_file", lambda: None)
    with Arena(64) as memory:
        assert memory.kind is RegionKind.HOST


@pytest.mark.parametrize("writable", [False, True])
def test_a_mapping_is_the_same_memory_at_another_address(writable: bool) -> None:
    with Arena(4_096) as memory:
        descriptor = memory.open(writable=writable)
        try:
            region: Region = Mapping(descriptor, memory.nbytes, writable=writable)
        finally:
            os.close(descriptor)
        memory.view(100, 4)[:] = b"page"
        assert region.address != memory.address
        assert at(region.address + 100, 4) == b"page" == bytes(region.view(100, 4))
        assert (region.kind, region.view(0, 1).readonly) == (RegionKind.SHARED, not writable)


def test_a_buffer_becomes_a_region_where_it_lies() -> None:
    buffer = memoryview(bytearray(256))
    region: Region = HostRegion(buffer, address_of(buffer))
    buffer[3] = 7
    assert (region.kind, region.nbytes, bytes(region.view(3, 1))) == (RegionKind.HOST, 256, b"\7")
    assert at(region.address, 256) == bytes(buffer)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 9), (8, 1), (0, -1)])
def test_a_view_lies_within_its_region(offset: int, nbytes: int) -> None:
    with pytest.raises(AssertionError):
        HostRegion(memoryview(bytearray(8)), 64).view(offset, nbytes)


def test_a_closed_region_gives_no_views() -> None:
    region = HostRegion(memoryview(bytearray(8)), 64, RegionKind.PINNED)
    region.close()
    region.close()
    with pytest.raises(ValueError, match="released"):
        region.view(0, 1)


def test_the_cpu_addresses_every_kind_but_a_devices() -> None:
    assert [kind for kind in RegionKind if not kind.host_addressable] == [RegionKind.DEVICE]
    with pytest.raises(AssertionError):
        HostRegion(memoryview(bytearray(8)), 64, RegionKind.DEVICE)
