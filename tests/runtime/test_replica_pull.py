"""Pages from shard to shard: only whole and correct pages are kept, whatever the source does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvcluster.core.ids import CLUSTER, Caller, Epoch, NamespaceId, ShardId
from kvcluster.core.invariants import check_shard
from kvcluster.core.messages import (
    PageKey,
    PullOrder,
    ReadRequest,
    Refused,
    RefusedKind,
    ShardAddress,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CredentialError
from kvcluster.memory import codec
from kvcluster.runtime import replica_pull
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.base import BytesPayload, Deadline, PageSink, Payload, RefusedByShard, Unavailable, read_whole
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.worker_exchange import RecordSink
from tests.records import pass_on
from tests.runtime.hosts import (
    BOUND_S,
    EPOCH,
    ME,
    SPEC,
    Coordinator,
    acknowledge,
    content,
    counted,
    flip,
    held,
    new_page,
    shard,
    store,
)
from tests.waiting import eventually

SOURCE = ShardAddress(ShardId("source"), EPOCH, "source")
LAYERS = SPEC.whole(0).layers


class Way(MemoryTransport):
    """To the source, as another shard comes; `between` sees and may replace what arrives, frame by frame."""

    def __init__(self, host: ShardHost) -> None:
        super().__init__(host, Caller(CLUSTER, internal=True))
        self.between: Callable[[PageSink], PageSink] = lambda sink: sink
        self.after_frame: Callable[[], object] = lambda: None
        self.suspected: list[PageKey] = []
        self.closed = threading.Event()

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        frames = super().read(request, self.between(sink), deadline)
        try:
            while True:
                try:
                    next(frames)
                except StopIteration as end:
                    outcome: list[Miss | None] = end.value
                    return outcome
                self.after_frame()
                yield
        finally:
            frames.close()

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        self.suspected += keys
        super().suspect(namespace, epoch, keys, deadline)

    def close(self) -> None:
        self.closed.set()


class Changing(RecordSink):
    """A sink before another, that changes what comes for one page."""

    def __init__(self, sink: PageSink, item: int, change: Callable[..., tuple[object, ...]]) -> None:
        self._sink = sink
        self._item = item
        self._change = change

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        if item == self._item:
            came = memoryview(bytearray(data.nbytes))
            read_whole(data, came)
            item, layer, codec, sums, came = self._change(item, layer, codec, sums, came)  # type: ignore[assignment]
            data = BytesPayload(came)
        pass_on(self._sink, item, layer, codec, sums, data)


class Pair:
    """A source that holds pages, and a target that is told to pull them."""

    def __init__(self, source: ShardHost, target: ShardHost, coordinator: Coordinator, way: Way) -> None:
        self.source = source
        self.target = target
        self.coordinator = coordinator
        self.way = way
        self._orders = 0

    def order(self, *numbers: int) -> int:
        """Tells the target to pull these."""
        self._orders += 1
        number = self._orders
        order = PullOrder(number, SOURCE, ME, SPEC, tuple(map(new_page, numbers)))
        self.coordinator.say(lambda message: replace(acknowledge(message), orders=(order,)))
        return number

    def pull(self, *numbers: int) -> None:
        """Tells it, and waits until it says that it has ended."""
        number = self.order(*numbers)
        self.coordinator.wait_until(lambda report: report.orders.ended(number))

    def settled(self) -> None:
        """Nothing is left of any transfer, on neither side."""
        for host in (self.source, self.target):
            eventually(lambda host=host: host.inspect(lambda: not len(host.core.leases)))  # type: ignore[misc]
            host.inspect(lambda host=host: check_shard(host.core))  # type: ignore[misc]


@contextmanager
def pairs(**config: object) -> Iterator[Pair]:
    others, coordinator = Coordinator(), Coordinator()
    with shard(others, name="source") as source:
        way = Way(source)

        def open_source(address: ShardAddress) -> Way:
            assert address == SOURCE
            return way

        with shard(coordinator, name="target", open_source=open_source, **config) as target:
            others.wait_for(3)
            coordinator.wait_for(3)
            pair = Pair(source, target, coordinator, way)
            yield pair
            pair.settled()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pairs() as pair:
        yield pair


def expected(*numbers: int) -> dict[int, bytes]:
    return {number: content(number) for number in numbers}


def test_the_target_holds_the_same_bytes_and_so_does_the_source(pair: Pair) -> None:
    store(pair.source, range(1, 9))
    pair.pull(*range(2, 7))
    assert held(pair.target) == expected(*range(2, 7))
    assert held(pair.source) == expected(*range(1, 9))
    assert pair.way.closed.is_set()
    assert pair.way.suspected == []


def test_pulls_follow_one_another(pair: Pair) -> None:
    store(pair.source, range(1, 9))
    for number in range(1, 9):
        pair.pull(number)
    assert held(pair.target) == expected(*range(1, 9))


def test_at_its_source_a_fetch_has_a_name_that_no_client_could_take_before(pair: Pair) -> None:
    store(pair.source, [1, 2])
    names = []
    pair.way.after_frame = lambda: names.extend(lease.attempt for lease in pair.source.core.leases.all())
    pair.pull(1)
    pair.pull(2)
    own = pair.target.core.state.own.next()
    assert len(set(names)) == 2
    assert own.holder not in {name.holder for name in names}


def test_what_the_source_has_lost_meanwhile_leaves_no_hole(pair: Pair) -> None:
    store(pair.source, [1, 3])
    pair.pull(1, 2, 3)
    assert held(pair.target) == expected(1, 3)


def test_a_page_that_rotted_at_its_source_is_not_copied_and_goes_there_too(pair: Pair) -> None:
    store(pair.source, [1, 2, 3])
    flip(pair.source, 2, bit=100)
    pair.pull(1, 2, 3)
    assert held(pair.target) == expected(1, 3)
    assert pair.way.suspected == [new_page(2).key]
    eventually(lambda: counted(pair.source)["corrupt"] == 1)
    assert held(pair.source) == expected(1, 3)


def test_a_bit_that_flips_on_the_way_costs_the_copy_and_not_the_page(pair: Pair) -> None:
    def flipped(item: int, layer: int, codec: int, sums: Sequence[int], data: memoryview) -> tuple[object, ...]:
        return item, layer, codec, sums, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    store(pair.source, [1, 2])
    pair.way.between = lambda sink: Changing(sink, 0, flipped)
    pair.pull(1, 2)
    assert held(pair.target) == expected(2)
    eventually(lambda: counted(pair.source)["verified"] == 1)
    assert held(pair.source) == expected(1, 2), "the source has read it again and found it right"


def test_the_bytes_of_another_page_are_not_taken_for_it(pair: Pair) -> None:
    store(pair.source, [1, 2])
    swapped: list[tuple[Sequence[int], bytes]] = []

    def swap(item: int, layer: int, codec: int, sums: Sequence[int], data: memoryview) -> tuple[object, ...]:
        swapped.append((sums, bytes(data)))
        return item, layer, codec, sums, data

    def swap_back(item: int, layer: int, codec: int, sums: Sequence[int], data: memoryview) -> tuple[object, ...]:
        other_sums, other = swapped[0]
        return item, layer, codec, other_sums, memoryview(other)

    pair.way.between = lambda sink: Changing(Changing(sink, 0, swap), 1, swap_back)
    pair.pull(1, 2)
    assert held(pair.target) == expected(1)


@pytest.mark.parametrize(
    "lie",
    [
        lambda item, layer, codec, sums, data: (item, layer, codec, sums, data[:-1]),
        lambda item, layer, codec, sums, data: (item, layer + 1, codec, sums, data),
        lambda item, layer, codec, sums, data: (item, layer, codec, (*sums, 1), data),
    ],
    ids=["short", "another layer", "more sums"],
)
def test_a_source_that_speaks_nonsense_is_listened_to_no_longer(
    pair: Pair, lie: Callable[..., tuple[object, ...]]
) -> None:
    store(pair.source, [1, 2, 3])
    pair.way.between = lambda sink: Changing(sink, 1, lie)
    pair.pull(1, 2, 3)
    assert held(pair.target) == expected(1)
    pair.way.between = lambda sink: sink
    pair.pull(2, 3)
    assert held(pair.target) == expected(1, 2, 3)


def test_a_page_that_comes_in_another_codec_than_there_is_room_for_is_left_and_the_others_come(pair: Pair) -> None:
    store(pair.source, [1, 2, 3])
    pair.way.between = lambda sink: Changing(
        sink, 1, lambda item, layer, codec_id, sums, data: (item, layer, codec.Codec.Q8, sums, data)
    )
    pair.pull(1, 2, 3)
    assert held(pair.target) == expected(1, 3)
    pair.way.between = lambda sink: sink
    pair.pull(2)
    assert held(pair.target) == expected(1, 2, 3)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable(Miss(MissReason.SHARD_LOST)),
        RefusedByShard(Refused(RefusedKind.STALE, "restarted")),
        CredentialError("not ours"),
    ],
)
def test_a_source_that_fails_leaves_what_had_come(pair: Pair, error: Exception) -> None:
    def fail() -> None:
        raise error

    many = range(1, 12)
    store(pair.source, many)
    pair.way.after_frame = fail
    with frames_of(2):
        pair.pull(*many)
    assert held(pair.target) == expected(1, 2)
    pair.way.after_frame = lambda: None
    pair.pull(*many)
    assert held(pair.target) == expected(*many)


@contextmanager
def frames_of(pages: int) -> Iterator[None]:
    """Frames hold that many pages of the test's spec."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvcluster.core.limits.FRAME_BYTES", pages * SPEC.page_bytes(0, SPEC.whole(0)))
        yield


