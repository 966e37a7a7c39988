"""What becomes of a call with tensors on a GPU: by what was set, and by what this machine has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from random import Random
from subprocess import CalledProcessError
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kvcluster
from kvcluster import Paged
from kvcluster import device as device_package
from kvcluster.core.miss import MissReason
from kvcluster.device import torch_cuda
from kvcluster.device.cuda import CudaDevice
from kvcluster.device.cuda_driver import CudaDriver
from kvcluster.device.device import Range
from kvcluster.device.devices import DEVICES, Devices
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import DeviceStaging
from kvcluster.errors import CallerError, ConfigError
from kvcluster.memory.region import bytes_at
from kvcluster.testing import MemoryCluster
from tests.client.build import BLOCK, DIM, HEADS, LAYERS, spec_of
from tests.device.fake_cuda import FakeCard, library

SPEC, TOKENS = spec_of(dtype="bfloat16"), list(range(2 * BLOCK))


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEVICES, "staging_bytes", 0)
    monkeypatch.setattr(torch_cuda, "_TRIED", {})


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(shards=1, ram_bytes="4MiB") as cluster:
        yield cluster


def on_a_card() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, LAYERS, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16, device="cuda:0")


def test_tensors_on_a_card_are_refused_unless_their_user_has_said_otherwise(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    for call in (client.store, client.load):
        with pytest.raises(
            CallerError, match=r"is a tensor on cuda:0, and .*ClientConfig\(device_staging_bytes=2\*\*28"
        ):
            call(TOKENS, on_a_card())


def test_without_what_it_takes_the_reason_is_named() -> None:
    with MemoryCluster(shards=1, config={"client": {"device_staging_bytes": "64MiB"}}) as cluster:
        client = cluster.client(SPEC)
        assert DEVICES.staging_bytes == 2**26
        refused = r"cuda:0, which cannot be used: .*(Triton|libcuda).*\. Pass tensor\.cpu\(\)"
        with pytest.raises(CallerError, match=refused):
            client.load(TOKENS, on_a_card())
    assert not DEVICES


def test_a_process_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch_cuda, "_opened", lambda index: asked.append(index) or "no")
    kind = SPEC.groups[0], BLOCK, HEADS
    assert torch_cuda.reach(0, *kind) == torch_cuda.reach(0, *kind) == torch_cuda.reach(1, *kind) == "no"
    assert asked == [0, 1]


@pytest.mark.parametrize("nbytes", ["1KiB", 1])
def test_staging_that_holds_no_chunk_is_refused(nbytes: int | str) -> None:
    with pytest.raises(ConfigError, match=r"device_staging_bytes must be 0 or at least 16777216, not 1"):
        kvcluster.local(ray=False, config={"client": {"device_staging_bytes": nbytes}})


def test_a_device_without_room_for_staging_is_a_miss_and_is_asked_again(cluster: MemoryCluster) -> None:
    twin = Twin(Machine(Random(3)), nbytes=1 << 22, pinnable=0)
    memory = twin.allocate(2 * torch.Size((2, LAYERS, 2, BLOCK, HEADS, DIM)).numel())
    cache = torch.frombuffer(bytes_at(*memory.range), dtype=torch.bfloat16).view(2, LAYERS, 2, BLOCK, HEADS, DIM)
    layers = Paged([cache[:, layer] for layer in range(LAYERS)], range(2))
    DEVICES.open_later(twin, lambda: DeviceStaging(twin, slot_bytes=4_096, slots=2), 4_096)
    try:
        client = cluster.client(SPEC)
        missed = client.store(TOKENS, layers)
        assert missed.blocks == 0 and missed.miss is not None and missed.miss.reason is MissReason.DEVICE_LOST
        assert "twin-0 has no room for staging: 4096 bytes cannot be pinned" in str(missed.miss)
        twin._pinnable = 1 << 20
        assert client.store(TOKENS, layers).blocks == 2
    finally:
        DEVICES.remove(twin)


def test_allocations_are_asked_for_once_a_call() -> None:
    one, other = (Twin(Machine(Random(seed)), f"twin-{seed}") for seed in (0, 1))
    asked: list[int] = []
    devices = Devices()
    for twin in (one, other):
        around = twin.around

        def noted(address: int, around: Callable[[int], Range | None] = around) -> Range | None:
            asked.append(address)
            return around(address)

        twin.around = noted  # type: ignore[method-assign]
        devices.add(DeviceStaging(twin, slot_bytes=64, slots=1))
    memories = [twin.allocate(64).range.address for twin in (one, other)]
    here = id(asked)
    addresses = [memories[0], memories[0] + 8, memories[1], memories[1] + 63, memories[0], here, here]
    assert devices.holders(addresses) == [one, other, None]
    assert asked == [memories[0], memories[1], memories[1], here, here, here, here]


def test_ids_on_a_card_are_refused_since_they_would_be_waited_for(cluster: MemoryCluster) -> None:
    with FakeTensorMode():
        ids = torch.zeros(2, dtype=torch.int64, device="cuda:0")
    layers = [torch.zeros(2, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    with pytest.raises(CallerError, match="are a tensor on cuda:0, whose values this thread would have to wait for"):
        cluster.client(SPEC).load(TOKENS, Paged(layers, ids))


KERNELS = "triton_moves", "triton_sums", "triton_decoding"


class Kernels(ModuleType):
    """Stands in for a module that Triton is needed for."""

    def __init__(self, fails: Exception | None) -> None:
        super().__init__("kernels")
        self.fails, self.built = fails, 0

    def enqueue(self, kernel: object, **settings: object) -> None:
        """Is not called."""

    def build(self, *arguments: object) -> None:
        self.built += 1
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Has a driver with a device, and kernels that are built, all but one of KERNELS."""

    def has(failing: int | None) -> None:
        for number, name in enumerate(KERNELS):
            fails = CalledProcessError(1, ["gcc"]) if number == failing else None
            monkeypatch.setitem(sys.modules, f"kvcluster.device.{name}", Kernels(fails))
            monkeypatch.setattr(device_package, name, sys.modules[f"kvcluster.device.{name}"], raising=False)
        monkeypatch.setattr(torch_cuda, "CudaDriver", partial(CudaDriver, library()))
        monkeypatch.setattr(torch_cuda, "_cache", nullcontext)
        monkeypatch.setattr(torch_cuda, "_BUILT", set())
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        monkeypatch.setattr(torch_cuda, "DEVICES", Devices())
        FakeCard()

    return has


@pytest.mark.parametrize("which", range(3))
def test_kernels_that_cannot_be_built_are_a_reason(card: Callable[[int | None], None], which: int) -> None:
    card(which)
    for _ in range(2):
        assert "CalledProcessError: Command '['gcc']'" in torch_cuda.reach(0, SPEC.groups[0], BLOCK, HEADS)


def test_a_device_is_opened_once_and_built_for_each_kind_of_page(card: Callable[[int | None], None]) -> None:
    card(None)
    for heads in (HEADS, HEADS, HEADS + 1, HEADS):
        assert torch_cuda.reach(0, SPEC.groups[0], BLOCK, heads) == ""
    (device,) = torch_cuda.DEVICES._added
    assert isinstance(device, CudaDevice)
    assert [sys.modules[f"kvcluster.device.{name}"].built for name in KERNELS] == [1, 1, 2]
    assert "cuDeviceGetAttribute" in torch_cuda.reach(1, SPEC.groups[0], BLOCK, HEADS), "there is no second one"
