"""The conductor's side of an engine replica: a process, its pipes, and its certain end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcluster.errors import KVClusterError

SILENCE_S = 300
"""No single layer or token takes that long; a replica that says nothing for longer hangs."""

END_S = 10


class Replica:
    """A replica for as long as a `with` block. `log` is the file that takes all it prints."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._replies: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Replica:
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvcluster.cli.demo.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env={**os.environ, **quiet},
                start_new_session=True,  # Ctrl-C reaches the conductor alone, which then ends this
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        if kind is not None:
            process.kill()
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ask(self, op: str, progress: Callable[[int, int], None] | None = None, **arguments: Any) -> dict[str, Any]:
        """Runs one op of engine.Engine. Raises KVClusterError where it fails, ends or falls silent."""
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            print(json.dumps({"op": op, **arguments}), file=process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed("has ended") from None
        while True:
            try:
                line = self._replies.get(timeout=SILENCE_S)
            except queue.Empty:
                raise self._failed(f"said nothing for {SILENCE_S} s") from None
            if not line:
                raise self._failed("has ended")
            reply = json.loads(line)
            if "error" in reply:
                raise KVClusterError(f"{self.name}: {reply['error']}")
            if "result" in reply:
                result: dict[str, Any] = reply["result"]
                return result
            if progress is not None:
                progress(*reply["progress"])

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put("")

    def _failed(self, what: str) -> KVClusterError:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:]
        return KVClusterError("\n".join([f"{self.name} {what} during the demo. It said last:", *said]))
