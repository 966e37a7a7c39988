"""The loads and stores of a worker: whatever engines do, in a random order, each with its bytes compared."""

from __future__ import annotations

import random
import threading
import time

from kvcluster import Buffers
from kvcluster.client import Client
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Miss
from tests.chaos.content import PAGE_BYTES, SPEC, prompt, right_bytes, wrong
from tests.chaos.judge import Caller, Journal

PROMPTS = 80
BLOCKS = 24
"""All prompts together are about 110 MiB of pages: more than half of what the shards hold."""

_DEADLINES_MS = (150, 500, 2_000)
_PREFILL_S = 0.002
"""A block that missed is computed, and not on a CPU: 8,000 tokens a second."""


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
            self.loaded("load", number, blocks, loaded // SPEC.block_tokens, pages)

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
            self.loaded("load by ticket", number, blocks, outcome[0], pages)

    def loaded(self, name: str, number: int, blocks: int, loaded: int, pages: list[bytearray]) -> None:
        """Compares the first `loaded` pages, and stores what is missing."""
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
