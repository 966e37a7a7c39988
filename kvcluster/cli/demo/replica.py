"""The conductor's side of an engine replica: starts its process, talks over its pipes, and always ends it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kvcluster.errors import KVClusterError

SILENCE_S = 300
"""No single layer or token takes this long; a replica that sends nothing for longer hangs."""

END_S = 10

ENGINE = (sys.executable, "-m", "kvcluster.cli.demo.engine")


class EngineReplica:
    """A replica that runs within a `with` block. `log` is the file for its output."""

    process: subprocess.Popen[str]

    def __init__(self, name: str, log: Path, command: Sequence[str] = ENGINE) -> None:
        self.name = name
        self._log = log
        self._command = command
        self._replies: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> EngineReplica:
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env={**os.environ, **quiet},
                start_new_session=True,  # Ctrl-C reaches only the conductor, which then ends this process
            )
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.process.kill()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, op: str, progress: Callable[[int, int], None] | None = None, **arguments: Any) -> dict[str, Any]:
        """Runs one op of engine.Engine. Raises KVClusterError if it fails, ends or sends nothing for SILENCE_S."""
        try:
            print(json.dumps({"op": op, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed("has ended") from None
        while True:
            try:
                line = self._replies.get(timeout=SILENCE_S)
            except queue.Empty:
                raise self._failed(f"has sent nothing for {SILENCE_S} s") from None
            if not line:
                self._replies.put("")  # so that later calls fail as well
                raise self._failed("has ended")
            reply = json.loads(line)
            if "error" in reply:
                raise KVClusterError(f"{self.name}: {reply['error']}")
            if "result" in reply:
                result: dict[str, Any] = reply["result"]
                return result
            if progress is not None:
                progress(*reply["progress"])

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put("")

    def _failed(self, what: str) -> KVClusterError:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:]
        return KVClusterError("\n".join([f"{self.name} {what} during the demo. It said last:", *said]))
