"""A context that the resident set has no room for is streamed, with the bits that it has in one tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, merge, partial
from kvcluster.client.client import Client
from kvcluster.core.messages import ReadRequest
from kvcluster.errors import LostTokens, ResidentSetFull
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.tickets import Ticket, Tickets
from kvcluster.transport.base import Deadline
from kvcluster.transport.in_process_transport import MemoryTransport
from tests.client.conftest import Start
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK, GROUP = 16, 32, 2
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
PAGES = 40
"""Pages of the resident set. Two buffers for one cut of 512 tokens take 17 of them."""

TOKENS = 10_000
"""Eight times as many as the resident set holds."""


_opened: list[kvcluster.Sequence] = []
"""Those of one test: a sequence that is not closed has to have a reference until its client is."""


@dataclass
class Context:
    """A sequence, and the KV of its tokens: `[layers, tokens, heads, dim]`."""

    sequence: kvcluster.Sequence
    k: Tensor
    v: Tensor
    number: int = 0  # token ids are another context's only if its number is

    def __post_init__(self) -> None:
        _opened.append(self.sequence)

    def grow(self, tokens: int, seed: int) -> None:
        seed += 100_000 * self.number
        k, v = (torch.randn(LAYERS, tokens, HEADS, DIM, generator=seeded(seed + at)).bfloat16() for at in (0, 1))
        for layer in range(LAYERS):
            self.sequence.append(layer, k[layer], v[layer])
        first = 100_000 * self.number + self.k.shape[1]
        self.sequence.advance(list(range(first, first + tokens)))
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)

    def fork(self) -> Context:
        return Context(self.sequence.fork(), self.k, self.v, self.number)

    def expected(self, layer: int, query: Tensor, **scores: Any) -> Tensor:
        """Attention of the last tokens over all KV in one tensor of pages."""
        tokens = self.k.shape[1]
        blocks = -(-tokens // BLOCK)
        pool = torch.zeros(blocks, LAYERS, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
        for plane, values in enumerate((self.k, self.v)):
            padded = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, blocks * BLOCK - tokens))
            pool[:, :, plane] = padded.view(LAYERS, blocks, BLOCK, HEADS, DIM).transpose(0, 1)
        layout = PageLayout(SPEC.groups[0], BLOCK, LAYERS, HEADS)
        pages = PageAddresses.from_pool(layout, pool, torch.arange(blocks, dtype=torch.int32))
        row = QueryRow(range(tokens - len(query), tokens), [PageSpan(pages, 0, tokens)])
        sinks = scores.pop("sinks", None)
        result = partial(query, [row], layout, layer, **scores)
        return (result if sinks is None else merge([result], sinks=sinks)).out

    def check(self, queries: int = 1, **scores: Any) -> None:
        for layer in range(LAYERS):
            query = asked(queries, layer)
            assert torch.equal(self.sequence.attend(layer, query, **scores), self.expected(layer, query, **scores))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def asked(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HEADS * GROUP, DIM, generator=seeded(900 + seed))


def context(client: Client, tokens: int = TOKENS, step: int = 256, number: int = 0) -> Context:
    none = torch.zeros(LAYERS, 0, HEADS, DIM, dtype=torch.bfloat16)
    one = Context(client.sequence(), none, none, number)
    for first in range(0, tokens, step):
        one.grow(min(step, tokens - first), first)
    return one


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return small(start)


@pytest.fixture
def client(cluster: MemoryCluster) -> Iterator[Client]:
    """A client that closes the sequences of a test."""
    with cluster.client(SPEC) as client:
        yield client
    _opened.clear()


def small(start: Start, pages: int = PAGES) -> MemoryCluster:
    return start(shards=2, ram_bytes="16MiB", config={"client": {"resident_bytes": pages * PAGE}})


def test_a_context_of_eight_resident_sets_has_the_bits_of_one_tensor(client: Client) -> None:
    one = context(client)
    one.check()
    one.check(queries=70, scale=0.4, softcap=3.0, sinks=torch.arange(4.0))
    one.check(queries=3, window=5_000)
    one.check(window=300)
    one.grow(5, seed=1)
    one.check(queries=5)
    assert client.resident().pages_peak <= PAGES


def test_the_tokens_of_a_step_are_seen_while_the_context_is_streamed(client: Client) -> None:
    one = context(client)
    k, v = (torch.randn(LAYERS, 2, HEADS, DIM, generator=seeded(seed)).bfloat16() for seed in (1, 2))
    after = Context(one.sequence, torch.cat([one.k, k], 1), torch.cat([one.v, v], 1))
    for layer in range(LAYERS):
        one.sequence.append(layer, k[layer], v[layer])
        query = asked(2, layer)
        assert torch.equal(one.sequence.attend(layer, query), after.expected(layer, query))


def test_rows_that_share_a_streamed_context_have_the_bits_that_each_has_alone(client: Client) -> None:
    shared = context(client, 3_000)
    rows = [shared, shared.fork(), context(client, 2_500, number=1), shared.fork()]
    for at, row in enumerate(rows):
        row.grow(3 + at, seed=40 * at)
    batch = kvcluster.SequenceBatch([row.sequence for row in rows])
    tokens = [3, 1, 0, 2]
    query = asked(6)
    for layer in range(LAYERS):
        out = batch.attend(layer, query, tokens=tokens)
        for row, mine, its in zip(rows, out.split(tokens), query.split(tokens), strict=True):
            assert torch.equal(mine, row.expected(layer, its) if len(its) else its)


def test_rows_are_streamed_one_after_the_other_if_one_cut_of_all_finds_no_room(client: Client) -> None:
    rows = [context(client, 700 + 100 * at, number=at) for at in range(5)]
    batch = kvcluster.SequenceBatch([row.sequence for row in rows])
    query = asked(5)
    for layer in range(LAYERS):
        out = batch.attend(layer, query)
        for at, row in enumerate(rows):
            assert torch.equal(out[at : at + 1], row.expected(layer, query[at : at + 1]))


def test_threads_that_stream_take_turns_at_the_scratch_pages(client: Client) -> None:
    """There is room for the scratch pages of two calls, but not for those of three and what they append."""
    rows = [context(client, 2_000, number=at) for at in range(3)]
    failures: list[BaseException] = []

    def use(row: Context) -> None:
        try:
            for step in range(4):
                row.check(queries=2)
                row.grow(3, seed=7_000 + step)
        except BaseException as failed:
            failures.append(failed)

    threads = [threading.Thread(target=use, args=[row]) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for row in rows:
        row.check()


def test_a_call_gives_its_scratch_pages_back(client: Client) -> None:
    one = context(client, 5_000)
    one.check()
    used = client.resident().pages_used
    for _ in range(3):
        one.check()
    assert client.resident().pages_used == used
    one.sequence.close()
    assert client.resident().pages_used == 0


def test_a_layer_is_moved_alone_and_the_coordinator_is_not_asked_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = context(client, 5_000)
    one.check()
    moved: list[tuple[object, int, int]] = []
    read, prepare = MemoryTransport.read, Mock(side_effect=AssertionError("asked again"))

    def noted(self: MemoryTransport, request: ReadRequest, *others: Any) -> Any:
        moved.extend((want.key.hash, want.layer_start, want.layer_stop) for want in request.wants)
        return read(self, request, *others)

    monkeypatch.setattr(MemoryTransport, "read", noted)
    monkeypatch.setattr(Tickets, "prepare", prepare)
    one.check()
    assert {stop - start for _, start, stop in moved} == {1}
    absent = (one.sequence.length - one.sequence.statistics().resident) // BLOCK
    assert absent > 2 * PAGES
    assert len(set(moved)) == LAYERS * absent


def test_a_lost_block_is_named_and_leaves_nothing_behind(client: Client, cluster: MemoryCluster) -> None:
    one = context(client, 5_000)
    one.check()
    used = client.resident().pages_used
    client.clear()
    cluster.wait_until(lambda: not any([*host.core.pool.ready()] for host in cluster.shards.values()))
    with pytest.raises(LostTokens) as lost:
        one.sequence.attend(0, asked(1))
    assert lost.value.position % BLOCK == 0
    assert client.resident().pages_used == used
    one.sequence.truncate(lost.value.position)
    one.sequence.reset()
    one.k, one.v = one.k[:, :0], one.v[:, :0]
    for seed in range(10):
        one.grow(200, seed)
    one.check()


def test_a_block_that_the_coordinator_has_not_heard_of_yet_is_not_lost(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is stored gives up its page at once; its shard reports it a moment later."""
    reported: list[bool] = []
    flush, prepare = ShardConnections.flush, Tickets.prepare

    def flushed(self: ShardConnections, deadline: Deadline) -> bool:
        reported.append(flush(self, deadline))
        return reported[-1]

    def prepared(self: Tickets, *given: Any, **options: Any) -> Ticket:
        ticket = prepare(self, *given, **options)
        if not reported:
            ticket.release()
            ticket.body = replace(ticket.body, hashes=(), runs=())
        return ticket

    monkeypatch.setattr(ShardConnections, "flush", flushed)
    monkeypatch.setattr(Tickets, "prepare", prepared)
    with cluster.client(SPEC) as client:
        one = context(client, 3_000)
        one.check()
    assert reported


def test_a_resident_set_below_one_cut_is_refused_by_name(start: Start) -> None:
    with small(start, pages=16).client(SPEC) as client:
        one = context(client, 2_000, step=64)
        with pytest.raises(ResidentSetFull, match="resident_bytes"):
            one.sequence.attend(0, asked(1))
