"""Loads of encoded pages beside raw ones, and stores while others are encoded, on a cluster of `kvcluster.local()`.

One shard in a process of its own, pages of a Llama-3-8B (32 layers, 8 heads of 128 channels, bfloat16, 16 tokens: 2
MiB) of random numbers. How they are encoded has no bearing on what they are.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import kvcluster
from kvcluster.cli.bench.specs import llama_8b
from kvcluster.cli.bench.transfer.party import warm_memory
from kvcluster.client import Client
from kvcluster.client.control import NO_CALL, GrpcPort, expect
from kvcluster.config import ClientConfig
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Done, PageKey, SetPolicy
from kvcluster.errors import KVClusterError
from kvcluster.pages import checksum, codec
from kvcluster.transport.rpc import Connection
from kvcluster.transport.seam import Deadline

BLOCK_TOKENS = 16
SPEC = llama_8b("sha256:bench", BLOCK_TOKENS)
_SHAPE = (32, 2, BLOCK_TOKENS, 8, 128)
_PAGE = SPEC.page_bytes(0, SPEC.whole(0))
_CALL_MS = 60_000
_SETTLE_S = 30.0
_LOOK_S = 0.02
_OVER_S = 0.4
_FILL, _WARM = 64, 10


def measure(*, rounds: int, blocks: int, stores: int, say: Callable[[str], object]) -> dict[str, Any]:
    """All figures: loads of so many blocks in so many turns, and the latencies of so many stores of one block."""
    torch.set_num_threads(1)
    return {
        "page_bytes": _PAGE,
        "rounds": rounds,
        "blocks": blocks,
        "loads": _loads(rounds, blocks, say),
        "stages": _stages(blocks),
        "stores": _stores(stores, say),
    }


# -------------------------------------------------------------------------------------------------------- loads


def _loads(rounds: int, blocks: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Prompts that lie raw, in q8 and in q4 are loaded in turns, over tcp and over shm; medians."""
    memory = [warm_memory(blocks * _PAGE) for _ in range(2)]
    source, into = (torch.frombuffer(m, dtype=torch.bfloat16).view(blocks, *_SHAPE) for m in memory)
    source.normal_()
    # The prompt that goes down is followed by one that pushes it there: twice as many blocks as fit above.
    with _cluster(device_bytes=2 * blocks * _PAGE, host_bytes=4 * blocks * _PAGE) as cluster:
        writer = cluster.client(SPEC)
        for number, name in enumerate(("q4", "q8")):
            say(f"encoding in {name}")
            _set(cluster.address, ("host.codec", name))
            _store(writer, _prompt(number, blocks), source)
            for pushing in range(2):
                _store(writer, _prompt(100 + 10 * number + pushing, blocks), source)
            _until(partial(_lies_in, "host", writer, _prompt(number, blocks)), f"a prompt is in {name}")
        _store(writer, _prompt(9, blocks), source)
        prompts = {"raw": _prompt(9, blocks), "q8": _prompt(1, blocks), "q4": _prompt(0, blocks)}
        times: dict[tuple[str, str], list[float]] = {}
        for path in ("tcp", "shm"):
            say(f"loads over {path}")
            config = ClientConfig(deadline_ms=_CALL_MS, transports=(path,))
            with kvcluster.connect(cluster.address, SPEC, config=config) as client:
                for turn in range(rounds + 1):  # the first connects
                    for name, tokens in prompts.items():
                        began = time.perf_counter()
                        loaded = client.load(tokens, into)
                        took = time.perf_counter() - began
                        if loaded != len(tokens):
                            raise KVClusterError(f"{loaded} of {len(tokens)} tokens of {name} were loaded")
                        if turn:
                            times.setdefault((path, name), []).append(took)
        tiers = {name: _tier(writer, tokens) for name, tokens in prompts.items()}
    if tiers != {"raw": "device", "q8": "host", "q4": "host"}:
        raise KVClusterError(f"what was to be measured has moved meanwhile: {tiers}")
    rows = []
    for (path, name), turns in times.items():
        rate = blocks * BLOCK_TOKENS / statistics.median(turns)
        raw = blocks * BLOCK_TOKENS / statistics.median(times[path, "raw"])
        rows.append({"path": path, "codec": name, "tokens_per_s": rate, "of_raw": rate / raw})
    return rows


def _stages(blocks: int) -> list[dict[str, Any]]:
    """What of a load is done on the reader's side, each alone on one thread: milliseconds for a thousand tokens."""
    group, tokens = SPEC.groups[0], blocks * BLOCK_TOKENS
    raw = warm_memory(blocks * _PAGE)
    torch.frombuffer(raw, dtype=torch.bfloat16).normal_()
    identity = checksum.identity(NamespaceId(bytes(32)), PageKey(BlockHash(bytes(32)), 0, SPEC.whole(0)), codec.RAW)
    rows = []
    for each in Codec:
        layer = layer_bytes(each, group, block_tokens=BLOCK_TOKENS, heads=8)
        coded = warm_memory(blocks * 32 * layer)
        coder = codec.coder(each, group, block_tokens=BLOCK_TOKENS, heads=8)
        if each is not Codec.RAW:
            assert coder.encode(raw, coded, blocks * 32)

        def verify(coded: memoryview = coded, layer: int = layer) -> None:
            for at in range(0, len(coded), 32 * layer):
                checksum.layer_sums(identity, 0, 32, coded[at : at + 32 * layer])

        def decode(coded: memoryview = coded, layer: int = layer, coder: codec.Coder = coder) -> None:
            for block in range(blocks):
                part = coded[block * 32 * layer : (block + 1) * 32 * layer]
                coder.decode(part, raw[block * _PAGE : (block + 1) * _PAGE], 32)

        row: dict[str, Any] = {"codec": each.name.lower(), "page_bytes": 32 * layer}
        row["verify_ms"] = _median_s(verify) * 1e6 / tokens
        row["decode_ms"] = 0.0 if each is Codec.RAW else _median_s(decode) * 1e6 / tokens
        rows.append(row)
    return rows


