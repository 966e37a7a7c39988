"""`lmcache_server` of LMCache, spoken to with its own messages, in the order in which its own connector sends them.

Sends one request at a time over one connection, as that connector does; but received bytes go directly into place,
while the connector first allocates memory, and its event loop is left out. So these are the figures of the server and
the protocol, and the connector's are no better. The server does not answer a PUT, so a store ends with an EXIST of its
last page. The server deletes nothing, so every store but the first overwrites the keys of the one before.
"""

import socket
import sys
from contextlib import contextmanager

import torch
import worker
from lmcache.utils import CacheEngineKey
from lmcache.v1 import protocol
from lmcache.v1.memory_management import MemoryFormat

PATHS = {"lmcache": {"over": "tcp", "note": "GET and PUT one by one, as its connector; no checksum, no lookup"}}


@contextmanager
def serve(paths, work):
    port = worker.free_port()
    command = [sys.executable, "-I", "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    with worker.running(command, port=port) as pid:
        yield {"at": port, "pids": [pid]}


def connect(path, work, at):
    return Server(work, at)


class Server(worker.Path):
    def __init__(self, work, port):
        self.work = work
        self.shape, self.nothing = torch.Size([work.page_bytes, 0, 0, 0]), torch.Size([0, 0, 0, 0])
        self.dtype, self.format = torch.uint8, MemoryFormat.BINARY
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.keys = {
            kind: [
                CacheEngineKey("bench", work.clients, work.client, kind << 32 | n, self.dtype)
                for n in range(work.pages)
            ]
            for kind in (1, 2)
        }

    def names(self, batch):
        return self.keys[2 if batch else 1]

    def ask(self, command, key, nbytes, shape):
        message = protocol.ClientMetaMessage(command, key, nbytes, self.format, self.dtype, shape)
        self.socket.sendall(message.serialize())

    def answer(self):
        data = bytearray(protocol.ServerMetaMessage.packlength())
        self.receive(memoryview(data))
        answer = protocol.ServerMetaMessage.deserialize(bytes(data))
        if answer.code != protocol.ServerReturnCode.SUCCESS:
            raise OSError("the server does not have it")
        return answer

    def receive(self, view):
        if self.socket.recv_into(view, 0, socket.MSG_WAITALL) != view.nbytes:
            raise OSError("the server has closed the connection")

    def store(self, batch):
        keys, command = self.names(batch), protocol.ClientCommand
        for number, key in enumerate(keys):
            self.ask(command.PUT, key, self.work.page_bytes, self.shape)
            self.socket.sendall(self.work.source[self.work.page(number)])
        self.ask(command.EXIST, keys[-1], 0, self.nothing)
        self.answer()

    def load(self, batch):
        for number, key in enumerate(self.names(batch)):
            self.ask(protocol.ClientCommand.GET, key, 0, self.nothing)
            self.answer()
            self.receive(self.work.into[self.work.page(number)])

    def close(self):
        self.socket.close()
