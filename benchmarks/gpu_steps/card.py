"""What the driver says of the card: what it can do with host memory, its copy engines, its place in the machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu_steps.driver import Driver, DriverError
from benchmarks.gpu_steps.rows import row

ATTRIBUTES = {
    "multiprocessors": 16,
    "L2 bytes": 38,
    "copy engines": 40,
    "unified addressing": 41,
    "stream priorities": 78,
    "managed memory": 83,
    "concurrent managed access": 89,
    "pageable memory access": 88,
    "pageable access by the host's page tables": 100,
    "host pointer serves for registered memory": 91,
    "registering host memory": 99,
    "registering memory that is mapped read-only (113)": 113,
    "virtual memory management": 102,
    "export as POSIX descriptor": 103,
    "memory pools": 115,
    "GPUDirect RDMA": 116,
    "dma-buf": 124,
    "NUMA node of the host (134)": 134,
    "MPS": 133,
}
LINK = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node")


def versions() -> str:
    named = []
    for name in ("torch", "triton", "transformers", "grpcio", "protobuf", "nanobind"):
        try:
            named.append(f"{name} {torch.__version__ if name == 'torch' else version(name)}")
        except PackageNotFoundError:
            named.append(f"no {name}")
    return f"python {platform.python_version()}, {', '.join(named)}"


def main(device: str) -> None:
    row("versions", value=versions())
    row("processors", value=os.cpu_count())
    row("memory of the machine, GiB", value=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30)
    try:
        from kvcluster.memory import native

        row("native core", value=native.name())
    except ImportError as error:
        row("native core", value=f"kvcluster cannot be imported: {error}", right=False)
    if device != "cuda":
        return
    driver = Driver()
    shown = torch.cuda.get_device_properties(0)
    row("name", value=shown.name)
    row("compute capability", value=f"{shown.major}.{shown.minor}")
    row("memory of the card, GiB", value=shown.total_memory >> 30)
    row("driver's CUDA version", value=driver.version())
    row("torch's CUDA version", value=str(torch.version.cuda))
    for name, number in ATTRIBUTES.items():
        try:
            row(name, value=driver.attribute(number))
        except DriverError as error:
            row(name, value=str(error))
    place = f"{driver.attribute(50):04x}:{driver.attribute(33):02x}:{driver.attribute(34):02x}.0"
    for name in LINK:
        path = Path("/sys/bus/pci/devices", place, name)
        row(f"PCI {name}", value=path.read_text().strip() if path.exists() else "not shown")
    row("NUMA nodes of the machine", value=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


if __name__ == "__main__":
    main(sys.argv[1])
