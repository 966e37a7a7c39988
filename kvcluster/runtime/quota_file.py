"""The quota file of a cluster (core/quotas.py), read again when it changes, as a token file is.

The coordinator applies quotas of what is stored; it has the file looked at by a thread, since no call may come. The
coordinator and the shards apply rates, each by the file on its own machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcluster.core import limits
from kvcluster.core.quotas import NO_QUOTAS, Quotas, parse_quotas
from kvcluster.runtime.audit_log import audited
from kvcluster.transport.thread_start import start_thread
from kvcluster.watched_files import LOOK_S, WatchedFiles, read_guarded


class QuotaFile:
    """The quotas of one file; those of no file if `path` is "". Thread-safe."""

    def __init__(self, path: str, *, must_exist: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError if the file cannot be used now. `must_exist` is False for a process that restarts: then it
        has no quotas until the file can be used."""
        self._file = (
            WatchedFiles(
                (path,),
                lambda before: read_quota_file(path),
                stays="The quotas that it had hold on",
                again=lambda quotas: _taken(path, quotas),
                must_exist=must_exist,
                clock=clock,
            )
            if path
            else None
        )
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def quotas(self) -> Quotas:
        """Returns the quotas that hold now."""
        return (self._file.value() if self._file is not None else None) or NO_QUOTAS

    def trouble(self) -> str:
        """Returns why the newest version of the file is not in use; "" if it is, or if there is no file."""
        return self._file.trouble() if self._file is not None else ""

    def watch(self, take: Callable[[Quotas, str], object]) -> None:
        """Calls `take` with the quotas and the trouble: now, and on a thread whenever either has changed."""
        before = self.quotas(), self.trouble()
        take(*before)
        if self._file is None:
            return

        def run() -> None:
            known = before
            while not self._ended.wait(LOOK_S / 2):
                found = self.quotas(), self.trouble()
                if found != known:
                    take(*found)
                    known = found

        self._watcher = threading.Thread(target=run, name="kvcluster-quotas", daemon=True)
        start_thread(self._watcher)

    def close(self) -> None:
        """Ends the thread, if there is one."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()


def read_quota_file(path: str) -> Quotas:
    """Returns the quotas of a file. Raises ConfigError if it cannot be read, is not valid, or could have been written
    by another user than root and the user of this process."""
    return parse_quotas(read_guarded(path, "quota file", limits.QUOTA_FILE_BYTES, "grant any tenant anything"))


def _taken(path: str, quotas: Quotas) -> str:
    """Records that a new version of the file holds. Returns a line for the log."""
    audited("quota_file_read", path=path, tenants=len(quotas.tenants))
    return f"the quota file {path} was read again: {len(quotas.tenants)} tenants"
