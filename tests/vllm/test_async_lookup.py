"""Lookups: a scheduler never waits for one, a request waits only while the coordinator answers, no ticket is leaked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvcluster.client.bounded_calls import LIMIT, OPEN_NS, Call
from kvcluster.client.client import Client
from kvcluster.core.ids import BlockHash, Caller, Tenant
from kvcluster.core.messages import CoordinatorQuestion, PrepareLoad
from kvcluster.core.miss import Miss, MissReason
from kvcluster.engines.vllm.async_lookup import Ask, AsyncLookups, LookupAnswer, PendingLookup, PrefixQuestion
from kvcluster.errors import CallerError, LimitError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.tickets import Ticket
from kvcluster.transport.base import Unavailable
from tests.client.build import BLOCK, BOUND_S, SPEC, Hold, Port, kv, prompt, watched_client
from tests.client.conftest import Start

# Lookups alone are asked for here: nothing takes the tickets of their hits.
pytestmark = pytest.mark.filterwarnings("ignore:a ticket for", "ignore::pytest.PytestUnraisableExceptionWarning")

TOKENS = prompt(4)
MS = 1_000_000
PATIENCE = 250 * MS
LOST = Unavailable(Miss(MissReason.COORDINATOR_LOST, "gone"))


class Bench:
    """Lookups over a cluster that has TOKENS. Time is what a test says."""

    def __init__(self, cluster: MemoryCluster, stack: ExitStack) -> None:
        self.cluster = cluster
        self.port = Port(cluster)
        self.client: Client = stack.enter_context(watched_client(cluster, port=self.port))
        assert self.client.store(TOKENS, kv(4)).blocks == 4
        assert self.client.flush()
        self.hashes = self.client.hashes(TOKENS)
        self.lookups = AsyncLookups(PATIENCE)
        stack.callback(self.lookups.close)
        self.now = 1_000_000 * MS

    def ask(self) -> PrefixQuestion:
        return PrefixQuestion(self.client, self.hashes, "")

    def begin(self, ask: Ask | None = None) -> PendingLookup:
        begun = self.lookups.begin(ask or self.ask, self.now)
        assert isinstance(begun, Call), begun
        return begun

    def look(self, lookup: PendingLookup) -> LookupAnswer | None:
        return self.lookups.look(lookup, self.now)

    def heard(self, lookup: PendingLookup) -> LookupAnswer:
        """The answer, once it is there."""
        lookup.done.result(BOUND_S)
        answer = self.look(lookup)
        assert answer is not None
        return answer

    def granted(self, lookup: PendingLookup) -> Ticket:
        """The ticket that the lookup came to, once it is there."""
        ticket = self.heard(lookup).ticket
        assert ticket is not None
        return ticket

    def fail(self, times: int = 2) -> None:
        """Lookups that the coordinator does not answer, one after the other."""
        for _ in range(times):
            lookup = self.begin(_raises(LOST))
            assert self.heard(lookup).ticket is None
            lookup.leave()

    def hold(self) -> Hold:
        """The coordinator's answers to lookups stay away until the test lets them go."""
        hold = Hold()

        def after(message: CoordinatorQuestion) -> None:
            if isinstance(message, PrepareLoad):
                hold()

        self.port.after = after
        return hold


def _raises(error: BaseException) -> Ask:
    def ask() -> Any:
        raise error

    return ask


@pytest.fixture
def bench(start: Start) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(start(shards=1, ram_bytes="1MiB"), stack)


def test_a_lookup_is_pending_until_it_is_answered(bench: Bench) -> None:
    hold = bench.hold()
    lookup = bench.begin()
    hold.wait_reached()
    assert bench.look(lookup) is None
    hold.let_go()
    answer = bench.heard(lookup)
    assert (bench.granted(lookup).blocks, list(answer.hashes), answer.miss) == (4, bench.hashes, None)
    assert bench.look(lookup) == answer, "it may be looked at again"
    lookup.leave()
    bench.cluster.wait_until_idle(BOUND_S)


def test_what_it_prepares_is_for_all_ranks(bench: Bench) -> None:
    lookup = bench.begin()
    assert bench.granted(lookup).body.need.parts == (SPEC.whole(0),)
    lookup.leave()


def test_to_find_nothing_is_an_answer(bench: Bench) -> None:
    others = bench.client.hashes(prompt(3, seed=9))
    for _ in range(3):
        lookup = bench.begin(lambda: PrefixQuestion(bench.client, others, ""))
        assert bench.granted(lookup).blocks == 0
        miss = bench.heard(lookup).miss
        assert miss is not None and miss.reason is MissReason.NEVER_SEEN
    assert bench.lookups.healthy


