"""A worker of a chaos run: loads and stores without pause, checks every byte and every deadline, and writes it down.

`python -m tests.chaos.worker ADDRESS TOKEN SEED TRANSPORTS FILE` runs until SIGTERM. Every half second it appends to
FILE what it has seen since, as one line of JSON, and at once what must not be; so what is lost when it is killed is
half a second.
Its prompts are few and known to all workers, so that one loads what another has stored.
"""

from __future__ import annotations

import collections
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TextIO, TypeVar

import kvcluster
from kvcluster.client import Client
from kvcluster.client.layouts import Buffers
from kvcluster.config import ClientConfig
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Miss
from kvcluster.errors import Unreachable
from tests.chaos.content import PAGE_BYTES, SPEC, prompt, right_bytes, wrong
from tests.chaos.stopwatch import Stopwatch, Taken, allowed_ns

T = TypeVar("T")
THREADS = 2
PROMPTS = 80
BLOCKS = 24
"""All prompts together are about 110 MiB of pages: more than half of what the shards hold."""

_DEADLINES_MS = (150, 500, 2_000)
_PREFILL_S = 0.002
"""A block that missed is computed, and not on a CPU: 8,000 tokens a second."""

CALLS = "calls held to their deadline"
_MAY_BE_UNREACHABLE = ("status", "clear")
"""Calls that have no miss to answer with."""

_SAY_S = 0.5


class Journal:
    """Records what was seen: outcomes are counted, violations are recorded in full."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def count(self, outcome: str, number: int = 1) -> None:
        with self._lock:
            self._counts[outcome] += number

    def late(self, what: str) -> None:
        """A call passed its deadline."""
        with self._lock:
            self._write({"late": what})

    def wrong(self, what: str) -> None:
        """Something that must not be."""
        with self._lock:
            self._write({"wrong": what})

    def say(self, **words: Any) -> None:
        """Writes down what was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
            self._write({"counts": counts, **words})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Caller:
    """Makes calls, and holds each to its deadline and to what it may raise."""

    def __init__(self, journal: Journal, watch: Stopwatch) -> None:
        self._journal = journal
        self._watch = watch

    def __call__(self, name: str, deadline_ms: float, call: Callable[[], T]) -> T | None:
        """Returns what the call returns; None if it raised, which is a violation."""
        self._journal.count(CALLS)
        try:
            with self._watch.timing() as taken:
                return call()
        except Exception as error:
            if not (isinstance(error, Unreachable) and name in _MAY_BE_UNREACHABLE):
                self._journal.wrong(f"{name} raised: {traceback.format_exc()}")
        finally:
            self._judge(name, deadline_ms, taken)
        return None

    def _judge(self, name: str, deadline_ms: float, taken: Taken) -> None:
        deadline_ns, took_ns = int(deadline_ms * 1e6), taken.ended_ns - taken.began_ns
        late_ns = self._watch.late_ns(deadline_ns, taken)
        if late_ns:
            took = (
                f"took {took_ns / 1e6:.0f} ms, {late_ns / 1e6:.0f} ms more than it may "
                f"({taken.waited_ns / 1e6:.0f} ms of it its thread waited for a CPU)"
            )
            self._journal.late(f"{name} with a deadline of {deadline_ms} ms {took}")
        elif took_ns > allowed_ns(deadline_ns):
            self._journal.count("calls that were late only by what does not count")


