"""A worker in a process of its own: `python -m tests.actors.worker JOB ARGUMENT...` says what came of it, in JSON.

What it stores and what the tests expect are made from a seed, alike in every process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from ray._private import services

import kvcluster
from kvcluster.config import ClientConfig
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.memory import checksum
from kvcluster.transfers import python_verified_copies
from tests.actors.processes import session, title
from tests.waiting import eventually

SPEC = KVSpec.uniform(
    model="tiny", weights="sha256:1", num_layers=4, num_kv_heads=4, head_dim=8, dtype="float32", block_tokens=16
)
PATIENT = ClientConfig(deadline_ms=60_000, connect_ms=60_000)
"""For machines that have much else to do; nothing here waits this long to succeed."""


def tokens(seed: int, blocks: int = 8) -> list[int]:
    """A prompt of full blocks that no other seed shares."""
    return list(range(seed * 100_000, seed * 100_000 + blocks * SPEC.block_tokens))


def kv(seed: int, blocks: int = 8) -> torch.Tensor:
    """Its KV: [blocks, layers, k and v, block_tokens, heads, dim]."""
    return torch.randn(blocks, 4, 2, 16, 4, 8, generator=torch.Generator().manual_seed(seed))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def load(address: str, seed: str) -> None:
    """Loads the seed's prompt."""
    out = torch.zeros_like(kv(0))
    with kvcluster.connect(address, SPEC, config=PATIENT) as client:
        say(tokens=client.load(tokens(int(seed)), out), digest=digest(out))


def redeem(address: str, ticket: str, layer_start: str, layer_stop: str, head_start: str, head_stop: str) -> None:
    """Loads its own layers and heads of a ticket that another process prepared."""
    part = Part(int(layer_start), int(layer_stop), int(head_start), int(head_stop))
    with kvcluster.connect(address, SPEC, part=part, config=PATIENT) as client:
        redeemed = client.redeem(bytes.fromhex(ticket))
        out = torch.zeros(redeemed.blocks, part.layers, 2, 16, part.head_stop - part.head_start, 8)
        loaded = client.begin_load(redeemed, out).result()
        say(blocks=loaded.blocks, digest=digest(out))


def store(address: str, seed: str, blocks: str, halt: str, halt_at: str, transport: str = "shm") -> None:
    """Stores by one transport, and sends itself a signal when that many pages were gathered to be sent."""
    gathered = itertools.count(1)

    def counted(gather: Callable[..., Any]) -> Callable[..., Any]:
        def gathers(*arguments: Any) -> Any:
            if next(gathered) == int(halt_at):
                signal.raise_signal(signal.Signals[halt])  # of this thread, which does not run on
            return gather(*arguments)

        return gathers

    python_verified_copies.EXECUTORS = ()  # in native code pages are not gathered one by one
    checksum.layer_sums = counted(checksum.layer_sums)
    checksum.copy_sums = counted(checksum.copy_sums)
    with kvcluster.connect(address, SPEC, config=replace(PATIENT, transports=(transport,))) as client:
        prompt, source = tokens(int(seed), int(blocks)), kv(int(seed), int(blocks))
        stored = client.store(prompt, source)
        say(blocks=stored.blocks, miss=str(stored.miss))


def embed() -> None:
    """Three embedded clusters: the first ends, the second waits for Ctrl-C, the third for worse."""

    def left() -> list[int]:
        return [pid for pid in session(os.getsid(0)) if pid != os.getpid()]

    def said_when_gone(**words: Any) -> None:
        eventually(lambda: not left())
        say(**words, settings=sorted(name for name in os.environ if name.startswith("RAY_AUTH")))

    with kvcluster.local(shards=2, ram_bytes="16MiB") as cluster:
        ours = set(cluster.pids()) <= set(left())
    said_when_gone(ours=ours)
    try:
        with kvcluster.local(ram_bytes="16MiB"):
            say(started=len(left()))
            threading.Event().wait()
    except KeyboardInterrupt:
        said_when_gone(interrupted=True)
    with kvcluster.local(ram_bytes="16MiB") as cluster:
        say(pids=cluster.pids())
        threading.Event().wait()


def notebook() -> None:
    """Two embedded clusters without a `with` block, as in a notebook. The one that has started Ray is closed first, and
    the other is left to the end of the process."""
    sys.stderr = sys.stdout  # what is told of them shows as a line that is no JSON
    first = kvcluster.local(ram_bytes="16MiB")
    second = kvcluster.local(ram_bytes="16MiB")
    client = second.client(SPEC)
    first.close()
    first.close()
    stored = client.store(tokens(1), kv(1))
    say(blocks=stored.blocks, shown=repr(first).endswith(", closed>"), pids=second.pids())


def gcs(program: str, patience_s: str) -> None:
    """An embedded cluster that uses a program in place of the server of Ray's control store."""
    os.environ.update(RAY_gcs_server_port_wait_time_s=patience_s)
    services.GCS_SERVER_EXECUTABLE = program
    error = ""
    try:
        kvcluster.local(ram_bytes="16MiB").close()
    except KVClusterError as failed:
        error = str(failed)
    say(error=error, left=[title(pid) for pid in session(os.getsid(0)) if pid != os.getpid()])


if __name__ == "__main__":
    {job.__name__: job for job in (load, redeem, store, embed, notebook, gcs)}[sys.argv[1]](*sys.argv[2:])