def _median_s(work: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# ------------------------------------------------------------------------------------------------------- stores


def _stores(count: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Latencies of stores of one block each: while nothing moves, and while others are demoted in q4."""
    one = torch.empty(1, *_SHAPE, dtype=torch.bfloat16).normal_()
    many = torch.empty(_FILL, *_SHAPE, dtype=torch.bfloat16).normal_()
    pages = 8 * count
    settings = {"low_free": 0.25, "high_free": 0.75, "host_codec": "q4"}
    with _cluster(device_bytes=pages * _PAGE, host_bytes=pages * _PAGE // 2, **settings) as cluster:
        client = cluster.client(SPEC)
        say("stores while nothing moves")
        idle = [_timed(client, number, one) for number in range(count + _WARM)][_WARM:]
        say("stores while pages are encoded")
        watch = _Watch(cluster.client(SPEC))
        during: list[tuple[float, float]] = []
        try:
            for number in range(pages // _FILL):
                if watch.changes:
                    break
                _store(client, _prompt(100_000 + number, _FILL), many)
            while not watch.is_over():
                began = time.monotonic()
                during.append((began, _timed(client, 200_000 + len(during), one)))
        finally:
            watch.end()
        first, last = watch.changes[0], watch.changes[-1]
        busy = [took for began, took in during if first <= began and began + took <= last]
    if len(busy) < count // 4:
        raise KVClusterError(f"only {len(busy)} stores fell into the demotion; measure more at once")
    rows = {"idle": _quantiles(idle), "demoting": _quantiles(busy)}
    ratio = {name: rows["demoting"][name] / rows["idle"][name] for name in ("p50_ms", "p99_ms")}
    return {**rows, "p50_of_idle": ratio["p50_ms"], "p99_of_idle": ratio["p99_ms"]}


class _Watch:
    """Looks on a thread of its own how many pages went down; `changes` are the moments at which it was more."""

    def __init__(self, client: Client) -> None:
        self.changes: list[float] = []
        self._client = client
        self._seen = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Has it begun, and has nothing changed for a while?"""
        return bool(self.changes) and time.monotonic() - self.changes[-1] > _OVER_S

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            demoted = self._client.status()["totals"]["demoted"]
            if demoted != self._seen:
                self._seen = demoted
                self.changes.append(time.monotonic())


def _timed(client: Client, number: int, kv: torch.Tensor) -> float:
    began = time.perf_counter()
    _store(client, _prompt(number, 1), kv)
    return time.perf_counter() - began


def _quantiles(took: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(took, n=100)
    return {"stores": len(took), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


# ------------------------------------------------------------------------------------------------------ helpers


@contextmanager
def _cluster(*, device_bytes: int, host_bytes: int, **coordinator: Any) -> Iterator[Any]:
    """One shard whose tiers change only by the watermarks that are given; nothing is promoted."""
    quiet = {"hold_ms": 0, "host_raw_blocks": 0, "promote_loads": 1_000_000, **coordinator}
    config = {"coordinator": quiet, "shard": {"scrub_bytes": 0}, "client": {"deadline_ms": _CALL_MS}}
    with kvcluster.local(shards=1, device_bytes=device_bytes, host_bytes=host_bytes, config=config) as cluster:
        yield cluster


def _set(address: str, setting: tuple[str, str]) -> None:
    connection = Connection(address, None)
    try:
        expect(Done, GrpcPort(connection).ask(SetPolicy(NO_CALL, (setting,)), Deadline.after_ms(_CALL_MS)))
    finally:
        connection.close()


def _prompt(number: int, blocks: int) -> list[int]:
    """One that no other number has."""
    return [number, *range(1, blocks * BLOCK_TOKENS)]


def _store(client: Client, tokens: list[int], kv: torch.Tensor) -> None:
    stored = client.store(tokens, kv)
    if stored.blocks != len(kv):
        raise KVClusterError(f"{len(kv)} blocks were to be stored: {stored}")


def _tier(client: Client, tokens: list[int]) -> str:
    """Where all of it lies, or "" where that is not one tier."""
    tiers = {block.tier if block.hit else "" for block in client.explain(tokens)}
    return tiers.pop() if len(tiers) == 1 else ""


def _lies_in(tier: str, client: Client, tokens: list[int]) -> bool:
    return _tier(client, tokens) == tier


def _until(holds: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + _SETTLE_S
    while not holds():
        if time.monotonic() > give_up:
            raise KVClusterError(f"not within {_SETTLE_S:.0f} s: {what}")
        time.sleep(_LOOK_S)
