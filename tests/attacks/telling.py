"""Can a tenant tell by the clock which blocks another has? `python -m tests.attacks.telling`

The other tenant asks over gRPC, in a drawn order, for blocks that we store, stored or lost, and for blocks that do not
exist: a lookup, a load and an explain. The times of both kinds are compared by the test of Mann and Whitney, which asks
how often a draw of one is larger than a draw of the other: 0.5 if they cannot be told apart. With 10,000 draws of each,
a deviation beyond BOUND comes by chance once in 1,000 runs, and one of DETECTED is found in nine runs of ten.

Then a leak is planted, 0.1 ms for a block that any tenant has lost, and must be found. Ends with status 1 if a
difference is found where none is planted, or none where one is.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvcluster.actors.coordinator import handlers_of
from kvcluster.core.coordinator.eviction_history import EvictionHistory
from kvcluster.core.ids import HASH_BYTES, BlockHash, NamespaceId
from kvcluster.core.miss import Miss, MissReason
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.driver import Driver
from kvcluster.runtime.server import GrpcServer
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR
from tests.core.lone_coordinator import BLOCKS
from tests.core.samples import OURS, SPEC, THEIRS, chain
from tests.core.test_tenants_tell_nothing import KINDS, cluster

SAMPLES = 10_000
_SIGMA = (1 / (6 * SAMPLES)) ** 0.5
BOUND = 3.29 * _SIGMA
DETECTED = (3.29 + 1.28) * _SIGMA
_LEAK_S = 100e-6
_TOKEN = "theirs"


def superiority(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns how often a draw of `one` is larger than a draw of `other`, where a tie counts half (Mann and Whitney,
    1947)."""
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    total, at = 0.0, 0
    while at < len(ranked):
        stop = at
        while stop < len(ranked) and ranked[stop][0] == ranked[at][0]:
            stop += 1
        rank = (at + 1 + stop) / 2
        total += rank * sum(which == 0 for _, which in ranked[at:stop])
        at = stop
    return (total - len(one) * (len(one) + 1) / 2) / (len(one) * len(other))


@contextmanager
def served() -> Iterator[Connection]:
    """A coordinator that has blocks of ours, behind gRPC, and a connection of the other tenant to it."""
    coordinator = cluster()
    driver = Driver(
        coordinator.core,
        lambda effect: None,
        stall_ns=10**18,
        on_failure=lambda error: None,
        clock=lambda: coordinator.now,
    )
    auth = Authenticator({digest(_TOKEN): THEIRS, digest("ours"): OURS}, "secret")
    server = GrpcServer(handlers_of(driver.ask)[0], auth, "127.0.0.1", 0, 2)
    server.start()
    connection = Connection(server.address, Credentials(_TOKEN))
    try:
        yield connection
    finally:
        connection.close()
        server.close(0)
        driver.close()


def measured(kind: str, samples: int) -> float:
    """Returns how often a question of this kind takes longer for a block of ours than for one that does not exist."""
    draw = random.Random(kind)
    asked = [(block, True) for block in draw.choices([*BLOCKS, *chain(4, seed=5)], k=samples)]
    asked += [(BlockHash(draw.randbytes(HASH_BYTES)), False) for _ in range(samples)]
    draw.shuffle(asked)
    took: dict[bool, list[float]] = {True: [], False: []}
    space, deadline = SPEC.namespace(THEIRS), Deadline.after_ms(600_000)
    with served() as connection:
        for number, (block, ours) in enumerate(asked, 1):
            question = KINDS[kind](number, block)
            began = time.perf_counter()
            connection.ask(COORDINATOR[type(question).__name__], question, deadline, space)
            took[ours].append(time.perf_counter() - began)
    return superiority(took[True], took[False])


@contextmanager
def planted() -> Iterator[None]:
    """Within the context a lost block of any tenant takes _LEAK_S more."""
    lost: dict[BlockHash, None] = {}
    add, why = EvictionHistory.add, EvictionHistory.why

    def remember(self: EvictionHistory, space: NamespaceId, block: BlockHash, now: int, reason: MissReason) -> None:
        lost[block] = None
        add(self, space, block, now, reason)

    def look(self: EvictionHistory, space: NamespaceId, block: BlockHash, now: int) -> Miss | None:
        until = time.perf_counter() + (_LEAK_S if block in lost else 0)
        while time.perf_counter() < until:
            pass
        return why(self, space, block, now)

    EvictionHistory.add, EvictionHistory.why = remember, look  # type: ignore[method-assign]
    try:
        yield
    finally:
        EvictionHistory.add, EvictionHistory.why = add, why  # type: ignore[method-assign]


def main() -> int:
    """Measures each kind of question without and with the leak, and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.telling", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="draws of each side (10,000)")
    samples = parser.parse_args().samples
    scale = (SAMPLES / samples) ** 0.5
    print(f"bound {BOUND * scale:.4f} (p 0.001), detected with a power of 0.9 from {DETECTED * scale:.4f} on")
    wrong = 0
    for what, context, found in (("as it is", suppress, False), ("with a planted leak", planted, True)):
        for kind in KINDS:
            with context():
                deviation = measured(kind, samples) - 0.5
            told = abs(deviation) > BOUND * scale
            wrong += told != found
            print(f"{kind:<8} {what:<20} {deviation:+.4f} {'can be told apart' if told else 'alike'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
