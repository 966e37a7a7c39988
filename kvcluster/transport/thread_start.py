"""Starting a thread in a process that may have no room for one: under a limit of processes or of address space."""

from __future__ import annotations

import threading

from kvcluster.errors import KVClusterError


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread. Raises KVClusterError if the process has no room for another; then it may be started later, and
    must not be joined before."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        if thread.ident is not None:  # it was started before, which is a mistake of ours
            raise
        raise KVClusterError(
            f"this process has no room for another thread ({error}): raise its limits of processes (ulimit -u, "
            "pids.max) and of memory, or use fewer threads"
        ) from None
