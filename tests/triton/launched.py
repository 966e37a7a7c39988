"""Opens the kernels that move and verify records and launches drawn ones, for a driver that loads and launches nothing:
`python -m tests.triton.launched` prints how many kernels opening has built and loaded, how many launches there were,
and how many kernels those have built and loaded besides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvcluster.device import triton_moves, triton_sums
from kvcluster.device.device import Range
from tests.device import moved, summed


class Utils:
    """What Triton loads a kernel with."""

    loaded = 0

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        Utils.loaded += 1
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "max_num_regs": 65_536, "multiprocessor_count": 132, "warpSize": 32}


class Launcher:
    """What Triton launches a kernel with."""

    launched = 0

    def __init__(self, source: object, metadata: object) -> None:
        """Needs to know neither."""

    def __call__(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        assert stream == 7 and z == 1
        Launcher.launched += 1


class CardDriver:
    """Triton's driver of an H100."""

    utils = Utils()
    launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


if __name__ == "__main__":
    driver.set_active(CardDriver())
    moves, sums_by = triton_moves.build(), triton_sums.build()
    opened = Utils.loaded
    for seed in range(200):
        for _, kernel in moved.drawn(seed, "cpu"):
            table = Range(0x7F00_0000_0000, kernel.table.nbytes)  # as an address of a device
            triton_moves.enqueue(replace(kernel, table=table), 7, moves)
        sums = summed.drawn(seed, "cpu").kernel
        triton_sums.enqueue(replace(sums, table=Range(0x7F00_0000_0000, sums.table.nbytes)), 7, sums_by)
    print(f"{opened} built, {Launcher.launched} launches, {Utils.loaded - opened} built besides")