def test_a_request_waits_no_longer_than_its_patience(bench: Bench) -> None:
    hold = bench.hold()
    lookup = bench.begin()
    hold.wait_reached()
    bench.now += PATIENCE - 1
    assert bench.look(lookup) is None
    bench.now += 1
    answer = bench.look(lookup)
    assert answer is not None and answer.ticket is None
    assert answer.miss is not None and answer.miss.reason is MissReason.DEADLINE
    assert bench.lookups.healthy, "one may be the engine's own, that had no time to hear"
    lookup.leave()
    hold.let_go()
    bench.cluster.wait_until_idle(BOUND_S)


def test_an_answer_that_comes_late_gives_its_ticket_back(bench: Bench) -> None:
    hold = bench.hold()
    lookup = bench.begin()
    hold.wait_reached()
    assert not bench.cluster.idle(), "the coordinator has granted it"
    bench.now += PATIENCE
    assert bench.look(lookup) is not None
    lookup.leave()
    hold.let_go()
    bench.cluster.wait_until_idle(BOUND_S)
    assert lookup.result is None


def test_an_answer_whose_request_is_gone_gives_its_ticket_back(bench: Bench) -> None:
    lookup = bench.begin()
    lookup.done.result(BOUND_S)
    assert not bench.cluster.idle()
    lookup.leave()
    bench.cluster.wait_until_idle(BOUND_S)


@pytest.mark.parametrize(
    "error",
    [Unavailable(Miss(MissReason.DEADLINE)), Unavailable(Miss(MissReason.SHARD_LOST)), CallerError("no"), OSError("x")],
)
def test_whatever_befalls_a_lookup_its_request_hears_of_it(bench: Bench, error: BaseException) -> None:
    lookup = bench.begin(_raises(error))
    answer = bench.heard(lookup)
    assert answer.ticket is None and answer.miss is not None


def test_after_two_failures_no_request_is_kept_waiting(bench: Bench) -> None:
    bench.fail(1)
    assert bench.lookups.healthy
    bench.fail(1)
    assert not bench.lookups.healthy
    for _ in range(100):
        miss = bench.lookups.begin(bench.ask, bench.now)
        assert isinstance(miss, Miss) and miss.reason is MissReason.COORDINATOR_LOST


def test_prompts_that_were_lost_with_their_shard_leave_the_lookups_of_others_alone(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="1MiB", config={"membership_ttl_ms": 300})
    with ExitStack() as stack:
        bench = Bench(cluster, stack)
        chains = [bench.client.hashes(prompt(4, seed)) for seed in range(12)]
        for seed in range(12):
            assert bench.client.store(prompt(4, seed), kv(4, seed)).miss is None
        assert bench.client.flush()
        lost_shard = sorted(cluster.shards)[1]
        on_it = {page.key.hash for page in cluster.shards[lost_shard].core.pool.ready()}
        lost = [chain for chain in chains if chain[0] in on_it]
        kept = [chain for chain in chains if on_it.isdisjoint(chain)]
        assert len(lost) >= 2 and len(kept) >= 2
        cluster.stop_shard(lost_shard)

        def found(chain: list[BlockHash]) -> tuple[int, MissReason | None]:
            lookup = bench.begin(lambda: PrefixQuestion(bench.client, chain, ""))
            answer = bench.heard(lookup)
            blocks, miss = answer.ticket.blocks if answer.ticket else -1, answer.miss
            lookup.leave()
            return blocks, miss.reason if miss is not None else None

        cluster.wait_until(lambda: bench.client.prepare_load(lost[0]).miss is not None)
        gone = (0, MissReason.SHARD_LOST)
        assert [found(chain) for chain in (kept[0], lost[0], lost[1], kept[1])] == [(4, None), gone, gone, (4, None)]
        assert bench.lookups.healthy


@pytest.mark.parametrize("error", [CallerError("no"), LimitError("too many"), OSError("x")])
def test_what_goes_wrong_with_some_prompts_does_not_keep_others_from_being_asked_for(
    bench: Bench, error: BaseException
) -> None:
    for _ in range(5):
        lookup = bench.begin(_raises(error))
        answer = bench.heard(lookup)
        assert answer.miss is not None and str(error) in answer.miss.detail
        lookup.leave()
    assert bench.lookups.healthy
    assert bench.granted(bench.begin()).blocks == 4


def test_an_answer_in_between_forgets_the_failure(bench: Bench) -> None:
    for _ in range(3):
        bench.fail(1)
        assert bench.granted(bench.begin())
    assert bench.lookups.healthy


def test_a_probe_that_keeps_no_request_waiting_finds_that_the_cluster_is_back(bench: Bench) -> None:
    bench.fail()
    bench.now += OPEN_NS
    hold = bench.hold()
    probe = bench.begin()
    assert bench.look(probe) is not None, "its request goes on at once"
    probe.leave()
    assert isinstance(bench.lookups.begin(bench.ask, bench.now), Miss), "one is enough"
    hold.wait_reached()
    hold.let_go()
    probe.done.result(BOUND_S)
    assert not bench.lookups.healthy
    bench.lookups.tend(bench.now)
    assert bench.lookups.healthy
    bench.port.after = lambda message: None
    assert bench.granted(bench.begin())
    # The probe's own ticket has gone, which the bill says that is settled when the last lookup is closed.


