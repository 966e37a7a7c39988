"""The store plan, stepped by hand: when the source is free, when the outcome is reported, and when the ticket is
ended."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from kvcluster.core import limits
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash
from kvcluster.core.messages import Decision, NewPage, PageKey, RefusedKind, ShardAddress, StoreGrant, StoreRun, Written
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import CallerError, LimitError
from kvcluster.transfers.plan_messages import (
    AskStore,
    Begin,
    Cancel,
    CloseTicket,
    FinishStore,
    FreeSource,
    SourceDrained,
    StartWrite,
    StopWrite,
    StoreEffect,
    StoreEvent,
    StoreGranted,
    StoreOver,
    TicketEnded,
    WriteEnded,
    WriteStopped,
)
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transfers.store_executor import StoreProgress, StoreTerms
from kvcluster.transfers.store_plan import WRITERS, StorePlan
from kvcluster.transfers.transfer import Stored
from kvcluster.transport.base import Streams, Unavailable
from tests.client.build import PAGE_BYTES, SPEC
from tests.client.stepping import (
    DEADLINE,
    EVICTED,
    GIVEN_UP,
    HASHES,
    HOLDER,
    LOST,
    SPACE,
    WHOLE,
    A,
    B,
    one,
    policy,
    refused,
)

TICKET = Attempt(HOLDER, 0)
DONE = Written.COMMITTED
FULL = Miss(MissReason.FULL)


def to(shard: ShardAddress, count: int = 1) -> StoreRun:
    return StoreRun(count, Decision.WRITE, shard)


class SteppedStore:
    """A store plan of so many new blocks of a chain, and what it wants."""

    def __init__(self, blocks: int, *, first: int = 0, streams: int = 1, shards: ShardHealth | None = None) -> None:
        attempts = (Attempt(HOLDER, number) for number in itertools.count(1))
        self.now = 0
        self.terms = StoreTerms(SPEC, HASHES[: first + blocks], first, ((0, WHOLE),), Loss.Q8, (), TICKET, 7)
        self.plan = StorePlan(
            self.terms,
            StoreProgress(),
            shards or policy(),
            streams=lambda shard: Streams(streams),
            next_attempt=lambda: next(attempts),
            deadline_ns=DEADLINE,
        )

    def step(self, event: StoreEvent, now: int | None = None) -> list[StoreEffect]:
        self.now = self.now if now is None else now
        return self.plan.step(event, self.now)

    def grant(self, *runs: StoreRun) -> list[StoreEffect]:
        """Returns the effects of its beginning and this grant."""
        assert self.step(Begin()) == [AskStore()]
        return self.step(StoreGranted(SPACE, StoreGrant(runs)))

    def writes(self, *runs: StoreRun) -> list[StartWrite]:
        """The exchanges of this grant, where it wants nothing else."""
        effects = self.grant(*runs)
        starts = [effect for effect in effects if isinstance(effect, StartWrite)]
        assert starts == effects
        return starts

    def drain(self, start: StartWrite) -> list[StoreEffect]:
        return self.step(SourceDrained(start.exchange))

    def end(self, start: StartWrite, *outcome: Written) -> list[StoreEffect]:
        """All its pages have this outcome, or each its own."""
        every = outcome if len(outcome) > 1 else outcome * len(start.blocks)
        return self.step(WriteEnded(start.exchange, len(start.blocks) * PAGE_BYTES, every))

    def fail(self, start: StartWrite, error: BaseException | None = None, nbytes: int = 0) -> list[StoreEffect]:
        return self.step(WriteEnded(start.exchange, nbytes, error=error or Unavailable(LOST)))

    def over(self) -> list[StoreEffect]:
        return self.step(TicketEnded())


def closing(store: SteppedStore, effects: Sequence[StoreEffect]) -> FinishStore:
    """Returns the outcome if it is reported only after the ticket was ended."""
    assert effects[-1] == CloseTicket(TICKET)
    assert not any(isinstance(effect, FinishStore) for effect in effects)
    told, over = store.over()
    assert isinstance(told, FinishStore) and over == StoreOver()
    return told


# ----------------------------------------------------------------------------------------------- writing


def test_each_shard_gets_its_blocks_by_one_exchange() -> None:
    store = SteppedStore(3, first=1)
    first, second = store.writes(to(A), to(B), to(A))
    assert (first.shard, first.blocks, second.shard, second.blocks) == (A, [0, 2], B, [1])
    request = first.request
    assert (request.namespace, request.epoch, request.wait_ns) == (SPACE, A.epoch, 7)
    assert request.attempt != second.request.attempt
    assert request.pages == (
        NewPage(PageKey(HASHES[1], 0, WHOLE), HASHES[0], 1, Loss.Q8),
        NewPage(PageKey(HASHES[3], 0, WHOLE), HASHES[2], 3, Loss.Q8),
    )


def test_the_first_block_of_a_chain_has_no_parent() -> None:
    (start,) = SteppedStore(2).writes(to(A, 2))
    assert [page.parent for page in start.request.pages] == [BlockHash(bytes(HASH_BYTES)), HASHES[0]]


def test_a_shard_gets_several_exchanges_of_whole_blocks_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_BYTES", PAGE_BYTES)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", PAGE_BYTES)
    starts = SteppedStore(5, streams=2).writes(to(A, 5))
    assert [start.blocks for start in starts] == [[0, 1, 2], [3, 4]]
    assert starts[0].request.attempt != starts[1].request.attempt


def test_a_store_that_is_small_goes_by_one_exchange_whatever_the_way() -> None:
    assert len(SteppedStore(5, streams=2).writes(to(A, 5))) == 1


def test_many_shards_share_the_exchanges_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_BYTES", PAGE_BYTES)
    monkeypatch.setattr(limits, "WIDE_STREAM_BYTES", PAGE_BYTES)
    assert len(SteppedStore(40, streams=40).writes(to(A, 20), to(B, 20))) == WRITERS // 2 * 2


# ------------------------------------------------------------------------------------ the source is free


@pytest.mark.parametrize("how", ["drained", "ended", "failed", "stopped"])
def test_the_source_is_free_when_the_last_exchange_reads_it_no_more(how: str) -> None:
    store = SteppedStore(2)
    first, second = store.writes(to(A), to(B))
    assert store.drain(first) == []
    if how == "drained":
        freed = store.drain(second)
    elif how == "ended":
        freed = store.end(second, DONE)
    elif how == "failed":
        freed = store.fail(second)
    else:
        assert store.step(Cancel(GIVEN_UP)) == [StopWrite(second.exchange)], "the other reads no more"
        freed = store.step(WriteStopped(second.exchange))
    assert freed[0] == FreeSource()
    assert FreeSource() not in store.end(first, DONE), "once"


def test_the_outcome_of_a_whole_store_is_told_before_its_ticket_is_ended() -> None:
    store = SteppedStore(3)
    first, second = store.writes(to(A), to(B, 2))
    assert store.end(first, Written.DUPLICATE) == []
    assert store.end(second, DONE) == [FreeSource(), FinishStore(Stored(2, 1, 0, 3 * PAGE_BYTES)), CloseTicket(TICKET)]
    assert not store.plan.ended
    assert store.over() == [StoreOver()]
    assert store.plan.ended


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        (Written.PENDING, Stored(1, 0, 1, 2 * PAGE_BYTES)),
        (Written.FULL, Stored(1, 0, 0, 2 * PAGE_BYTES, FULL)),
        (Written.LOST, Stored(1, 0, 0, 2 * PAGE_BYTES, Miss(MissReason.SHARD_LOST, "the shard could not commit"))),
    ],
)
def test_where_a_block_was_not_written_the_ticket_ends_first(written: Written, stored: Stored) -> None:
    store = SteppedStore(2)
    (start,) = store.writes(to(A, 2))
    assert closing(store, store.end(start, DONE, written)) == FinishStore(stored)


def test_an_exchange_that_fails_is_a_miss_and_its_bytes_count() -> None:
    store = SteppedStore(2)
    first, second = store.writes(to(A), to(B))
    store.fail(first, nbytes=5)
    assert closing(store, store.end(second, DONE)) == FinishStore(Stored(1, 0, 0, PAGE_BYTES + 5, LOST))


@pytest.mark.parametrize("kind", [RefusedKind.LIMIT, RefusedKind.BAD])
def test_a_mistake_is_told_when_the_other_exchanges_have_ended(kind: RefusedKind) -> None:
    store = SteppedStore(2)
    first, second = store.writes(to(A), to(B))
    assert store.fail(first, refused(kind)) == []
    told = closing(store, store.fail(second, ZeroDivisionError()))
    assert isinstance(told.error, LimitError if kind is RefusedKind.LIMIT else CallerError), "the first one"
    assert told.stored is None


def test_a_shard_whose_breaker_is_open_is_not_written_to() -> None:
    shards = policy(failures=1)
    permit = shards.permit(A, 0)
    assert not isinstance(permit, Miss)
    shards.failed(permit, EVICTED, 0)
    store = SteppedStore(2, shards=shards)
    start = one(store.grant(to(A), to(B)), StartWrite)
    told = closing(store, store.end(start, DONE)).stored
    assert start.shard == B and told is not None
    assert (told.blocks, told.miss and told.miss.reason) == (1, MissReason.EVICTED)


def test_where_no_shard_may_be_asked_the_store_is_over_when_its_ticket_is() -> None:
    shards = policy(failures=1)
    permit = shards.permit(A, 0)
    assert not isinstance(permit, Miss)
    shards.failed(permit, LOST, 0)
    store = SteppedStore(1, shards=shards)
    effects = store.grant(to(A))
    assert effects == [FreeSource(), CloseTicket(TICKET)]
    assert closing(store, effects).stored is not None


# ---------------------------------------------------------------------------------- a forgotten namespace


def test_a_forgotten_namespace_is_named_once_more_to_the_same_shard() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    again = one(store.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE)), StartWrite)
    assert (again.shard, again.request.pages, again.blocks) == (A, start.request.pages, start.blocks)
    assert again.exchange != start.exchange and again.request.attempt != start.request.attempt
    assert store.end(again, DONE)[:2] == [FreeSource(), FinishStore(Stored(1, 0, 0, PAGE_BYTES))]


def test_a_namespace_that_is_forgotten_twice_is_a_miss() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    again = one(store.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE)), StartWrite)
    told = closing(store, store.fail(again, refused(RefusedKind.UNKNOWN_NAMESPACE))).stored
    assert told is not None
    assert told.miss == Miss(MissReason.SHARD_LOST, "a forgets the namespace: in these words")


def test_a_source_that_was_said_to_be_free_is_never_read_again() -> None:
    store = SteppedStore(1)
    (start,) = store.writes(to(A))
    assert store.drain(start) == [FreeSource()]
    effects = store.fail(start, refused(RefusedKind.UNKNOWN_NAMESPACE), PAGE_BYTES)
    told = closing(store, effects).stored
    assert told is not None
    assert (told.nbytes, told.miss) == (PAGE_BYTES, Miss(MissReason.SHARD_LOST, "a forgot the namespace"))
