"""A worker on one host: `python -m tests.hosts.worker ADDRESS JOB ARGUMENT...` says what came of it, in JSON.

What is stored is made from a seed, alike in every process, so that every loaded byte is compared.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch

import kvcluster
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.spec import KVSpec

SPEC = KVSpec.uniform(
    model="hosts", weights="sha256:1", num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32", block_tokens=16
)
BLOCKS = 16
PAGE_BYTES = SPEC.layer_bytes(0, SPEC.whole(0)) * 4
PATIENT = ClientConfig(deadline_ms=30_000, connect_ms=30_000, store_wait_ms=10_000)


def tokens(seed: int, blocks: int = BLOCKS) -> list[int]:
    """A prompt of full blocks that no other seed shares."""
    return list(range(seed * 1_000, seed * 1_000 + blocks * SPEC.block_tokens))


def kv(seed: int) -> torch.Tensor:
    """Its KV: [blocks, layers, k and v, block_tokens, heads, dim]."""
    return torch.randn(BLOCKS, 4, 2, 16, 8, 64, generator=torch.Generator().manual_seed(seed))


def store(client: Client, first: int, last: int) -> dict[str, Any]:
    """Stores the prompts of these seeds."""
    stored = sum(client.store(tokens(seed), kv(seed)).blocks for seed in range(first, last))
    return {"stored": stored, "flushed": client.flush()}


def load(client: Client, first: int, last: int) -> dict[str, Any]:
    """Loads the prompts of these seeds, and compares every byte of what was loaded."""
    began, loaded, wrong = time.monotonic(), 0, 0
    for seed in range(first, last):
        out = torch.zeros_like(kv(seed))
        blocks = client.load(tokens(seed), out) // SPEC.block_tokens
        loaded += blocks
        wrong += not torch.equal(out[:blocks], kv(seed)[:blocks])
    return {"blocks": loaded, "of": (last - first) * BLOCKS, "wrong": wrong, "seconds": time.monotonic() - began}


def replay(client: Client, first: int, last: int) -> dict[str, Any]:
    """Loads the prompts of these seeds in the same order again and again, until a line comes in, and says what came of
    each round, also when it ends. Nothing is stored, so that what was lost stays lost."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    rounds = []
    while not stop.is_set():
        rounds.append(load(client, first, last))
        print(json.dumps(rounds[-1]), flush=True)
    return {"rounds": rounds}


def main(address: str, job: str, first: str, last: str) -> None:
    """Does one job and says what came of it."""
    token = os.environ["KVCLUSTER_TOKEN"]
    with kvcluster.connect(address, SPEC, token=token, config=PATIENT) as client:
        print(json.dumps({"store": store, "load": load, "replay": replay}[job](client, int(first), int(last))))


if __name__ == "__main__":
    main(*sys.argv[1:])
