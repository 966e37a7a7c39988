"""The limits of every path: memcpy, memcpy with one checksum pass, and raw TCP with one and two streams.

A baseline does the least that a path of its kind can do. It copies page by page, as every paged path must; it has no
block names, holds the batch that is kept and the last stored one, and computes no checksum unless its name says so.
"memcpy + xxh3" copies a chunk and reads the copy once more while it is in the CPU cache, which is the cheapest way to
get a verified private copy.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise, repeat
from typing import Any

from xxhash import xxh3_64_intdigest

from kvcluster.cli.bench.transfer.party import Path, Work, warm_memory
from kvcluster.core import limits

_RAW = {"raw TCP x1": 1, "raw TCP x2": 2}
_PIECE_BYTES = 4 * 2**20
_COMMAND_BYTES = 17

PATHS = {
    "memcpy": {"over": "memory", "note": "one process; no checksum, no lookup, no pin"},
    "memcpy + xxh3": {"over": "memory", "note": "one process; one sum a chunk, no lookup, no pin"},
    "raw TCP x1": {"over": "tcp", "note": "no checksum, no lookup, no pin"},
    "raw TCP x2": {"over": "tcp", "note": "no checksum, no lookup, no pin"},
}


def missing() -> str | None:
    """Returns None: this driver needs nothing that could be missing."""
    return None


def connect(path: str, work: Work, at: Any) -> Path:
    """Opens the path of this name."""
    if path in _RAW:
        return _Raw(work, at, streams=_RAW[path])
    return _Memcpy(work) if path == "memcpy" else _CheckedCopy(work)


@cache
def _arena(nbytes: int) -> memoryview:
    """Returns one arena, which all paths of a process share because they take turns."""
    return warm_memory(nbytes)


class _Memcpy:
    """Copies between the client's memory and other memory of the same process, which stands for an arena."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._arena = _arena(2 * work.nbytes)

    def load(self, batch: int) -> None:
        self._copy(self._work.into, self._place(batch))

    def store(self, batch: int) -> None:
        self._copy(self._place(batch), self._work.source)

    def _place(self, batch: int) -> memoryview:
        """Returns the memory of a batch: the kept batch comes first, then the other."""
        return self._arena[self._work.nbytes :] if batch else self._arena[: self._work.nbytes]

    def _copy(self, into: memoryview, source: memoryview) -> None:
        for number in range(self._work.pages):
            page = self._work.page(number)
            into[page] = source[page]

    def forget(self, batch: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


class _CheckedCopy(_Memcpy):
    """Copies a chunk, then computes the checksum of the copy."""

    def _copy(self, into: memoryview, source: memoryview) -> None:
        page_bytes = self._work.page_bytes
        for start in range(0, self._work.nbytes, page_bytes):
            for at in range(start, start + page_bytes, limits.CHUNK_BYTES):
                chunk = slice(at, min(at + limits.CHUNK_BYTES, start + page_bytes))
                into[chunk] = source[chunk]
                xxh3_64_intdigest(into[chunk])


# ------------------------------------------------------------------------------------------- raw sockets


class _Raw:
    """One connection per stream, each with its share of the bytes and its own thread."""

    def __init__(self, work: Work, at: Any, *, streams: int) -> None:
        self._work = work
        self._sockets = [socket.create_connection(tuple(at)) for _ in range(streams)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.sendall(work.client.to_bytes(1, "little"))
        self._pool = ThreadPoolExecutor(streams)
        share = work.nbytes // streams
        cuts = [number * share for number in range(streams)] + [work.nbytes]
        self._shares = [slice(*cut) for cut in pairwise(cuts)]

    def load(self, batch: int) -> None:
        list(self._pool.map(self._receive, self._sockets, self._shares, repeat(batch)))

    def store(self, batch: int) -> None:
        list(self._pool.map(self._send, self._sockets, self._shares, repeat(batch)))

    def load_page(self, batch: int, number: int) -> None:
        self._receive(self._sockets[0], self._work.page(number), batch)

    def forget(self, batch: int) -> None:
        """The next batch takes the place of this one."""

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self._pool.shutdown()

    def _receive(self, stream: socket.socket, share: slice, batch: int) -> None:
        stream.sendall(self._command(b"L", share, batch))
        _receive_into(stream, self._work.into[share])

    def _send(self, stream: socket.socket, share: slice, batch: int) -> None:
        stream.sendall(self._command(b"S", share, batch))
        _send(stream, self._work.source[share])
        stream.recv(1)

    def _command(self, what: bytes, share: slice, batch: int) -> bytes:
        """Returns the command for a range of the server's memory, where the kept batch comes before the other."""
        skip = self._work.nbytes if batch else 0
        start, stop = int(skip + share.start), int(skip + share.stop)
        return what + start.to_bytes(8, "little") + stop.to_bytes(8, "little")


@contextmanager
def serve(paths: Sequence[str], work: Work) -> Iterator[dict[str, Any]]:
    """Serves in this process, with memory for each client and a thread for each connection."""
    memories = [warm_memory(2 * work.nbytes) for _ in range(work.clients)]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):  # closed
                while True:
                    stream, _ = listening.accept()
                    threading.Thread(target=_answer, args=(stream, memories), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield {"at": listening.getsockname(), "pids": []}


def _answer(stream: socket.socket, memories: Sequence[memoryview]) -> None:
    """Serves one connection: receives and sends bytes as its commands say."""
    with stream, suppress(OSError):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = memories[stream.recv(1)[0]]
        command = bytearray(_COMMAND_BYTES)
        while _receive_into(stream, memoryview(command)):
            here = memory[int.from_bytes(command[1:9], "little") : int.from_bytes(command[9:], "little")]
            if command[:1] == b"L":
                _send(stream, here)
            else:
                _receive_into(stream, here)
                stream.sendall(b"\0")


def _send(stream: socket.socket, data: memoryview) -> None:
    for at in range(0, data.nbytes, _PIECE_BYTES):
        stream.sendall(data[at : at + _PIECE_BYTES])


def _receive_into(stream: socket.socket, into: memoryview) -> bool:
    """Fills `into`. Returns False if the other side has closed the connection."""
    at = 0
    while at < into.nbytes:
        got = stream.recv_into(into[at : at + _PIECE_BYTES])
        if not got:
            return False
        at += got
    return True
