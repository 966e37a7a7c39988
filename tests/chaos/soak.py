"""Full load without faults: `python -m tests.chaos.soak --minutes 60`. Does memory stay flat, and descriptors too?

Each second the resident memory and the open descriptors of every process of the cluster and its workers are read. What
is judged are our own: actors and workers. The first quarter, in which pools fill and caches warm, is left out; what
then rises, beyond three standard errors of a least-squares line, ends the run with status 1.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.actors.processes import title
from tests.chaos.run import Run
from tests.chaos.trend import Trend, averaged, fit

SAMPLE_S = 1.0
_WARM = 0.25
_STRETCHES = 30
_MIB = 2**20
Samples = list[tuple[float, float]]


class Watched:
    """The samples of one process."""

    def __init__(self, name: str, ours: bool) -> None:
        self.name = name
        self.ours = ours
        self.rss: Samples = []
        self.descriptors: Samples = []

    def rises(self) -> bool:
        """Ours, and it takes more and more."""
        memory, descriptors = self._fits()
        return self.ours and (memory.rises(_MIB + 0.01 * memory.mean) or descriptors.rises(2.0))

    def line(self) -> str:
        memory, descriptors = self._fits()
        return (
            f"{self.name:<34} {memory.mean / _MIB:>8.1f} MiB {memory.slope * 3_600 / _MIB:>+8.2f} "
            f"± {memory.error * 3_600 / _MIB:.2f} MiB/h {descriptors.mean:>7.1f} fds "
            f"{descriptors.slope * 3_600:>+7.2f} ± {descriptors.error * 3_600:.2f} /h"
            f"{'  RISES' if self.rises() else '' if self.ours else '  (Ray)'}"
        )

    def _fits(self) -> tuple[Trend, Trend]:
        return fit(averaged(_warm(self.rss), _STRETCHES)), fit(averaged(_warm(self.descriptors), _STRETCHES))


def main() -> int:
    """Runs for so many minutes and prints a line a process."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description="Full load without faults.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left then either
    watched: dict[int, Watched] = {}
    with Run(options.seed, functools.partial(print, flush=True)) as run:
        began, pause = time.monotonic(), threading.Event()
        while time.monotonic() - began < options.minutes * 60:
            for pid, name in run.processes().items():
                with suppress(OSError):  # it has ended
                    _sample(watched.setdefault(pid, Watched(*_named(pid, name))), pid, time.monotonic() - began)
            pause.wait(SAMPLE_S)
        report = run.finish()
    longest = max(len(each.rss) for each in watched.values())
    whole = [each for each in watched.values() if 2 * len(each.rss) > longest]  # not what came and went
    print(report.table(), "\n\nmemory and descriptors, after the first quarter", sep="")
    print("\n".join(each.line() for each in sorted(whole, key=lambda each: (not each.ours, each.name))))
    return int(bool(report.wrong) or any(each.rises() for each in whole))


def _named(pid: int, name: str) -> tuple[str, bool]:
    """What a process is called in the table, and whether it is ours."""
    called = title(pid).replace("\0", " ").strip()
    ours = bool(name) or "Actor" in called
    return name or called.split("/")[-1].removeprefix("ray::")[:34], ours


def _sample(watched: Watched, pid: int, at_s: float) -> None:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    watched.rss.append((at_s, float(pages * os.sysconf("SC_PAGESIZE"))))
    watched.descriptors.append((at_s, float(len(os.listdir(f"/proc/{pid}/fd")))))


def _warm(samples: Samples) -> Samples:
    return samples[int(len(samples) * _WARM) :]


if __name__ == "__main__":
    sys.exit(main())
