"""Measures loads of encoded pages against raw ones, and stores while other pages are encoded, on `kvcluster.local()`.

Pages hold random numbers: the time to encode a page does not depend on its content.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvcluster
from kvcluster.cli.bench.tiers.fixtures import (
    BLOCK_TOKENS,
    CALL_MS,
    LOOK_S,
    PAGE_BYTES,
    SHAPE,
    SPEC,
    lies_in,
    load,
    one_shard,
    prompt,
    rates,
    set_policy,
    store,
    tensors,
    tier_of,
    until,
)
from kvcluster.cli.bench.tiers.restart import restart
from kvcluster.cli.bench.transfer.party import warm_memory
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import PageKey
from kvcluster.errors import KVClusterError
from kvcluster.pages import checksum, codec

_OVER_S = 0.4
_FILL, _WARM = 64, 10


def measure(
    *, rounds: int, blocks: int, stores: int, folder: Path | None, say: Callable[[str], object]
) -> dict[str, Any]:
    """Returns all figures: loads of `blocks` blocks in `rounds` turns, the latencies of `stores` stores of one block,
    and loads from a killed shard's disk tier in `folder` after its restart."""
    torch.set_num_threads(1)
    return {
        "page_bytes": PAGE_BYTES,
        "rounds": rounds,
        "blocks": blocks,
        "loads": _loads(rounds, blocks, say),
        "stages": _stages(blocks),
        "stores": _stores(stores, say),
        "restart": restart(rounds, blocks, folder, say),
    }


# -------------------------------------------------------------------------------------------------------- loads


def _loads(rounds: int, blocks: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Loads prompts that are stored raw, in q8 and in q4 in turns, over tcp and over shm. Returns medians."""
    source, into = tensors(blocks)
    # Two more prompts are stored after the one to demote, which push it out of the device tier.
    with one_shard(device_bytes=2 * blocks * PAGE_BYTES, host_bytes=4 * blocks * PAGE_BYTES) as cluster:
        writer = cluster.client(SPEC)
        for number, name in enumerate(("q4", "q8")):
            say(f"encoding in {name}")
            set_policy(cluster.address, ("host.codec", name))
            store(writer, prompt(number, blocks), source)
            for pushing in range(2):
                store(writer, prompt(100 + 10 * number + pushing, blocks), source)
            until(partial(lies_in, "host", writer, prompt(number, blocks)), f"a prompt is in {name}")
        store(writer, prompt(9, blocks), source)
        prompts = {"raw": prompt(9, blocks), "q8": prompt(1, blocks), "q4": prompt(0, blocks)}
        times: dict[tuple[str, str], list[float]] = {}
        for path in ("tcp", "shm"):
            say(f"loads over {path}")
            config = ClientConfig(deadline_ms=CALL_MS, transports=(path,))
            with kvcluster.connect(cluster.address, SPEC, config=config) as client:
                for turn in range(rounds + 1):  # the first connects
                    for name, tokens in prompts.items():
                        took = load(client, tokens, into)
                        if turn:
                            times.setdefault((path, name), []).append(took)
        tiers = {name: tier_of(writer, tokens) for name, tokens in prompts.items()}
    if tiers != {"raw": "device", "q8": "host", "q4": "host"}:
        raise KVClusterError(f"prompts moved to other tiers during the measurement: {tiers}")
    return [
        {"path": path, "codec": name, **rates(turns, times[path, "raw"], blocks)}
        for (path, name), turns in times.items()
    ]


def _stages(blocks: int) -> list[dict[str, Any]]:
    """Times the stages of a load on the reader's side, each alone on one thread: milliseconds per thousand tokens."""
    group, tokens = SPEC.groups[0], blocks * BLOCK_TOKENS
    raw = warm_memory(blocks * PAGE_BYTES)
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
                coder.decode(part, raw[block * PAGE_BYTES : (block + 1) * PAGE_BYTES], 32)

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
    """Measures stores of one block each: while no pages move, and while other pages are demoted as q4."""
    one = torch.empty(1, *SHAPE, dtype=torch.bfloat16).normal_()
    many = torch.empty(_FILL, *SHAPE, dtype=torch.bfloat16).normal_()
    pages = 8 * count
    settings = {"low_free": 0.25, "high_free": 0.75, "host_codec": "q4"}
    with one_shard(
        device_bytes=pages * PAGE_BYTES, host_bytes=pages * PAGE_BYTES // 2, coordinator=settings
    ) as cluster:
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
                store(client, prompt(100_000 + number, _FILL), many)
            while not watch.is_over():
                began = time.monotonic()
                during.append((began, _timed(client, 200_000 + len(during), one)))
        finally:
            watch.end()
        first, last = watch.changes[0], watch.changes[-1]
        busy = [took for began, took in during if first <= began and began + took <= last]
    if len(busy) < count // 4:
        raise KVClusterError(f"only {len(busy)} stores ran during the demotion; run more stores")
    rows = {"idle": _quantiles(idle), "demoting": _quantiles(busy)}
    ratio = {name: rows["demoting"][name] / rows["idle"][name] for name in ("p50_ms", "p99_ms")}
    return {**rows, "p50_of_idle": ratio["p50_ms"], "p99_of_idle": ratio["p99_ms"]}


class _Watch:
    """Polls the number of demoted pages on its own thread; `changes` are the times at which it had grown."""

    def __init__(self, client: Client) -> None:
        self.changes: list[float] = []
        self._client = client
        self._seen = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether the demotion has begun, and nothing has changed for a while."""
        return bool(self.changes) and time.monotonic() - self.changes[-1] > _OVER_S

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            demoted = self._client.status()["totals"]["demoted"]
            if demoted != self._seen:
                self._seen = demoted
                self.changes.append(time.monotonic())


def _timed(client: Client, number: int, kv: torch.Tensor) -> float:
    began = time.perf_counter()
    store(client, prompt(number, 1), kv)
    return time.perf_counter() - began


def _quantiles(took: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(took, n=100)
    return {"stores": len(took), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}
