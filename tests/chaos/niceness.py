"""The CPU priorities of a run's processes on one machine, where they stand for many machines."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NODE, WORKER = -5, 5
"""A node's own machine would have a CPU for it, and Ray's patience is short; an engine keeps a GPU busy, and here it
must not keep the cluster from its CPUs."""


def set_niceness(pid: int, niceness: int) -> None:
    """Of a process that leads a session, and what it starts from now on.

    Linux shares its CPUs first among sessions ("autogroups") and only then by the niceness of processes, so both are
    set, as far as there are autogroups and one may go first.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with suppress(FileNotFoundError, PermissionError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness), encoding="ascii")
