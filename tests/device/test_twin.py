"""The twin of a device: what every device does, and that whatever nothing orders is found."""

from __future__ import annotations

import signal
import subprocess
import sys
from random import Random

import pytest

from kvcluster.device.device import DeviceFailed, Range
from kvcluster.device.ordering import Ordering, Unordered
from kvcluster.device.software_twin import Machine, Twin
from tests.device.conformance import DeviceConformance
from tests.device.programs import NBYTES, Program, finish

SEEDS = range(300)


@pytest.fixture
def device() -> Twin:
    return Twin(Machine(Random(1)))


class TestTwin(DeviceConformance):
    """The claims of every device."""


# ------------------------------------------------------------------------------------------------- order


def test_programs_that_wait_where_they_must_leave_the_same_bytes_however_late_the_device_is() -> None:
    for seed in SEEDS:
        assert Program(Twin(Machine(Random(-seed))), Random(seed)).agrees(25), f"seed {seed}"


def test_the_first_wait_that_is_left_out_is_found_at_once() -> None:
    """By the order alone: whether bytes would have come out wrong or not."""
    found = [Program(Twin(Machine(Random(-seed))), Random(seed), forgets=True).run(40) for seed in SEEDS]
    assert found.count(False) > 0.9 * len(SEEDS)


class Blind(Ordering):
    """Sees nothing."""

    def _touch(self, access: object) -> None:
        """Everything is in order."""


def lands_in_time(seed: int) -> bool:
    """A copy to the device and one back on another stream, which does not wait."""
    machine = Machine(Random(seed))
    machine.ordering = Blind()
    twin = Twin(machine)
    there, back, memory = twin.pin(NBYTES), twin.pin(NBYTES), twin.allocate(NBYTES)
    first, last = twin.stream(), twin.stream()
    data = Random(0).randbytes(NBYTES)
    with there.opened(0, NBYTES, writes=True) as view:
        view[:] = data
    twin.copy(memory.range, there.range, first)
    twin.copy(back.range, memory.range, last)
    finish(twin, twin.record(last))
    with back.opened(0, NBYTES, writes=False) as view:
        return bytes(view) == data


def test_what_is_not_ordered_comes_out_wrong_in_most_runs_and_right_in_some() -> None:
    in_time = [lands_in_time(seed) for seed in range(100)]
    assert 0 < sum(in_time) < 50


def test_a_read_of_the_cpu_before_the_event_is_done_is_named(device: Twin) -> None:
    pinned, memory, stream = device.pin(NBYTES), device.allocate(NBYTES), device.stream()
    device.copy(pinned.range, memory.range, stream)
    event = device.record(stream)
    unordered = pytest.raises(Unordered, match=f"the CPU's read touches what a copy of {NBYTES} bytes on stream 2")
    with unordered, pinned.opened(0, NBYTES, writes=False):
        raise AssertionError("it may be under way")
    finish(device, event)
    with pinned.opened(0, NBYTES, writes=False):
        """Now it is done, and that is known."""


def test_a_slot_that_is_used_again_early_is_named(device: Twin) -> None:
    slot, memory, stream = device.pin(NBYTES), device.allocate(NBYTES), device.stream()
    device.copy(memory.range, slot.range, stream)
    with pytest.raises(Unordered, match="the CPU's write"), slot.opened(0, NBYTES, writes=True):
        raise AssertionError("it is being read")


def test_a_slot_that_is_copied_while_the_cpu_writes_it_is_named(device: Twin) -> None:
    slot, memory, stream = device.pin(NBYTES), device.allocate(NBYTES), device.stream()
    with pytest.raises(Unordered), slot.opened(0, NBYTES, writes=True):
        device.copy(memory.range, slot.range, stream)


def test_memory_that_is_given_back_under_way_is_named(device: Twin) -> None:
    slot, memory, stream = device.pin(NBYTES), device.allocate(NBYTES), device.stream()
    device.copy(memory.range, slot.range, stream)
    for given_back in (slot, memory):
        with pytest.raises(Unordered, match="giv"):
            given_back.release()


# ------------------------------------------------------------------------------------------------ misuse


def test_new_memory_holds_garbage(device: Twin) -> None:
    with device.pin(NBYTES).opened(0, NBYTES, writes=False) as view:
        assert any(view)


def test_memory_of_another_device_or_of_nobody_is_refused() -> None:
    machine = Machine(Random(1))
    ours, theirs = Twin(machine, "twin-0"), Twin(machine, "twin-1")
    here, there, stream = ours.allocate(NBYTES), theirs.allocate(NBYTES), ours.stream()
    with pytest.raises(AssertionError, match="neither memory of twin-0"):
        ours.copy(here.range, there.range, stream)
    with pytest.raises(AssertionError, match="is not of twin-1"):
        theirs.record(stream)
    here.release()
    with pytest.raises(AssertionError, match="neither memory of twin-0"):
        ours.copy(here.range, ours.pin(NBYTES).range, stream)
    with pytest.raises(AssertionError, match="nor pinned"):
        ours.copy(ours.allocate(NBYTES).range, Range(id(machine), NBYTES), stream)


def test_the_cpu_cannot_touch_its_memory() -> None:
    """The process that tries ends."""
    script = """
import random
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.memory.region import bytes_at
memory = Twin(Machine(random.Random(1))).allocate(64)
print("allocated", flush=True)
bytes(bytes_at(*memory.range))
print("read", flush=True)
"""
    ended = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV and ended.stdout == "allocated\n", ended


def test_a_device_that_has_failed_answers_nothing_and_does_nothing_more(device: Twin) -> None:
    slot, memory, stream = device.pin(NBYTES), device.allocate(NBYTES), device.stream()
    device.copy(memory.range, slot.range, stream)
    event = device.record(stream)
    device.fail()
    calls = (lambda: device.done(event), device.stream, lambda: device.allocate(1), lambda: device.pin(1))
    for call in calls:
        with pytest.raises(DeviceFailed, match="twin-0"):
            call()
