"""Measures what TLS costs: whole loads and stores over TCP, and control calls, of two clusters that run side by side.

Both have one shard on this machine and differ in `security.encryption` alone. The certificates are made for the run.
Loads and stores are whole calls of one client in this process, of blocks of an 8B model in one tensor; a store follows
a purge of what was stored before. Each round has both clusters do the same, in a random order, with cold CPU caches.
Lookups of many clients come from processes of their own, which ask as fast as they are answered.
"""

from __future__ import annotations

import itertools
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvcluster
from benchmarks.rounds import interleaved, latency_ms, medians, paired
from benchmarks.specs import llama_8b, page_shape
from kvcluster.child_python import spawn_context, spawning
from kvcluster.cli import certificates
from kvcluster.cli.figures import table
from kvcluster.config import TLS, ClientConfig
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import client_credentials
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR

PLAIN = "plain"
_SETTINGS = (PLAIN, TLS)
_MARGIN_BYTES = 256 * 2**20
_CLIENTS = 8
_ASKING_S = 2.0
"""How long they ask in each round."""


class _Side:
    """One of the two clusters, with a client and what it stores."""

    def __init__(self, house: ExitStack, name: str, folder: Path, blocks: int) -> None:
        spec = llama_8b()
        room = blocks * spec.block_tokens * spec.token_bytes * 2 + _MARGIN_BYTES
        files = _files(folder) if name == TLS else {}
        config = {
            "name": f"bench-{name}",
            "shard": {"ram_bytes": room, "scrub_bytes": 0},
            "server": {"transports": ["grpc", "tcp"]},
            "security": {"encryption": TLS, **files} if files else {},
            "client": {"transports": ["tcp"], "deadline_ms": 60_000},
        }
        running = house.enter_context(kvcluster.local(shards=1, config=config))
        self.client = running.client(spec)
        ours = ClientConfig(ca_file=files.get("ca_file", ""))
        self.connection = Connection(running.address, client_credentials(running.address, None, ours))
        house.callback(self.connection.close)
        self._address, self._config = running.address, ours
        self._numbers = itertools.count()
        self.memory = torch.randn(blocks, *page_shape(spec)).to(torch.bfloat16)
        self.into = torch.zeros_like(self.memory)
        self._tokens = blocks * spec.block_tokens
        self.kept = self._fresh()
        self.store(self.kept)

    def _fresh(self) -> list[int]:
        return [next(self._numbers), *range(1, self._tokens)]

    def store(self, tokens: list[int] | None = None) -> None:
        """Stores all blocks under a prompt that is new, or this one."""
        self.client.store(tokens or self._fresh(), self.memory)
        assert self.client.flush(), "everything is stored"

    def load(self) -> None:
        """Loads the first prompt."""
        assert self.client.load(self.kept, self.into) == self._tokens, "the cluster has room for all of it"

    def empty(self) -> None:
        """Makes a call that does nothing."""
        self.connection.ask(COORDINATOR["Ping"], None, Deadline.after_ms(60_000))

    def lookup(self) -> None:
        """Looks the first prompt up."""
        assert self.client.lookup(self.kept).tokens == self._tokens

    def askers(self, house: ExitStack) -> list[Pipe]:
        """Starts clients of the cluster, each in a process of its own. Returns pipes to them, for _asks."""
        processes, pipes = spawn_context(), []
        for _ in range(_CLIENTS):
            ours, its = processes.Pipe()
            given = self._address, self.client.spec, self._config, self.kept, its
            process = processes.Process(target=_asks, args=given, daemon=True)
            with spawning():
                process.start()
            house.callback(process.join)
            house.callback(ours.send, 0.0)
            pipes.append(ours)
        return pipes


def _asks(address: str, spec: kvcluster.KVSpec, config: ClientConfig, tokens: list[int], pipe: Pipe) -> None:
    """For each number of seconds that it receives from the pipe, looks a prompt up repeatedly for so long and sends
    back how many lookups were answered. Returns at 0."""
    with kvcluster.connect(address, spec, config=config) as client:
        client.lookup(tokens)
        while seconds := pipe.recv():
            until, asked = time.monotonic() + seconds, 0
            while time.monotonic() < until:
                assert client.lookup(tokens).blocks
                asked += 1
            pipe.send(asked)


