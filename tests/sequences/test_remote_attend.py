"""Spans attended to at the shards that have them: the bits of one memory, whatever is local, loaded or shipped."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcluster
from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, merge, partial
from kvcluster.client.client import Client
from kvcluster.config import TRANSPORTS, ClientConfig
from kvcluster.core import limits
from kvcluster.core.attend_work import attend_work
from kvcluster.core.groups import Group, Plane
from kvcluster.core.ids import Caller, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    AttendDeclined,
    Attended,
    AttendRequest,
    DeclineReason,
    Offer,
    Offers,
    ReadRequest,
    RegisterSpans,
    ShardAddress,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.errors import CallerError, LimitError, LostTokens
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.sequences import block_places
from kvcluster.sequences.attend_planner import AttendPlanner, ShipAbsent, SpanChoice, StepFacts
from kvcluster.sequences.batch_attention import BatchAttention
from kvcluster.testing import MemoryCluster
from kvcluster.testing.split_transport import SplitTransport
from kvcluster.transport.attend_session import SpanResults
from kvcluster.transport.auto import OPENERS, AutoTransport, own_attempts
from kvcluster.transport.base import Deadline, PageSink, Transport, Unavailable
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.process_location import ProcessLocation
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.tcp_pages import TcpServer
from tests.client.conftest import Start, settle
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK, GROUP = 8, 16, 2
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
LAYOUT = PageLayout(SPEC.groups[0], BLOCK, LAYERS, HEADS)
TENANT = Tenant("default")
LONG = 12 * CUT_TOKENS + 75


def made(tokens: int, seed: int) -> Tensor:
    values = torch.randn(LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16()


def asked(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(900 + seed))


def ids(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(tokens)]


@dataclass
class Text:
    """A sequence and the KV of its tokens: `[layers, tokens, heads, dim]`."""

    sequence: kvcluster.Sequence
    k: Tensor
    v: Tensor

    def append(self, tokens: list[int] | int, seed: int) -> None:
        count = tokens if isinstance(tokens, int) else len(tokens)
        k, v = made(count, seed), made(count, seed + 1)
        for layer in range(LAYERS):
            self.sequence.append(layer, k[layer], v[layer])
        self.sequence.advance(tokens)
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)

    def truncate(self, tokens: int) -> None:
        self.sequence.truncate(tokens)
        self.k, self.v = self.k[:, :tokens], self.v[:, :tokens]

    def fork(self) -> Text:
        return Text(self.sequence.fork(), self.k, self.v)

    def expected(self, layer: int, query: Tensor, **scoring: Any) -> Tensor:
        """Attention over all of it in one tensor of pages."""
        tokens = self.k.shape[1]
        blocks = -(-tokens // BLOCK)
        pool = torch.zeros(blocks, LAYERS, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
        for plane, values in enumerate((self.k, self.v)):
            padded = torch.zeros(LAYERS, blocks * BLOCK, HEADS, DIM, dtype=torch.bfloat16)
            padded[:, :tokens] = values
            pool[:, :, plane] = padded.view(LAYERS, blocks, BLOCK, HEADS, DIM).transpose(0, 1)
        pages = PageAddresses.from_pool(LAYOUT, pool, torch.arange(blocks, dtype=torch.int32))
        row = QueryRow(range(tokens - len(query), tokens), [PageSpan(pages, 0, tokens)])
        sinks = scoring.pop("sinks", None)
        whole = partial(query, [row], LAYOUT, layer, **scoring)
        return (whole if sinks is None else merge([whole], sinks=sinks)).out

    def check(self, planner: AttendPlanner | None, *, queries: int = 1, **scoring: Any) -> None:
        for layer in range(LAYERS):
            query = asked(queries, layer)
            out = self.sequence.attend(layer, query, planner=planner, **scoring)
            assert torch.equal(out, self.expected(layer, query, **scoring))


def text(client: Client, tokens: int, seed: int = 0) -> Text:
    empty = made(0, 0)
    one = Text(client.sequence(), empty, empty)
    one.append(ids(tokens, seed), 10 * seed + 1)
    return one


@dataclass
class Wire:
    """What clients of a cluster have sent to its shards, and what befalls it: `before` is called with each Attend, and
    may answer it or raise; reads wait for `readable`."""

    attends: list[tuple[ShardId, AttendRequest]] = field(default_factory=list)
    registered: list[tuple[ShardId, RegisterSpans]] = field(default_factory=list)
    namespaces: list[NamespaceId] = field(default_factory=list)
    before: Callable[[ShardId, AttendRequest], SpanResults | None] = lambda shard, request: None
    readable: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.readable.set()


class WatchedTransport(MemoryTransport):
    def __init__(self, wire: Wire, shard: ShardId, *given: Any) -> None:
        super().__init__(*given)
        self._wire = wire
        self._shard = shard

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        self._wire.registered.append((self._shard, message))
        self._wire.namespaces.append(namespace)
        super().register_spans(namespace, message, deadline)

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        assert self._wire.readable.wait(60)
        return (yield from super().read(request, sink, deadline))

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        self._wire.attends.append((self._shard, request))
        answer = self._wire.before(self._shard, request)
        return answer or super().attend(request, query, deadline)


class Reader:
    """A client of a cluster, with a resident set of so many pages, whose messages to shards are watched."""

    def __init__(self, cluster: MemoryCluster, pages: int, spec: kvcluster.KVSpec = SPEC, **config: Any) -> None:
        self.wire = Wire()

        def opener(shard: ShardAddress) -> Transport:
            host = cluster.shards.get(shard.shard)
            if host is None or host.core.epoch != shard.epoch:
                raise Unavailable(Miss(MissReason.SHARD_LOST, "not running"))
            return WatchedTransport(self.wire, shard.shard, host, Caller(TENANT))

        given = {"resident_bytes": pages * spec.page_bytes(0, spec.whole(0)), "deadline_ms": 20_000, **config}
        self.client = Client(cluster.port(), opener, spec, config=ClientConfig(**given))

    def open(self, of: Text, tokens: list[int]) -> Text:
        """Opens the sequence of these tokens, which another client has stored."""
        sequence = self.client.sequence(tokens)
        assert sequence.length == len(tokens) // BLOCK * BLOCK
        return Text(sequence, of.k[:, : sequence.length], of.v[:, : sequence.length])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    """Four shards, on which each cut is placed by itself, and stays: these tests open one text so often that it would
    be copied to further shards."""
    config = {"coordinator": {"run_blocks": 32, "hot_replicas": 1}}
    with MemoryCluster(shards=4, ram_bytes="16MiB", config=config) as cluster:
        yield cluster
        settle(cluster)


@pytest.fixture(scope="module")
def stored(cluster: MemoryCluster) -> Iterator[Text]:
    """A long text that the shards have."""
    one = text(cluster.client(SPEC), LONG)
    with one.sequence:
        assert one.sequence.flush()
        yield one


def test_a_context_many_times_the_resident_set_is_attended_to_where_it_lies(
    cluster: MemoryCluster, stored: Text
) -> None:
    with Reader(cluster, 24) as reader:
        one = reader.open(stored, ids(LONG))
        one.check(ShipAbsent())
        one.append(ids(40, 5), 50)
        one.check(ShipAbsent(), queries=7)
        one.check(ShipAbsent(), queries=2, softcap=3.0, scale=0.4, sinks=torch.arange(4.0))
        one.check(ShipAbsent(), window=CUT_TOKENS // 4)
        assert reader.client.resident().pages_peak <= 24
        assert len({shard for shard, _ in reader.wire.attends}) > 1
        with pytest.raises(LimitError):
            one.sequence.attend(0, asked(1))


def test_a_step_sends_one_message_to_each_shard_and_layer(cluster: MemoryCluster, stored: Text) -> None:
    with Reader(cluster, 200) as reader:
        one = reader.open(stored, ids(LONG))
        rows = [one, one.fork(), one.fork()]
        for at, row in enumerate(rows):
            row.append(ids(3, at), 60 + at)
        batch = kvcluster.SequenceBatch([row.sequence for row in rows])
        sent, shards = 0, set[ShardId]()
        for step in range(3):
            reader.wire.attends.clear()
            for layer in range(LAYERS):
                query = asked(3, layer)
                out = batch.attend(layer, query, planner=ShipAbsent())
                for at, row in enumerate(rows):
                    assert torch.equal(out[at : at + 1], row.expected(layer, query[at : at + 1]))
            counted = Counter((shard, request.layer) for shard, request in reader.wire.attends)
            assert set(counted.values()) == {1}
            sent += len(counted)
            shards |= {shard for shard, _ in counted}
            assert set(counted) == {(shard, layer) for shard in shards for layer in range(LAYERS)}
            assert all(len(request.rows) == 3 for _, request in reader.wire.attends)
            for at, row in enumerate(rows):
                row.append([step], 70 + 10 * step + 2 * at)
        assert sorted(shard for shard, _ in reader.wire.registered) == sorted(shards), "spans are registered once"
        shipped = reader.client.shipped()
        assert shipped.messages == sent and not shipped.failed
        assert shipped.query_bytes == shipped.messages * 3 * HEADS * GROUP * DIM * 4
        assert shipped.result_bytes > 0 and not shipped.result_bytes % (HEADS * GROUP * (DIM + 1) * 4)


def test_forks_and_truncated_sequences_name_the_spans_that_they_have(cluster: MemoryCluster, stored: Text) -> None:
    with Reader(cluster, 200) as reader:
        one = reader.open(stored, ids(LONG))
        one.check(ShipAbsent())
        fork = one.fork()
        fork.truncate(6 * CUT_TOKENS + 10)
        fork.append(ids(700, 8), 80)
        fork.check(ShipAbsent())
        one.check(ShipAbsent())
        before = len(reader.wire.registered)
        fork.truncate(3 * CUT_TOKENS)
        fork.check(ShipAbsent(), queries=3)
        assert len(reader.wire.registered) == before, "a truncated sequence names fewer, and tells no shard"


class Choosing:
    """Chooses by the position and rows of a span, the same each time."""

    def __init__(self, seed: int, choices: list[SpanChoice]) -> None:
        self._seed = seed
        self._choices = choices

    def choose(self, step: StepFacts) -> list[SpanChoice]:
        return [random.Random(f"{self._seed} {span.start} {span.rows}").choice(self._choices) for span in step.spans]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    pages=st.sampled_from([500, 900]),
    queries=st.integers(1, 5),
    window=st.sampled_from([None, 700, 3_000]),
    forks=st.lists(st.integers(1, LONG - 100), max_size=2),
    choices=st.lists(st.sampled_from(list(SpanChoice)), min_size=1),
)
def test_any_mixture_over_four_shards_has_the_bits_of_one_memory(
    cluster: MemoryCluster,
    stored: Text,
    seed: int,
    pages: int,
    queries: int,
    window: int | None,
    forks: list[int],
    choices: list[SpanChoice],
) -> None:
    with Reader(cluster, pages) as reader:
        one = reader.open(stored, ids(LONG))
        rows = [one]
        for at, tokens in enumerate(forks):
            rows.append(one.fork())
            rows[-1].truncate(tokens)
            rows[-1].append(20 + at, seed + at)  # private from here on
        batch = kvcluster.SequenceBatch([row.sequence for row in rows])
        for repeat in range(2):
            planner = Choosing(seed + repeat, choices)
            for layer in range(LAYERS):
                query = asked(queries * len(rows), seed + layer)
                out = batch.attend(layer, query, window=window, planner=planner)
                each = zip(rows, query.split(queries), strict=True)
                assert torch.equal(out, torch.cat([row.expected(layer, part, window=window) for row, part in each]))


def test_spans_that_are_fetched_stay_here_and_those_that_are_shipped_bring_nothing(
    cluster: MemoryCluster, stored: Text
) -> None:
    with Reader(cluster, 900) as reader:
        sequence = reader.client.sequence(ids(LONG), prefetch=False)
        one = Text(sequence, stored.k[:, : sequence.length], stored.v[:, : sequence.length])
        assert sequence.explain_attention().places == ()
        for _ in range(3):
            one.check(ShipAbsent())
        assert sequence.statistics().resident < CUT_TOKENS, "nothing but what no shard has whole"
        assert {place.choice for place in sequence.explain_attention().places} == {SpanChoice.SHIP}
        assert "tokens 0-" in str(sequence.explain_attention())
        one.check(Choosing(1, [SpanChoice.FETCH]))
        assert sequence.statistics().resident == sequence.length
        reader.wire.attends.clear()
        one.check(ShipAbsent())
        assert not reader.wire.attends
        assert reader.client.shipped().chosen.keys() == {"ship", "fetch", "local"}


def test_what_is_taken_away_before_it_is_attended_to_here_is_brought_back_together(
    cluster: MemoryCluster, stored: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other blocks of the resident set make room for it, though these were brought there later."""
    with Reader(cluster, 80) as reader:
        sequence, other = reader.client.sequence(ids(LONG), prefetch=False), text(reader.client, 4, seed=7)
        one = Text(sequence, stored.k[:, : sequence.length], stored.v[:, : sequence.length])
        sequence.load(0, CUT_TOKENS)
        sequence.load(12 * CUT_TOKENS)  # the rest of the last cut is attended to here, too
        here, provide, pressed = sequence.statistics().resident, BatchAttention._provide, Counter[str]()

        def press(self: BatchAttention, *given: Any) -> None:
            provide(self, *given)
            pressed["times"] += 1
            if pressed["times"] == 1:
                other.append(64 * BLOCK, 70)
                assert other.sequence.flush()
                assert sequence.statistics().resident < here

        monkeypatch.setattr(BatchAttention, "_provide", press)
        one.check(ShipAbsent())
        assert pressed["times"] == LAYERS + 1
        assert reader.wire.attends, "the rest was shipped"


