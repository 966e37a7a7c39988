"""Logs of a process as JSON, one object a line, bounded in rate.

    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "process": "shard-0", "logger": "kvcluster.decisions", ...}

A decision (decisions.py) has its event and fields in the object; any other record has its `message`. Of each event, and
of all else that one logger logs, so many lines a second are written, whoever causes them: the next line has the number
that was `left_out`. A text is cut at TEXT_CHARS. So no tenant and no stranger fills a disk.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import IO, Any

from kvcluster.config import LogConfig

TEXT_CHARS = 512
"""The most characters of one text in a line: an error may quote what a stranger has sent."""

_TRACE_CHARS = 4 * TEXT_CHARS
_OURS = "kvcluster"


def set_up_log(config: LogConfig, process: str, stream: IO[str] | None = None) -> None:
    """Has this process log as configured. With "json": all that kvcluster logs from INFO on, and warnings of others, to
    `stream`, by default its standard error. With "text" nothing is changed."""
    if config.format != "json":
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process))
    handler.addFilter(LineBudget(config.lines_per_second))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_OURS).setLevel(logging.INFO)


class LineBudget(logging.Filter):
    """Lets so many lines of each event, and of each logger besides, through in a second. The first line after others
    were left out has their number as `left_out`."""

    def __init__(self, lines_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = lines_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], tuple[int, int, int]] = {}  # a second, lines in it, and lines left out

    def filter(self, record: logging.LogRecord) -> bool:
        source = record.name, getattr(record, "event", "")
        now = int(self._clock())
        with self._lock:
            second, lines, left_out = self._lines.get(source, (now, 0, 0))
            if second != now:
                lines = 0
            passes = lines < self._most
            self._lines[source] = (now, lines + 1, 0) if passes else (now, lines, left_out + 1)
        if passes and left_out:
            record.left_out = left_out
        return passes


class JsonFormatter(logging.Formatter):
    """One JSON object a record, in one line. `process` names the process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
        }
        event = getattr(record, "event", None)
        said = {"message": record.getMessage()} if event is None else {"event": event, **record.__dict__["fields"]}
        line |= {name: _cut(value) for name, value in said.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_TRACE_CHARS:]
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        return json.dumps(line, default=str)


def _cut(value: Any) -> Any:
    return value[:TEXT_CHARS] if isinstance(value, str) else value
