"""Transfers: loads and stores of pages through a real cluster, beside one raw TCP stream and memcpy.

A whole `client` load or store is timed, lookup and checksums included, against the same bytes sent with
`sendall` by another process and taken with `recv_into` into memory that is warm. All take turns; medians count.
"""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

import kvcluster
from kvcluster.core.spec import KVSpec

if TYPE_CHECKING:
    from kvcluster.actors.local import LocalCluster

PAGE_BYTES = (64 * 2**10, 2 * 2**20, 16 * 2**20)
MOVED_BYTES = 64 * 2**20


def measure(rounds: int) -> dict[str, Any]:
    """GB/s of every path and page size, and their ratios to one raw TCP stream."""
    rows = []
    with kvcluster.local(shards=1, device_bytes=MOVED_BYTES * 8) as cluster, _RawPeer() as raw:
        for page_bytes in PAGE_BYTES:
            rows += _measure_pages(cluster, raw, page_bytes, rounds)
    return {"rounds": rounds, "moved_bytes": MOVED_BYTES, "transport": "grpc", "paths": rows}


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures as a table."""
    out = [f"\n{figures['moved_bytes'] >> 20} MiB a turn, {figures['rounds']} turns, medians; checksums on"]
    out.append(f"{'page':>8} {'path':<12} {'GB/s':>6} {'of raw TCP':>11} {'of memcpy':>10}")
    for row in figures["paths"]:
        out.append(
            f"{row['page_bytes'] >> 10:>4} KiB {row['path']:<12} {row['gb_per_s']:>6.2f} "
            f"{row['of_raw_tcp']:>11.2f} {row['of_memcpy']:>10.2f}"
        )
    return out


def _measure_pages(cluster: LocalCluster, raw: _RawPeer, page_bytes: int, rounds: int) -> list[dict[str, Any]]:
    layers, heads, dim, block_tokens = 32, 8, 128, 16
    if page_bytes < 2**20:
        layers, heads = 4, 2
    elif page_bytes > 2**22:
        block_tokens = 128
    spec = KVSpec.uniform(
        model=f"bench-{page_bytes}",
        weights="sha256:bench",
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )
    assert spec.page_bytes(0, spec.whole(0)) == page_bytes
    blocks = MOVED_BYTES // page_bytes
    shape = (blocks, layers, 2, block_tokens, heads, dim)
    source = torch.randint(-(2**15), 2**15 - 1, shape, dtype=torch.int16).view(torch.bfloat16)
    into = torch.zeros(shape, dtype=torch.bfloat16)
    flat_source, flat_into = source.view(torch.int16).flatten(), into.view(torch.int16).flatten()
    # Tokens that no turn has used: the second store of the same blocks would move nothing.
    fresh = itertools.count()
    client = cluster.client(spec)

    def tokens() -> list[int]:
        start = next(fresh) * blocks * block_tokens
        return list(range(start, start + blocks * block_tokens))

    stored = tokens()
    client.store(stored, source)
    client.flush()

    def store() -> None:
        outcome = client.store(tokens(), source)
        assert outcome.blocks == blocks, outcome

    def load() -> None:
        # Stores may have evicted what is to be loaded; then it is stored again, which is not timed.
        assert client.load(stored, into) == len(stored)

    def memcpy() -> None:
        flat_into.copy_(flat_source)

    paths: dict[str, Callable[[], None]] = {
        "memcpy": memcpy,
        "raw TCP": raw.receive,
        "grpc load": load,
        "grpc store": store,
    }
    times: dict[str, list[float]] = {name: [] for name in paths}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(rounds + 1):
            for name, path in paths.items():
                if name == "grpc load" and client.lookup(stored).blocks < blocks:
                    client.store(stored, source)
                    client.flush()
                began = time.perf_counter()
                path()
                if turn:  # the first warms up
                    times[name].append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    load()
    assert torch.equal(flat_source, flat_into), "what was loaded is not what was stored"
    median = {name: statistics.median(of) for name, of in times.items()}
    return [
        {
            "page_bytes": page_bytes,
            "path": name,
            "gb_per_s": MOVED_BYTES / median[name] / 1e9,
            "of_raw_tcp": median["raw TCP"] / median[name],
            "of_memcpy": median["memcpy"] / median[name],
        }
        for name in paths
    ]


class _RawPeer:
    """Another process that sends MOVED_BYTES down one TCP stream whenever it is asked to."""

    def __enter__(self) -> _RawPeer:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._ask, theirs = context.Pipe()
            self._process = context.Process(target=_send, args=(theirs, server.getsockname()[1]), daemon=True)
            self._process.start()
            self._socket, _ = server.accept()
        self._into = memoryview(bytearray(MOVED_BYTES))
        return self

    def __exit__(self, *error: object) -> None:
        self._ask.send(False)
        self._socket.close()
        self._process.join(10)

    def receive(self) -> None:
        self._ask.send(True)
        at = 0
        while at < MOVED_BYTES:
            at += self._socket.recv_into(self._into[at : at + 4 * 2**20])


def _send(asked: Connection[Any, Any], port: int) -> None:
    data = memoryview(bytearray(b"\x5a" * MOVED_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as stream:
        while asked.recv():
            stream.sendall(data)
