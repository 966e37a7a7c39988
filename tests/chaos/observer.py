"""The observer of a chaos run: a worker without load of its own, beside the coordinator, that does as it is told.

`python -m tests.chaos.observer ADDRESS TOKEN FILE` reads questions from its standard input, `{"do": NAME, ...}` a line,
and answers each with a line of JSON. It tells how long something took from a moment of the monotonic clock, which
all processes of a machine share. Its prompts are its own, and what it loads it checks as every worker does.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvcluster.client import Client
from kvcluster.client.status import other_tiers
from kvcluster.config import TRANSPORTS
from kvcluster.transfers import store_executor
from kvcluster.transfers.layouts import Buffers
from tests.chaos.content import PAGE_BYTES, SPEC, lonely, right_bytes, wrong
from tests.chaos.judge import Caller, Journal
from tests.chaos.stopwatch import Stopwatch
from tests.chaos.worker import connected

BLOCKS = 4
_CALL_MS = 1_000
_PIN_S = 60.0
_FILL_BLOCKS = 64


class Observer:
    """Each public method is a question; what it returns is the answer."""

    def __init__(self, client: Client, journal: Journal, call: Caller) -> None:
        self._client = client
        self._journal = journal
        self._call = call
        self._numbers = itertools.count()

    def status(self) -> dict[str, Any] | None:
        """The cluster as the coordinator sees it; None where it does not answer."""
        return self._call("status", _CALL_MS, lambda: self._client.status(deadline_ms=_CALL_MS))

    def well(self, shards: int, timeout_s: float) -> dict[str, Any]:
        """Waits until the coordinator serves and every shard is up."""
        return self._until(time.monotonic_ns(), timeout_s, lambda: self._is_well(shards))

    def quiet(self, shards: int, timeout_s: float) -> dict[str, Any]:
        """Waits until the cluster is well, and no ticket, lease, or page without a block is left."""
        return self._until(time.monotonic_ns(), timeout_s, lambda: self._is_well(shards) and not self._left())

    def on_gpus(self) -> dict[str, Any]:
        """Counts the pages that lie on GPUs."""
        status = self.status() or {"shards": []}
        return {"pages": sum(tier["pages"] for shard in status["shards"] for tier in shard["above"])}

    def plant(self, shard: str, timeout_s: float, replicas: int = 1) -> dict[str, Any]:
        """Stores a prompt of its own that lies on that shard ("" for any), and says its number and hashes. With
        `replicas` it asks for as many."""
        found: dict[str, Any] = {}

        def planted() -> bool:
            number = next(self._numbers)
            tokens = lonely(number, BLOCKS)
            if self._store(number) < BLOCKS:
                return False
            self._call("flush", _CALL_MS, lambda: self._client.flush(deadline_ms=_CALL_MS))
            where = self._call("explain", _CALL_MS, lambda: self._client.explain(tokens, deadline_ms=_CALL_MS)) or []
            found.update(number=number, hashes=[block.hex() for block in self._client.hashes(tokens)])
            return bool(where) and all(block.hit and shard in ("", block.shard) for block in where)

        answer = self._until(time.monotonic_ns(), timeout_s, planted) | found
        if answer["ok"] and replicas > 1:
            tokens = lonely(found["number"], BLOCKS)
            pin = functools.partial(self._client.pin, tokens, _PIN_S, replicas=replicas, deadline_ms=_CALL_MS)
            answer["pinned"] = self._call("pin", _CALL_MS, pin) is not None
        return answer

    def clear(self, timeout_s: float) -> dict[str, Any]:
        """Forgets every block of this tenant."""
        return self._until(time.monotonic_ns(), timeout_s, self._clear)

    def served(self, number: int, since_ns: int, storing: bool, timeout_s: float) -> dict[str, Any]:
        """Waits until the whole prompt is loaded, storing it again in between if `storing`."""

        def served() -> bool:
            if storing:
                self._store(number)
            return self._load(number) == BLOCKS

        return self._until(since_ns, timeout_s, served)

    def load(self, number: int) -> dict[str, Any]:
        """Loads a prompt once."""
        return {"blocks": self._load(number)}

    def fill(self, nbytes: int) -> dict[str, Any]:
        """Stores so many bytes that are never read."""
        stored = 0
        for _ in range(0, nbytes, _FILL_BLOCKS * PAGE_BYTES):
            stored += self._store(next(self._numbers), _FILL_BLOCKS)
        return {"blocks": stored}

    def _clear(self) -> bool:
        return self._call("clear", _CALL_MS, lambda: self._client.clear(deadline_ms=_CALL_MS)) is not None

    def _is_well(self, shards: int) -> bool:
        status = self.status()
        return (
            status is not None
            and status["state"] == "serving"
            and [shard["state"] for shard in status["shards"]].count("up") == shards == len(status["shards"])
        )

    def _states(self) -> str:
        """The state of the coordinator and of every shard, for what a run says when it gives up."""
        status = self.status()
        if status is None:
            return "the coordinator does not answer"
        shards = (f"{shard['shard']} is {shard['state']}" for shard in status["shards"])
        return ", ".join((f"the coordinator is {status['state']}", *shards))

    def _left(self) -> str:
        """What a cluster still counts as held, after all its workers have ended: "" where there is nothing."""
        status = self.status()
        if status is None:
            return "no answer"
        left = {"tickets": status["tickets"], "leases": sum(shard["leases"] for shard in status["shards"])}
        # A block may lie in another tier alone, where a shard had to make room.
        pages = sum(shard["pages"] + sum(tier["pages"] for tier in other_tiers(shard)) for shard in status["shards"])
        left["blocks in the index that no shard has"] = max(0, status["blocks"] - pages)
        for shard in status["shards"]:
            for tier in ({"tier": "ram"} | shard, *shard["above"]):
                used = tier["capacity_bytes"] - tier["free_bytes"]
                left[f"bytes of no page on {shard['shard']}, {tier['tier']}"] = used - tier["pages"] * PAGE_BYTES
        return ", ".join(f"{number} {what}" for what, number in left.items() if number)

    def _store(self, number: int, blocks: int = BLOCKS) -> int:
        tokens = lonely(number, blocks)
        source = Buffers([right_bytes(block) for block in self._client.hashes(tokens)])
        stored = self._call("store", _CALL_MS, lambda: self._client.store(tokens, source, deadline_ms=_CALL_MS))
        return 0 if stored is None else stored.blocks + stored.deduplicated

    def _load(self, number: int) -> int:
        tokens, pages = lonely(number, BLOCKS), [bytearray(PAGE_BYTES) for _ in range(BLOCKS)]
        loaded = self._call("load", _CALL_MS, lambda: self._client.load(tokens, Buffers(pages), deadline_ms=_CALL_MS))
        blocks = (loaded or 0) // SPEC.block_tokens
        for block in wrong(self._client.hashes(tokens)[:blocks], pages):
            self._journal.wrong(f"wrong bytes: block {block} of the observer's prompt {number}")
        return blocks

    def _until(self, since_ns: int, timeout_s: float, look: Callable[[], bool]) -> dict[str, Any]:
        pause, give_up = threading.Event(), time.monotonic() + timeout_s
        while not look():
            if time.monotonic() > give_up:
                left = f"{self._states()}; {self._left() or 'nothing is held'}"
                return {"ok": False, "took_s": (time.monotonic_ns() - since_ns) / 1e9, "left": left}
            pause.wait(0.02)
        return {"ok": True, "took_s": (time.monotonic_ns() - since_ns) / 1e9}


def main(address: str, token: str, path: str) -> None:
    """Answers until its input ends."""
    # As from a host without a shard: otherwise all its prompts would be placed on the shard beside it.
    store_executor.here = lambda: "observer"
    with ExitStack() as house:
        journal = Journal(house.enter_context(open(path, "a", encoding="utf-8")))
        house.callback(lambda: journal.say(ended=True))
        watch = house.enter_context(Stopwatch())
        client = house.enter_context(connected(address, token or None, TRANSPORTS, journal, threading.Event()))
        observer = Observer(client, journal, Caller(journal, watch))
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(getattr(observer, question.pop("do"))(**question)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
