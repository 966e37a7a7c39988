"""An engine's process as its pod runs it: `python -m tests.pods.engine ADDRESS USER GROUP MODE`, another user with the
group of the sockets, in user and process namespaces of its own if MODE is pod. Each line in is a job, and its answer a
line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import kvcluster
from kvcluster.client import Client
from kvcluster.errors import KVClusterError
from tests.hosts.worker import PAGE_BYTES, PATIENT, SPEC, kv, load, store, tokens
from tests.other_users import become


def rate(client: Client, first: int, last: int) -> dict[str, Any]:
    """Loads the prompts of these seeds, time and again into the same memory, and returns the bytes a second of the
    quickest round, in which nothing is compared."""
    out, best = torch.zeros_like(kv(first)), 0.0
    for _ in range(20):
        began = time.perf_counter()
        blocks = sum(client.load(tokens(seed), out) // SPEC.block_tokens for seed in range(first, last))
        best = max(best, blocks * PAGE_BYTES / (time.perf_counter() - began))
    assert torch.equal(out, kv(last - 1))
    return {"rate": best}


JOBS = {"store": store, "load": load, "rate": rate}


def main(address: str, user: str, group: str, mode: str) -> None:
    """Connects, and carries out jobs: JOB FIRST LAST."""
    become(int(user), int(group), in_pod=mode == "pod")
    try:
        client = kvcluster.connect(address, SPEC, token=os.environ["KVCLUSTER_TOKEN"], config=PATIENT)
    except KVClusterError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    with client:
        print(json.dumps({"connected": address}), flush=True)
        for line in sys.stdin:
            job, first, last = line.split()
            done = JOBS[job](client, int(first), int(last))
            print(json.dumps({**done, "ways": list(client.shard_connections.names().values())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
