"""NIXL over UCX: registered memory, descriptor lists prepared once, one transfer for a whole batch, a READ for a load
and a WRITE for a store. It moves bytes between two agents and has no names for them: the serving agent has memory for
one batch to load and one to store for each client. Between processes of one machine UCX uses shared memory; `nixl tcp`
disables it.
"""

import base64
import ctypes
import os
from contextlib import contextmanager

import worker
from nixl._api import nixl_agent, nixl_agent_config

PATHS = {
    "nixl ucx": {"over": "memory", "note": "one prepared transfer a batch; no names, no checksum, no lookup"},
    "nixl tcp": {
        "over": "tcp",
        "note": "UCX held to TCP; one prepared transfer a batch; no names, no checksum, no lookup",
    },
}
RESTS = True  # the thread with which an agent makes progress never sleeps


def _agent(path, name):
    # UCX reads this when the agent makes its context, so one process can have one of each.
    if path == "nixl tcp":
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)
    return nixl_agent(f"{path} {name}", nixl_agent_config(backends=["UCX"]))


def _address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _register(agent, memory):
    agent.register_memory([(_address(memory), memory.nbytes, 0, "")], "DRAM")


@contextmanager
def serve(paths, work):
    memory = worker.warm_memory(2 * work.nbytes * work.clients)
    agents = {}
    for path in paths:
        agents[path] = _agent(path, "server")
        _register(agents[path], memory)
    at = {path: base64.b64encode(agent.get_agent_metadata()).decode() for path, agent in agents.items()}
    yield {"at": at | {"address": _address(memory)}}


def connect(path, work, at):
    return Nixl(path, work, base64.b64decode(at[path]), at["address"])


class Nixl(worker.Path):
    def __init__(self, path, work, metadata, address):
        self.work = work
        self.agent = _agent(path, f"client {work.client}")
        for memory in (work.source, work.into):
            _register(self.agent, memory)
        self.peer = self.agent.add_remote_agent(metadata)
        if isinstance(self.peer, bytes):
            self.peer = self.peer.decode()
        self.source, self.into = (self.pages("", _address(memory)) for memory in (work.source, work.into))
        mine = address + 2 * work.client * work.nbytes
        self.theirs = [self.pages(self.peer, mine), self.pages(self.peer, mine + work.nbytes)]

    def pages(self, agent, address):
        size = self.work.page_bytes
        return self.agent.prep_xfer_dlist(
            agent, [(address + n * size, size, 0) for n in range(self.work.pages)], "DRAM"
        )

    def move(self, operation, mine, theirs):
        numbers = list(range(self.work.pages))
        handle = self.agent.make_prepped_xfer(operation, mine, numbers, theirs, numbers)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"nixl's transfer ended as {state}")

    def load(self, batch):
        self.move("READ", self.into, self.theirs[bool(batch)])

    def store(self, batch):
        self.move("WRITE", self.source, self.theirs[bool(batch)])
