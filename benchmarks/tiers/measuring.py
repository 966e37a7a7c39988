"""Measures loads of encoded pages against raw ones, and stores while other pages are encoded, on `kvcluster.local()`.

Pages hold random numbers: the time to encode a page does not depend on its content.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvcluster
from benchmarks.codec.coded import CodedPages
from benchmarks.rounds import interleaved, latency_ms, medians
from benchmarks.specs import CALL_MS
from benchmarks.tiers.fixtures import (
    PAGE_BYTES,
    SPEC,
    load,
    one_shard,
    prompt,
    random_kv,
    rates,
    set_policy,
    store,
    tier_of,
    wait_for_tier,
)
from benchmarks.tiers.restart import restart
from benchmarks.transfer.worker import warm_memory
from kvcluster.cli.figures import progress
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import PageKey
from kvcluster.errors import KVClusterError
from kvcluster.memory import checksum, codec

_OVER_S = 0.4
"""The demotion is over when no page has been demoted for this long."""

_FILL, _WARM = 64, 10


def measure(*, rounds: int, blocks: int, stores: int, folder: Path | None) -> dict[str, Any]:
    """Returns all figures: loads of `blocks` blocks in `rounds` rounds, the latencies of `stores` stores of one block,
    and loads from a killed shard's disk tier in `folder` after its restart."""
    torch.set_num_threads(1)
    return {
        "page_bytes": PAGE_BYTES,
        "rounds": rounds,
        "blocks": blocks,
        "loads": _loads(rounds, blocks),
        "stages": _stages(blocks),
        "stores": _stores(stores),
        "restart": restart(rounds, blocks, folder),
    }


# -------------------------------------------------------------------------------------------------------- loads


def _loads(rounds: int, blocks: int) -> list[dict[str, Any]]:
    """Loads prompts that are stored raw, in q8 and in q4 in turns, over tcp and over shm. Returns medians."""
    source, into = random_kv(blocks), random_kv(blocks)
    prompts = {name: prompt(number, blocks) for number, name in enumerate(("q4", "q8", "raw"))}
    seconds: dict[str, dict[str, list[float]]] = {}
    # Two more prompts are stored after the one to demote, which push it out of the RAM tier.
    with one_shard({}, ram_bytes=2 * blocks * PAGE_BYTES, host_bytes=4 * blocks * PAGE_BYTES) as (cluster, writer):
        for number, name in enumerate(("q4", "q8")):
            progress(f"encoding in {name}")
            set_policy(cluster.address, ("host.codec", name))
            for each in (number, 100 + 10 * number, 101 + 10 * number):
                store(writer, each, source)
            wait_for_tier(writer, prompts[name], "host")
        store(writer, 2, source)
        for path in ("tcp", "shm"):
            progress(f"loads over {path}")
            config = ClientConfig(deadline_ms=CALL_MS, transports=(path,))
            with kvcluster.connect(cluster.address, SPEC, config=config) as client:
                runs = {name: partial(load, client, prompts[name], into) for name in ("raw", "q8", "q4")}
                seconds[path] = interleaved(runs, rounds)
        tiers = {name: tier_of(writer, tokens) for name, tokens in prompts.items()}
    if tiers != {"raw": "ram", "q8": "host", "q4": "host"}:
        raise KVClusterError(f"prompts moved to other tiers during the measurement: {tiers}")
    return [
        {"path": path, "codec": name, **figures}
        for path, of_path in seconds.items()
        for name, figures in rates(of_path, "raw", blocks).items()
    ]


def _stages(blocks: int) -> list[dict[str, Any]]:
    """Times the stages of a load on the reader's side, each alone on one thread: milliseconds per thousand tokens."""
    source, into = (warm_memory(blocks * PAGE_BYTES) for _ in range(2))
    torch.frombuffer(source, dtype=torch.bfloat16).normal_()
    identity = checksum.identity(NamespaceId(bytes(32)), PageKey(BlockHash(bytes(32)), 0, SPEC.whole(0)), codec.RAW)
    coded = {each: CodedPages(each, SPEC.groups[0], SPEC.block_tokens, source) for each in Codec}

    def verify(pages: CodedPages) -> None:
        for page in pages.coded_pages():
            checksum.layer_sums(identity, 0, len(SPEC.groups[0].layers), page)

    runs = {("verify", each): partial(verify, pages) for each, pages in coded.items()}
    for each, pages in coded.items():
        if each is not Codec.RAW:
            pages.encode()
            runs["decode", each] = partial(pages.decode, into)
    per_thousand = {name: of * 1e6 / (blocks * SPEC.block_tokens) for name, of in medians(interleaved(runs, 5)).items()}
    return [
        {
            "codec": each.name.lower(),
            "page_bytes": pages.page_bytes,
            "verify_ms": per_thousand["verify", each],
            "decode_ms": per_thousand.get(("decode", each), 0.0),
        }
        for each, pages in coded.items()
    ]


# ------------------------------------------------------------------------------------------------------- stores


def _stores(count: int) -> dict[str, Any]:
    """Measures stores of one block each: while no pages move, and while other pages are demoted as q4."""
    one, many = random_kv(1), random_kv(_FILL)
    pages = 8 * count
    settings = {"low_free": 0.25, "high_free": 0.75, "host_codec": "q4"}
    tiers = {"ram_bytes": pages * PAGE_BYTES, "host_bytes": pages * PAGE_BYTES // 2}
    with one_shard(settings, **tiers) as (_, client):
        progress("stores while nothing moves")
        idle = [store(client, number, one) for number in range(count + _WARM)][_WARM:]
        progress("stores while pages are encoded")
        for number in range(pages // _FILL):
            if not _demoted(client):
                store(client, 100_000 + number, many)
        busy = _stores_during_demotion(client, one)
    if len(busy) < count // 4:
        few = f"only {len(busy)} stores ran while pages were demoted, fewer than {count // 4}"
        raise KVClusterError(f"{few}: run it on a quieter machine")
    rows = {name: {"stores": len(of), **latency_ms(of)} for name, of in (("idle", idle), ("demoting", busy))}
    ratio = {name: rows["demoting"][name] / rows["idle"][name] for name in ("p50_ms", "p99_ms")}
    return {**rows, "p50_of_idle": ratio["p50_ms"], "p99_of_idle": ratio["p99_ms"]}


def _stores_during_demotion(client: Client, kv: torch.Tensor) -> list[float]:
    """Stores until nothing is demoted any more. Returns the seconds of the stores up to the last change."""
    took: list[float] = []
    before, changed_s, during = _demoted(client), time.monotonic(), 0
    while time.monotonic() - changed_s < _OVER_S:
        took.append(store(client, 200_000 + len(took), kv))
        now = _demoted(client)
        if now != before:
            before, changed_s, during = now, time.monotonic(), len(took)
    return took[:during]


def _demoted(client: Client) -> int:
    """Returns the number of pages that the shard has demoted, as it last reported."""
    return int(client.status()["totals"]["demoted"])