def _rates(sides: Mapping[str, _Side], rounds: int) -> dict[str, Any]:
    """Returns how many lookups a second both clusters answer to many clients at once, and the median of the ratios."""
    with ExitStack() as house:
        pipes = {name: side.askers(house) for name, side in sides.items()}

        def rate(name: str, seconds: float) -> float:
            for pipe in pipes[name]:
                pipe.send(seconds)
            return sum(pipe.recv() for pipe in pipes[name]) / seconds

        for name in sides:
            rate(name, 0.1)
        found = [{name: rate(name, _ASKING_S) for name in sides} for _ in range(rounds)]
    of = {f"{name}_per_s": medians({0: [one[name] for one in found]})[0] for name in sides}
    return {"clients": _CLIENTS, **of, "ratio": medians({0: [one[TLS] / one[PLAIN] for one in found]})[0]}


def _files(folder: Path) -> dict[str, str]:
    """Makes an authority and a certificate for this machine's loopback. Returns the settings that name them."""
    now = datetime.now(timezone.utc)
    made = certificates.new_authority("bench-tls", days=2, now=now)
    authority = certificates.read_authority(made.certificate, made.key)
    subject = certificates.subject_of(("coordinator", "shard"), None, ("127.0.0.1",))
    pair = certificates.issue(authority, subject, days=1, now=now)
    paths = {}
    for name, data in (("ca_file", made.certificate), ("cert_file", pair.certificate), ("key_file", pair.key)):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(data)
        paths[name] = str(path)
    return paths


@contextmanager
def _sides(blocks: int) -> Iterator[dict[str, _Side]]:
    with TemporaryDirectory() as folder, ExitStack() as house:
        yield {name: _Side(house, name, Path(folder), blocks) for name in _SETTINGS}


def measure(rounds: int, blocks: int, calls: int) -> dict[str, Any]:
    """Returns the figures: of `rounds` loads and stores of so many blocks, and of `calls` control calls."""
    with _sides(blocks) as sides:
        plain, tls = sides[PLAIN], sides[TLS]
        nbytes = plain.memory.nbytes
        moved = {}
        for what in ("load", "store"):

            def purge(_: object) -> None:
                for side in sides.values():
                    side.client.purge(model="llama-3-8b")
                    side.store(side.kept)

            before = purge if what == "store" else (lambda _: None)
            pairs = paired(getattr(plain, what), {TLS: getattr(tls, what)}, rounds, before)[TLS]
            of_plain, of_tls = zip(*pairs, strict=True)
            moved[what] = {
                "plain_gb_per_s": nbytes / medians({0: list(of_plain)})[0] / 1e9,
                "tls_gb_per_s": nbytes / medians({0: list(of_tls)})[0] / 1e9,
                "ratio": medians({0: [base / took for base, took in pairs]})[0],
            }
        asked = {}
        for what in ("empty", "lookup"):
            times = interleaved({name: getattr(side, what) for name, side in sides.items()}, calls)
            figures = {name: latency_ms(times[name]) for name in _SETTINGS}
            asked[what] = {
                **{f"{name}_{of}": figures[name][of] for name in _SETTINGS for of in ("p50_ms", "p99_ms")},
                "ratio": figures[TLS]["p50_ms"] / figures[PLAIN]["p50_ms"],
            }
        rates = _rates(sides, max(3, rounds // 2))
        for side in sides.values():
            assert torch.equal(side.memory, side.into), "what was loaded is what was stored"
    setting = {"rounds": rounds, "mib": nbytes / 2**20, "blocks": blocks, "calls": calls}
    return {**setting, "openssl": ssl.OPENSSL_VERSION, "moved": moved, "asked": asked, "rates": rates}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the figures as lines of text."""
    yield f"whole calls of {figures['mib']:.0f} MiB over tcp, medians of {figures['rounds']} rounds"
    yield figures["openssl"]
    columns = {
        "call": "{call}",
        "plain GB/s": "{plain_gb_per_s:.2f}",
        "TLS GB/s": "{tls_gb_per_s:.2f}",
        "TLS of plain": "{ratio:.2f}",
    }
    yield from table([{"call": what, **row} for what, row in figures["moved"].items()], columns)
    yield f"\ncontrol calls, {figures['calls']} of each kind; a lookup is of {figures['blocks']} blocks"
    columns = {
        "call": "{call}",
        "plain p50 ms": "{plain_p50_ms:.3f}",
        "TLS p50 ms": "{tls_p50_ms:.3f}",
        "TLS of plain": "{ratio:.2f}",
        "plain p99": "{plain_p99_ms:.3f}",
        "TLS p99": "{tls_p99_ms:.3f}",
    }
    yield from table([{"call": what, **row} for what, row in figures["asked"].items()], columns)
    rates = figures["rates"]
    yield (
        f"\nlookups of {rates['clients']} clients at once: {rates['plain_per_s']:,.0f} a second in the clear, "
        f"{rates['tls_per_s']:,.0f} within TLS: {rates['ratio']:.2f}"
    )