def test_latent_pages_are_shipped_and_streamed_with_the_same_bits(cluster: MemoryCluster) -> None:
    latent = Group(layers=(0, 1), planes=(Plane("latent", 1, 40, "bfloat16"),))
    spec = kvcluster.KVSpec(model="mla", weights="sha256:1", block_tokens=BLOCK, groups=(latent,))
    tokens, query = ids(4 * CUT_TOKENS + 20, 9), torch.randn(3, 6, 40, generator=torch.Generator().manual_seed(8))
    with Reader(cluster, 400, spec) as writer, Reader(cluster, 40, spec) as reader:
        sequence = writer.client.sequence()
        for layer in range(LAYERS):
            generator = torch.Generator().manual_seed(layer)
            sequence.append(layer, torch.randn(len(tokens), 1, 40, generator=generator).bfloat16())
        sequence.advance(tokens)
        assert sequence.flush()
        sequence.truncate(len(tokens) // BLOCK * BLOCK)
        far = reader.client.sequence(tokens, prefetch=False)
        for layer in range(LAYERS):
            right = sequence.attend(layer, query, latent_values=32)
            for planner in (kvcluster.ShipAbsent(), None):
                assert torch.equal(far.attend(layer, query, latent_values=32, planner=planner), right)
        assert reader.wire.attends and right.shape == (3, 6, 32)


class Mute:
    """Chooses for no span."""

    def choose(self, step: StepFacts) -> list[SpanChoice]:
        return []


def test_a_planner_that_forgets_spans_is_told(cluster: MemoryCluster, stored: Text) -> None:
    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        with pytest.raises(CallerError, match="Mute chose for 0 spans; this step has"):
            one.check(Mute())


def test_what_is_too_much_for_a_message_is_divided(
    cluster: MemoryCluster, stored: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = attend_work(1, 1, heads=HEADS * GROUP, channels=2 * DIM)
    monkeypatch.setattr(limits, "ATTEND_WORK", 3 * work)
    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        one.check(Choosing(1, [SpanChoice.SHIP]), queries=3)
        asked_for = [row for _, request in reader.wire.attends for row in request.rows]
        assert all(len(row.spans) == 1 for row in asked_for) and len(asked_for) == 12 * LAYERS
        reader.wire.attends.clear()
        one.check(Choosing(1, [SpanChoice.SHIP]), queries=4)
        assert not reader.wire.attends, "a query of which not even one cut may be asked stays here"


@pytest.mark.parametrize("shape", [(1, HEADS * GROUP, DIM + 1), (1, HEADS + 1, DIM), (1, HEADS * GROUP * DIM)])
def test_a_query_that_does_not_fit_is_not_sent(cluster: MemoryCluster, stored: Text, shape: tuple[int, ...]) -> None:
    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        with pytest.raises(CallerError, match="quer"):
            one.sequence.attend(0, torch.zeros(shape), planner=Choosing(1, [SpanChoice.SHIP]))
        assert not reader.wire.attends


def test_private_blocks_are_shipped_beside_public_ones(start: Start) -> None:
    cluster = start(shards=2, ram_bytes="8MiB")
    with Reader(cluster, 260) as reader:
        one = text(reader.client, 3 * CUT_TOKENS)
        one.append(4 * CUT_TOKENS, 90)
        assert one.sequence.flush()
        one.append(ids(10), 95)
        one.check(Choosing(1, [SpanChoice.SHIP]))
        named = [message.spans for _, message in reader.wire.registered]
        assert sum(map(len, named)) == 7
        assert len(dict.fromkeys(reader.wire.namespaces)) == 2, "each namespace has messages of its own"


def test_a_worker_learns_that_it_was_forgotten_and_registers_again(
    cluster: MemoryCluster, stored: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(cluster, 24) as reader:
        one = reader.open(stored, ids(LONG))
        one.check(ShipAbsent())
        before = len(reader.wire.registered)
        for host in cluster.shards.values():
            host.inspect(lambda host=host: host.core.spans.registry.expire(2**62))
        one.check(ShipAbsent())
        assert before and len(reader.wire.registered) == 2 * before


def test_a_busy_shard_is_asked_again_if_there_is_no_room_to_load(cluster: MemoryCluster, stored: Text) -> None:
    with Reader(cluster, 24) as reader:
        one = reader.open(stored, ids(LONG))
        declined = SpanResults(AttendDeclined(DeclineReason.BUSY), memoryview(b""))
        left = [5]

        def busy(shard: ShardId, request: AttendRequest) -> SpanResults | None:
            left[0] -= 1
            return declined if left[0] >= 0 else None

        reader.wire.before = busy
        one.check(ShipAbsent())
        assert left[0] < 0


@pytest.mark.parametrize("reason", list(DeclineReason))
def test_what_a_shard_declines_is_loaded(
    cluster: MemoryCluster, stored: Text, reason: DeclineReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_places, "_AGAIN_NS", 10**15)
    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        declined = SpanResults(AttendDeclined(reason), memoryview(b""))
        reader.wire.before = lambda shard, request: declined if shard == reader.wire.attends[0][0] else None
        one.check(Choosing(1, [SpanChoice.SHIP]))
        answered = [shard for shard, _ in reader.wire.attends]
        assert answered.count(answered[0]) == 1, "a shard that has declined is left alone for a while"


def test_a_shard_that_breaks_off_is_replaced_by_loading(cluster: MemoryCluster, stored: Text) -> None:
    def fail(shard: ShardId, request: AttendRequest) -> None:
        if shard == reader.wire.attends[0][0]:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "gone"))

    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        reader.wire.before = fail
        one.check(Choosing(1, [SpanChoice.SHIP]), queries=2)


def test_results_of_another_size_are_not_merged(cluster: MemoryCluster, stored: Text) -> None:
    def shorten(shard: ShardId, request: AttendRequest) -> SpanResults | None:
        return (
            SpanResults(Attended(8, request_loss), memoryview(bytes(8))) if shard == reader.wire.attends[0][0] else None
        )

    request_loss = Loss.EXACT
    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        reader.wire.before = shorten
        one.check(Choosing(1, [SpanChoice.SHIP]))


def test_an_error_of_ours_is_raised_and_not_waited_for(cluster: MemoryCluster, stored: Text) -> None:
    def fail(shard: ShardId, request: AttendRequest) -> None:
        raise ZeroDivisionError("a bug")

    with Reader(cluster, 900) as reader:
        one = reader.open(stored, ids(LONG))
        reader.wire.before = fail
        with pytest.raises(ZeroDivisionError):
            one.check(Choosing(1, [SpanChoice.SHIP]))


def test_a_generation_goes_on_without_the_coordinator(start: Start) -> None:
    cluster = start(shards=3, ram_bytes="8MiB")
    with Reader(cluster, 400) as writer, Reader(cluster, 40) as reader:
        first = text(writer.client, 5 * CUT_TOKENS)
        assert first.sequence.flush()
        one = reader.open(first, ids(5 * CUT_TOKENS))
        one.check(ShipAbsent())
        cluster.stop_coordinator()
        for step in range(3):
            one.append([step], 60 + step)
            one.check(ShipAbsent())


def test_a_lost_shard_without_a_replica_names_the_first_lost_token(start: Start) -> None:
    cluster = start(shards=3, ram_bytes="8MiB")
    with Reader(cluster, 400) as writer, Reader(cluster, 40) as reader:
        first = text(writer.client, 6 * CUT_TOKENS)
        assert first.sequence.flush()
        one = reader.open(first, ids(6 * CUT_TOKENS))
        one.check(ShipAbsent())
        shard, request = next((shard, request) for shard, request in reader.wire.attends if request.rows)
        lost = min(level_index[1] << level_index[0] for level_index in request.rows[0].subtrees) * CUT_TOKENS
        cluster.stop_shard(shard)
        with pytest.raises(LostTokens) as raised:
            one.sequence.attend(0, asked(1), planner=ShipAbsent())
        assert raised.value.position == lost
        one.truncate(lost)
        if lost:
            one.check(ShipAbsent())


def test_with_two_replicas_a_lost_shard_is_not_noticed(start: Start) -> None:
    cluster = start(shards=3, ram_bytes="8MiB")
    tokens = ids(6 * CUT_TOKENS)
    with Reader(cluster, 400) as writer, Reader(cluster, 40) as reader:
        first = text(writer.client, len(tokens))
        assert first.sequence.flush()
        assert writer.client.pin(tokens, 600.0, replicas=2).tokens == len(tokens)

        def copied() -> bool:
            ready = sum(1 for host in cluster.shards.values() for _ in host.core.pool.ready())
            return ready >= 2 * len(tokens) // BLOCK

        cluster.wait_until(copied, 60.0)
        assert writer.client.flush()
        one = reader.open(first, tokens)
        one.check(ShipAbsent())
        shard = reader.wire.attends[0][0]
        cluster.stop_shard(shard)
        one.check(ShipAbsent())
        assert reader.client.resident().pages_peak <= 40, "another replica was asked, and nothing loaded"


# ------------------------------------------------------------------------------------------ real servers


class OfferingControl(MemoryTransport):
    """Control of a shard that offers these transports."""

    name = "grpc"

    def __init__(self, host: ShardHost, offers: tuple[Offer, ...]) -> None:
        super().__init__(host, Caller(TENANT))
        self._offers = Offers(host.core.epoch, offers)

    def offers(self, deadline: Deadline) -> Offers:
        return self._offers


@pytest.fixture(params=["tcp", "shm"])
def served(request: pytest.FixtureRequest, cluster: MemoryCluster) -> Iterator[Client]:
    """A client that reaches the shards by their servers of that transport."""
    with ExitStack() as stack:
        offers: dict[str, Offer] = {}
        for shard, host in cluster.shards.items():
            server: TcpServer | ShmServer
            if request.param == "tcp":
                server = TcpServer(host, lambda token: Caller(TENANT), "127.0.0.1")
            else:
                server = ShmServer(host, lambda token: Caller(TENANT))
            server.start()
            stack.callback(server.close)
            offers[shard] = Offer(request.param, server.address)

        def opener(shard: ShardAddress) -> Transport:
            control = OfferingControl(cluster.shards[shard.shard], (offers[shard.shard],))
            return AutoTransport(
                shard,
                control,
                OPENERS,
                credentials=ANONYMOUS,
                next_attempt=own_attempts(),
                location=ProcessLocation("memory"),
                takes=TRANSPORTS,
            )

        config = ClientConfig(resident_bytes=900 * PAGE, deadline_ms=20_000)
        client = Client(cluster.port(), opener, SPEC, config=config)
        stack.callback(client.close)
        yield client


def test_queries_go_over_the_servers_of_a_transport(served: Client, stored: Text) -> None:
    sequence = served.sequence(ids(LONG))
    one = Text(sequence, stored.k[:, : sequence.length], stored.v[:, : sequence.length])
    rows = [one, one.fork()]
    rows[1].truncate(7 * CUT_TOKENS + 100)
    batch = kvcluster.SequenceBatch([row.sequence for row in rows])
    for step in range(4):
        planner = Choosing(step, [SpanChoice.SHIP, SpanChoice.SHIP, SpanChoice.LOCAL])
        for layer in range(LAYERS):
            query = asked(6, step).bfloat16()
            out = batch.attend(layer, query, planner=ShipAbsent() if not step else planner)
            expected = torch.cat([rows[0].expected(layer, query[:3]), rows[1].expected(layer, query[3:])])
            assert torch.equal(out, expected.bfloat16())
    paths = {shard: path["name"] for shard, path in served.shard_connections.names().items()}
    shards = [shard for known in served.shard_connections._connections.values() for shard in known]
    lending = {shard.shard: served.shard_connections.lends(shard) for shard in shards}
    assert len(shards) > 1 and lending == {shard: path == "shm" for shard, path in paths.items()}
    for row in rows:
        row.sequence.close()


class GrpcLike(SplitTransport):
    """Control of a shard that offers nothing else, over which spans are registered and no query goes."""

    def __init__(self, host: ShardHost) -> None:
        self._memory = MemoryTransport(host, Caller(TENANT))
        super().__init__(self._memory, self._memory)
        self._epoch = host.core.epoch
        self.registered = 0

    def offers(self, deadline: Deadline) -> Offers:
        return Offers(self._epoch)

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        self.registered += 1
        self._memory.register_spans(namespace, message, deadline)


@pytest.mark.parametrize("auto", [True, False])
def test_over_a_transport_that_carries_no_queries_pages_are_loaded(
    cluster: MemoryCluster, stored: Text, auto: bool
) -> None:
    controls: list[GrpcLike] = []

    def opener(shard: ShardAddress) -> Transport:
        controls.append(GrpcLike(cluster.shards[shard.shard]))
        if not auto:
            return SplitTransport(controls[-1], controls[-1])
        return AutoTransport(shard, controls[-1], OPENERS, credentials=ANONYMOUS, next_attempt=own_attempts())

    config = ClientConfig(resident_bytes=900 * PAGE, deadline_ms=20_000)
    with Client(cluster.port(), opener, SPEC, config=config) as client:
        sequence = client.sequence(ids(LONG))
        one = Text(sequence, stored.k[:, : sequence.length], stored.v[:, : sequence.length])
        one.check(Choosing(1, [SpanChoice.SHIP]))
        assert any(control.registered for control in controls) == auto
