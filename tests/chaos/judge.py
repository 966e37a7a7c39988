"""What a worker of a chaos run writes down, and how it judges its calls: by their deadline, and by what they raise."""

from __future__ import annotations

import collections
import json
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from kvcluster.errors import Unreachable
from tests.chaos.stopwatch import Stopwatch, Taken, allowed_ns

T = TypeVar("T")
CALLS = "calls held to their deadline"
_MAY_BE_UNREACHABLE = ("status", "clear")
"""Calls that have no miss to answer with."""


class Journal:
    """Records what was seen: outcomes are counted, violations are recorded in full."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def count(self, outcome: str, number: int = 1) -> None:
        with self._lock:
            self._counts[outcome] += number

    def late(self, what: str) -> None:
        """A call passed its deadline."""
        with self._lock:
            self._write({"late": what})

    def wrong(self, what: str) -> None:
        """Something that must not be."""
        with self._lock:
            self._write({"wrong": what})

    def say(self, **words: Any) -> None:
        """Writes down what was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
            self._write({"counts": counts, **words})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Caller:
    """Makes calls, and holds each to its deadline and to what it may raise."""

    def __init__(self, journal: Journal, watch: Stopwatch) -> None:
        self._journal = journal
        self._watch = watch

    def __call__(self, name: str, deadline_ms: float, call: Callable[[], T]) -> T | None:
        """Returns what the call returns; None if it raised, which is a violation."""
        self._journal.count(CALLS)
        try:
            with self._watch.timing() as taken:
                return call()
        except Exception as error:
            if not (isinstance(error, Unreachable) and name in _MAY_BE_UNREACHABLE):
                self._journal.wrong(f"{name} raised: {traceback.format_exc()}")
        finally:
            self._judge(name, deadline_ms, taken)
        return None

    def _judge(self, name: str, deadline_ms: float, taken: Taken) -> None:
        deadline_ns, took_ns = int(deadline_ms * 1e6), taken.ended_ns - taken.began_ns
        late_ns = self._watch.late_ns(deadline_ns, taken)
        if late_ns:
            took = (
                f"took {took_ns / 1e6:.0f} ms, {late_ns / 1e6:.0f} ms more than it may "
                f"({taken.waited_ns / 1e6:.0f} ms of it its thread waited for a CPU)"
            )
            self._journal.late(f"{name} with a deadline of {deadline_ms} ms {took}")
        elif took_ns > allowed_ns(deadline_ns):
            self._journal.count("calls that were late only by what does not count")
