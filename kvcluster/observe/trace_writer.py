"""Writes a trace file (trace_file.py) on a thread of its own, and never disturbs the engine.

The engine's threads only append to a bounded list. Everything else happens on the writer's thread: hashing, encoding,
writing. That thread gives way to the engine's: it works in small pieces and sleeps in between, since a thread that
computes keeps Python's interpreter lock for milliseconds at a time.

Whatever fails (an unwritable folder, a full disk, a mistake of ours) is counted, reported once, and has no other
effect. After a failed write the writer tries again after RETRY_S; lines that are added meanwhile are dropped.

A file and its older half take `limit_bytes`; a folder keeps the newest files (core/limits.py), and a new writer removes
older ones.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcluster.core import hashing, limits
from kvcluster.core.ids import BlockHash
from kvcluster.observe.trace_file import OLD, PREFIX, SUFFIX, ObservingCost, TraceHeader, cost_line, header_line
from kvcluster.transport.thread_start import start_thread

Log = Callable[[str], object]
Line = Callable[[], Mapping[str, Any]]
"""Makes one line, on the writer's thread."""

RETRY_S = 30.0
_BATCH_S = 0.5
_COST_S = 10.0
_PIECE_BLOCKS = 64
_PAUSE_S = 0.0001
_CLOSE_S = 5.0


class TraceWriter:
    """The trace of one process. Thread-safe; `start` it once, `close` it at the end. No method raises for a fault."""

    def __init__(self, folder: Path, header: TraceHeader, *, limit_bytes: int, log: Log) -> None:
        self.cost = ObservingCost()
        self.path = folder / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{header.id}{SUFFIX}"
        self._folder = folder
        self._preamble = [_encoded(header_line(header))]
        self._limit_bytes = limit_bytes
        self._log = log
        self._waiting: deque[tuple[Line, int]] = deque()
        self._added_tokens = 0  # of all lines so far
        self._taken_tokens = 0  # by the writer's thread
        self._lock = threading.Lock()  # among those that add: the writer's thread never holds it
        self._closed = threading.Event()
        self._file: int | None = None
        self._size = 0
        self._retry_at = 0.0
        self._cost_at = 0.0
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="kvcluster-trace", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def add(self, line: Line, tokens: int = 0) -> None:
        """Has `line` made and written soon. Drops it if too many tokens wait already. Returns at once."""
        tokens = max(1, tokens)
        with self._lock:
            waiting = self._added_tokens - self._taken_tokens
            if waiting + tokens > limits.TRACE_WAITING_TOKENS or self._closed.is_set():
                self.cost.dropped += 1
                return
            self._added_tokens += tokens
            self._waiting.append((line, tokens))

    def keep(self, line: Mapping[str, Any]) -> None:
        """Has `line` written now, and again at the beginning of each later file."""

        def kept() -> Mapping[str, Any]:
            self._preamble.append(_encoded(line))
            return line

        self.add(kept)

    def close(self) -> None:
        """Writes what waits, for a few seconds at most, and ends. May be called again."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        """Looks twice a second. It is not woken: that could cost the thread that adds its turn on the processor."""
        while not self._closed.wait(_BATCH_S):
            self._write_waiting(ends=False)
        self._write_waiting(ends=True)
        self._close_file()

    def _write_waiting(self, *, ends: bool) -> None:
        lines: list[bytes] = []
        while self._waiting:
            make, tokens = self._waiting.popleft()
            self._taken_tokens += tokens
            try:
                lines.append(_encoded(make()))
            except Exception as error:  # a mistake of ours costs a line, and no more
                self._fault(f"cannot make a line of a trace: {type(error).__name__}: {error}")
        now = time.monotonic()
        if ends or (lines and now >= self._cost_at + _COST_S):
            self._cost_at = now
            lines.append(_encoded(cost_line(self.cost)))
        if lines:
            self._write(lines, now)

    def _write(self, lines: Sequence[bytes], now: float) -> None:
        if now < self._retry_at:
            self.cost.dropped += len(lines)
            return
        try:
            if self._file is not None and 2 * (self._size + sum(map(len, lines))) > self._limit_bytes:
                self._turn_over()
            if self._file is None:
                self._open()
                lines = [*self._preamble, *(line for line in lines if line not in self._preamble)]
            self._append(b"".join(lines))
        except OSError as error:
            self.cost.dropped += len(lines)
            self._retry_at = now + RETRY_S
            self._close_file()
            self._fault(f"cannot write the trace {self.path}: {error.strerror or error}")

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # no torn line is left behind
            raise
        self._size += written

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_oldest()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._file).st_size

    def _turn_over(self) -> None:
        self._close_file()
        os.replace(self.path, self.path.with_name(self.path.name.removesuffix(SUFFIX) + OLD))

    def _remove_oldest(self) -> None:
        """Makes room for this file among the files of the folder: those of running processes are new."""
        with suppress(OSError):
            files = sorted(self._folder.glob(f"{PREFIX}*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
            for file in files[: max(0, len(files) - limits.TRACE_FILES + 1)]:
                file.unlink()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def _fault(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._log(f"{what}. The engine is not affected; the trace lacks what came meanwhile")


def gentle_chain(
    parent: BlockHash, tokens: Sequence[int], block_tokens: int, extra: Mapping[int, bytes]
) -> list[BlockHash]:
    """Returns `hashing.chain`, computed in small pieces with pauses, so that other threads get the interpreter."""
    hashes: list[BlockHash] = []
    for first in range(0, len(tokens) // block_tokens, _PIECE_BLOCKS):
        piece = tokens[first * block_tokens : (first + _PIECE_BLOCKS) * block_tokens]
        keys = {block - first: key for block, key in extra.items() if first <= block < first + _PIECE_BLOCKS}
        hashes += hashing.chain(hashes[-1] if hashes else parent, piece, block_tokens, keys)
        time.sleep(_PAUSE_S)
    return hashes


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
