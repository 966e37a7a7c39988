"""The memory of this process that is occupied."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """Returns how many bytes of this process's private memory are occupied: shared memory, such as an arena, is left
    out."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
