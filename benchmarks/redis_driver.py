"""Redis, set up for throughput as its documentation recommends: pipelined commands, hiredis's C parser, nothing written
to disk, and a unix socket if client and server share a machine. Values are Python bytes, so a load copies them once.
"""

import shutil
import tempfile
from contextlib import contextmanager

import hiredis  # noqa: F401 - redis uses its parser if it is installed
import redis
import worker

if shutil.which("redis-server") is None:
    raise FileNotFoundError("no redis-server on the path")

PATHS = {
    "redis unix": {"over": "unix", "note": "pipelined GET and SET; no checksum, no lookup"},
    "redis tcp": {"over": "tcp", "note": "pipelined GET and SET; no checksum, no lookup"},
}
PIPELINE_BYTES = 8 * 2**20
"""Bytes of one pipeline: Redis keeps all its answers in memory until they are sent."""


@contextmanager
def serve(paths, work):
    with tempfile.TemporaryDirectory() as folder:
        port, unix = worker.free_port(), f"{folder}/redis.sock"
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", unix, "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        with worker.running(command, port=port) as pid:
            yield {"at": {"port": port, "unix": unix}, "pids": [pid]}


def connect(path, work, at):
    where = {"unix_socket_path": at["unix"]} if path == "redis unix" else {"host": "127.0.0.1", "port": at["port"]}
    return Redis(redis.Redis(**where), path, work)


class Redis(worker.Path):
    def __init__(self, server, path, work):
        self.server, self.path, self.work = server, path, work
        self.step = max(1, PIPELINE_BYTES // work.page_bytes)

    def key(self, batch, number):
        return f"{self.path}/{self.work.client}/{batch}/{number}"

    def slices(self):
        for first in range(0, self.work.pages, self.step):
            yield range(first, min(first + self.step, self.work.pages))

    def store(self, batch):
        for numbers in self.slices():
            pipeline = self.server.pipeline(transaction=False)
            for number in numbers:
                pipeline.set(self.key(batch, number), self.work.source[self.work.page(number)])
            pipeline.execute()

    def load(self, batch):
        for numbers in self.slices():
            pipeline = self.server.pipeline(transaction=False)
            for number in numbers:
                pipeline.get(self.key(batch, number))
            for number, value in zip(numbers, pipeline.execute(), strict=True):
                self.work.into[self.work.page(number)] = value

    def forget(self, batch):
        self.server.delete(*[self.key(batch, number) for number in range(self.work.pages)])

    def close(self):
        self.server.close()
