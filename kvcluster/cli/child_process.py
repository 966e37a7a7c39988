"""Starts and controls a child process that answers requests: a worker of the benchmark, or a replica of the demo.

A child that dies or hangs fails only its request: every answer has a deadline, and the error message ends with the last
lines that the process printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from kvcluster.errors import KVClusterError

ANSWER_S = 300.0
"""The longest silence before an answer or a progress message. A measurement, a layer or a token takes seconds; to start
a cluster or to load a model takes longer on a busy machine."""

_END_S = 20.0


class ChildError(KVClusterError):
    """A child process failed at a request, or could not be started."""


class ChildProcess:
    """One process that serves `answer_requests`; its command gets the file descriptor of the
    connection as the last argument. A context manager, which waits for the end of the process, or with
    `kill_on_error` kills it if the block raised. `environment` is added to that of this process; `shown_lines` of its
    output are shown if it fails."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        name: str = "the process",
        shown_lines: int = 1,
        kill_on_error: bool = False,
    ) -> None:
        self._name = name
        self._shown_lines = shown_lines
        self._kill_on_error = kill_on_error
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - what it prints; closed with it
        self._connection, theirs = Pipe()
        try:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            self._connection.close()
            self._output.close()
            raise ChildError(f"cannot run {command[0]}: {error}") from None
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, request: str, progress: Callable[[int, int], object] | None = None, **arguments: Any) -> Any:
        """Sends a request, which names a method of the child's object, and returns its answer. `progress` gets the work
        done and the total, as the child reports them. Raises ChildError."""
        self.send(request, **arguments)
        return self.answer(progress)

    def send(self, request: str, **arguments: Any) -> None:
        """Sends a request without waiting for its answer. Raises ChildError."""
        try:
            self._connection.send((request, arguments))
        except OSError:
            raise self._failed("has ended") from None

    def answer(self, progress: Callable[[int, int], object] | None = None) -> Any:
        """Returns the answer to the oldest unanswered request. Raises ChildError."""
        while True:
            try:
                if not self._connection.poll(ANSWER_S):
                    raise self._failed(f"has not answered for {ANSWER_S:.0f} s")
                answer = self._connection.recv()
            except (EOFError, OSError):
                raise self._failed("has ended") from None
            if "error" in answer:
                raise ChildError(answer["error"])
            if "result" in answer:
                return answer["result"]
            if progress is not None:
                progress(*answer["progress"])

    def stop(self) -> None:
        """Stops the process until `resume` is called."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.resume()
        if kind is not None and self._kill_on_error:
            self.process.kill()
        self._connection.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def _failed(self, how: str) -> ChildError:
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").strip().splitlines()[-self._shown_lines :]
        return ChildError(f"{self._name} {how}: " + "\n".join(printed or ["it printed nothing"]))


# ------------------------------------------------------------------------------------------- the child's side


def answer_requests(connection: Connection, target: object) -> None:
    """Calls the methods of `target` that the requests name, until the other end of the connection is closed."""
    with suppress(EOFError):
        while True:
            request, arguments = connection.recv()
            try:
                answer = {"result": getattr(target, request)(**arguments)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)


def inherited_connection() -> Connection:
    """Returns the connection whose file descriptor is the last argument of this process."""
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)  # so that processes started here do not keep it open
    return Connection(descriptor)
