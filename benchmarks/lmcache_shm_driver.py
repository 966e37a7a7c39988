"""LMCache's multiprocess server, whose memory its clients share: `lmcache server` with `--shm-name`, in the transfer
mode that its own workers use on a CPU (engine_driven).

A load looks up the tokens, prepares the retrieval, copies each chunk once from shared memory to where it belongs, and
commits the retrieval, which releases the chunk; a store prepares, copies once and commits. The calls are those of
LMCache's own worker. The copies are the benchmark's: one thread of torch, straight between shared memory and the blocks
of the layout, as other peers scatter from and gather into their buffers. A chunk has 256 tokens, LMCache's default, or
fewer where the batch has no whole number of them. Chunks are registered as one plane, so that their bytes are
contiguous pages. Nothing is deleted: the server evicts the batches that were used least recently.
"""

import os
import sys
from contextlib import contextmanager

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import torch
import worker
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

PATHS = {
    "lmcache shm": {"over": "memory", "into": "straight", "note": "one copy a chunk; its lookup and locks; no checksum"}
}
PAGE_TOKENS, CHUNK_PAGES = 16, 16
TIMEOUT_S = 60.0


def _chunk_pages(work):
    """The most pages, up to LMCache's default of 256 tokens, that leave no rest."""
    return next(count for count in range(CHUNK_PAGES, 0, -1) if work.pages % count == 0)


@contextmanager
def serve(paths, work):
    port = worker.free_port()
    options = {
        "host": "127.0.0.1",
        "port": port,
        "chunk-size": PAGE_TOKENS * _chunk_pages(work),
        "l1-size-gb": 10 * work.nbytes * work.clients / 2**30 + 0.25,
        "eviction-policy": "LRU",
        "eviction-trigger-watermark": 0.4,  # it evicts beside the calls, and must be done before there is no room
        "shm-name": f"bench-{os.getpid()}",
        "supported-transfer-mode": "engine_driven",
    }
    command = [sys.executable, "-I", "-m", "lmcache.v1.multiprocess.server"]
    command += [f"--{name}={value}" for name, value in options.items()]
    command += ["--no-l1-use-lazy", "--disable-observability"]
    with worker.running(command, port=port) as pid:
        yield {"at": port, "pids": [pid]}


def connect(path, work, at):
    return SharedMemory(work, at)


class SharedMemory(worker.Path):
    def __init__(self, work, port):
        self.work = work
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        self.requests = 0
        tokens = PAGE_TOKENS * _chunk_pages(work)
        shape = {"num_layers": 1, "hidden_dim_size": work.page_bytes // (2 * PAGE_TOKENS), "dtype_str": "bfloat16"}
        payload = RegisterEngineDrivenContextPayload(
            instance_id=work.client,
            model_name="bench",
            world_size=1,
            block_size=PAGE_TOKENS,
            use_mla=True,
            num_physical_slots=tokens,
            **shape,
        )
        pool = self.client.register_kv_cache_engine_driven_context(payload).result(timeout=TIMEOUT_S)
        self.context = EngineDrivenContextShm(None, self.client, TIMEOUT_S, pool.shm_name, pool.pool_size)
        bytes(self.context._shm_buffer[::4096])  # touched before, as all memory of the benchmark is

    def key(self, batch):
        self.requests += 1
        tokens = PAGE_TOKENS * self.work.pages
        return IPCCacheServerKey(
            model_name="bench",
            world_size=1,
            worker_id=0,
            token_ids=(self.work.client, batch, *range(2, tokens)),
            start=0,
            end=tokens,
            request_id=f"{self.work.client}/{self.requests}",
            num_kv_readers=1,
        )

    def store(self, batch):
        self.store_from(batch, lambda first, chunk: chunk.copy_(self.part(self.work.source, first, chunk)))

    def load(self, batch):
        self.load_into(batch, lambda first, chunk: self.part(self.work.into, first, chunk).copy_(chunk))

    def in_layout(self, memory, work):
        return InLayout(self, memory)

    def part(self, memory, first, chunk):
        start = first * self.work.page_bytes
        return torch.frombuffer(memory, dtype=torch.uint8)[start : start + chunk.numel()]

    def store_from(self, batch, copy):
        key = self.key(batch)
        chunks, numbers = self.context.prepare_store(key, self.work.client)
        if len(chunks) * _chunk_pages(self.work) != self.work.pages:
            raise OSError(f"LMCache takes {len(chunks)} of {self.work.pages // _chunk_pages(self.work)} chunks")
        for number, chunk in zip(numbers, chunks, strict=True):
            copy(number * _chunk_pages(self.work), chunk.view(torch.uint8).view(-1))
        if not self.context.commit_store(key, self.work.client, []):
            raise OSError("LMCache did not commit the store")
        self.client.end_session(key.request_id)

    def load_into(self, batch, copy):
        key = self.key(batch)
        self.client.lookup(key.no_worker_id_version(), 1).result(timeout=TIMEOUT_S)
        while (found := self.client.query_prefetch_status(key.request_id).result(timeout=TIMEOUT_S)) is None:
            pass
        chunks = self.context.prepare_retrieve(key, self.work.client)
        if chunks is None or len(chunks) * _chunk_pages(self.work) != self.work.pages:
            raise OSError(f"LMCache has {found} chunks")
        for number, chunk in enumerate(chunks):
            copy(number * _chunk_pages(self.work), chunk.view(torch.uint8).view(-1))
        self.context.commit_retrieve(key, self.work.client)
        self.client.end_session(key.request_id)

    def close(self):
        self.context.close()
        self.client.close()


class InLayout(worker.Path):
    """The same, straight between shared memory and the blocks of a layout."""

    def __init__(self, shared, memory):
        self.shared, self.memory = shared, memory

    def store(self, batch):
        self.shared.store_from(batch, lambda first, chunk: self.memory.source.gather(chunk, first))

    def load(self, batch):
        self.shared.load_into(batch, lambda first, chunk: self.memory.into.scatter(chunk, first))
