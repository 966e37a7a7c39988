"""Counts the files and rooms that one call passes through: `python tools/rooms.py [load | store | attend]`.

A warm client loads 16 blocks from a MemoryCluster, stores 16 others there, or attends to 16 blocks of an open sequence,
all of which it has. Each call of a function of kvcluster, in any thread of the process,
enters a file; it changes the room if its caller, the next function of kvcluster above it, is in another package. Of
many calls the one with the fewest changes is shown: beside the others a shard reported, or a timer fired.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator
from itertools import count, islice
from pathlib import Path
from types import FrameType

import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster

BLOCKS = 16
TIMES = 20
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float16", block_tokens=16
)
VALUES = torch.randn(BLOCKS, 4, 2, 16, 2, 64).half()
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


def load(client: Client) -> Generator[Callable[[], object], None, None]:
    """Yields loads of a stored prompt."""
    prompt = prompt_of(0)
    client.store(prompt, VALUES)
    client.flush()
    out = torch.empty_like(VALUES)
    while True:
        yield lambda: client.load(prompt, out)


def store(client: Client) -> Generator[Callable[[], object], None, None]:
    """Yields stores, each of another prompt."""
    for number in count():
        prompt = prompt_of(number)
        yield lambda prompt=prompt: client.store(prompt, VALUES)  # type: ignore[misc]


def attend(client: Client) -> Generator[Callable[[], object], None, None]:
    """Yields attention of one layer to a resident sequence."""
    with client.sequence() as sequence:
        tokens = BLOCKS * SPEC.block_tokens
        keys = torch.randn(tokens, 2, 64).half()
        for layer in range(4):
            sequence.append(layer, keys, keys)
        sequence.advance(prompt_of(0))
        query = torch.randn(1, 2, 64).half()
        while True:
            yield lambda: sequence.attend(0, query)


CALLS = {"load": load, "store": store, "attend": attend}


def prompt_of(number: int) -> list[int]:
    return [number, *range(1, BLOCKS * SPEC.block_tokens)]


def main() -> None:
    """Prints the counts, and the changes by pair of rooms."""
    rooms, counted = Rooms(), []
    threading.setprofile(rooms)
    sys.setprofile(rooms)
    with MemoryCluster(ram_bytes="16MiB", config={"shard": {"scrub_bytes": 0}}) as cluster:
        calls = CALLS[sys.argv[1] if len(sys.argv) > 1 else "load"](cluster.client(SPEC))
        next(calls)()
        for call in islice(calls, TIMES):
            rooms.files, rooms.changes = Counter(), Counter()
            rooms.counting = True
            call()
            rooms.counting = False
            counted.append((rooms.changes, rooms.files))
        calls.close()
    sys.setprofile(None)
    threading.setprofile(None)
    changes, files = min(counted, key=lambda both: both[0].total())
    print(f"{len(files)} files, {changes.total()} changes of room, {files.total()} calls")
    for (above, below), times in changes.most_common():
        print(f"{times:4} {above} -> {below}")


if __name__ == "__main__":
    main()