def test_a_source_that_cannot_be_reached_costs_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    store(pair.source, [1])

    def lost(address: ShardAddress) -> Way:
        raise Unavailable(Miss(MissReason.SHARD_LOST))

    fetcher = pair.target._fetcher
    opened = fetcher._open
    monkeypatch.setattr(fetcher, "_open", lost)
    pair.pull(1)
    assert held(pair.target) == {}
    monkeypatch.setattr(fetcher, "_open", opened)
    pair.pull(1)
    assert held(pair.target) == expected(1)


def test_a_source_of_another_epoch_gives_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    store(pair.source, [1])
    monkeypatch.setattr(pair.source.core.state, "epoch", Epoch(EPOCH + 1))
    pair.pull(1)
    assert held(pair.target) == {}


def test_each_frame_renews_the_lease() -> None:
    """A fetch that takes longer than a lease, and never pauses for as long, is not broken off."""
    with pairs(lease_ttl_ms=200) as pair:
        renewed_for = threading.Event()
        store(pair.source, range(1, 9))
        began: list[int] = []

        def slowly() -> None:
            leases = pair.target.core.leases
            expiry = pair.target.inspect(lambda: leases.next_expiry)
            assert isinstance(expiry, int)
            began.append(expiry)
            renewed_for.wait(0.1)

        pair.way.after_frame = slowly
        with frames_of(1):
            pair.pull(*range(1, 9))
        assert held(pair.target) == expected(*range(1, 9))
        assert began == sorted(set(began))
        assert began[-1] - began[0] > 200_000_000


