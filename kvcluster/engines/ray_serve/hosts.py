"""On which host a replica runs: Serve knows its node, Ray's head the node's host name.

The head is asked on a thread, and only for a node that is not known yet; until it has answered, the node's host is "".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

_RETRY_S = 1.0


class Hosts:
    """What is known of nodes. `read` asks for all of them, and may block."""

    def __init__(self, read: Callable[[], Mapping[str, str]], log: Callable[[str], object]) -> None:
        self._read = read
        self._log = log
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._reading = False
        self._read_at = -_RETRY_S

    def of(self, node: str | None) -> str:
        """The node's host name, or "" while that is not known. Never blocks."""
        name = self._names.get(node or "", "")
        if node and not name:
            self._begin()
        return name

    def _begin(self) -> None:
        with self._lock:
            if self._reading or time.monotonic() < self._read_at + _RETRY_S:
                return
            self._reading = True
        threading.Thread(target=self._run, name="kvcluster-hosts", daemon=True).start()

    def _run(self) -> None:
        try:
            self._names = dict(self._read())
        except Exception as error:  # a thread that dies silently would be a riddle
            self._log(f"cannot find out on which hosts replicas run: {type(error).__name__}: {error}")
        with self._lock:
            self._read_at = time.monotonic()
            self._reading = False
