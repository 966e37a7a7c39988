"""Which pages a shard reads again, at what rate, and what follows from the result."""

from __future__ import annotations

import itertools

import pytest

from kvcluster.config import ShardConfig
from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Epoch, ShardId, Tenant
from kvcluster.core.messages import Done, NewPage, Refused, RefusedKind, RemovedEvent, Suspect, Verified, Verify
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.shard import scrubber
from kvcluster.core.shard.page import Page
from kvcluster.core.shard.report_sender import Inventoried
from kvcluster.core.shard.scrubber import ROUND_NS, Scrubber
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.replay.core_stepper import build_request
from tests.core.build import ROOT, SPACE, key
from tests.core.lone_shard import BLOCKS, A, B, C, LoneShard, counters, end, misses, pinned
from tests.core.samples import OURS, PAGE, SECOND, SUMS, THEIRS
from tests.core.samples import attempt as of_worker
from tests.core.samples import key as key_of


class Reader:
    """A verifier over a pool of pages of 64 bytes. The test plays the shell, and finds no page corrupt."""

    def __init__(self, *, scrub_bytes: int = 64, pages: int = 16) -> None:
        state = ShardState(
            *(ShardId("s"), Epoch(1), ShardConfig(ram_bytes=pages * 64, host_bytes=0, extent_bytes=64), {}),
            membership_ttl_ms=10_000,
            uses=lambda namespace: True,
            everything=lambda: Inventoried([]),
        )
        self.pool = state.pool
        self.core = Scrubber(state, scrub_bytes=scrub_bytes)

    def commit(self, number: int) -> Page:
        page = self.pool.reserve(SPACE, NewPage(key(number), ROOT, 0, Loss.EXACT), 64)
        assert page is not None
        self.pool.commit(page, SUMS)
        self.core.committed(page)
        return page

    def read(self, now: int) -> list[Page]:
        """Returns the pages chosen now, and reads them at once."""
        effects = self.core.begin(now)
        if not effects:
            return []
        [effect] = effects
        assert isinstance(effect, Verify)
        pages = [page for slot in effect.slots for page in self.pool.ready() if page.key == slot.key]
        assert self.core.begin(now) == [], "one batch at a time"
        assert self.core.next_deadline is None, "its end is a message"
        self.core.end(Verified(effect.attempt, ()))
        return pages

    def until(self, now: int) -> list[tuple[int, Page]]:
        """Returns which pages are read, and when, if the scrubber is called at each of its deadlines."""
        read: list[tuple[int, Page]] = []
        while (due := self.core.next_deadline) is not None and due <= now:
            read += [(due, page) for page in self.read(due)]
        return read


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "BATCH_BYTES", 64)


# ---------------------------------------------------------------------------------------- the round


@pytest.mark.usefixtures("small_batches")
def test_every_page_has_its_turn_at_the_rate_and_in_the_order_of_its_last_reading() -> None:
    reader = Reader(scrub_bytes=64)
    pages = [reader.commit(number) for number in range(12)]
    read = reader.until(30 * SECOND)
    assert [page for _, page in read[:24]] == pages * 2
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(read)]
    assert min(gaps) >= SECOND, "64 bytes a second, and a page has 64"


@pytest.mark.usefixtures("small_batches")
def test_a_small_pool_is_not_read_all_the_time() -> None:
    reader = Reader(scrub_bytes=2**30)
    pages = [reader.commit(number) for number in range(3)]
    read = reader.until(2 * ROUND_NS - 1)
    assert [page for _, page in read] == pages * 2
    assert read[3][0] - read[0][0] >= ROUND_NS
    assert read[2][0] < SECOND


def test_without_a_rate_nothing_is_read_but_what_is_suspected() -> None:
    reader = Reader(scrub_bytes=0)
    page = reader.commit(0)
    assert reader.core.next_deadline is None
    assert reader.read(100 * SECOND) == []
    reader.core.suspect(page)
    assert reader.core.next_deadline == 0
    assert reader.read(0) == [page]


@pytest.mark.usefixtures("small_batches")
def test_what_is_gone_by_its_turn_is_passed_over_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUSPECTS", 2)
    reader = Reader(scrub_bytes=64)
    pages = [reader.commit(number) for number in range(6)]
    for page in pages[:5]:
        reader.pool.condemn(page)
    assert reader.core.begin(0) == [], "two of them were looked at"
    assert reader.core.next_deadline == 1, "and the others are next"
    assert [page for _, page in reader.until(SECOND)] == [pages[5]]


def test_a_round_does_not_remember_what_is_gone_for_ever() -> None:
    reader = Reader(scrub_bytes=64)
    for number in range(5_000):
        reader.pool.condemn(reader.commit(number))
    assert len(reader.core._round) <= 1_025
    kept = reader.commit(5_000)
    assert reader.read(0) == [kept]


def test_a_shard_without_pages_asks_for_no_tick() -> None:
    reader = Reader()
    assert reader.read(5 * SECOND) == []
    assert reader.core.next_deadline is None


# ----------------------------------------------------------------------------------------- suspects


@pytest.mark.usefixtures("small_batches")
def test_suspects_are_read_before_the_round_goes_on() -> None:
    reader = Reader(scrub_bytes=64)
    first, second, third = (reader.commit(number) for number in range(3))
    assert reader.read(0) == [first]
    reader.core.suspect(third)
    reader.core.suspect(third)
    assert reader.core.next_deadline == 0
    assert reader.read(1) == [third], "once, however many suspect it"
    assert reader.read(2) == []
    assert reader.read(SECOND + 1) == [second]