def test_a_probe_that_fails_doubles_the_time_until_the_next(bench: Bench) -> None:
    bench.fail()
    bench.now += OPEN_NS
    bench.fail(1)
    bench.lookups.tend(bench.now)
    bench.now += OPEN_NS
    assert isinstance(bench.lookups.begin(bench.ask, bench.now), Miss)
    bench.now += OPEN_NS
    assert isinstance(bench.lookups.begin(bench.ask, bench.now), Call)


def test_a_late_answer_says_nothing_of_the_coordinator_as_it_is_now(bench: Bench) -> None:
    hold = bench.hold()
    late = bench.begin()
    hold.wait_reached()
    bench.now += PATIENCE
    bench.look(late)
    late.leave()
    bench.fail(1)
    assert not bench.lookups.healthy
    hold.let_go()
    late.done.result(BOUND_S)
    bench.lookups.tend(bench.now)
    assert not bench.lookups.healthy


def test_so_many_are_under_way_at_most(bench: Bench) -> None:
    hold = bench.hold()
    lookups = [bench.begin() for _ in range(LIMIT)]
    assert bench.lookups.begin(bench.ask, bench.now) is None
    lookups[0].leave()
    assert bench.lookups.begin(bench.ask, bench.now) is None, "it is asked still"
    hold.let_go()
    for lookup in lookups:
        lookup.done.result(BOUND_S)
    bench.lookups.tend(bench.now)
    bench.begin()
    for lookup in lookups:
        lookup.leave()


def test_closed_in_the_midst_no_ticket_is_left(bench: Bench) -> None:
    hold = bench.hold()
    lookups = [bench.begin() for _ in range(5)]
    hold.wait_reached()
    bench.lookups.close()
    hold.let_go()
    bench.cluster.wait_until_idle(BOUND_S)
    assert all(lookup.result is None for lookup in lookups)


def test_prompts_are_hashed_on_the_lookups_own_thread(bench: Bench) -> None:
    hold = Hold()
    asked: list[Callable[[], Any]] = []

    def ask() -> Any:
        hold()
        asked.append(bench.ask)
        return bench.ask()

    lookup = bench.begin(ask)
    hold.wait_reached()
    assert bench.look(lookup) is None and not asked
    hold.let_go()
    assert bench.granted(lookup)
    lookup.leave()
    assert len(TOKENS) == 4 * BLOCK


# -------------------------------------------------------------------------------------- of a tenant that is also read


def also(bench: Bench, blocks: int) -> tuple[Client, Callable[[], Sequence[BlockHash]]]:
    """A client that reads the tenant `public`, which has so many of these blocks; to be closed by the test."""
    owner = bench.cluster.client(SPEC, tenant="public")
    if blocks:
        owner.store(TOKENS[: blocks * BLOCK], kv(blocks))
        owner.flush()
    caller = Caller(Tenant("default"), reads=frozenset({Tenant("public")}))
    reader = watched_client(bench.cluster, caller=caller, reads="public")
    return reader, lambda: reader.hashes(TOKENS)


@pytest.mark.parametrize(("own", "theirs"), [(0, 3), (2, 3), (3, 2), (2, 0), (4, 4)])
def test_the_longer_of_two_prefixes_is_granted_and_nothing_else_is_held(bench: Bench, own: int, theirs: int) -> None:
    bench.client.clear()
    if own:
        bench.client.store(TOKENS[: own * BLOCK], kv(own))
        bench.client.flush()
    other = also(bench, theirs)
    with other[0]:
        lookup = bench.begin(lambda: PrefixQuestion(bench.client, bench.hashes, "", also=other))
        answer = bench.heard(lookup)
        assert answer.ticket is not None and answer.ticket.blocks == max(own, theirs)
        assert (answer.of_another, answer.own_blocks) == (theirs > own, own)
        assert list(answer.hashes) == bench.hashes, "of its own tenant, by which it stores"
        bench.cluster.wait_until(lambda: bench.client.status()["tickets"] == 1)  # the shorter one is given back
        lookup.leave()


def test_what_goes_wrong_there_leaves_its_own(bench: Bench) -> None:
    def revoked() -> Sequence[BlockHash]:
        raise CallerError("this credential may not read the KV of tenant 'public'")

    with also(bench, 0)[0] as reader:
        longer = bench.client.hashes(TOKENS + prompt(1, seed=7))
        lookup = bench.begin(lambda: PrefixQuestion(bench.client, longer, "", also=(reader, revoked)))
        assert bench.granted(lookup).blocks == 4
        lookup.leave()
