"""The cores can step everything that the wire accepts: a well-formed message without meaning breaks no invariant.

Worlds come from the transcripts of tests/core, each played up to some line. Messages come from them too: as they went
to a core there, changed as the fuzzer changes them, and read again as a server does. What is read goes to a core that
is in the middle of something else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.ids import Caller, CallId
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import PageWant, Pin, ReadRequest, Request, Reserve, WriteRequest
from kvcluster.core.shard.shard import Shard
from kvcluster.errors import KVClusterError
from kvcluster.wire import frames
from kvcluster.wire.methods import COORDINATOR, SHARD, Method
from tests.core.transcripts.commands import Commands
from tests.core.transcripts.names import TENANT
from tests.core.transcripts.script import INDENT
from tests.core.transcripts.stage import StagedCore
from tests.fuzz.mutator import Mutator
from tests.fuzz.trees import Tree, message
from tests.fuzz.wire_parsers import framed

TRANSCRIPTS = sorted(Path(__file__).parents[1].glob("core/transcripts/*/*.txt"))
MESSAGES = 40
"""To each world."""

Read = Callable[[bytes, CallId], Any]


def commands(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", INDENT))]


def read_pin(data: bytes, call: CallId) -> Request[Pin]:
    """As the session of a load makes one."""
    r = frames.decode_read_request(data)
    return Request(call, TENANT, r.namespace, Pin(r.attempt, r.epoch, tuple(want.key for want in r.wants)))


def read_reserve(data: bytes, call: CallId) -> Request[Reserve]:
    """As the session of a store makes one."""
    r = frames.decode_write_request(data)
    return Request(call, TENANT, r.namespace, Reserve(r.attempt, r.epoch, r.pages, r.wait_ns))


def written(sent: Any) -> tuple[str, bytes] | None:
    """How a message travels, and the name of its reader; None where it stays within a process."""
    if not isinstance(sent, Request):
        return None
    asked, namespace = sent.question, sent.namespace
    match asked:
        case Pin():
            assert namespace is not None
            wants = tuple(PageWant(key, 0, key.part.layers) for key in asked.keys)
            return "pin", frames.encode_read_request(ReadRequest(namespace, asked.attempt, asked.epoch, wants))
        case Reserve():
            assert namespace is not None
            request = WriteRequest(namespace, asked.attempt, asked.epoch, asked.pages, asked.wait_ns)
            return "reserve", frames.encode_write_request(request)
    name = type(asked).__name__
    for service, methods in (("coordinator", COORDINATOR), ("shard", SHARD)):
        if name in methods and (name != "Attach" or service == "coordinator"):
            return f"{service} {name}", methods[name].encode_request(asked, namespace)
    return None


def readers() -> dict[str, Read]:
    """Every reader of a message to a core, by name."""

    def reader(method: Method) -> Read:
        return lambda data, call: method.decode_request(data, call, Caller(TENANT))

    found: dict[str, Read] = {"pin": read_pin, "reserve": read_reserve}
    for service, methods in (("coordinator", COORDINATOR), ("shard", SHARD)):
        found |= {f"{service} {name}": reader(method) for name, method in methods.items()}
    return found


def overheard() -> dict[str, Mutator]:
    """For each reader, a source of what is almost what went to a core in some transcript."""
    heard: dict[str, dict[bytes, None]] = {}

    def listen(core: StagedCore, sent: Any, effects: Any, now: int) -> None:
        if (travelling := written(sent)) is not None:
            heard.setdefault(travelling[0], {})[travelling[1]] = None

    with patch.object(StagedCore, "stepped", listen):
        for path in TRANSCRIPTS:
            played = Commands()
            for line in commands(path):
                played.run(line)
    dissect = {"pin": framed, "reserve": framed}
    return {
        name: Mutator([Tree(dissect.get(name, message)(data)) for data in inputs]) for name, inputs in heard.items()
    }


def bombard(
    core: Coordinator | Shard, now: int, mutators: dict[str, Mutator], rng: Random, calls: itertools.count[int]
) -> int:
    """Steps what can be read of MESSAGES inputs; how many that were."""
    kind = "coordinator" if isinstance(core, Coordinator) else "shard"
    names = [name for name in mutators if name.startswith(kind) or (kind == "shard" and name in ("pin", "reserve"))]
    read, stepped = readers(), 0
    for _ in range(MESSAGES):
        name = rng.choice(names)
        data = mutators[name].make(rng)
        try:
            sent = read[name](data, CallId(next(calls)))
        except KVClusterError:
            continue
        try:
            core.step(sent, now)
            check_shard(core) if isinstance(core, Shard) else check_coordinator(core)
        except Exception as error:
            raise AssertionError(f"{kind} broke on {name} {data.hex()}: {sent}") from error
        stepped += 1
    return stepped


def test_what_the_wire_lets_through_the_cores_can_step(nightly: bool) -> None:
    worlds = 1_000 if nightly else 60
    mutators, calls, stepped = overheard(), itertools.count(2**40), 0
    assert {"coordinator Report", "coordinator Purge", "shard Suspect", "pin", "reserve"} <= set(mutators)
    for world in range(worlds):
        rng = Random(world)
        path = TRANSCRIPTS[world % len(TRANSCRIPTS)]
        lines = commands(path)
        played = Commands()
        for line in lines[: rng.randint(1, len(lines))]:
            played.run(line)
        stage = played.stage
        for name in [*stage.coordinators, *stage.shards]:
            try:
                stepped += bombard(stage.process(name).core, stage.kernel.now, mutators, rng, calls)
            except AssertionError as error:
                raise AssertionError(f"world {world} of {path.name}: {error}") from error
    assert stepped > 10 * worlds
