"""A process that forks with a client open: `python -m tests.client.forked JOB ADDRESS` says in JSON what its child met.

The child tells its parent by a pipe, and ends at once: nothing that it inherited is torn down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvcluster
from kvcluster.client.client import Client
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Deadline
from kvcluster.transport.forks import FORKS

SPEC = kvcluster.KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=4
)
PAGE = bytes(range(256)) * (SPEC.block_bytes // 256)
PROMPT = [1, 2, 3, 4]
BOUND_S = 20.0
"""How long a child may take before it is ended."""
PATIENT = kvcluster.ClientConfig(deadline_ms=10_000)


def in_child(call: Callable[[], Any]) -> Any:
    """Returns what `call` returns in a forked child; the name of the signal that ends the child, if one does."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(int(BOUND_S))
        try:
            answer = call()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(said) if said else signal.Signals(os.WTERMSIG(status)).name


def refusal(call: Callable[[], object]) -> str:
    """Returns the message by which a call is refused."""
    try:
        return f"no refusal: {call()!r}"
    except KVClusterError as error:
        return f"{type(error).__name__}: {error}"


def read(client: Client) -> bool:
    """Looks up and loads."""
    into = bytearray(len(PAGE))
    return client.lookup(PROMPT).blocks == 1 and client.load(PROMPT, into) == 4 and bytes(into) == PAGE


def connect_and_read(address: str) -> bool:
    with kvcluster.connect(address, SPEC, config=PATIENT) as client:
        return read(client)


@contextmanager
def stored(address: str) -> Iterator[Client]:
    with kvcluster.connect(address, SPEC, config=PATIENT) as client:
        client.store(PROMPT, kvcluster.Buffers([PAGE]))
        assert client.flush()
        yield client


def new(address: str) -> Any:
    """Connects, forks at once and connects again in the child; then reads in the parent. A thread that connecting has
    left within gRPC would make the fork unsafe."""
    answers, alive, threads = [], [], []
    with stored(address):
        pass
    for _ in range(5):
        with kvcluster.connect(address, SPEC, config=PATIENT) as client:
            threads.append(sum(not thread.name.startswith("kvcluster-call") for thread in threading.enumerate()))
            answers.append(in_child(lambda: connect_and_read(address)))
            alive.append(read(client))
    return {"child": answers, "parent": all(alive), "threads": max(threads)}


def busy(address: str) -> Any:
    """Forks while other threads call all the time."""
    with stored(address) as client:
        over = threading.Event()

        def call() -> None:
            while not over.is_set():
                client.lookup(PROMPT)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        answers = [in_child(lambda: connect_and_read(address)) for _ in range(20)]
        over.set()
        for thread in threads:
            thread.join()
        return {"child": answers, "parent": read(client)}


def inherited(address: str) -> Any:
    """Uses in the child what it inherited, and closes it there."""
    with stored(address) as client:
        hashes = client.hashes(PROMPT)
        ticket = client.prepare_load(hashes)
        transfer = client.begin_load(ticket, bytearray(len(PAGE)))
        transfer.result()
        calls: dict[str, Callable[[], object]] = {
            "lookup": lambda: client.lookup(PROMPT),
            "load": lambda: client.load(PROMPT, bytearray(len(PAGE))),
            "store": lambda: client.store(PROMPT, PAGE),
            "status": client.status,
            "flush": client.flush,
            "begin_load": lambda: client.begin_load(ticket, bytearray(len(PAGE))),
            "result": transfer.result,
            "wait_layer": lambda: transfer.wait_layer(0),
        }

        def use() -> dict[str, str]:
            answers = {name: refusal(call) for name, call in calls.items()}
            ticket.release()
            client.close()
            return answers

        return {"child": in_child(use), "parent": read(client)}


def stuck(address: str) -> Any:
    """Forks while a call is under way that does not end."""
    begun, over = threading.Event(), threading.Event()

    def call() -> None:
        with FORKS.call(Deadline.after_ms(BOUND_S * 1e3)):
            begun.set()
            over.wait(BOUND_S)

    with stored(address) as client:
        thread = threading.Thread(target=call)
        thread.start()
        begun.wait(BOUND_S)
        answer = in_child(lambda: refusal(lambda: kvcluster.connect(address, SPEC, config=PATIENT)))
        over.set()
        thread.join()
        return {"child": answer, "parent": read(client)}


if __name__ == "__main__":
    jobs = {job.__name__: job for job in (new, busy, inherited, stuck)}
    print(json.dumps(jobs[sys.argv[1]](sys.argv[2])), flush=True)
