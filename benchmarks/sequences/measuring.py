"""Measures the calls of one sequence at several lengths, on `kvcluster.local()`, and the calls that reach the
coordinator meanwhile. The model is small, so that a million tokens fit: what is measured are tables, not bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvcluster
from benchmarks.rounds import duration
from benchmarks.specs import CALL_MS
from kvcluster.cli.figures import progress
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import CoordinatorQuestion, Reply
from kvcluster.errors import KVClusterError
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transport.auto import choose, own_attempts
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.rpc import Connection

SPEC = kvcluster.KVSpec.uniform(
    model="small",
    weights="sha256:bench",
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    dtype="float16",
    block_tokens=16,
)
_TAIL, _STEP_TOKENS, _WINDOW, _QUERY_HEADS = 64, 512, 1_024, 4
_MIGRATION = 256

_TOLD_S = 0.7
"""What is sealed is told to the coordinator within this time. A model takes longer for _MIGRATION tokens, so it asks as
often as is counted here."""


class CountingPort(GrpcPort):
    """Counts the questions that reach the coordinator, by name."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.asked: dict[str, int] = {}

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        name = type(question).__name__
        self.asked[name] = self.asked.get(name, 0) + 1
        return super().ask(question, deadline, namespace)


def measure(*, tokens: Sequence[int], calls: int, decoded: int) -> dict[str, Any]:
    """Returns for each length, in ascending order, the median milliseconds of each call, out of `calls`; and how often
    the coordinator was asked while `decoded` tokens were decoded one by one."""
    torch.set_num_threads(1)
    token_bytes = int(SPEC.token_bytes)
    room = 2 * token_bytes * tokens[-1] + 2**26
    with kvcluster.local(shards=2, ram_bytes=room) as cluster:
        port = CountingPort(Connection(cluster.address))
        config = ClientConfig(resident_bytes=room, deadline_ms=CALL_MS)
        attempts = own_attempts()
        with Client(port, lambda shard: choose(shard, ANONYMOUS, attempts), SPEC, config=config) as client:
            policy = kvcluster.WindowPolicy(tail_tokens=_TAIL, migration_tokens=_MIGRATION)
            with client.sequence(policy=policy) as sequence:
                return _measure(sequence, port, cluster.client(SPEC), tokens, calls, decoded)


def _measure(
    sequence: kvcluster.Sequence,
    port: CountingPort,
    other: Client,
    lengths: Sequence[int],
    calls: int,
    decoded: int,
) -> dict[str, Any]:
    rows = []
    for length in lengths:
        progress(f"{length:,} tokens")
        _grow(sequence, length)
        if not sequence.flush(deadline_ms=CALL_MS):
            raise KVClusterError("a sequence could not be stored: raise the memory of the shards")
        rows.append({"tokens": length} | _calls(sequence, calls) | _opening(other, length))
    before = dict(port.asked)
    for number in range(decoded):
        step(sequence)
        if not (number + 1) % _MIGRATION:
            time.sleep(_TOLD_S)
    sequence.flush(deadline_ms=CALL_MS)
    time.sleep(_TOLD_S)
    asked = {name: count - before.get(name, 0) for name, count in port.asked.items()}
    return {
        "calls": calls,
        "block_tokens": SPEC.block_tokens,
        "window": _WINDOW,
        "lengths": rows,
        "decoded": decoded,
        "asked": {name: count for name, count in sorted(asked.items()) if count},
        "asked_per_token": sum(asked.values()) / decoded,
    }


def step(sequence: kvcluster.Sequence, tokens: int = 1) -> None:
    """Appends tokens, whose ids are their positions."""
    first = sequence.length
    sequence.append(0, *_kv(tokens))
    sequence.advance(range(first, first + tokens))


def _grow(sequence: kvcluster.Sequence, length: int) -> None:
    while sequence.length < length:
        step(sequence, min(_STEP_TOKENS, length - sequence.length))


def _kv(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, 1, 16).half() for _ in range(2)]


def _calls(sequence: kvcluster.Sequence, calls: int) -> dict[str, float]:
    """Returns the median milliseconds of each call. The sequence is as before when it returns."""
    length, query = sequence.length, torch.randn(1, _QUERY_HEADS, 16)
    forks: list[kvcluster.Sequence] = []

    def fork() -> None:
        forks.append(sequence.fork())

    def draft() -> None:
        step(forks[-1], 4)

    took = {"fork": _median(fork, calls)}
    took["append and advance"] = _median(lambda: step(forks[-1]), calls)
    took["truncate a draft"] = _median(lambda: forks[-1].truncate(forks[-1].length - 4), calls, before=draft)
    deep = length - _TAIL - 24  # within a sealed block
    fresh = iter(forks[:-1])
    took["truncate deep"] = _median(lambda: next(fresh).truncate(deep), min(calls, len(forks) - 1))
    took["attend a window"] = _median(lambda: sequence.attend(0, query, window=_WINDOW), calls)
    took["read 16 tokens"] = _median(lambda: sequence.read(0, length - 16, 16), calls)
    left = iter(forks)
    took["close a fork"] = _median(lambda: next(left).close(), len(forks))
    return took


def _opening(client: Client, length: int) -> dict[str, float]:
    """Returns the milliseconds in which another worker opens a sequence with this prompt, and closes it."""
    prompt = list(range(length))
    began = time.perf_counter()
    opened = client.sequence(prompt, deadline_ms=CALL_MS)
    took = time.perf_counter() - began
    if opened.length != length // SPEC.block_tokens * SPEC.block_tokens:
        raise KVClusterError(f"of {length} stored tokens another worker found {opened.length}")
    return {"open elsewhere": took * 1e3, "close there": duration(opened.close) * 1e3}


def _median(call: Callable[[], object], calls: int, before: Callable[[], object] = lambda: None) -> float:
    took = []
    for _ in range(calls):
        before()
        took.append(duration(call))
    return statistics.median(took) * 1e3
