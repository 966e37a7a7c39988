"""What it takes to make host memory known to the card: seconds a GiB of registering a shard's memory file, which is
populated already, of giving it back, and of torch's own pinned memory, which is made new."""

from __future__ import annotations

import os
import time

import torch

from benchmarks.gpu_steps.copies import READ_ONLY
from benchmarks.gpu_steps.driver import Driver, DriverError
from benchmarks.gpu_steps.rows import row
from kvcluster.memory.arena import Arena
from kvcluster.memory.region import Mapping

GIB = 2**30


def timed(driver: Driver, region: Arena | Mapping, nbytes: int, flags: int) -> tuple[float | str, float | str]:
    began = time.perf_counter()
    try:
        driver.register(region.address, nbytes, flags)
    except DriverError as error:
        return str(error), ""
    registered = time.perf_counter()
    driver.unregister(region.address)
    return (registered - began) * GIB / nbytes, (time.perf_counter() - registered) * GIB / nbytes


def main() -> None:
    torch.empty(1, device="cuda")
    driver = Driver()
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for gib in (1, 4, 8):
        nbytes = gib * GIB
        if 3 * nbytes > room:
            row("memory file", GiB=gib, populate="too little memory here", register="", give_back="")
            continue
        began = time.perf_counter()
        with Arena(nbytes) as arena:
            populated = (time.perf_counter() - began) / gib
            register, back = timed(driver, arena, nbytes, 0)
            row("memory file, writable", GiB=gib, populate=populated, register=register, give_back=back)
            fd = arena.open(writable=False)
            mapping = Mapping(fd, nbytes, writable=False)
            os.close(fd)
            register, back = timed(driver, mapping, nbytes, READ_ONLY)
            row("memory file, mapped read-only", GiB=gib, populate="", register=register, give_back=back)
            del mapping
    for gib in (1, 4):
        began = time.perf_counter()
        pinned = torch.empty(gib * GIB, dtype=torch.uint8, pin_memory=True)
        row(
            "pinned by torch, made new",
            GiB=gib,
            populate="",
            register=(time.perf_counter() - began) / gib,
            give_back="",
        )
        del pinned


if __name__ == "__main__":
    main()
