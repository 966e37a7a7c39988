"""A core with its driver: what effects come to, and how an incarnation ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvcluster.config import Config, load
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, CallId, Epoch, Holder, ShardId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    AttachShard,
    Done,
    Farewell,
    Inventory,
    NewPage,
    PageKey,
    PageSlot,
    RefusedKind,
    Renew,
    Reply,
    Report,
    ReportAck,
    Reserve,
    ShardInfo,
    WriteGrant,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.seam import Deadline, RefusedByShard, Trouble

BOUND_S = 20.0
ME, ATTEMPT = Tenant("me"), Attempt(Holder(bytes(HOLDER_BYTES)), 1)
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16", block_tokens=4
)
EPOCH = Epoch(5)
Answer = Callable[[Report | Inventory], Reply]


def configured(**shard: object) -> Config:
    quick = {"device_bytes": 2**20, "report_interval_ms": 20, "report_retry_ms": 1}
    return load(overrides={"shard": {**quick, **shard}})


def acknowledge(message: Report | Inventory) -> ReportAck:
    """A coordinator that is content with everything."""
    told = message.first + len(message.events) - 1 if isinstance(message, Report) else message.upto
    return ReportAck(Epoch(1), told)


class Coordinator:
    """Answers reports one after the other: as scripted, then content."""

    def __init__(self, *script: Answer) -> None:
        self._script = list(script)
        self.heard: queue.SimpleQueue[Report | Inventory] = queue.SimpleQueue()

    def tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        self.heard.put(message)
        return (self._script.pop(0) if self._script else acknowledge)(message)

    def wait_for(self, number: int) -> Report | Inventory:
        """The message of that number, from 1 on."""
        return [self.heard.get(timeout=BOUND_S) for _ in range(number)][-1]


@contextmanager
def shard(
    coordinator: Coordinator, *, on_end: Callable[[str], None] = lambda reason: None, **config: object
) -> Iterator[ShardHost]:
    host = ShardHost(
        ShardId("shard-0"),
        EPOCH,
        configured(**config),
        address="here",
        host="host",
        tell=coordinator.tell,
        on_end=on_end,
    )
    host.start()
    try:
        yield host
    finally:
        host.close()


def granted(host: ShardHost) -> PageSlot:
    """A page that this test writes."""
    attached = host.ask(lambda call: AttachShard(call, ME, SPEC), BOUND_S)
    assert isinstance(attached, AttachedShard)
    key = PageKey(BlockHash(bytes(HASH_BYTES)), 0, SPEC.whole(0))
    pages = (NewPage(key, key.hash, 0),)
    grant = host.ask(lambda call: Reserve(call, ME, attached.namespace, ATTEMPT, EPOCH, pages), BOUND_S)
    assert isinstance(grant, WriteGrant)
    assert isinstance(grant.pages[0], PageSlot)
    return grant.pages[0]


# ---------------------------------------------------------------------------------------------------- shards


def test_a_shard_reports_by_itself_and_keeps_doing_so() -> None:
    coordinator = Coordinator()
    with shard(coordinator):
        heard = coordinator.wait_for(4)
    assert isinstance(heard, Report)
    assert heard.info.shard == "shard-0"
    assert heard.info.epoch == EPOCH


@pytest.mark.parametrize("error", [Trouble(Miss(MissReason.SHARD_LOST)), ProtocolError("another version")])
def test_a_report_that_fails_is_sent_again(error: Exception) -> None:
    def fail(message: Report | Inventory) -> Reply:
        raise error

    coordinator = Coordinator(fail, fail)
    with shard(coordinator) as host:
        coordinator.wait_for(5)
        assert granted(host).nbytes == SPEC.page_bytes(0, SPEC.whole(0)), "it is a member after all"


def test_a_shard_whose_successor_is_known_ends_itself() -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    coordinator = Coordinator(lambda message: ReportAck(Epoch(1), 0, leave=Farewell.REPLACED))
    with shard(coordinator, on_end=ended.put):
        assert "newer incarnation" in ended.get(timeout=BOUND_S)


def test_a_lease_that_runs_out_stops_whoever_moves_its_bytes() -> None:
    coordinator, stopped = Coordinator(), threading.Event()
    with shard(coordinator, lease_ttl_ms=100) as host:
        coordinator.wait_for(3)
        with host.on_revoke(ATTEMPT, stopped.set):
            granted(host)
            assert stopped.wait(BOUND_S)
            assert host.ask(lambda call: Renew(call, ATTEMPT), BOUND_S) == Done(False)


def test_an_attempt_is_under_way_once_at_a_time() -> None:
    with shard(Coordinator()) as host:
        with host.on_revoke(ATTEMPT, lambda: None):
            with pytest.raises(RefusedByShard) as refused, host.on_revoke(ATTEMPT, lambda: None):
                raise AssertionError("twice at once")
            with pytest.raises(RefusedByShard), host.on_revoke(ATTEMPT, lambda: None):
                raise AssertionError("a refused one does not end the first")
        assert refused.value.refused.kind is RefusedKind.BAD
        with host.on_revoke(ATTEMPT, lambda: None):
            """When it has ended it may be made again."""


def test_a_page_of_a_shard_that_was_closed_is_lost() -> None:
    coordinator = Coordinator()
    with shard(coordinator) as host:
        coordinator.wait_for(3)
        slot = granted(host)
        host.view(slot)[:] = bytes(slot.nbytes)
    with pytest.raises(Trouble) as trouble:
        host.view(slot)
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_a_mistake_in_the_core_ends_the_process() -> None:
    ended: list[str] = []
    with shard(Coordinator(), on_end=ended.append) as host, pytest.raises(Trouble):
        host.ask(lambda call: Unheard(), BOUND_S)
    assert len(ended) == 1
    assert "shard-0 failed" in ended[0]


class Unheard:
    """A message that no core knows."""


# -------------------------------------------------------------------------------------------------- coordinators


def test_a_coordinator_whose_successor_is_known_ends_itself() -> None:
    ended: list[str] = []
    host = CoordinatorHost(Epoch(1), configured(), on_end=ended.append)
    host.start()
    info = ShardInfo(ShardId("shard-0"), EPOCH, "here", "host", 2**20, 2**20, 0, 0)
    everything = Inventory(CallId(0), info, Epoch(1), upto=0, chunk=0, last=True, pages=())
    host.ask(lambda call: replace(everything, call=call), BOUND_S)
    assert ended == [], "all its shards have reported: it coordinates"
    host.ask(lambda call: Report(call, info, coordinator=Epoch(2), first=1), BOUND_S)
    host.close()
    assert ended == ["a newer coordinator is known"]
    with pytest.raises(Trouble, match="is ending"):
        host.ask(lambda call: Report(call, info, Epoch(2), first=1), BOUND_S)


def test_a_mistake_in_the_coordinator_ends_the_process() -> None:
    ended: list[str] = []
    host = CoordinatorHost(Epoch(1), configured(), on_end=ended.append)
    with pytest.raises(Trouble, match="coordinator failed"):
        host.ask(lambda call: Unheard(), BOUND_S)
    assert len(ended) == 1
    assert host.inspect(lambda: CallId(1)) == 1, "what is left can still be looked at"
    host.close()
