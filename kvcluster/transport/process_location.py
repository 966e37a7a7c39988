"""Where this process runs (core/placement.py)."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

from kvcluster.core.placement import host_text

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/net"


@cache
def here() -> str:
    """Returns this process's place. The machine is identified by the kernel's boot id, which containers share; where
    that cannot be read, by the host's name."""
    name = socket.gethostname()
    try:
        machine = _BOOT_ID.read_text(encoding="ascii").strip().replace("-", "")[:12]
        return host_text(name, machine, str(os.stat(_NAMESPACE).st_ino))
    except (OSError, ValueError):
        return host_text(name, name, "")
