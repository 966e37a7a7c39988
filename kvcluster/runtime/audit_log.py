"""The audit log: one JSON object a line for each call of an operator, and for each file of theirs that was read again.

    {"time": "2026-01-31T12:00:00.123Z", "call": "Drain", "tenant": "-", "operator": true,
     "parameters": "shard='shard-1', leaving=False", "outcome": "done"}

The coordinator writes it, since all these calls are the coordinator's, to `log.audit_file` on its node; without one
they are decisions with the event `audit` (json_log.py). Nothing waits for it: lines wait for a thread,
limits.AUDIT_LINES of them at most, and the next line has the number that was `left_out` for want of room. Calls of
tenants that are not operators, such as one that is refused, or a purge of what is their own, get CALLS_PER_SECOND lines
each, so that none pushes out what operators did. A file of limits.AUDIT_FILE_BYTES is renamed, with `.1` at its end, in
place of the one before.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from datetime import datetime, timezone
from typing import Any

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Tenant
from kvcluster.core.messages import Done, Purged, Refused, Reply, Request
from kvcluster.core.token_bucket import TenantRates
from kvcluster.errors import ConfigError
from kvcluster.runtime.json_log import TEXT_CHARS, decided
from kvcluster.transport.thread_start import start_thread

log = logging.getLogger(__name__)

CALLS = ("Drain", "SetPolicy", "Probe", "Purge", "SetWeights")
"""The calls that are recorded."""

CALLS_PER_SECOND = 1.0
"""Of each tenant's calls without an operator's token."""


class AuditLog:
    """Appends lines to one file, on a thread of its own."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._path = path
        self._waiting: queue.Queue[str | None] = queue.Queue(limits.AUDIT_LINES)
        self._left_out, self._torn = 0, False
        self._lock = threading.Lock()
        self._rates = TenantRates(lambda tenant: CALLS_PER_SECOND)
        self._file = self._open()
        self._thread = threading.Thread(target=self._run, name="kvcluster-audit", daemon=True)
        start_thread(self._thread)

    def add(self, fields: dict[str, Any], tenant: Tenant, *, operator: bool) -> None:
        """Adds a line; never waits."""
        with self._lock:
            if not operator and not self._rates.take(tenant, time.monotonic_ns()):
                self._left_out += 1
                return
            more = {"left_out": self._left_out} if self._left_out else {}
            try:
                self._waiting.put_nowait(json.dumps({**fields, **more}, default=str))
                self._left_out = 0
            except queue.Full:
                self._left_out += 1

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _open(self) -> Any:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"log.audit_file {self._path} cannot be written: {error.strerror}") from None

    def _write(self, line: bytes) -> None:
        """Writes a line. Raises OSError if there is no room for all of it; the next then begins with a line break."""
        line, self._torn = (b"\n" + line if self._torn else line), False
        written = self._file.write(line) or 0
        if written < len(line):
            self._torn = written > 0
            raise OSError("there is no room for it")

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._write(line.encode() + b"\n")
                if os.fstat(self._file.fileno()).st_size >= limits.AUDIT_FILE_BYTES:
                    os.replace(self._path, f"{self._path}.1")
                    before, self._file = self._file, self._open()
                    before.close()
            except (OSError, ConfigError) as error:  # a full disk: what operators do must go on
                log.error("a line of the audit log is lost: %s", error)
                with self._lock:
                    self._left_out += 1


_audit: AuditLog | None = None


def set_up_audit(path: str) -> None:
    """Has this process write its audit log to that file from now on; "" for none. Raises ConfigError."""
    global _audit
    before, _audit = _audit, AuditLog(path) if path else None
    if before is not None:
        before.close()


def audited(
    call: str, tenant: Tenant = CLUSTER, *, operator: bool = True, outcome: str = "done", **parameters: Any
) -> None:
    """Records a call, who made it, and what became of it."""
    fields = {
        "call": call,
        "tenant": tenant,
        "operator": operator,
        "parameters": ", ".join(f"{name}={value!r}" for name, value in parameters.items())[:TEXT_CHARS],
        "outcome": outcome[:TEXT_CHARS],
    }
    if _audit is not None:
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        _audit.add({"time": at, **fields}, tenant, operator=operator)
    else:
        decided("audit", **fields)


def audit_answer(request: Request[Any], reply: Reply | None, why: str = "") -> None:
    """Records a question of CALLS and its answer; `why` there is none. Does nothing for any other question."""
    question = request.question
    name = type(question).__name__
    if name not in CALLS:
        return
    match reply:
        case None:
            outcome = f"failed: {why}"
        case Refused(kind, detail):
            outcome = f"refused ({kind.value}): {detail}"
        case Purged(blocks):
            outcome = f"done: {blocks} blocks"
        case Done(False):
            outcome = "done: nothing of that name"
        case _:
            outcome = "done"
    parameters = {field: getattr(question, field) for field in question.__slots__}
    audited(name, request.tenant, operator=request.operator, outcome=outcome, **parameters)