def test_a_fetch_whose_lease_runs_out_breaks_off_and_gives_its_pages_back() -> None:
    """A source that hangs is not waited for: its connection is closed, and only then is the room free."""
    with pairs(lease_ttl_ms=100) as pair:
        store(pair.source, [1, 2])
        seen: list[bool] = []

        def hang() -> None:
            assert pair.way.closed.wait(BOUND_S), "it was not broken off"
            seen.append(bool(pair.target.inspect(lambda: len(pair.target.core.leases))))
            raise Unavailable(Miss(MissReason.SHARD_LOST, "closed"))

        pair.way.after_frame = hang
        pair.pull(1, 2)
        assert seen == [True], "while it may still write, the pages are its own"
        assert held(pair.target) == {}
        assert counted(pair.target)["revoked"] == 1


def test_a_shard_that_ends_does_not_wait_for_a_source_that_hangs() -> None:
    with pairs() as pair:
        store(pair.source, [1])
        hanging = threading.Event()

        def hang() -> None:
            hanging.set()
            assert pair.way.closed.wait(BOUND_S), "it was not broken off"
            raise Unavailable(Miss(MissReason.SHARD_LOST, "closed"))

        pair.way.after_frame = hang
        pair.order(1)
        assert hanging.wait(BOUND_S)
        pair.target.close()
        assert pair.way.closed.is_set()
        # What its driver did not hear any more stays as it was; its memory is gone.
        pair.settled = lambda: None  # type: ignore[method-assign]


def test_a_fetch_has_a_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pull, "FETCH_S", 0.0)
    store(pair.source, [1])
    pair.pull(1)
    assert held(pair.target) == {}
