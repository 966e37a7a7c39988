"""What every device does: claims that the twin and a card have to meet."""

from __future__ import annotations

import os
from random import Random

import pytest

from kvcluster.device.device import Device, NoMemory, Range
from tests.device.programs import NBYTES, Program, Xor, finish


class DeviceConformance:
    """Claims about one device, which the fixture `device` makes."""

    def test_what_is_copied_there_and_back_is_the_same(self, device: Device) -> None:
        there, back, memory, stream = device.pin(NBYTES), device.pin(NBYTES), device.allocate(NBYTES), device.stream()
        with there.opened(0, NBYTES, writes=True) as view:
            view[:] = bytes(range(NBYTES))
        device.copy(memory.range, there.range, stream)
        device.copy(back.range, memory.range, stream)
        finish(device, device.record(stream))
        with back.opened(0, NBYTES, writes=False) as view:
            assert view == bytes(range(NBYTES)) and view.readonly

    def test_a_stream_that_waits_for_another_comes_after_it(self, device: Device) -> None:
        pinned, memory = device.pin(2 * NBYTES), device.allocate(NBYTES)
        first, last = device.stream(), device.stream()
        with pinned.opened(0, NBYTES, writes=True) as view:
            view[:] = b"\x05" * NBYTES
        half = Range(pinned.range.address, NBYTES)
        device.copy(memory.range, half, first)
        device.wait(last, device.record(first))
        device.launch(Xor(memory.range, half), last)
        device.copy(Range(pinned.range.address + NBYTES, NBYTES), memory.range, last)
        finish(device, device.record(last))
        with pinned.opened(NBYTES, 2 * NBYTES, writes=False) as view:
            assert bytes(view) == bytes(NBYTES)

    def test_it_knows_its_own_memory_by_address(self, device: Device) -> None:
        memory, pinned = device.allocate(NBYTES), device.pin(NBYTES)
        around = device.around(memory.range.address + NBYTES - 1)
        assert around is not None and around.address <= memory.range.address
        assert around.address + around.nbytes >= memory.range.address + NBYTES
        assert device.around(pinned.range.address) is None

    def test_memory_that_is_not_there_is_refused_and_nothing_is_taken(self, device: Device) -> None:
        for take in (device.allocate, device.pin):
            with pytest.raises(NoMemory):
                take(1 << 60)
            take(NBYTES).release()

    def test_memory_is_given_back_once(self, device: Device) -> None:
        for memory in (device.allocate(NBYTES), device.pin(NBYTES)):
            memory.release()
            memory.release()

    def test_what_is_shared_is_read_where_it_was_opened_also_when_its_owner_has_given_it_back(
        self, device: Device
    ) -> None:
        shared, stream = device.allocate_shared(NBYTES), device.stream()
        nbytes = shared.range.nbytes
        pinned = device.pin(2 * NBYTES)
        with pinned.opened(0, NBYTES, writes=True) as view:
            view[:] = bytes(range(NBYTES))
        device.copy(shared.range.piece(0, NBYTES), pinned.range.piece(0, NBYTES), stream)
        finish(device, device.record(stream))
        descriptor = shared.descriptor()
        opened = device.open_shared(descriptor, nbytes)
        os.close(descriptor)
        assert opened.range.nbytes == nbytes >= NBYTES and opened.range.address != shared.range.address
        assert device.around(opened.range.address) is not None
        device.copy(pinned.range.piece(NBYTES, NBYTES), opened.range.piece(0, NBYTES), stream)
        finish(device, device.record(stream))
        with pinned.opened(NBYTES, 2 * NBYTES, writes=False) as view:
            assert bytes(view) == bytes(range(NBYTES))
        for memory in (shared, opened, shared, opened):
            memory.release()

    def test_what_is_not_shared_memory_of_it_is_not_opened(self, device: Device) -> None:
        reads, writes = os.pipe()
        for each in (reads, writes, 10**6):
            with pytest.raises(NoMemory):
                device.open_shared(each, NBYTES)
        os.close(reads)
        os.close(writes)
        with pytest.raises(NoMemory):
            device.allocate_shared(1 << 60)

    @pytest.mark.parametrize("seed", range(20))
    def test_a_program_that_waits_where_it_must_leaves_what_it_would_in_order(self, device: Device, seed: int) -> None:
        assert Program(device, Random(seed)).agrees(30)
