"""A pair: a worker and a shard, joined by a process group of torch.distributed that has only these two. The backend is
Gloo, over sockets of its own, which it connects by addresses that are exchanged in PAIR frames.

What is received lands in memory that belongs to the pair. A transfer that does not end by its deadline ends the pair:
Gloo closes its sockets then, and neither reads nor writes the memory of any transfer after that. Neither side ends with
the other, and nothing is registered with torch for the process as a whole.

Gloo trusts the other side of its sockets: it asks it for no credential, and takes its word for where a message goes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_ubyte
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any

from kvcluster.core import limits
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.extras import needs
from kvcluster.pages.region import address_of
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.wire import socket_frames
from kvcluster.wire.socket_frames import FrameKind

SHARD, WORKER = 0, 1
"""The ranks of a pair."""

_PAGES, _END = 0, 1
"""The tags of messages: pages, in their order; and one that is never sent (Pair.end)."""

_AT_ONCE = timedelta(milliseconds=1)

_SHOWN = 200


class Pair:
    """One end of a pair. `end` may be called from any thread; all else belongs to one thread."""

    def __init__(self, group: Any, rank: int, peer: str) -> None:
        self._group = group
        self._other = WORKER if rank == SHARD else SHARD
        self._peer = peer
        self._lock = threading.Lock()
        self._ended = False

    def send(self, memory: memoryview) -> Transfer:
        """Begins to send this memory, which must not be changed until the transfer has ended."""
        with _unless_lost(self._peer):
            return Transfer(self._group.send([_tensor(memory)], self._other, _PAGES), self, self._peer, memory)

    def receive(self, memory: memoryview) -> Transfer:
        """Begins to receive as many bytes as this memory has, by the next `send` of the other side. The memory may be
        written until the transfer has ended, or the pair."""
        with _unless_lost(self._peer):
            return Transfer(self._group.recv([_tensor(memory)], self._other, _PAGES), self, self._peer, memory)

    def end(self) -> None:
        """Ends all transfers, and every later one, with an error. When this returns, no memory is read or written."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        # Gloo has no call for it but a transfer that is out of time: that closes the sockets, and fails the others.
        with suppress(RuntimeError):
            self._group.recv([_tensor(memoryview(bytearray(1)))], self._other, _END).wait(_AT_ONCE)


class Transfer:
    """A message on its way. It keeps its memory, and is kept until it or the pair has ended."""

    def __init__(self, work: Any, pair: Pair, peer: str, memory: memoryview) -> None:
        self._memory = memory
        self._work = work
        self._pair = pair
        self._peer = peer

    def wait(self, deadline: Deadline) -> None:
        """Returns once it has ended; called once. Raises Unavailable if it does not by the deadline, or cannot any
        more; the pair has ended then."""
        try:
            deadline.check(self._peer)
            with _unless_lost(self._peer, deadline):
                self._work.wait(max(_AT_ONCE, timedelta(seconds=deadline.remaining_s())))
        except Unavailable:
            self._pair.end()
            raise


@contextmanager
def _unless_lost(peer: str, deadline: Deadline | None = None) -> Iterator[None]:
    """Raises Unavailable for an error of Gloo."""
    try:
        yield
    except RuntimeError as error:
        if deadline is not None:
            deadline.check(peer)
        words = str(error).partition("] ")[2] or str(error)
        why = words.splitlines()[0][:_SHOWN] if words else "the pair has ended"
        raise Unavailable(Miss(MissReason.SHARD_LOST, f"{peer}: {why}")) from None


def _tensor(memory: memoryview) -> Any:
    import torch

    # By its address: of memory that is only sent, such as an arena's, torch would warn that it must not be written.
    return torch.frombuffer((c_ubyte * memory.nbytes).from_address(address_of(memory)), dtype=torch.uint8)


# ----------------------------------------------------------------------------------------------- joining


def check_usable() -> Any:
    """Returns torch.distributed. Raises KVClusterError, with what to do, if this process cannot make pairs."""
    with needs("torch"):
        distributed: Any = import_module("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise KVClusterError("torch was built without torch.distributed and Gloo here; install the wheel of PyTorch")
    return distributed


def join(frames: FramedSocket, rank: int, deadline: Deadline) -> Pair:
    """Joins the two sides of a connection; both call this. Raises Unavailable, ProtocolError or KVClusterError."""
    distributed = check_usable()
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [_interface(local_address(frames), os.getpid())]
    options._timeout = timedelta(milliseconds=limits.PAIR_MS)
    options._threads = 1
    soonest = min(deadline, Deadline.after_ms(limits.PAIR_MS), key=lambda one: one.at_ns)
    try:
        group = distributed.ProcessGroupGloo(_store(frames, soonest), rank, 2, options)
    except RuntimeError as error:
        soonest.check(frames.peer)
        words = str(error).splitlines()[0][:_SHOWN]
        raise Unavailable(Miss(MissReason.SHARD_LOST, f"{frames.peer}: no pair could be made: {words}")) from None
    return Pair(group, rank, frames.peer)


@lru_cache(maxsize=8)
def _interface(address: str, process: int) -> Any:
    """Returns Gloo's listener and its thread at a local address, which the pairs of a process share."""
    return check_usable().ProcessGroupGloo.create_device(hostname=address)


def local_address(frames: FramedSocket) -> str:
    """Returns the address of this side's end of a TCP connection."""
    found: list[str] = []

    def look(connected: socket.socket) -> None:
        found.append(connected.getsockname()[0])

    frames.tune(look)
    return found[0]


def _store(frames: FramedSocket, deadline: Deadline) -> Any:
    """Returns the store by which Gloo learns the other side's address: what one side sets is sent to the other."""
    kind: Any = check_usable().Store

    class Rendezvous(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}
            self._received = 0

        def set(self, key: str, value: Any) -> None:
            self._values[key] = bytes(value)
            frames.send(FrameKind.PAIR, socket_frames.encode_pair(key, bytes(value)), deadline)

        def get(self, key: str) -> bytes:
            while key not in self._values:
                _, body = frames.receive(FrameKind.PAIR, deadline=deadline)
                self._received += 1
                if self._received > limits.PAIR_VALUES:
                    raise ProtocolError(f"{frames.peer} sent more than {limits.PAIR_VALUES} values for one pair")
                other, value = socket_frames.decode_pair(body)
                self._values.setdefault(other, value)
            return self._values[key]

        def wait(self, keys: Sequence[str], timeout: timedelta = _AT_ONCE) -> None:
            for key in keys:
                self.get(key)

    return Rendezvous()
