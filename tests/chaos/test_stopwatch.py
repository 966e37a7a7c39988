"""What counts against a deadline: the time of a call, less what its process stood still or waited for a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.actors.processes import ROOT
from tests.chaos.stopwatch import Stop, Stopwatch, Taken, late_ns
from tests.waiting import eventually

MS = 1_000_000
SECOND = 1_000 * MS


def test_a_call_may_pass_its_deadline_by_a_tenth_or_250_ms() -> None:
    assert late_ns(SECOND, Taken(0, 1_250 * MS), []) == 0
    assert late_ns(SECOND, Taken(0, 1_251 * MS), []) == MS
    assert late_ns(10 * SECOND, Taken(0, 11 * SECOND), []) == 0
    assert late_ns(10 * SECOND, Taken(0, 11 * SECOND + MS), []) == MS


def test_waiting_for_a_cpu_does_not_count() -> None:
    assert late_ns(SECOND, Taken(0, 2 * SECOND, waited_ns=700 * MS), []) == 50 * MS


def test_standing_still_counts_as_far_as_it_is_outside_the_call() -> None:
    taken = Taken(5 * SECOND, 8 * SECOND)
    within = Stop(6 * SECOND, 7 * SECOND, 980 * MS)
    before = Stop(4 * SECOND, 5 * SECOND, SECOND)
    astride = Stop(7 * SECOND, 9 * SECOND, 2 * SECOND)
    assert late_ns(SECOND, taken, []) == 1_750 * MS
    assert late_ns(SECOND, taken, [before]) == 1_750 * MS
    assert late_ns(SECOND, taken, [before, within]) == 770 * MS
    assert late_ns(SECOND, taken, [astride]) == 750 * MS


def test_a_process_that_was_stopped_is_not_late_and_one_that_waited_is() -> None:
    command = [sys.executable, "-m", "tests.chaos.test_stopwatch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
        began = time.monotonic()
        eventually(lambda: time.monotonic() - began > 1.0)
        os.kill(child.pid, signal.SIGCONT)
        late_while_stopped, late_while_waiting = map(int, child.stdout.readline().split())
    assert late_while_stopped == 0
    assert late_while_waiting > 0


def _child() -> None:
    """Two calls with a deadline of 1 ms that take a second: in one it stops itself, in the other it waits."""
    with Stopwatch() as watch:
        late = []
        with watch.timing() as taken:
            os.kill(os.getpid(), signal.SIGSTOP)
        late.append(watch.late_ns(MS, taken))
        with watch.timing() as taken:
            began = time.monotonic()
            eventually(lambda: time.monotonic() - began > 1.0)
        late.append(watch.late_ns(MS, taken))
        print(*late, flush=True)


if __name__ == "__main__":
    _child()
