"""How cuda.py calls the driver, over a library that stands in for it: what every device does, contexts, errors. What
the driver of a card then does is asked of one by `make gpu`."""

from __future__ import annotations

import gc
import logging
import os
import threading

import pytest

from kvcluster.device import cuda
from kvcluster.device.cuda import CudaDevice
from kvcluster.device.cuda_driver import CudaDriver, DriverError
from kvcluster.device.device import DeviceFailed, NoMemory, Range
from tests.device.conformance import DeviceConformance
from tests.device.fake_cuda import FakeCard, library
from tests.device.programs import NBYTES, finish


@pytest.fixture
def card() -> FakeCard:
    return FakeCard()


@pytest.fixture
def device(card: FakeCard) -> CudaDevice:
    return card.device


class TestCuda(DeviceConformance):
    """The claims of every device."""


def test_it_has_the_name_that_other_processes_know(device: CudaDevice) -> None:
    assert device.name == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_every_thread_may_call_and_has_its_own_context_back_afterwards(card: FakeCard) -> None:
    """None is current there before and after, which the library refuses calls without."""
    done: list[bool] = []

    def run() -> None:
        stream = card.device.stream()
        finish(card.device, card.device.record(stream))
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done and card.library.cuCtxPopCurrent_v2(bytes(8)) == 201


def test_events_are_used_again_when_nobody_knows_them(card: FakeCard) -> None:
    stream = card.device.stream()
    kept = [card.device.record(stream) for _ in range(3)]
    made = card.count("fake_events")
    for _ in range(50):
        finish(card.device, card.device.record(stream))
    gc.collect()
    assert card.count("fake_events") <= made + 2
    assert all(card.device.done(event) for event in kept)


def test_memory_is_given_back_to_the_driver_once(card: FakeCard) -> None:
    taken, before = [card.device.allocate(NBYTES), card.device.pin(NBYTES)], card.count("fake_freed")
    for _ in range(2):
        for each in taken:
            each.release()
    assert card.count("fake_freed") == before + 2


def test_the_first_error_is_final_and_logged_once(card: FakeCard, caplog: pytest.LogCaptureFixture) -> None:
    device = card.device
    stream, memory, pinned = device.stream(), device.allocate(NBYTES), device.pin(NBYTES)
    event = device.record(stream)
    card.fail()
    calls = (
        lambda: device.done(event),
        device.stream,
        lambda: device.allocate(1),
        lambda: device.pin(1),
        lambda: device.record(stream),
        lambda: device.wait(stream, event),
        lambda: device.copy(memory.range, pinned.range, stream),
    )
    with caplog.at_level(logging.ERROR):
        for call in calls:
            with pytest.raises(DeviceFailed, match=r"is used no more in this process: cuEventQuery: 700"):
                call()
            card.library.fake_heal()  # it may answer again, but nobody can know what holds there
    assert len(caplog.records) == 1 and "restart the process" in caplog.text
    memory.release()
    pinned.release()


def test_an_address_that_a_failed_device_cannot_tell_is_not_the_cpus(card: FakeCard) -> None:
    memory = card.device.allocate(NBYTES)
    card.fail()
    assert card.device.around(memory.range.address) == Range(memory.range.address, 1)


def test_memory_that_is_not_pinned_is_an_error_and_not_a_copy(card: FakeCard) -> None:
    memory = card.device.allocate(NBYTES)
    with pytest.raises(DeviceFailed, match="cuMemcpyAsync: CUDA_ERROR"):
        card.device.copy(memory.range, memory.range._replace(address=id(card)), card.device.stream())


def test_a_size_that_is_refused_is_an_answer(card: FakeCard) -> None:
    with pytest.raises(NoMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        card.device.allocate(1 << 33)
    with pytest.raises(NoMemory, match="cuMemHostRegister"):
        card.device.pin(1 << 25)
    assert card.device.allocate(NBYTES).range.nbytes == NBYTES


def test_more_pinned_memory_than_a_container_may_have_is_refused_and_not_tried(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "memory_limit_bytes", lambda: 2 * NBYTES)
    first, _ = card.device.pin(NBYTES), card.device.pin(NBYTES)
    with pytest.raises(NoMemory, match=f"{2 * NBYTES + 1} pinned bytes are more than the {2 * NBYTES} of this machine"):
        card.device.pin(1)
    first.release()
    first.release()
    with pytest.raises(NoMemory, match="pinned bytes"):
        card.device.pin(NBYTES + 1)
    assert card.device.pin(NBYTES).range.nbytes == NBYTES


def test_a_process_that_was_forked_cannot_use_it(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything asked there: a lock may be held by a thread that the child does not have."""
    stream, parent = card.device.stream(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(DeviceFailed, match=f"opened by process {parent}, of which this one is a fork"):
        card.device.record(stream)
    monkeypatch.setattr(cuda.GATE, "passed", None)
    assert card.device.around(id(card)) is None


def test_without_a_library_or_a_device_it_says_so() -> None:
    with pytest.raises(OSError, match="libcuda-none"):
        CudaDriver("libcuda-none.so")
    with pytest.raises(DriverError, match=r"cuDeviceGetUuid_v2: .* \(101\)"):
        CudaDevice(CudaDriver(library()), 1, current=int, kernels={})


@pytest.mark.parametrize(("devices", "are_peers", "others"), [(1, 0, 0), (3, 0, 0), (3, 1, 2), (3, -1, 0)])
def test_a_card_reads_its_own_memory_and_that_of_its_peers(
    card: FakeCard, devices: int, are_peers: int, others: int
) -> None:
    """Below 0 the driver fails to say whether they are."""
    card.library.fake_devices(devices, are_peers)
    try:
        driver = CudaDriver(library())
        device = CudaDevice(driver, 0, current=int, kernels={})
        names = {driver.uuid(ordinal) for ordinal in range(1 + others)}
        assert device.reads == names and len(names) == 1 + others and device.name in names
    finally:
        card.library.fake_devices(1, 0)


def test_shared_memory_leaves_nothing_behind(card: FakeCard) -> None:
    shared = card.device.allocate_shared(NBYTES)
    descriptor = shared.descriptor()
    opened, before = card.device.open_shared(descriptor, shared.range.nbytes), card.count("fake_freed")
    os.close(descriptor)
    for memory in (shared, opened):
        memory.release()
    assert card.count("fake_freed") == before + 2
    with pytest.raises(NoMemory):  # more than was shared: nothing stays mapped or reserved
        larger = card.device.allocate_shared(NBYTES)
        card.device.open_shared(larger.descriptor(), 2 * larger.range.nbytes)
    assert card.count("fake_freed") == before + 3
