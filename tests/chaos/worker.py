"""A worker of a chaos run: loads and stores without pause, checks every byte and every deadline, and writes it down.

`python -m tests.chaos.worker ADDRESS TOKEN SEED TRANSPORTS FILE` runs until SIGTERM. Every half second it appends to
FILE what it has seen since, as one line of JSON, and at once what must not be; so what is lost when it is killed is
half a second.
Its prompts are few and known to all workers, so that one loads what another has stored.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import kvcluster
from kvcluster.client import Client
from kvcluster.config import TRANSPORTS, ClientConfig
from kvcluster.core.messages import ReadRequest
from kvcluster.core.spec import KVSpec
from kvcluster.errors import Unreachable
from tests.chaos.content import SPEC
from tests.chaos.judge import Caller, Journal
from tests.chaos.load import Load
from tests.chaos.stopwatch import Stopwatch

THREADS = 2
_SAY_S = 0.5


class Steps(Protocol):
    """What a thread of a worker does without pause."""

    def step(self) -> None:
        """One call, or a few that belong together."""


def connected(
    address: str,
    token: str | None,
    transports: Sequence[str],
    journal: Journal,
    ended: threading.Event,
    *,
    spec: KVSpec = SPEC,
    **settings: Any,
) -> Client:
    """A client, as soon as the cluster lets one in."""
    config = ClientConfig(connect_ms=2_000, deadline_ms=10_000, transports=tuple(transports), **settings)
    while True:
        try:
            return kvcluster.connect(address, spec, token=token, config=config)
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
        call = Caller(journal, house.enter_context(Stopwatch()))
        given = address, token or None, transports.split(","), journal, ended
        client = house.enter_context(connected(*given))
        seeds = [int(seed) * THREADS + number for number in range(THREADS)]
        loads: list[Steps] = [Load(client, journal, call, each, ended) for each in seeds]
        if hasattr(kvcluster, "ShipAbsent"):  # not in an older release
            from tests.chaos.known_kv import SEQUENCE_SPEC
            from tests.chaos.sequence_load import SEQUENCE_CONFIG, SequenceLoad

            beside = house.enter_context(connected(*given, spec=SEQUENCE_SPEC, **SEQUENCE_CONFIG))
            loads.append(SequenceLoad(beside, journal, call, int(seed)))
        if hasattr(ReadRequest, "on_device"):  # not in an older release
            from tests.chaos.device_load import DeviceLoad

            every = house.enter_context(connected(address, token or None, TRANSPORTS, journal, ended))
            loads.append(DeviceLoad(every, journal, call, int(seed), ended))

        def work(load: Steps) -> None:
            try:
                while not ended.is_set():
                    load.step()
            except BaseException:
                journal.wrong(f"a worker's own thread ended: {traceback.format_exc()}")

        threads = [threading.Thread(target=work, args=(load,), name=f"chaos-{at}") for at, load in enumerate(loads)]
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
