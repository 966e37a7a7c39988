"""Whole generations over a context that lies on four shards, behind a link: fetched, or attended to there.

A generation opens the context, which the cluster has, computes the KV of a question, and decodes token by token; the
rows of a batch ask about the same context. What a layer computes beside attention is left out, so all of the time is
that of the cache. The lengths of a generation are read off one run: nothing in it knows how long it will be. Each has a
client of its own, that has attached before the clock starts. Registering spans, loads and
queries go over the link, and so does everything else between the client and the shards; the coordinator is beside the
client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import kvcluster
from benchmarks.attention.contexts import ModelLayer, fill
from benchmarks.attention.links import EmulatedLink, LinkProcess
from benchmarks.specs import CALL_MS, MODELS
from kvcluster.cli.figures import progress
from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.messages import Offer, ShardAddress
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transport.auto import OPENERS, AutoTransport, own_attempts
from kvcluster.transport.base import DataPath, Transport
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.rpc import Connection

SHARDS = 4
LAYERS = 2
QUESTION_TOKENS = 64

WAYS: dict[str, Callable[[], kvcluster.AttendPlanner | None]] = {
    "fetch": lambda: None,
    "ship": kvcluster.ShipAbsent,
}


def ranks() -> list[ModelLayer]:
    """Returns LAYERS layers of what one of eight ranks has of two models: one KV head of Llama 3 8B for four query
    heads, and the latent KV of DeepSeek V3 for 16."""
    llama, deepseek = MODELS["llama-3-8b"], MODELS["deepseek-v3"]
    return [
        ModelLayer("llama-3-8b, a rank of 8", _layers(llama, heads=1), 4, None),
        ModelLayer("deepseek-v3, a rank of 8", _layers(deepseek, heads=1), 16, 512),
    ]


def _layers(spec: KVSpec, *, heads: int) -> KVSpec:
    group = spec.groups[0]
    planes = tuple(replace(plane, heads=heads) for plane in group.planes)
    return replace(spec, groups=(replace(group, layers=tuple(range(LAYERS)), planes=planes),))


def measure(
    *, links: Sequence[EmulatedLink], tokens: int, lengths: Sequence[int], batches: Sequence[int]
) -> dict[str, Any]:
    """Returns the figures: for each model, link, batch and number of new tokens a row with the seconds and bytes of
    each way, and the time of shipping by that of fetching."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for of in ranks():
        with kvcluster.local(shards=SHARDS, ram_bytes=SHARDS * tokens * of.token_bytes + 2**28) as cluster:
            ids = list(range(tokens))
            _store(cluster, of, ids)
            _warm(cluster, of, ids)
            for through in links:
                with LinkProcess(through) as process:
                    for batch in batches:
                        progress(f"{of.name}, {through.name}, batch {batch}")
                        found = {way: _generate(cluster, process, of, ids, way, lengths, batch) for way in WAYS}
                        rows += [
                            _row(of, through, batch, new, {way: found[way][at] for way in WAYS})
                            for at, new in enumerate(lengths)
                        ]
    return {"tokens": tokens, "layers": LAYERS, "shards": SHARDS, "question": QUESTION_TOKENS, "rows": rows}


def _row(
    of: ModelLayer, through: EmulatedLink, batch: int, new: int, found: dict[str, dict[str, float]]
) -> dict[str, Any]:
    figures = {f"{way}_{what}": found[way][what] for way in WAYS for what in ("seconds", "bytes")}
    about = {"model": of.name, "link": through.name, "batch": batch, "new": new}
    return about | figures | {"of_fetch": found["ship"]["seconds"] / found["fetch"]["seconds"]}


def _store(cluster: Any, of: ModelLayer, ids: Sequence[int]) -> None:
    """Stores the context: random KV."""
    with cluster.client(of.spec) as client, client.sequence() as sequence:
        fill(sequence, of, ids, lambda first, stop: of.values(stop - first))
        if not sequence.flush(deadline_ms=CALL_MS):
            raise kvcluster.errors.KVClusterError("the context could not be stored: raise the memory of the shards")


def _warm(cluster: Any, of: ModelLayer, ids: Sequence[int]) -> None:
    """Has every shard attend once: the first time it imports torch."""
    with cluster.client(of.spec) as client, client.sequence(ids, prefetch=False) as sequence:
        sequence.append(0, *of.values(1))
        query = of.query(1)
        sequence.attend(0, query, planner=kvcluster.ShipAbsent(), latent_values=of.latent_values, deadline_ms=CALL_MS)
    if not client.shipped().messages:
        raise kvcluster.errors.KVClusterError("no shard attends: this benchmark needs torch in the shards")


def _generate(
    cluster: Any, process: LinkProcess, of: ModelLayer, ids: Sequence[int], way: str, lengths: Sequence[int], batch: int
) -> list[dict[str, float]]:
    """Returns the seconds and bytes of a generation at each of these lengths."""
    planner = WAYS[way]()
    room = 2 * (len(ids) + (QUESTION_TOKENS + max(lengths) + 32) * batch) * of.token_bytes
    with _client(cluster, process, of.spec, room) as client:
        client.lookup(ids[:16])
        before, began, told = process.counted(), time.perf_counter(), list[dict[str, float]]()
        first = client.sequence(ids, prefetch=planner is None)
        rows = kvcluster.SequenceBatch([first, *(first.fork() for _ in range(batch - 1))])
        _step(rows, of, QUESTION_TOKENS, planner)
        for made in range(1, max(lengths) + 1):
            _step(rows, of, 1, planner)
            if made in lengths:
                took = time.perf_counter() - began
                told.append({"seconds": took, "bytes": process.counted() - before})
        return told


def _step(rows: kvcluster.SequenceBatch, of: ModelLayer, tokens: int, planner: kvcluster.AttendPlanner | None) -> None:
    for layer in range(LAYERS):
        rows.append(layer, *of.values(tokens * len(rows)))
        query = of.query(tokens * len(rows))
        rows.attend(layer, query, planner=planner, latent_values=of.latent_values, deadline_ms=CALL_MS)
    rows.advance([torch.randint(2**31, (tokens,)).tolist() for _ in range(len(rows))])


def _client(cluster: Any, process: LinkProcess, spec: KVSpec, resident_bytes: int) -> Client:
    """Returns a client that reaches the shards over the link, by tcp."""
    next_attempt = own_attempts()

    def open_tcp(offer: Offer, credentials: Credentials) -> DataPath:
        return OPENERS["tcp"](replace(offer, address=process.through(offer.address)), credentials)

    def opener(shard: ShardAddress) -> Transport:
        control = GrpcPages(process.through(shard.address))
        return AutoTransport(shard, control, {"tcp": open_tcp}, credentials=ANONYMOUS, next_attempt=next_attempt)

    config = ClientConfig(resident_bytes=resident_bytes, deadline_ms=CALL_MS)
    return Client(GrpcPort(Connection(cluster.address)), opener, spec, config=config)
