"""Counts the files and rooms that one load passes through: `python tools/rooms.py`.

A warm client loads 16 blocks from a MemoryCluster. Each call of a function of kvcluster, in any thread of the process,
enters a file; it changes the room if its caller, the next function of kvcluster above it, is in another package. Of
many loads the one with the fewest changes is shown: beside the others a shard reported, or a timer fired.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

import kvcluster
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster

BLOCKS = 16
LOADS = 20
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float16", block_tokens=16
)
_ROOT = Path(kvcluster.__file__).parent


class Rooms:
    """What is entered while `counting`. To be the profile function of all threads before they begin."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.changes: Counter[tuple[str, str]] = Counter()
        self.counting = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """As sys.setprofile takes it."""
        if event != "call" or not self.counting:
            return
        here = _file_of(frame)
        if here is None:
            return
        self.files[here] += 1
        above = frame.f_back
        while above is not None and _file_of(above) is None:
            above = above.f_back
        if above is not None:
            rooms = _room(_file_of(above) or ""), _room(here)
            if rooms[0] != rooms[1]:
                self.changes[rooms] += 1


def _file_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else None


def _room(file: str) -> str:
    return file.rpartition("/")[0]


def main() -> None:
    """Prints the counts, and the changes by pair of rooms."""
    rooms, counted = Rooms(), []
    threading.setprofile(rooms)
    sys.setprofile(rooms)
    prompt, values = list(range(BLOCKS * SPEC.block_tokens)), torch.randn(BLOCKS, 4, 2, 16, 2, 64).half()
    out = torch.empty_like(values)
    with MemoryCluster(ram_bytes="16MiB", config={"shard": {"scrub_bytes": 0}}) as cluster:
        client = cluster.client(SPEC)
        client.store(prompt, values)
        client.flush()
        client.load(prompt, out)
        for _ in range(LOADS):
            rooms.files, rooms.changes = Counter(), Counter()
            rooms.counting = True
            client.load(prompt, out)
            rooms.counting = False
            counted.append((rooms.changes, rooms.files))
    sys.setprofile(None)
    threading.setprofile(None)
    changes, files = min(counted, key=lambda both: both[0].total())
    print(f"{len(files)} files, {changes.total()} changes of room, {files.total()} calls")
    for (above, below), count in changes.most_common():
        print(f"{count:4} {above} -> {below}")


if __name__ == "__main__":
    main()