class Load:
    """The load of one thread: whatever engines do, in a random order."""

    def __init__(self, client: Client, journal: Journal, call: Caller, seed: int, ended: threading.Event) -> None:
        self._client = client
        self._ended = ended
        self._journal = journal
        self._call = call
        self._random = random.Random(seed)
        self._chains: dict[int, list[BlockHash]] = {}

    def step(self) -> None:
        """One call, or a few that belong together."""
        number = min(self._random.randrange(PROMPTS), self._random.randrange(PROMPTS))  # some are hotter
        blocks = self._random.randint(1, BLOCKS)
        deadline_ms = self._random.choice(_DEADLINES_MS)
        what = self._random.choices(
            (self._load, self._load_by_ticket, self._lookup, self._explain, self._pin, self._flush),
            (60, 15, 10, 5, 5, 5),
        )[0]
        what(number, blocks, deadline_ms)

    def _load(self, number: int, blocks: int, deadline_ms: float) -> None:
        tokens, pages = prompt(number, blocks), _room(blocks)
        loaded = self._call(
            "load", deadline_ms, lambda: self._client.load(tokens, Buffers(pages), deadline_ms=deadline_ms)
        )
        if loaded is not None:
            self._loaded("load", number, blocks, loaded // SPEC.block_tokens, pages)

    def _load_by_ticket(self, number: int, blocks: int, deadline_ms: float) -> None:
        hashes, pages = self._hashes(number, blocks), _room(blocks)

        def load() -> tuple[int, Miss | None]:
            began = time.monotonic()
            with self._client.prepare_load(hashes, deadline_ms=deadline_ms) as ticket:
                redeemed = self._client.redeem(bytes(ticket))
                left_ms = max(1.0, deadline_ms - (time.monotonic() - began) * 1e3)
                loaded = self._client.begin_load(redeemed, Buffers(pages), deadline_ms=left_ms).result()
                return loaded.blocks, loaded.miss

        outcome = self._call("load by ticket", deadline_ms, load)
        if outcome is not None:
            self._loaded("load by ticket", number, blocks, outcome[0], pages)

    def _loaded(self, name: str, number: int, blocks: int, loaded: int, pages: list[bytearray]) -> None:
        hashes = self._hashes(number, blocks)
        self._journal.count("bytes checked", loaded * PAGE_BYTES)
        for block in wrong(hashes[:loaded], pages):
            self._journal.wrong(f"wrong bytes: block {block} of prompt {number}, {name}")
        if loaded == blocks:
            self._journal.count(f"{name}: all of it")
            return
        self._journal.count(f"{name}: a part" if loaded else f"{name}: nothing")
        self._ended.wait(_PREFILL_S * (blocks - loaded))
        self._store(number, blocks)

    def _store(self, number: int, blocks: int) -> None:
        source = Buffers([right_bytes(block) for block in self._hashes(number, blocks)])
        stored = self._call(
            "store", 2_000, lambda: self._client.store(prompt(number, blocks), source, deadline_ms=2_000)
        )
        if stored is None:
            return
        self._journal.count("store: " + ("all of it" if stored.miss is None else str(stored.miss.reason.value)))
        self._journal.count("blocks stored", stored.blocks)
        self._journal.count("blocks that others had stored", stored.deduplicated)

    def _lookup(self, number: int, blocks: int, deadline_ms: float) -> None:
        tokens = prompt(number, blocks)
        found = self._call("lookup", deadline_ms, lambda: self._client.lookup(tokens, deadline_ms=deadline_ms))
        if found is not None:
            reason = "all of it" if found.reason is None else found.reason.reason.value
            self._journal.count(f"lookup: {reason}")

    def _explain(self, number: int, blocks: int, deadline_ms: float) -> None:
        tokens = prompt(number, blocks)
        if self._call("explain", deadline_ms, lambda: self._client.explain(tokens, deadline_ms=deadline_ms)):
            self._journal.count("explain")

    def _pin(self, number: int, _: int, deadline_ms: float) -> None:
        tokens = prompt(number, 4)
        if self._call("pin", deadline_ms, lambda: self._client.pin(tokens, 1.0, deadline_ms=deadline_ms)) is not None:
            self._journal.count("pin")

    def _flush(self, number: int, blocks: int, deadline_ms: float) -> None:
        flushed = self._call("flush", deadline_ms, lambda: self._client.flush(deadline_ms=deadline_ms))
        if flushed is not None:
            self._journal.count("flush: all is visible" if flushed else "flush: not all")

    def _hashes(self, number: int, blocks: int) -> list[BlockHash]:
        if number not in self._chains:
            self._chains[number] = self._client.hashes(prompt(number, BLOCKS))
        return self._chains[number][:blocks]


def _room(blocks: int) -> list[bytearray]:
    return [bytearray(PAGE_BYTES) for _ in range(blocks)]


def connected(
    address: str, token: str | None, transports: Sequence[str], journal: Journal, ended: threading.Event
) -> Client:
    """A client, as soon as the cluster lets one in."""
    config = ClientConfig(connect_ms=2_000, deadline_ms=10_000, transports=tuple(transports))
    while True:
        try:
            return kvcluster.connect(address, SPEC, token=token, config=config)
        except Unreachable:
            journal.count("connect: unreachable")
            if ended.wait(0.1):
                raise


def main(address: str, token: str, seed: str, transports: str, path: str) -> None:
    """Loads and stores until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with ExitStack() as house:
        journal = Journal(house.enter_context(open(path, "a", encoding="utf-8")))
        house.callback(lambda: journal.say(ended=True))
        watch = house.enter_context(Stopwatch())
        client = house.enter_context(connected(address, token or None, transports.split(","), journal, ended))

        def work(number: int) -> None:
            load = Load(client, journal, Caller(journal, watch), int(seed) * THREADS + number, ended)
            try:
                while not ended.is_set():
                    load.step()
            except BaseException:
                journal.wrong(f"a worker's own thread ended: {traceback.format_exc()}")

        threads = [threading.Thread(target=work, args=(number,), name=f"chaos-{number}") for number in range(THREADS)]
        for thread in threads:
            thread.start()
        while not ended.wait(_SAY_S):
            for way in client._shards.names().values():
                journal.count(f"half seconds with a shard reached over {way['name']}")
            journal.say()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
