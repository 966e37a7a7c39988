"""Mooncake Store over TCP: `batch_put_from` and `batch_get_into` from and into registered memory, which is the way
without copies that its documentation gives for throughput. The memory of the store is that of the serving process;
clients bring none.
"""

import ctypes
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import worker

for library in (found for folder in sys.path for found in Path(folder).glob("nvidia/cuda_runtime/lib/libcudart.so.*")):
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # mooncake needs a CUDA runtime even without a GPU

from mooncake.store import MooncakeDistributedStore  # noqa: E402

PATHS = {"mooncake tcp": {"over": "tcp", "note": "batches from and into registered memory; its lookup, no checksum"}}
METADATA = "P2PHANDSHAKE"
SPARE_BYTES = 256 * 2**20


def _master():
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


def _join(master, segment_bytes):
    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", METADATA, segment_bytes, 16 * 2**20, "tcp", "", f"127.0.0.1:{master}")
    if status:
        raise OSError(f"mooncake's setup ended with {status}")
    return store


@contextmanager
def serve(paths, work):
    port, metrics = worker.free_port(), worker.free_port()
    command = [_master(), f"--rpc_port={port}", f"--metrics_port={metrics}"]
    with worker.running(command, port=port) as pid:
        # Twice the bytes that are stored at the same time, so that it evicts nothing.
        store = _join(port, 4 * work.nbytes * work.clients + SPARE_BYTES)
        try:
            yield {"at": port, "pids": [pid]}
        finally:
            store.close()


def connect(path, work, at):
    return Mooncake(_join(at, 0), work)


class Mooncake(worker.Path):
    def __init__(self, store, work):
        self.store_, self.work = store, work
        self.sizes = [work.page_bytes] * work.pages
        self.from_, self.to = (self.register(memory) for memory in (work.source, work.into))

    def register(self, memory):
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.store_.register_buffer(address, memory.nbytes):
            raise OSError("mooncake does not register this memory")
        return [address + number * self.work.page_bytes for number in range(self.work.pages)]

    def keys(self, batch):
        return [f"{self.work.client}/{batch}/{number}" for number in range(self.work.pages)]

    def store(self, batch):
        if any(self.store_.batch_put_from(self.keys(batch), self.from_, self.sizes)):
            raise OSError("mooncake did not store every page")

    def load(self, batch):
        if self.store_.batch_get_into(self.keys(batch), self.to, self.sizes) != self.sizes:
            raise OSError("mooncake did not load every page")

    def forget(self, batch):
        self.store_.batch_remove(self.keys(batch), True)

    def close(self):
        self.store_.close()
