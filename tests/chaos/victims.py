"""Finding and harming processes of a cluster from outside; no code of the product takes part.

An actor is found by what it calls itself, and a shard among shards by the port that it listens on. A bit is flipped in
a resident page through /proc/PID/mem, where the page is found by the bytes that it must have.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvcluster.core.ids import BlockHash
from kvcluster.memory.arena import FILE_NAME
from tests.actors.processes import title
from tests.chaos.content import PAGE_BYTES, right_bytes

COORDINATOR, SHARD = "CoordinatorActor", "ShardActor"
_LISTENING = "0A"
_NEEDLE_BYTES = 64


def actors(pids: Iterable[int], kind: str) -> list[int]:
    """Those of these processes that are actors of that kind."""
    return [pid for pid in pids if title(pid).startswith("ray::") and kind in title(pid)]


def listener(pids: Iterable[int], port: int) -> int | None:
    """Which of these processes listens on that port of its own network."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            inodes = set(_listening(pid, port))
            if inodes and any(link in inodes for link in _open_files(pid)):
                return pid
    return None


def send(pids: Iterable[int], what: signal.Signals) -> None:
    """Sends a signal to all of them that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def holds(pid: int, blocks: Sequence[BlockHash], arena_bytes: int) -> bool:
    """Do all of these blocks lie in that process's arena?"""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        missing = set(blocks)
        for start, stop in _mappings(pid, arena_bytes):
            memory.seek(start)
            arena = memory.read(stop - start)
            missing = {block for block in missing if right_bytes(block) not in arena}
    return not missing


def flip_bits(pid: int, blocks: Sequence[BlockHash], rng: random.Random, arena_bytes: int) -> int:
    """Flips one bit in each of these blocks wherever its page lies in that process's arena, and returns in how many."""
    flipped: set[BlockHash] = set()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, stop in _mappings(pid, arena_bytes):
            memory.seek(start)
            arena = memory.read(stop - start)
            for block in blocks:
                at = arena.find(right_bytes(block)[:_NEEDLE_BYTES])
                if at >= 0:
                    at += rng.randrange(PAGE_BYTES)
                    memory.seek(start + at)
                    memory.write(bytes([arena[at] ^ 1 << rng.randrange(8)]))
                    flipped.add(block)
    return len(flipped)


def flip_pages(pid: int, pages: Iterable[bytes], arena_bytes: int) -> int:
    """Flips a bit in the middle of each of these pages wherever it lies in that process's arena; returns how many."""
    flipped = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, stop in _mappings(pid, arena_bytes):
            memory.seek(start)
            arena = memory.read(stop - start)
            for page in pages:
                at = arena.find(page)
                if at >= 0:
                    at += len(page) // 2
                    memory.seek(start + at)
                    memory.write(bytes([arena[at] ^ 1]))
                    flipped += 1
    return flipped


def _listening(pid: int, port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _open_files(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(entry)


def _mappings(pid: int, at_least: int) -> Iterator[tuple[int, int]]:
    """Writable memory in pieces of that size: an arena, or, where it is no memory file, what it lies within."""
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        where, access, _, _, inode, *name = line.split()
        start, stop = (int(address, 16) for address in where.split("-"))
        is_arena = access == "rw-s" and FILE_NAME in "".join(name)
        if (is_arena or (access == "rw-p" and inode == "0")) and stop - start >= at_least:
            yield start, stop