def test_more_suspects_than_can_be_remembered_are_left_to_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUSPECTS", 2)
    reader = Reader(scrub_bytes=0)
    pages = [reader.commit(number) for number in range(3)]
    for page in pages:
        reader.core.suspect(page)
    assert sorted(page.generation for page in reader.read(0)) == [pages[0].generation, pages[1].generation]
    assert reader.read(0) == []


@pytest.mark.usefixtures("small_batches")
def test_a_batch_of_suspects_ends_with_the_page_that_fills_it() -> None:
    reader = Reader(scrub_bytes=0)
    pages = [reader.commit(number) for number in range(3)]
    for page in pages:
        reader.core.suspect(page)
    assert [len(reader.read(0)) for _ in range(4)] == [1, 1, 1, 0]


def test_a_suspect_that_is_gone_is_not_read() -> None:
    reader = Reader(scrub_bytes=0)
    page = reader.commit(0)
    reader.core.suspect(page)
    reader.pool.condemn(page)
    assert reader.read(0) == []
    assert reader.core.next_deadline is None


# --------------------------------------------------------------------------------------- the shard's part


def suspect(shard: LoneShard, *blocks: bytes, tenant: Tenant = OURS, epoch: int = 7) -> object:
    keys = tuple(key_of(block) for block in blocks)  # type: ignore[arg-type]
    call = shard.call(build_request(Suspect(Epoch(epoch), keys), tenant, shard.space))
    return shard.replies[call]


def test_a_suspected_page_is_read_again_and_condemned_if_it_is_corrupt() -> None:
    shard = LoneShard.joined()
    shard.store(of_worker(1), A, B)
    assert suspect(shard, A, B, C) == Done()
    assert shard.reading is not None
    assert shard.reading.namespaces == (shard.space,) * 2
    where = [slot.key for slot in shard.reading.slots].index(key_of(B))
    assert pinned(shard.pin(of_worker(2), A, B)), "a report is no verdict"
    assert end(shard, of_worker(2))
    shard.verdict(where)
    assert shard.settle() == [RemovedEvent(shard.space, key_of(B), corrupt=True)]
    assert misses(shard.pin(of_worker(3), B)) == [MissReason.EVICTED]
    assert pinned(shard.pin(of_worker(4), A))
    counted = counters(shard)
    assert (counted["suspected"], counted["verified"], counted["corrupt"]) == (2, 2, 1)


def test_a_reader_s_word_condemns_nothing() -> None:
    shard = LoneShard.joined()
    shard.store(of_worker(1), A)
    suspect(shard, A)
    shard.verdict()
    assert pinned(shard.pin(of_worker(2), A))
    assert not [lease for lease in shard.core.leases.all() if lease.attempt != of_worker(2)]


def test_a_page_keeps_its_place_while_it_is_judged() -> None:
    shard = LoneShard.joined(pages=1)
    shard.store(of_worker(1), A)
    suspect(shard, A)
    shard.evict(A)
    waiting = shard.reserving(of_worker(2), B, wait_ns=SECOND)
    assert waiting not in shard.replies, "its bytes are still being read"
    shard.verdict(0)
    assert waiting in shard.replies
    assert [event for event in shard.settle() if isinstance(event, RemovedEvent)] == [
        RemovedEvent(shard.space, key_of(A), corrupt=False)
    ], "it was gone already, and is told once"


def test_a_verdict_may_come_after_its_lease_and_after_the_end() -> None:
    shard = LoneShard.joined(lease_ttl_ms=1_000)
    shard.store(of_worker(1), A)
    suspect(shard, A)
    shard.later(2 * SECOND)
    shard.settle()
    assert len(shard.revoked) == 1
    shard.verdict(0)
    assert not len(shard.core.leases)
    assert misses(shard.pin(of_worker(2), A)) == [MissReason.EVICTED]


def test_whose_namespace_it_is_not_suspects_nothing_and_an_older_incarnation_s_pages_are_others() -> None:
    shard = LoneShard.joined()
    shard.store(of_worker(1), A)
    refused = suspect(shard, A, tenant=THEIRS)
    assert isinstance(refused, Refused)
    assert refused.kind is RefusedKind.UNKNOWN_NAMESPACE
    assert suspect(shard, A, epoch=6) == Done()
    assert shard.reading is None
    assert suspect(shard, A, tenant=CLUSTER) == Done()
    assert shard.reading is not None, "another shard of the cluster speaks for every tenant"


def test_the_scrubber_reads_committed_pages_and_is_not_counted_as_a_lease() -> None:
    shard = LoneShard.joined(scrub_bytes=PAGE)
    shard.store(of_worker(1), *BLOCKS[:2])
    read: list[bytes] = []
    leases: set[int] = set()
    for _ in range(25):
        shard.settle()
        shard.later(SECOND)
        assert shard.sent is not None
        leases.add(shard.sent.info.leases)
        if shard.reading is not None:
            assert len(shard.core.leases) == 1
            read += [slot.key.hash for slot in shard.reading.slots]
            shard.verdict()
    assert read == list(BLOCKS[:2]) * 2, "both fit one batch, and a round begins every ten seconds"
    assert leases == {0}
