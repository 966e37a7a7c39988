"""The memory limit of the control group that this process runs in, and of those above it (cgroups(7), v1 and v2).

A container that shares its host's namespace of groups, a systemd service with MemoryMax, and a group within a container
all lie below the root of what is mounted; the smallest limit on the way up is the one that kills.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ESCAPED = re.compile(r"\\([0-7]{3})")
_INHERITED = re.compile(r"^hierarchical_memory_limit (\d+)$", re.MULTILINE)


def memory_limits(root: Path = Path("/")) -> list[int]:
    """Returns the limits in bytes that hold for this process, in no order; none where no group limits memory. `root`:
    where /proc and what is mounted are found."""
    limits: list[int] = []
    for folder in _groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # the other version's name, or "max"
                limits.append(int((folder / name).read_text(encoding="ascii")))
        with suppress(OSError):  # of v1 alone: it counts also the groups above what is mounted here
            limits += map(int, _INHERITED.findall((folder / "memory.stat").read_text(encoding="ascii")))
    return limits


def _groups(root: Path) -> Iterator[Path]:
    """Yields the folder of each group of this process that limits memory, and those above it as far as they are
    mounted."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    own: dict[str, str] = {}  # by kind of file system
    for line in memberships.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    for line in mounts.splitlines():
        where, _, what = line.partition(" - ")
        kind, _, options = what.split(" ", 2)
        top, mounted = (_unescaped(field) for field in where.split(" ")[3:5])
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(",")):
            within = PurePosixPath(own.get(kind, "/"))
            # Otherwise the group has another name in the namespace of groups in which this was mounted.
            below = (
                within.relative_to(top) if within.is_relative_to(top) and ".." not in within.parts else PurePosixPath()
            )
            for each in (below, *below.parents):
                yield root / mounted.lstrip("/") / each


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)
