"""Finds the host on which a replica runs: Serve knows the replica's node, Ray's head node knows the node's host name.

A thread asks the head node, and only when an unknown node is looked up; until the answer arrives, that node's host is
"".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from kvcluster.errors import KVClusterError
from kvcluster.transport.thread_start import start_thread

_RETRY_S = 1.0


class Hosts:
    """Caches host names by node. `read` returns those of all nodes, and may block."""

    def __init__(self, read: Callable[[], Mapping[str, str]], log: Callable[[str], object]) -> None:
        self._read = read
        self._log = log
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._reading = False
        self._read_at = -_RETRY_S

    def of(self, node: str | None) -> str:
        """Returns the node's host name, or "" while it is not known. Never blocks."""
        name = self._names.get(node or "", "")
        if node and not name:
            self._begin()
        return name

    def _begin(self) -> None:
        with self._lock:
            if self._reading or time.monotonic() < self._read_at + _RETRY_S:
                return
            self._reading = True
        try:
            start_thread(threading.Thread(target=self._run, name="kvcluster-hosts", daemon=True))
        except KVClusterError as error:
            self._ended(error)

    def _run(self) -> None:
        try:
            self._names = dict(self._read())
        except Exception as error:  # a thread must not die silently
            self._ended(error)
        else:
            self._ended()

    def _ended(self, error: Exception | None = None) -> None:
        if error is not None:
            self._log(f"cannot find out on which hosts replicas run: {type(error).__name__}: {error}")
        with self._lock:
            self._read_at = time.monotonic()
            self._reading = False
