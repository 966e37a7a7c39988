"""A core with its driver: how effects are carried out, and how an incarnation ends."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvcluster.core.ids import CLUSTER, HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, CallId, Epoch, Holder, ShardId
from kvcluster.core.messages import (
    AttachedShard,
    AttachShard,
    Done,
    Inventory,
    Leave,
    LeaveReason,
    NewPage,
    PageKey,
    PageSlot,
    Purge,
    Purged,
    Refused,
    RefusedKind,
    Renew,
    Reply,
    Report,
    ReportAck,
    Reserve,
    ShardInfo,
    Suspect,
    WriteGrant,
)
from kvcluster.core.miss import LEASE_ENDED, Miss, MissReason
from kvcluster.errors import ConfigError, ProtocolError
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.tombstones import NAME
from kvcluster.transport.base import RefusedByShard, Unavailable
from tests.runtime.hosts import (
    BOUND_S,
    EPOCH,
    ME,
    SPACE,
    SPEC,
    Coordinator,
    configured,
    content,
    counted,
    flip,
    held,
    new_page,
    shard,
    store,
)
from tests.waiting import eventually

ATTEMPT = Attempt(Holder(bytes(HOLDER_BYTES)), 2**40)


def granted(host: ShardHost) -> PageSlot:
    """A page that this test writes."""
    attached = host.ask(build_request(AttachShard(SPEC), ME), BOUND_S)
    assert isinstance(attached, AttachedShard)
    key = PageKey(BlockHash(bytes(HASH_BYTES)), 0, SPEC.whole(0))
    pages = (NewPage(key, key.hash, 0),)
    grant = host.ask(build_request(Reserve(ATTEMPT, EPOCH, pages), ME, attached.namespace), BOUND_S)
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


@pytest.mark.parametrize("error", [Unavailable(Miss(MissReason.SHARD_LOST)), ProtocolError("another version")])
def test_a_report_that_fails_is_sent_again(error: Exception) -> None:
    def fail(message: Report | Inventory) -> Reply:
        raise error

    coordinator = Coordinator(fail, fail)
    with shard(coordinator) as host:
        coordinator.wait_for(5)
        assert granted(host).nbytes == SPEC.page_bytes(0, SPEC.whole(0)), "it is a member after all"


def test_a_shard_whose_successor_is_known_ends_itself() -> None:
    ended: queue.SimpleQueue[Leave] = queue.SimpleQueue()
    coordinator = Coordinator(lambda message: ReportAck(Epoch(1), 0, leave=LeaveReason.REPLACED))
    with shard(coordinator, on_end=ended.put):
        leave = ended.get(timeout=BOUND_S)
    assert "newer incarnation" in leave.reason
    assert not leave.for_good, "and Ray restarts it"


def test_a_drained_shard_ends_for_good() -> None:
    ended: queue.SimpleQueue[Leave] = queue.SimpleQueue()
    coordinator = Coordinator(lambda message: ReportAck(Epoch(1), 0, leave=LeaveReason.DRAINED))
    with shard(coordinator, on_end=ended.put):
        assert ended.get(timeout=BOUND_S) == Leave("this shard is drained", for_good=True)


def test_a_report_that_is_refused_is_sent_again() -> None:
    coordinator = Coordinator(lambda message: Refused(RefusedKind.BAD, "not now"))
    with shard(coordinator) as host:
        coordinator.wait_for(4)
        assert granted(host).nbytes > 0, "it is a member after all"


# ----------------------------------------------------------------------------------------------- integrity


def suspect(host: ShardHost, *numbers: int) -> None:
    keys = tuple(new_page(number).key for number in numbers)
    assert host.ask(build_request(Suspect(EPOCH, keys), ME, SPACE), BOUND_S) == Done()


def test_a_page_that_a_reader_suspects_is_read_again_and_goes_if_it_is_corrupt() -> None:
    coordinator = Coordinator()
    with shard(coordinator) as host:
        coordinator.wait_for(3)
        store(host, range(1, 6))
        flip(host, 2)
        suspect(host, 1, 2)
        eventually(lambda: counted(host)["verified"] == 2)
        assert held(host) == {number: content(number) for number in (1, 3, 4, 5)}
        gone = coordinator.wait_until(lambda report: any(map(corrupt, report.events)))
    assert [event.key for event in gone.events if corrupt(event)] == [new_page(2).key]


def corrupt(event: object) -> bool:
    return getattr(event, "corrupt", False)


def test_a_page_that_rots_unread_is_found_by_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcluster.core.shard.scrubber.ROUND_NS", 0)
    coordinator = Coordinator()
    with shard(coordinator, scrub_bytes=64 * 2**10) as host:
        coordinator.wait_for(3)
        store(host, range(1, 6))
        eventually(lambda: counted(host)["verified"] >= 10)
        assert held(host) == {number: content(number) for number in range(1, 6)}
        flip(host, 3, bit=77)
        eventually(lambda: counted(host)["corrupt"])
        assert sorted(held(host)) == [1, 2, 4, 5]


# -------------------------------------------------------------------------------------------------- leases


def test_a_lease_that_runs_out_stops_the_session_that_moves_its_bytes() -> None:
    coordinator, stopped = Coordinator(), queue.SimpleQueue[Miss]()
    with shard(coordinator, lease_ttl_ms=100) as host:
        coordinator.wait_for(3)
        with host.on_revoke(ATTEMPT, stopped.put):
            granted(host)
            assert stopped.get(timeout=BOUND_S) == LEASE_ENDED
            assert host.ask(build_request(Renew(ATTEMPT), ME), BOUND_S) == Done(False)


def test_an_attempt_is_under_way_once_at_a_time() -> None:
    with shard(Coordinator()) as host:
        with host.on_revoke(ATTEMPT, lambda _: None):
            with pytest.raises(RefusedByShard) as refused, host.on_revoke(ATTEMPT, lambda _: None):
                raise AssertionError("twice at once")
            with pytest.raises(RefusedByShard), host.on_revoke(ATTEMPT, lambda _: None):
                raise AssertionError("a refused one does not end the first")
        assert refused.value.refused.kind is RefusedKind.BAD
        with host.on_revoke(ATTEMPT, lambda _: None):
            """When it has ended it may be made again."""


def test_a_page_of_a_shard_that_was_closed_is_lost() -> None:
    coordinator = Coordinator()
    with shard(coordinator) as host:
        coordinator.wait_for(3)
        slot = granted(host)
        host.read(slot)[:] = bytes(slot.nbytes)
    with pytest.raises(Unavailable) as trouble:
        host.read(slot)
    assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_a_mistake_in_the_core_ends_the_process() -> None:
    ended: list[Leave] = []
    with shard(Coordinator(), on_end=ended.append) as host, pytest.raises(Unavailable):
        host.ask(lambda call: Unheard(), BOUND_S)
    (leave,) = ended
    assert "shard-0 failed" in leave.reason
    assert not leave.for_good


def test_a_thread_of_a_shard_that_breaks_ends_the_process() -> None:
    """A shard that reports no more would be held for lost, and hold its memory for ever."""
    ended: queue.SimpleQueue[Leave] = queue.SimpleQueue()

    def break_it(message: Report | Inventory) -> Reply:
        raise AssertionError("a mistake")

    with shard(Coordinator(break_it), on_end=ended.put):
        assert "shard-0 failed: AssertionError('a mistake')" in ended.get(timeout=BOUND_S).reason


class Unheard:
    """A message that no core knows."""


# -------------------------------------------------------------------------------------------------- coordinators


def test_a_coordinator_whose_successor_is_known_ends_itself() -> None:
    ended: list[Leave] = []
    host = CoordinatorHost(Epoch(1), configured(), on_end=ended.append)
    host.start()
    info = ShardInfo(ShardId("shard-0"), EPOCH, "here", "host", 2**20, 2**20, 0, 0)
    everything = Inventory(info, Epoch(1), upto=0, chunk=0, last=True, pages=())
    host.ask(build_request(everything, CLUSTER), BOUND_S)
    assert ended == [], "all its shards have reported: it coordinates"
    host.ask(build_request(Report(info, coordinator=Epoch(2), first=1), CLUSTER), BOUND_S)
    host.close()
    assert ended == [Leave("a newer coordinator is known")]
    with pytest.raises(Unavailable, match="is ending"):
        host.ask(build_request(Report(info, Epoch(2), first=1), CLUSTER), BOUND_S)


def test_a_coordinator_that_waited_for_its_port_has_its_whole_grace_still() -> None:
    host = CoordinatorHost(Epoch(1), configured(), on_end=lambda leave: None)
    before, made = host.core.next_deadline(), time.monotonic_ns()
    eventually(lambda: time.monotonic_ns() - made > 2_000_000)
    waited_ns = time.monotonic_ns() - made
    host.start()
    after = host.inspect(host.core.next_deadline)
    host.close()
    assert before is not None and after is not None
    assert after - before >= waited_ns, "the grace has not begun before shards could report"


def test_a_mistake_in_the_coordinator_ends_the_process() -> None:
    ended: list[Leave] = []
    host = CoordinatorHost(Epoch(1), configured(), on_end=ended.append)
    with pytest.raises(Unavailable, match="coordinator failed"):
        host.ask(lambda call: Unheard(), BOUND_S)
    assert len(ended) == 1
    assert host.inspect(lambda: CallId(1)) == 1, "the remaining state can still be read"
    host.close()


def purge(host: CoordinatorHost) -> Reply:
    return host.ask(build_request(Purge(), ME), BOUND_S)


def test_a_coordinator_remembers_what_the_last_one_was_told_to_purge(tmp_path: Path) -> None:
    config = replace(configured(), coordinator=replace(configured().coordinator, state_dir=str(tmp_path)))
    for epoch in (1, 2):
        host = CoordinatorHost(Epoch(epoch), config, on_end=lambda leave: None)
        known = host.core.state.tombstones.all()
        assert [stone.tenant for stone in known] == [ME] * (epoch - 1)
        assert purge(host) == Purged(0)
        host.close()


def test_a_purge_that_cannot_be_kept_is_not_called_done(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    config = replace(configured(), coordinator=replace(configured().coordinator, state_dir=str(folder)))
    host = CoordinatorHost(Epoch(1), config, on_end=lambda leave: None)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable, match="cannot keep what is purged: No such file or directory"):
        purge(host)
    (tmp_path / "elsewhere").rename(folder)
    assert purge(host) == Purged(0), "when there is room again it can be asked once more"
    host.close()


def test_a_coordinator_does_not_start_over_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("torn", encoding="utf-8")
    config = replace(configured(), coordinator=replace(configured().coordinator, state_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be read"):
        CoordinatorHost(Epoch(1), config, on_end=lambda leave: None)
