"""What this machine and installation have for KV in the memory of a GPU, without importing torch or making contexts."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvcluster.device.cuda_driver import CudaDriver, DriverError

_MULTIPROCESSORS, _REGISTERS_READ_ONLY = 16, 113
_COMPILERS = ("gcc", "clang", "cc")


def kernel_cache() -> Path:
    """Returns the folder in which compiled kernels are kept. Raises RuntimeError if there is no home."""
    return Path.home() / ".cache" / "kvcluster" / "triton"


def examine() -> dict[str, Any]:
    """Returns the findings as plain values: `driver` (its version of CUDA, or None), `devices`, `torch` and `triton`
    (their versions, or None), `compiler`, `cache` (the folder for kernels, or None if they cannot be kept), and
    `missing`: why KV cannot lie on a GPU here, a sentence each."""
    missing: list[str] = []
    driver, devices = _devices(missing)
    torch, triton = _version("torch"), _version("triton")
    if torch is None:
        missing.append("torch is not installed: pip install torch")
    elif "+cpu" in torch or "+rocm" in torch:
        missing.append(f"torch {torch} is not built for CUDA: install its build for CUDA")
    if triton is None:
        missing.append("Triton is not installed: it comes with torch for CUDA")
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        missing.append("there is no C compiler, which Triton needs to launch kernels: install gcc")
    return {
        "driver": driver,
        "devices": devices,
        "torch": torch,
        "triton": triton,
        "compiler": compiler,
        "cache": _cache(),
        "missing": missing,
    }


def _devices(missing: list[str]) -> tuple[str | None, list[dict[str, Any]]]:
    """Returns the driver's version of CUDA and the devices that it shows to this process."""
    try:
        driver = CudaDriver()
        number, count = driver.version(), driver.count()
    except (OSError, DriverError) as error:
        missing.append(f"there is no driver of NVIDIA's, or it has no device: {error}")
        return None, []
    devices = []
    for ordinal in range(count):
        missing.extend(f"{driver.uuid(ordinal)} has no {name}" for name in driver.lacks(ordinal))
        devices.append(
            {
                "uuid": driver.uuid(ordinal),
                "name": driver.device_name(ordinal),
                "memory_bytes": driver.memory_bytes(ordinal),
                "multiprocessors": driver.attribute(_MULTIPROCESSORS, ordinal),
                "registers_read_only": bool(driver.attribute(_REGISTERS_READ_ONLY, ordinal)),
            }
        )
    if not devices:
        missing.append("the driver shows no device to this process: see CUDA_VISIBLE_DEVICES")
    return f"{number // 1000}.{number % 1000 // 10}", devices


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cache() -> str | None:
    """Returns the folder if kernels can be kept there: it, or the nearest one above it that exists, can be written."""
    try:
        folder = kernel_cache()
    except RuntimeError:
        return None
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return str(folder) if os.access(there, os.W_OK) else None
