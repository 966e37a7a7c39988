"""A worker that keeps what it has begun: `python -m tests.hosts.held_worker ADDRESS PORT` serves its metrics on PORT.

It does what its standard input says, a JSON array of a job and its arguments a line, and answers each with a line of
JSON. What a job has begun, such as a ticket or a sequence, is kept until the job `end`.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

import grpc
import prometheus_client
import torch

import kvcluster
from kvcluster.client import Client
from kvcluster.client.metrics import WorkerCollector
from kvcluster.config import ClientConfig
from kvcluster.core.messages import Attach, GetOffers, Offers
from kvcluster.errors import CredentialError, LostTokens
from kvcluster.release import OLDEST_VERSION
from kvcluster.runtime.auth import new_token
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import CA_FILE, Credentials, client_credentials
from kvcluster.transport.grpc_pages import WRITE
from kvcluster.transport.rpc import Connection, identity
from kvcluster.wire import socket_frames
from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.socket_frames import HEADER, FrameKind
from tests.hosts.worker import BLOCKS, SPEC, kv, load, store, tokens

HELD = ClientConfig(deadline_ms=10_000, connect_ms=30_000, store_wait_ms=3_000, breaker_failures=1)
_STREAM_MS = 60_000
_STEP = 16


def _shows(address: str, token: str) -> Credentials:
    """What this process shows there, by its environment."""
    return client_credentials(address, token, ClientConfig())


class HeldWorker:
    """The jobs, each a public method."""

    def __init__(self, client: Client, address: str, token: str) -> None:
        self._client, self._address, self._token = client, address, token
        self._held = ExitStack()
        self._tickets: dict[int, Any] = {}
        self._sequence: Any = None

    def store(self, first: int, last: int) -> dict[str, Any]:
        return store(self._client, first, last)

    def load(self, first: int, last: int) -> dict[str, Any]:
        return load(self._client, first, last)

    def end(self) -> None:
        """Ends all that is held."""
        self._held.close()

    # ------------------------------------------------------------------------------------------ holding

    def prepare(self, seed: int) -> int:
        """Holds a ticket for a prompt."""
        self._tickets[seed] = ticket = self._client.prepare_load(self._client.hashes(tokens(seed)))
        self._held.callback(ticket.release)
        return int(ticket.blocks)

    def redeem(self, first: int, last: int) -> int:
        """Loads by the tickets that are held."""
        loads = (self._client.begin_load(self._tickets[n], torch.zeros_like(kv(n))) for n in range(first, last))
        return sum(load.result().blocks for load in loads)

    def borrow(self, seed: int) -> int:
        """Reads a prompt in place in the shards of this host, until `end`; says how many blocks lie there."""
        ticket = self._client.prepare_load(self._client.hashes(tokens(seed)))
        blocks = self._held.enter_context(self._client.borrow(ticket))
        return sum(blocks.coded_page(index) is not None for index in range(blocks.blocks))

    def sequence(self, steps: int) -> int:
        """Holds an open sequence, whose tokens nobody can look up."""
        policy = kvcluster.WindowPolicy(tail_tokens=_STEP, migration_tokens=_STEP)
        sequence = self._client.sequence(policy=policy)
        self._held.callback(sequence.close)
        for _ in range(steps):
            for layer in range(4):
                sequence.append(layer, torch.randn(_STEP, 8, 64), torch.randn(_STEP, 8, 64))
            sequence.advance(_STEP)
        return int(sequence.length)

    def store_long(self, seed: int) -> int:
        """Stores a prompt that is long enough to be attended to at its shard; says how many of its blocks."""
        stored = self._client.store(tokens(seed, 2 * BLOCKS), torch.cat([kv(seed), kv(seed)])).blocks
        return int(stored) if self._client.flush() else 0

    def open(self, seed: int) -> int:
        """Holds a sequence that begins with that prompt, and leaves it where it is; says how long it is."""
        self._sequence = self._client.sequence(tokens(seed, 2 * BLOCKS), prefetch=False)
        self._held.callback(self._sequence.close)
        return int(self._sequence.length)

    def attend(self) -> dict[str, int]:
        """Sends the query of a token to the shards that have that sequence; says what all such messages have come
        to."""
        for layer in range(4):
            self._sequence.append(layer, torch.randn(1, 8, 64), torch.randn(1, 8, 64))
        with suppress(LostTokens):
            self._sequence.attend(0, torch.randn(1, 8, 64), planner=kvcluster.ShipAbsent(), deadline_ms=_STREAM_MS)
        self._sequence.advance(1)
        counts = self._client.shipped()
        return {"messages": counts.messages, "failed": counts.failed}

    def other_model(self) -> None:
        """Attaches as an engine of another model."""
        kvcluster.connect(self._address, replace(SPEC, model="other"), token=self._token, config=HELD).close()

    def repeat(self, job: str, first: int, prompts: int) -> None:
        """Repeats a job of one prompt over so many prompts, until `end`."""
        ended = threading.Event()

        def run() -> None:
            number = 0
            while not ended.wait(0.05):
                getattr(self, job)(first + number % prompts, first + number % prompts + 1)
                number += 1

        thread = threading.Thread(target=run)
        thread.start()
        self._held.callback(thread.join)
        self._held.callback(ended.set)

    def lookup(self, first: int, last: int) -> int:
        """Looks prompts up, and stores none."""
        return sum(self._client.lookup(tokens(seed)).blocks for seed in range(first, last))

    # ------------------------------------------------------------------------------------------ operating

    def pin(self, seed: int, replicas: int, seconds: float) -> int:
        return self._client.pin(tokens(seed), seconds, replicas=replicas).blocks

    def clear(self) -> int:
        return self._client.clear()

    # ------------------------------------------------------------------------------------------ strangers

    def stranger(self, shard: str) -> str:
        """Calls the coordinator and a shard with a token that they do not know."""
        with (
            closing(Connection(self._address, _shows(self._address, new_token()))) as connection,
            suppress(CredentialError),
        ):
            connection.ask(COORDINATOR["Attach"], Attach(SPEC), self._soon())
        return self._says(shard, OLDEST_VERSION, new_token())

    def old_release(self, shard: str) -> str:
        """Calls both as a release does that is too old: over gRPC without a version, over TCP with one too low."""
        certificates = _shows(self._address, "").certificates
        assert certificates is not None, "several hosts speak TLS"
        with (
            grpc.secure_channel(self._address, grpc.ssl_channel_credentials(certificates.now().ca)) as channel,
            suppress(grpc.RpcError),
        ):
            call = channel.unary_unary(COORDINATOR["Attach"].path, identity, identity)
            call(b"", metadata=(("authorization", f"Bearer {self._token}"),), timeout=10)
        return self._says(shard, OLDEST_VERSION - 1, self._token)

    def silent_stream(self, shard: str) -> None:
        """Opens a stream to a shard, and says nothing on it until `end`."""
        said = threading.Event()

        def nothing() -> Iterator[bytes]:
            said.wait()
            yield from ()

        connection = self._held.enter_context(closing(Connection(shard, _shows(shard, self._token))))
        connection.write_stream(WRITE, nothing(), Deadline.after_ms(_STREAM_MS))
        self._held.callback(said.set)

    def _says(self, shard: str, version: int, token: str) -> str:
        """Says hello to a shard's TCP port, within TLS, and returns what the refusal says."""
        with closing(Connection(shard, _shows(shard, self._token))) as connection:
            offers = connection.ask(SHARD["GetOffers"], GetOffers(), self._soon())
        assert isinstance(offers, Offers)
        (address,) = [offer.address for offer in offers.offers if offer.transport == "tcp"]
        host, _, port = address.rpartition(":")
        authorities = ssl.create_default_context(cafile=os.environ[CA_FILE])
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            authorities.wrap_socket(plain, server_hostname=host) as peer,
            peer.makefile("rb") as answer,
        ):
            body = token.encode()
            peer.sendall(HEADER.pack(socket_frames.MAGIC, version, FrameKind.HELLO, len(body)) + body)
            header = answer.read(HEADER.size)
            kind, nbytes = socket_frames.decode_header(header, socket_frames.version_of(header))
            assert kind is FrameKind.FAILED, kind
            return str(socket_frames.decode_failure(answer.read(nbytes)))

    def _soon(self) -> Deadline:
        return Deadline.after_ms(10_000)


def main(address: str, port: str) -> None:
    """Does the jobs until standard input ends."""
    token = os.environ["KVCLUSTER_TOKEN"]
    with kvcluster.connect(address, SPEC, token=token, config=HELD) as client:
        prometheus_client.REGISTRY.register(WorkerCollector(client))
        prometheus_client.start_http_server(int(port))
        worker = HeldWorker(client, address, token)
        print(json.dumps(BLOCKS), flush=True)
        for line in sys.stdin:
            job, *arguments = json.loads(line)
            do: Callable[..., Any] = getattr(worker, job)
            print(json.dumps(do(*arguments)), flush=True)
        worker.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
