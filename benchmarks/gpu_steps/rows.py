"""How a step reports: a line of JSON for each row, on stdout (benchmarks/gpu.py reads it)."""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from benchmarks.gpu import SKIP_STATUS


def row(what: str, **columns: Any) -> None:
    """Reports one row. `right=False` makes the step wrong."""
    print(json.dumps({"what": what, **columns}), flush=True)


def attempt(part: Callable[[], object], name: str) -> None:
    """Runs a part of a step. If it raises, that is a wrong row, and the parts after it are tried all the same."""
    try:
        part()
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        row(f"{name} failed", error=f"{type(error).__name__}: {error}"[:300], right=False)


def skip(why: str) -> NoReturn:
    """Ends the step, which cannot run here."""
    print(why, flush=True)
    sys.exit(SKIP_STATUS)


def device_seconds(call: Callable[[], object], *, least_s: float = 0.05, most: int = 200) -> float:
    """Returns the median time that the card takes for a call, in seconds, by events around it on the current stream:
    the card is kept busy meanwhile, so that what the host takes to enqueue it does not count."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    taken: list[float] = []
    while sum(taken) < least_s and len(taken) < most:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # about a millisecond
        began.record()
        call()
        ended.record()
        ended.synchronize()
        taken.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(taken)


def host_seconds(call: Callable[[], object], *, least_s: float = 0.05, most: int = 50, warm: int = 1) -> float:
    """Returns the median time of a call and of what it has queued, in seconds, by the host's clock."""
    taken: list[float] = []
    for number in range(most + warm):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= warm:
            taken.append(time.perf_counter() - began)
            if sum(taken) >= least_s:
                break
    return statistics.median(taken)
