"""Whole calls: `client.load` and `client.store` on a real cluster, from the tokens to the bytes in the engine's memory.

The times include hashes, lookup, ticket, pins, verification, commit and report: the full cost for an engine. The
cluster is `kvcluster.local()` with one shard and default settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import kvcluster
from benchmarks.specs import CALL_MS, PASSING_ADAPTER, batch_spec, page_shape
from benchmarks.transfer.worker import Path, Work
from kvcluster.cli.waiting import wait_until
from kvcluster.client import Client, Prompt
from kvcluster.config import ClientConfig
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transfers.layouts import Memory, Paged

if TYPE_CHECKING:
    from benchmarks.transfer.layout import Blocks, EngineMemory

_NOTE = "everything: hashes, lookup, ticket, pins, checksums, commit"
PATHS = {
    "client shm": {"over": "memory", "note": _NOTE},
    "client tcp": {"over": "tcp", "note": _NOTE},
    "client grpc": {"over": "tcp", "note": _NOTE},
}


def connect(path: str, work: Work, at: Any) -> Path:
    """Connects a client that uses only this transport."""
    torch.set_num_threads(1)
    name = path.removeprefix("client ")
    config = ClientConfig(deadline_ms=CALL_MS, transports=(name,))
    client = kvcluster.connect(at, batch_spec(work.page_bytes, 0), config=config)
    source, into = (pages_tensor(memory, client.spec) for memory in (work.source, work.into))
    return _Whole(client, name, work, source, into)


def pages_tensor(pages: memoryview, spec: KVSpec) -> torch.Tensor:
    """Returns contiguous pages as `[pages, layers, planes, block_tokens, heads, dim]`."""
    return torch.frombuffer(pages, dtype=torch.bfloat16).view(-1, *page_shape(spec))


def paged(layout: str, blocks: Blocks, spec: KVSpec) -> Paged:
    """Returns blocks of an engine's memory as its connector hands them to the client."""
    caches = [tensor.view(torch.bfloat16) for tensor in blocks.tensors]
    if layout == "transformers":
        heads, _, dim = caches[0][0].shape
        planes = [cache.view(heads, -1, spec.block_tokens, dim).permute(1, 2, 0, 3) for cache in caches]
        return Paged(list(zip(planes[::2], planes[1::2], strict=True)), blocks.ids)
    return {"nhd": Paged.nhd, "hnd": Paged.hnd, "cpu": Paged.vllm_cpu}[layout](caches, blocks.ids)


def fill(memory: Paged, pages: torch.Tensor) -> None:
    """Copies pages of `[pages, layers, planes, block_tokens, heads, dim]` into the blocks of an engine's memory."""
    ids = torch.as_tensor(memory.block_ids)
    for number, layer in enumerate(memory.layers):
        for plane, tensor in enumerate(layer if isinstance(layer, tuple) else layer.unbind(1)):
            tensor[ids] = pages[:, number, plane]


class _Whole(Path):
    """Batch 0 is kept; every other batch is stored under the adapter that is purged after the round."""

    def __init__(self, client: Client, transport: str, work: Work, source: Memory, into: Memory) -> None:
        self._client = client
        self._transport = transport
        self._work = work
        self._source = source
        self._into = into
        self._rest = list(range(2, work.pages * client.spec.block_tokens))

    def in_layout(self, memory: EngineMemory, work: Work) -> Path:
        """Returns whole calls with an engine's memory, whose source is given the content of `work.source`."""
        spec = self._client.spec
        source, into = (paged(memory.layout, blocks, spec) for blocks in (memory.source, memory.into))
        fill(source, pages_tensor(work.source, spec))
        return _Whole(self._client, self._transport, work, source, into)

    def load(self, batch: int) -> None:
        prompt = self._prompt(batch)
        tokens = len(prompt.token_ids)
        loaded = self._client.load(prompt, self._into)
        if loaded != tokens:
            why = self._client.explain(prompt)
            raise KVClusterError(f"{loaded} of {tokens} tokens were loaded; the last: {why[-1]}")

    def store(self, batch: int) -> None:
        stored = self._client.store(self._prompt(batch), self._source)
        if stored.blocks != self._work.pages:
            raise KVClusterError(f"not all of {self._work.pages} blocks were stored: {stored}")
        if not batch:
            self._check_transport()

    def flush(self) -> None:
        """Waits until the shard has reported the stored blocks, so that they can be looked up."""
        if not self._client.flush():
            raise KVClusterError(f"the shard did not report the stored blocks within {CALL_MS / 1e3:.0f} s")

    def close(self) -> None:
        self._client.close()

    def _prompt(self, batch: int) -> Prompt:
        # Each client and transport has its own prompt, since a block that is already cached would not be stored.
        who = self._work.client * len(PATHS) + list(PATHS).index(f"client {self._transport}")
        return Prompt([who, batch, *self._rest], adapter=PASSING_ADAPTER if batch else "")

    def _check_transport(self) -> None:
        used = self._client.status()["transports"]
        if not all(self._transport in str(transport) for transport in used.values()):
            raise KVClusterError(f"{self._transport} was requested, but these transports were used: {used}")


@contextmanager
def serve(paths: Sequence[str], work: Work) -> Iterator[dict[str, Any]]:
    """Starts the cluster. `pids` are its coordinator and its shard."""
    per_batch = work.nbytes * work.clients
    # Twice the largest stored size, so that nothing is evicted: low_free is a share of the whole.
    with kvcluster.local(shards=1, ram_bytes=max(256 * 2**20, 2 * per_batch * (len(paths) + 1))) as cluster:
        purger = cluster.client(batch_spec(work.page_bytes, 1))
        kept = work.pages * work.clients * len(paths)

        def forget() -> None:
            purger.purge(adapter=PASSING_ADAPTER)
            wait_until(lambda: sum(s["pages"] for s in purger.status()["shards"]) <= kept, "purged pages are gone")

        yield {"at": cluster.address, "pids": cluster.pids(), "forget": forget}
