"""NCCL in a world of one, which is all that one card can show of it: does torch's process group start over a store of
its own, does `all_to_all_single` give the bytes, and does `abort` return? Nothing of this says how NCCL moves bytes
between two cards."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_steps.rows import attempt, row, skip


def group() -> Any:
    """Returns a group of this process alone, which no other group of the process knows of."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=20)
    return dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)


def all_to_all() -> None:
    began = time.perf_counter()
    made = group()
    row("a group of one", seconds=time.perf_counter() - began)
    given = torch.randint(0, 256, (2**25,), dtype=torch.uint8, device="cuda")
    into = torch.empty_like(given)
    began = time.perf_counter()
    made.alltoall_base(into, given, [], []).wait()
    torch.cuda.synchronize()
    row("all_to_all_single of 32 MiB, the first", seconds=time.perf_counter() - began, right=torch.equal(into, given))
    torch.cuda._sleep(4_000_000_000)  # what follows is still under way
    made.alltoall_base(into, given, [], [])
    began = time.perf_counter()
    made.abort()
    row("abort of a transfer under way", seconds=time.perf_counter() - began)
    torch.cuda.synchronize()
    row("the card after the abort", right=int(torch.ones(8, device="cuda").sum()) == 8)


def main() -> None:
    if not dist.is_nccl_available():
        skip("this torch has no NCCL")
    row("version", value=".".join(map(str, torch.cuda.nccl.version())))
    attempt(all_to_all, "NCCL")


if __name__ == "__main__":
    main()
    sys.exit(0)
