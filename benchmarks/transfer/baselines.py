"""The limits of every path: memcpy, memcpy with one checksum pass, and raw TCP with one and two streams.

A baseline does the least that a path of its kind can do. It copies page by page, as every paged path must; it has no
block names, holds the batch that is kept and the last stored one, and computes no checksum unless its name says so.
"memcpy + xxh3" copies a chunk and reads the copy once more while it is in the CPU cache, which is the cheapest way to
get a verified private copy.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

from xxhash import xxh3_64_intdigest

from benchmarks.transfer.worker import Path, Work, warm_memory
from kvcluster.core import limits

_RAW = {"raw TCP x1": 1, "raw TCP x2": 2}
_COMMAND = struct.Struct("<cBQQ")
"""Load or store, the number of the client, and the range of its memory at the server."""

PATHS = {
    "memcpy": {"over": "memory", "note": "one process; no checksum, no lookup, no pin"},
    "memcpy + xxh3": {"over": "memory", "note": "one process; one sum a chunk, no lookup, no pin"},
    "raw TCP x1": {"over": "tcp", "note": "no checksum, no lookup, no pin"},
    "raw TCP x2": {"over": "tcp", "note": "no checksum, no lookup, no pin"},
}


def connect(path: str, work: Work, at: Any) -> Path:
    """Opens the path of this name."""
    if path in _RAW:
        return _Raw(work, at, streams=_RAW[path])
    return _Memcpy(work, step=work.page_bytes if path == "memcpy" else limits.CHUNK_BYTES, checked=path != "memcpy")


@cache
def _arena(nbytes: int) -> memoryview:
    """Returns one arena, which all paths of a process share because they take turns."""
    return warm_memory(nbytes)


class _Memcpy(Path):
    """Copies between the client's memory and other memory of the same process, which stands for an arena."""

    def __init__(self, work: Work, *, step: int, checked: bool) -> None:
        self._work = work
        self._arena = _arena(2 * work.nbytes)
        self._checked = checked
        self._pieces = [
            slice(at, min(at + step, page + work.page_bytes))
            for page in range(0, work.nbytes, work.page_bytes)
            for at in range(page, page + work.page_bytes, step)
        ]

    def load(self, batch: int) -> None:
        self._copy(self._work.into, self._place(batch))

    def store(self, batch: int) -> None:
        self._copy(self._place(batch), self._work.source)

    def _place(self, batch: int) -> memoryview:
        """Returns the memory of a batch: the kept batch comes first, then the other."""
        return self._arena[self._work.nbytes :] if batch else self._arena[: self._work.nbytes]

    def _copy(self, into: memoryview, source: memoryview) -> None:
        for piece in self._pieces:
            into[piece] = source[piece]
            if self._checked:
                xxh3_64_intdigest(into[piece])


# ------------------------------------------------------------------------------------------- raw sockets


class _Raw(Path):
    """One connection per stream, each with its share of the bytes and its own thread."""

    def __init__(self, work: Work, at: Any, *, streams: int) -> None:
        self._work = work
        self._sockets = [socket.create_connection(at) for _ in range(streams)]
        self._pool = ThreadPoolExecutor(streams)
        cuts = [*range(0, work.nbytes, -(-work.nbytes // streams)), work.nbytes]
        self._shares = [slice(*cut) for cut in pairwise(cuts)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def load(self, batch: int) -> None:
        self._each_share(self._receive, batch)

    def store(self, batch: int) -> None:
        self._each_share(self._send, batch)

    def load_page(self, batch: int, number: int) -> None:
        self._receive(self._sockets[0], self._work.page(number), batch)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self._pool.shutdown()

    def _each_share(self, move: Callable[[socket.socket, slice, int], None], batch: int) -> None:
        list(self._pool.map(move, self._sockets, self._shares, [batch] * len(self._shares)))

    def _receive(self, stream: socket.socket, share: slice, batch: int) -> None:
        stream.sendall(self._command(b"L", share, batch))
        _receive_into(stream, self._work.into[share])

    def _send(self, stream: socket.socket, share: slice, batch: int) -> None:
        stream.sendall(self._command(b"S", share, batch))
        stream.sendall(self._work.source[share])
        stream.recv(1)

    def _command(self, what: bytes, share: slice, batch: int) -> bytes:
        """Returns the command for a range of the server's memory, where the kept batch comes before the other."""
        skip = self._work.nbytes if batch else 0
        return _COMMAND.pack(what, self._work.client, skip + share.start, skip + share.stop)


@contextmanager
def serve(paths: Sequence[str], work: Work) -> Iterator[dict[str, Any]]:
    """Serves in this process, with memory for each client and a thread for each connection."""
    memories = [warm_memory(2 * work.nbytes) for _ in range(work.clients)]

    class RawConnection(BaseRequestHandler):
        """Receives and sends bytes as the commands of one connection say."""

        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            command = memoryview(bytearray(_COMMAND.size))
            while _receive_into(self.request, command):
                what, client, start, stop = _COMMAND.unpack(command)
                if what == b"L":
                    self.request.sendall(memories[client][start:stop])
                else:
                    _receive_into(self.request, memories[client][start:stop])
                    self.request.sendall(b"\0")

    with ThreadingTCPServer(("127.0.0.1", 0), RawConnection) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"at": server.server_address}
        server.shutdown()


def _receive_into(stream: socket.socket, into: memoryview) -> bool:
    """Fills `into`. Returns False if the other side has closed the connection."""
    return stream.recv_into(into, 0, socket.MSG_WAITALL) == into.nbytes
