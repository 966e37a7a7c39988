"""Starts and controls the benchmark's worker processes: requests, answers, their end, and their CPU time.

A worker that dies or hangs fails only its request: every answer has a deadline, and the error message is the last line
that the process printed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcluster.cli.bench.transfer import party
from kvcluster.errors import KVClusterError
from kvcluster.runtime.malloc_env import ENVIRONMENT

ANSWER_S = 180.0
"""Deadline of one answer. Measurements take seconds; the start of a cluster takes longer on a busy machine."""

_END_S = 20.0
_READ_BYTES = 2**16
OWN_PYTHON = (sys.executable, "-m", party.__name__)


class PartyError(KVClusterError):
    """A worker process failed at a request."""


def python_of(driver: str, peer_python: str) -> tuple[str, ...]:
    """Returns the command that starts a worker for this driver. A file is a peer's driver, which may use another Python
    and runs isolated (-I), so that neither its folder nor environment variables hide a package that it needs."""
    return (peer_python, "-I", str(Path(party.__file__))) if driver.endswith(".py") else OWN_PYTHON


def probe(driver: str, peer_python: str) -> dict[str, Any]:
    """Returns {"paths": ..., "missing": why the driver cannot run here, or None, "rests": as Lane.rests}."""
    command = [*python_of(driver, peer_python), "probe", driver]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"paths": {}, "rests": False, "missing": f"{peer_python} cannot run it: {error}"}


class PartyProcess:
    """One worker process. A context manager; `first` is the first message that it gets."""

    def __init__(self, python: Sequence[str], role: str, first: Mapping[str, Any]) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - what it prints besides its answers; closed with it
        self._read = b""
        env = dict(os.environ) | (ENVIRONMENT if role == "serve" else {})
        self._process = subprocess.Popen(
            [*python, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=env
        )
        self.send(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **order: Any) -> dict[str, Any]:
        """Sends an order and returns its answer. Raises PartyError."""
        self.send(order)
        return self.answer()

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order without waiting for its answer. Raises PartyError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("it ended") from None

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the oldest unanswered order. Raises PartyError."""
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        until = time.monotonic() + ANSWER_S
        while b"\n" not in self._read:
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._failed(f"no answer for {ANSWER_S:.0f} s")
            more = os.read(out, _READ_BYTES)
            if not more:
                raise self._failed("it ended")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PartyError(answer["error"])
        return answer

    def rest(self) -> None:
        """Stops the process until `wake` is called."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> PartyProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.wake()
        try:
            self._process.communicate(b'{"do": "end"}\n', timeout=_END_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._words.close()

    def _failed(self, how: str) -> PartyError:
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().splitlines()
        return PartyError(f"{how}: {said[-1]}" if said else how)


class CpuClock:
    """The CPU time of any process of this user, all its threads and those that ended included, in nanoseconds."""

    def __init__(self, pid: int) -> None:
        clock = ctypes.c_int()
        failed = ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
        if failed:
            raise PartyError(f"process {pid} has no clock: {os.strerror(failed)}")
        self._clock = clock.value

    def now_ns(self) -> int:
        """Returns the CPU time; 0 once the process is gone."""
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            return 0
