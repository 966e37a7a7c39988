"""The processes of hosts.py: what serves raw bytes on a node, and a client that loads on the worker's host.

    hosts_peers.py raw BYTES                          serves so many bytes of memory on port 9999
    hosts_peers.py client ADDRESS PAGE_BYTES PAGES    loads from the cluster and from raw servers

A client is told one JSON array a line, the name of a method and its arguments, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import torch

import kvcluster
from benchmarks.rounds import sweep_caches
from benchmarks.specs import BY_PAGE_BYTES, CALL_MS, page_shape
from benchmarks.transfer.end_to_end import fill, paged
from benchmarks.transfer.layout import EngineMemory
from benchmarks.transfer.worker import warm_memory
from kvcluster.client import Prompt
from kvcluster.config import ClientConfig

RAW_PORT = 9999
_BUFFER_BYTES = 2**20
_REQUEST = struct.Struct("<QQ")
"""How many pages are asked for, and their size."""


def tune(stream: socket.socket) -> None:
    """Sets what kvcluster's own TCP sets (transport/tcp_pages.py), without which one socket is a third slower here."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        stream.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def serve_raw(nbytes: int) -> None:
    """Answers each request for pages with as many, one after the other, until the process is ended."""
    memory = warm_memory(nbytes)

    class RawPages(BaseRequestHandler):
        """One connection, which carries a request at a time."""

        def handle(self) -> None:
            tune(self.request)
            while data := self.request.recv(_REQUEST.size, socket.MSG_WAITALL):
                pages, page_bytes = _REQUEST.unpack(data)
                for number in range(pages):
                    self.request.sendall(memory[number * page_bytes :][:page_bytes])

    class RawServer(ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with RawServer(("0.0.0.0", RAW_PORT), RawPages) as server:
        print(json.dumps("serving"), flush=True)
        server.serve_forever()


class HostClient:
    """A client of the cluster and of the raw servers, with memory for one prompt of each node. What is loaded from the
    cluster goes into vLLM's layout (layout.py), raw bytes into contiguous pages."""

    def __init__(self, address: str, page_bytes: int, pages: int) -> None:
        torch.set_num_threads(1)
        self._spec = BY_PAGE_BYTES[page_bytes]
        self._shape = page_shape(self._spec)
        self._pages, self._page_bytes = pages, page_bytes
        config = ClientConfig(deadline_ms=CALL_MS, connect_ms=CALL_MS, transports=("tcp",))
        self._client = kvcluster.connect(address, self._spec, token=os.environ["KVCLUSTER_TOKEN"], config=config)
        self._memory: list[EngineMemory] = []
        self._seeds: list[int] = []
        self._raw: list[socket.socket] = []
        self._into: list[memoryview] = []
        self._pool = ThreadPoolExecutor(16)

    def store(self, seed: int) -> list[str]:
        """Stores a prompt, and returns the shards on which it lies, by their names."""
        memory = EngineMemory("nhd", self._shape, self._pages)
        source = paged("nhd", memory.source, self._spec)
        fill(source, self._content(seed))
        stored = self._client.store(self._prompt(seed), source)
        assert stored.blocks == self._pages, stored
        assert self._client.flush()
        return sorted({str(block.shard) for block in self._client.explain(self._prompt(seed))})

    def prepare(self, seeds: list[int], addresses: list[str]) -> None:
        """Takes memory for these prompts, one of each node, and connects to the raw servers of the nodes."""
        self._seeds = seeds
        self._memory = [EngineMemory("nhd", self._shape, self._pages) for _ in seeds]
        for address in addresses:
            stream = socket.create_connection((address, RAW_PORT), 30)
            stream.settimeout(None)  # with a time, a receive may return before all has come
            tune(stream)
            self._raw.append(stream)
            self._into.append(warm_memory(self._pages * self._page_bytes))

    def sweep(self) -> None:
        """Fills the CPU caches with other data."""
        sweep_caches()

    def cluster(self, nodes: int) -> tuple[int, int]:
        """Loads the prompts of so many nodes at once, each by a whole call. Returns the beginning and the end in
        nanoseconds of the clock that all processes share."""
        return self._at_once(self._load, nodes)

    def sockets(self, nodes: int) -> tuple[int, int]:
        """The same bytes by raw sockets."""
        return self._at_once(self._receive, nodes)

    def check(self) -> None:
        """Loads all prompts into cleared memory. Raises AssertionError unless every byte is that which was stored."""
        for memory in self._memory:
            memory.clear()
        self.cluster(len(self._seeds))
        for memory, seed in zip(self._memory, self._seeds, strict=True):
            fill(paged("nhd", memory.source, self._spec), self._content(seed))
            assert memory.same(), f"prompt {seed}: what was loaded is not what was stored"

    def _at_once(self, move: Callable[[int], None], nodes: int) -> tuple[int, int]:
        began = time.monotonic_ns()
        list(self._pool.map(move, range(nodes)))
        return began, time.monotonic_ns()

    def _load(self, node: int) -> None:
        prompt = self._prompt(self._seeds[node])
        loaded = self._client.load(prompt, paged("nhd", self._memory[node].into, self._spec))
        assert loaded == len(prompt.token_ids), f"{loaded} of {len(prompt.token_ids)} tokens were loaded"

    def _receive(self, node: int) -> None:
        self._raw[node].sendall(_REQUEST.pack(self._pages, self._page_bytes))
        for number in range(self._pages):
            page = self._into[node][number * self._page_bytes :][: self._page_bytes]
            assert self._raw[node].recv_into(page, 0, socket.MSG_WAITALL) == self._page_bytes

    def _prompt(self, seed: int) -> Prompt:
        return Prompt([seed, *range(1, self._pages * self._spec.block_tokens)])

    def _content(self, seed: int) -> torch.Tensor:
        """The KV of a prompt: random bits, as pages."""
        size = (self._pages, *self._shape)
        bits = torch.randint(-(2**14), 2**14, size, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
        return bits.view(torch.bfloat16)


def serve_client(address: str, page_bytes: str, pages: str) -> None:
    """Does what standard input says until that ends."""
    client = HostClient(address, int(page_bytes), int(pages))
    print(json.dumps("connected"), flush=True)
    for line in sys.stdin:
        job, *arguments = json.loads(line)
        answer: Any = getattr(client, job)(*arguments)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the threads of this client hold nothing that must be put away


if __name__ == "__main__":
    threading.current_thread().name = sys.argv[1]
    if sys.argv[1] == "raw":
        serve_raw(int(sys.argv[2]))
    else:
        serve_client(*sys.argv[2:])
