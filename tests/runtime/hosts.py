"""Shards for tests, each with a coordinator that answers as the test says, and pages to store in them."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvcluster.config import Config, load
from kvcluster.core.ids import (
    HASH_BYTES,
    HOLDER_BYTES,
    Attempt,
    BlockHash,
    Caller,
    Epoch,
    Holder,
    NamespaceId,
    ShardId,
    Tenant,
)
from kvcluster.core.messages import (
    Inventory,
    Leave,
    NewPage,
    PageKey,
    Reply,
    Report,
    ReportAck,
    ShardAddress,
    WriteRequest,
    Written,
)
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum, codec
from kvcluster.runtime.replica_pull import OpenSource
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing.cluster import RecordSource, flip_bit
from kvcluster.transport.base import Deadline
from kvcluster.transport.in_process_transport import MemoryTransport

BOUND_S = 20.0
"""How long anything may take before a test fails; nothing is expected to take a tenth of it."""

ME = Tenant("me")
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16", block_tokens=4
)
SPACE = SPEC.namespace(ME)
EPOCH = Epoch(5)
PAGE_BYTES = SPEC.page_bytes(0, SPEC.whole(0))
Script = Callable[[Report | Inventory], Reply]
_attempts = itertools.count(1)


def soon() -> Deadline:
    return Deadline.after_ms(BOUND_S * 1e3)


def configured(**shard: object) -> Config:
    """Reports often, and reads no page again but those that are suspected."""
    quick = {"ram_bytes": 2**20, "report_interval_ms": 20, "report_retry_ms": 1, "scrub_bytes": 0}
    return load(overrides={"shard": {**quick, **shard}})


def acknowledge(message: Report | Inventory) -> ReportAck:
    """A coordinator that is content with everything."""
    told = message.first + len(message.events) - 1 if isinstance(message, Report) else message.upto
    return ReportAck(Epoch(1), told)


class Coordinator:
    """Answers reports one after the other: as scripted, then content. What is heard is kept for the test that waits."""

    def __init__(self, *script: Script) -> None:
        self._script = list(script)
        self.heard: queue.SimpleQueue[Report | Inventory] = queue.SimpleQueue()

    def tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        self.heard.put(message)
        return (self._script.pop(0) if self._script else acknowledge)(message)

    def say(self, answer: Script) -> None:
        """What the next report is answered."""
        self._script.append(answer)

    def wait_for(self, number: int) -> Report | Inventory:
        """The message of that number, from 1 on."""
        return [self.heard.get(timeout=BOUND_S) for _ in range(number)][-1]

    def wait_until(self, holds: Callable[[Report], object]) -> Report:
        """The first report of which that holds."""
        while True:
            message = self.heard.get(timeout=BOUND_S)
            if isinstance(message, Report) and holds(message):
                return message


def no_source(shard: object) -> MemoryTransport:
    raise AssertionError("this shard fetches nothing")


@contextmanager
def shard(
    coordinator: Coordinator,
    *,
    name: str = "shard-0",
    open_source: OpenSource = no_source,
    on_end: Callable[[Leave], None] = lambda leave: None,
    **config: object,
) -> Iterator[ShardHost]:
    host = ShardHost(
        ShardAddress(ShardId(name), EPOCH, name, "host"),
        configured(**config),
        tell=coordinator.tell,
        open_source=open_source,
        on_end=on_end,
    )
    host.start()
    try:
        yield host
    finally:
        host.close()


def attempt() -> Attempt:
    """An attempt that was never used."""
    return Attempt(Holder(bytes(HOLDER_BYTES)), next(_attempts))


def new_page(number: int) -> NewPage:
    key = PageKey(BlockHash(number.to_bytes(HASH_BYTES, "big")), 0, SPEC.whole(0))
    return NewPage(key, BlockHash(bytes(HASH_BYTES)), 0)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


class Content(RecordSource):
    """A store's source: what belongs into these pages."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def layer_bytes(self, item: int) -> int:
        return PAGE_BYTES // SPEC.whole(0).layers

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        number, step = self._numbers[item], self.layer_bytes(item)
        data = memoryview(content(number))[layer * step : (layer + layers) * step]
        identity = checksum.identity(NamespaceId(SPACE), new_page(number).key, codec.RAW)
        return checksum.copy_sums(identity, layer, layers, into, data)

    def drained(self) -> None:
        """Returns a new one each time."""


def store(host: ShardHost, numbers: Sequence[int]) -> None:
    """Puts these pages there, as a worker does."""
    transport = MemoryTransport(host, Caller(ME))
    transport.attach(SPEC, soon())
    request = WriteRequest(SPACE, attempt(), EPOCH, tuple(map(new_page, numbers)))
    assert transport.write(request, Content(numbers), soon()) == [Written.COMMITTED] * len(numbers)


def held(host: ShardHost) -> dict[int, bytes]:
    """What a reader would find there: the bytes of each page by its number."""

    def look() -> dict[int, bytes]:
        return {
            int.from_bytes(page.key.hash, "big"): bytes(host.read(page.slot()))
            for page in host.core.pool.ready()
            if page.space == SPACE
        }

    found = host.inspect(look)
    assert isinstance(found, dict)
    return found


def flip(host: ShardHost, number: int, bit: int = 0) -> None:
    """Spoils a bit of a page where it lies."""

    def spoil() -> None:
        page = host.core.pool.get(SPACE, new_page(number).key)
        assert page is not None
        flip_bit(host, page.slot(), bit)

    host.inspect(spoil)


def counted(host: ShardHost) -> dict[str, int]:
    """The shard's counters."""
    counters = host.inspect(lambda: dict(host.core.state.counters))
    assert isinstance(counters, dict)
    return counters
