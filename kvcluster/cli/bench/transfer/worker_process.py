"""Starts and controls the benchmark's worker processes: requests, answers, their end, and their CPU time.

A worker that dies or hangs fails only its request: every answer has a deadline, and the error message is the last line
that the process printed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from kvcluster.cli.bench.transfer import worker
from kvcluster.errors import KVClusterError

ANSWER_S = 180.0
"""Deadline of one answer. Measurements take seconds; the start of a cluster takes longer on a busy machine."""

_END_S = 20.0
OWN_PYTHON = (sys.executable, "-u", "-m", worker.__name__)


class WorkerError(KVClusterError):
    """A worker process failed at a request, or could not be started."""


def peer_command(python: str) -> tuple[str, ...]:
    """Returns the command that starts a worker in another Python. It runs isolated (-I), so that neither the folder of
    the driver nor environment variables hide a package that it needs."""
    return python, "-u", "-I", str(Path(worker.__file__))


class WorkerProcess:
    """One worker process. A context manager. `environment` is added to that of this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - what it prints; closed with it
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            self._connection.close()
            self._output.close()
            raise WorkerError(f"cannot run {command[0]}: {error}") from None
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: str, **arguments: Any) -> Any:
        """Sends a request, which names a method of `worker.BenchWorker`, and returns its answer. Raises WorkerError."""
        self.send(request, **arguments)
        return self.answer()

    def send(self, request: str, **arguments: Any) -> None:
        """Sends a request without waiting for its answer. Raises WorkerError."""
        try:
            self._connection.send((request, arguments))
        except OSError:
            raise self._failed("it ended") from None

    def answer(self) -> Any:
        """Returns the answer to the oldest unanswered request. Raises WorkerError."""
        try:
            if not self._connection.poll(ANSWER_S):
                raise self._failed(f"no answer for {ANSWER_S:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._failed("it ended") from None
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def stop(self) -> None:
        """Stops the process until `resume` is called."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _failed(self, how: str) -> WorkerError:
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip().splitlines()
        return WorkerError(": ".join([how, *printed[-1:]]))


def cpu_ns(pid: int) -> int:
    """Returns the CPU time in nanoseconds of any process of this user, all its threads and those that ended included; 0
    once the process is gone."""
    clock = ctypes.c_int()
    gone = ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    return 0 if gone else time.clock_gettime_ns(clock.value)
