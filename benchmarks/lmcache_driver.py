"""`lmcache_server` of LMCache, spoken to with its own messages, in the order in which its own connector sends them.

Sends one request at a time over one connection, as that connector does; but received bytes go directly into place,
while the connector first allocates memory, and its event loop is left out. So these are the figures of the server and
the protocol, and the connector's are no better. The server does not answer a PUT, so a store ends with an EXIST of its
last page. The server deletes nothing, so every store but the first overwrites the keys of the one before.
"""

import socket
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import party

PATHS = {"lmcache_server": {"over": "tcp", "note": "GET and PUT one by one, as its connector; no checksum, no lookup"}}


def missing():
    absent = [name for name in ("lmcache", "torch") if find_spec(name) is None]
    return f"no package {absent[0]}" if absent else None


@contextmanager
def serve(paths, work):
    port = party.free_port()
    command = [sys.executable, "-I", "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    with party.running(command, ready=lambda: party.listens(port)) as pid:
        yield {"at": port, "pids": [pid]}


def connect(path, work, at):
    return Server(work, at)


class Server:
    def __init__(self, work, port):
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1 import protocol
        from lmcache.v1.memory_management import MemoryFormat

        self.work = work
        self.protocol = protocol
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
        message = self.protocol.ClientMetaMessage(command, key, nbytes, self.format, self.dtype, shape)
        self.socket.sendall(message.serialize())

    def answer(self):
        data = bytearray(self.protocol.ServerMetaMessage.packlength())
        self.receive(memoryview(data))
        answer = self.protocol.ServerMetaMessage.deserialize(bytes(data))
        if answer.code != self.protocol.ServerReturnCode.SUCCESS:
            raise OSError("the server does not have it")
        return answer

    def receive(self, view):
        got = 0
        while got < view.nbytes:
            more = self.socket.recv_into(view[got:])
            if not more:
                raise OSError("the server has closed the connection")
            got += more

    def store(self, batch):
        keys, command = self.names(batch), self.protocol.ClientCommand
        for number, key in enumerate(keys):
            self.ask(command.PUT, key, self.work.page_bytes, self.shape)
            self.socket.sendall(self.work.source[self.work.page(number)])
        self.ask(command.EXIST, keys[-1], 0, self.nothing)
        self.answer()

    def load(self, batch):
        for number, key in enumerate(self.names(batch)):
            self.ask(self.protocol.ClientCommand.GET, key, 0, self.nothing)
            self.answer()
            self.receive(self.work.into[self.work.page(number)])

    def forget(self, batch):
        pass

    def close(self):
        self.socket.close()
