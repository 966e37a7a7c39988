"""A sequence attends to its pages wherever they lie, with the bits of the same pages in one tensor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.attention import PageAddresses, PageLayout, PageSpan, QueryRow, merge, partial
from kvcluster.errors import CallerError, LimitError, LostTokens
from kvcluster.sequences.loads import SequenceLoads
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.zero_copy import BorrowedBlocks
from tests.client.conftest import Start
from tests.client.test_tiers import NUMBERS, loaded, numbers, tiers, went_down
from tests.client.test_tiers import TOKENS as PROMPT
from tests.client.test_zero_copy import Desk
from tests.sequences.small_spec import HEADS, LAYERS
from tests.sequences.test_sequence import BLOCK, DIM, PAGE, SPEC, Grown, grown, made, small

TOKENS = list(range(30))
GROUP = 2  # query heads of one head of K and V


def asked(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(900 + seed))


def expected(one: Grown, layer: int, query: Tensor, last: int | None = None, **scoring: object) -> Tensor:
    """Attention over K and V in one tensor of pages, for the last tokens up to `last`."""
    tokens = one.k.shape[1] if last is None else last
    blocks = -(-tokens // BLOCK)
    pool = torch.zeros(blocks, LAYERS, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16)
    for plane, values in enumerate((one.k, one.v)):
        padded = torch.zeros(LAYERS, blocks * BLOCK, HEADS, DIM, dtype=torch.bfloat16)
        padded[:, :tokens] = values[:, :tokens]
        pool[:, :, plane] = padded.view(LAYERS, blocks, BLOCK, HEADS, DIM).transpose(0, 1)
    layout = PageLayout(SPEC.groups[0], BLOCK, LAYERS, HEADS)
    pages = PageAddresses.from_pool(layout, pool, torch.arange(blocks, dtype=torch.int32))
    row = QueryRow(range(tokens - len(query), tokens), [PageSpan(pages, 0, tokens)])
    sinks = scoring.pop("sinks", None)
    made_ = partial(query, [row], layout, layer, **scoring)  # type: ignore[arg-type]
    return (made_ if sinks is None else merge([made_], sinks=sinks)).out  # type: ignore[arg-type]


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=2, ram_bytes="4MiB", config={"client": {"resident_bytes": 1_024 * PAGE}})


@pytest.fixture
def desk(start: Start) -> Iterator[Desk]:
    """Two shards whose pages clients of this host borrow."""
    with ExitStack() as stack:
        yield Desk(start(shards=2, ram_bytes="4MiB"), stack)


def check(one: Grown, *, queries: int = 1, **scoring: object) -> None:
    for layer in range(LAYERS):
        query = asked(queries, layer)
        assert torch.equal(one.sequence.attend(layer, query, **scoring), expected(one, layer, query, **scoring))  # type: ignore[arg-type]


def test_each_token_sees_all_up_to_itself(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, TOKENS)
        check(one)
        check(one, queries=7)
        check(one, queries=3, window=5, scale=0.5, softcap=3.0, sinks=torch.arange(4.0))
        assert one.sequence.attend(0, asked(1).bfloat16()).dtype == torch.bfloat16


def test_the_tokens_of_a_step_are_seen_before_they_count(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one, k, v = grown(client, TOKENS), made(2, 50), made(2, 51)
        after = Grown(one.sequence, torch.cat([one.k, k], 1), torch.cat([one.v, v], 1))
        for layer in range(LAYERS):
            one.sequence.append(layer, k[layer], v[layer])
            query = asked(2, layer)
            assert torch.equal(one.sequence.attend(layer, query), expected(after, layer, query))
        one.sequence.advance([7, 8])
        check(after, queries=2)


def test_another_worker_attends_to_pages_where_they_lie(desk: Desk) -> None:
    mine, theirs = desk.connect(SPEC), desk.connect(SPEC)
    one = grown(mine, TOKENS)
    assert one.sequence.flush()
    again = Grown(theirs.sequence(TOKENS), one.k[:, :28], one.v[:, :28])
    check(again, queries=4)
    assert theirs.resident().pages_used == 0, "borrowed, not copied"
    again.append([5, 6, 7], seed=60)
    check(again)
    assert theirs.resident().pages_used == 1
    again.check()
    assert theirs.resident().pages_used == 8, "what is read as a tensor is loaded"
    check(again)
    one.sequence.close()
    again.sequence.close()


def test_what_was_borrowed_is_given_back_when_no_sequence_has_it(desk: Desk) -> None:
    mine, theirs = desk.connect(SPEC), desk.connect(SPEC)
    one = grown(mine, TOKENS)
    assert one.sequence.flush()
    again = theirs.sequence(TOKENS)
    fork = again.fork()
    again.attend(0, asked(1))
    again.close()
    check(Grown(fork, one.k[:, :28], one.v[:, :28]))
    fork.close()
    desk.cluster.wait_until(lambda: not any(len(host.core.leases) for host in desk.cluster.shards.values()))
    one.sequence.close()


def test_pages_that_are_taken_away_are_borrowed_again(start: Start) -> None:
    with ExitStack() as stack:
        desk = Desk(start(ram_bytes="4MiB"), stack)
        one = grown(desk.connect(SPEC), TOKENS)
        assert one.sequence.flush()
        again = Grown(desk.connect(SPEC).sequence(TOKENS), one.k[:, :28], one.v[:, :28])
        check(again)
        desk.expire_leases()
        check(again)


@pytest.mark.parametrize("planner", [None, kvcluster.ShipAbsent()], ids=["here", "shipped"])
@pytest.mark.parametrize("change", ["truncate", "write"])
def test_what_was_borrowed_of_a_block_is_not_read_once_the_block_was_written_again(
    desk: Desk, planner: kvcluster.ShipAbsent | None, change: str
) -> None:
    with desk.connect(SPEC, resident_bytes=16 * PAGE) as client, pytest.MonkeyPatch.context() as patched:
        one, other = grown(client, TOKENS[:8]), grown(client, list(range(100, 164)))
        runner = one.sequence.resources.runner
        patched.setattr(runner, "_sweep", lambda: None)  # as if none came yet
        patched.setattr(runner.loads, "sweep", lambda: None)
        assert one.sequence.flush() and other.sequence.flush()
        other.check()
        assert one.sequence.statistics().resident == 0
        one.sequence.attend(0, asked(1), planner=planner)
        assert client.resident().borrowed_pages == 2
        if change == "truncate":
            one.sequence.truncate(2)
            one = Grown(one.sequence, one.k[:, :2], one.v[:, :2])
            one.append([50, 51, 52, 53, 54, 55], seed=70)
        else:
            k, v = made(8, 70), made(8, 71)
            for layer in range(LAYERS):
                one.sequence.write(layer, 0, k[layer], v[layer])
            one = Grown(one.sequence, k, v)
        assert one.sequence.flush()
        other.check()
        assert one.sequence.statistics().resident == 0
        for layer in range(LAYERS):
            query = asked(1, layer)
            assert torch.equal(one.sequence.attend(layer, query, planner=planner), expected(one, layer, query))
        one.check()


@pytest.mark.parametrize("pages", [4, 64], ids=["streamed", "in place"])
def test_what_another_thread_gives_back_meanwhile_was_borrowed_while_it_was_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """It finds a loan that is not valid any more, and returns it, just when this thread asks whether it was valid."""
    one, valid = grown(desk.connect(SPEC), TOKENS), SequenceLoads.valid
    assert one.sequence.flush()
    seen: list[BorrowedBlocks] = []

    def given_back(loads: SequenceLoads, loan: BorrowedBlocks) -> bool:
        if not seen:
            with loads._runner.lock:
                loads.absent.lost(loan)
            loads.sweep()
        seen.append(loan)
        return valid(loads, loan)

    monkeypatch.setattr(SequenceLoads, "valid", given_back)
    again = desk.connect(SPEC, resident_bytes=pages * PAGE).sequence(TOKENS)
    query = asked(1)
    assert torch.equal(again.attend(0, query), expected(Grown(again, one.k[:, :28], one.v[:, :28]), 0, query))
    assert seen
    again.close()
    one.sequence.close()


def test_pages_that_the_cluster_has_lost_are_named_by_their_position(start: Start) -> None:
    with ExitStack() as stack:
        desk = Desk(start(ram_bytes="4MiB"), stack)
        client = desk.connect(SPEC)
        with grown(client, TOKENS).sequence as stored:
            assert stored.flush()
        again = desk.connect(SPEC).sequence(TOKENS)
        client.clear()
        desk.expire_leases()
        with pytest.raises(LostTokens) as lost:
            again.attend(0, asked(1))
        assert lost.value.position == 0
        with pytest.raises(CallerError, match="the query is"):  # what does not fit is said first
            again.attend(0, asked(1)[:, :, 1:])
        with pytest.raises(CallerError, match="query heads"):
            again.attend(0, asked(1)[:, :0])
        with pytest.raises(CallerError, match="the sinks are"):
            again.attend(0, asked(1), sinks=torch.zeros(1))


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_encoded_pages_are_decoded_as_they_are_read(start: Start, codec: str) -> None:
    cluster = tiers(start, codec)
    stored = loaded(went_down(cluster, numbers()))  # as decoding gives it
    blocks, layers, _, block, heads, dim = stored.shape
    layout = PageLayout(NUMBERS.groups[0], block, layers, heads)
    pages = PageAddresses.from_pool(layout, stored, torch.arange(blocks, dtype=torch.int32))
    row = QueryRow([blocks * block - 1], [PageSpan(pages, 0, blocks * block)])
    query = torch.randn(1, heads, dim)
    with ExitStack() as stack:
        client = Desk(cluster, stack).connect(NUMBERS)
        sequence = client.sequence(PROMPT)
        assert sequence.length == blocks * block
        for layer in range(layers):
            assert torch.equal(sequence.attend(layer, query), partial(query, [row], layout, layer).out)
        assert client.resident().pages_used == 0


def test_pages_of_other_hosts_are_loaded_and_kept(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as mine, cluster.client(SPEC) as theirs:
        one = grown(mine, TOKENS)
        assert one.sequence.flush()
        again = Grown(theirs.sequence(TOKENS), one.k[:, :28], one.v[:, :28])
        check(again)
        assert theirs.resident().pages_used == 7
        cluster.stop_coordinator()
        check(again)


def test_a_prefix_that_finds_no_free_page_is_loaded_when_it_is_seen(start: Start) -> None:
    cluster = small(start, 7)
    with cluster.client(SPEC) as mine, cluster.client(SPEC) as theirs:
        one = grown(mine, TOKENS)
        assert one.sequence.flush()
        full = grown(theirs, [90, 91, 92, 93])
        assert full.sequence.flush()
        again = Grown(theirs.sequence(TOKENS), one.k[:, :28], one.v[:, :28])
        check(again)
        check(again, window=4)
        check(full)
        check(again, window=6)


def test_rows_of_a_batch_have_the_bits_that_each_has_alone(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, TOKENS)
        rows = [one, *(Grown(one.sequence.fork(), one.k, one.v) for _ in range(3)), grown(client, [8, 9])]
        rows[2].append([70, 71, 72], seed=70)
        rows.append(Grown(rows[2].sequence.fork(), rows[2].k, rows[2].v))
        batch = kvcluster.SequenceBatch([row.sequence for row in rows])
        for step in range(6):
            k, v = made(len(rows), 100 + step), made(len(rows), 200 + step)
            after = [
                Grown(row.sequence, torch.cat([row.k, k[:, at : at + 1]], 1), torch.cat([row.v, v[:, at : at + 1]], 1))
                for at, row in enumerate(rows)
            ]
            for layer in range(LAYERS):
                batch.append(layer, k[layer], v[layer])
                query = asked(len(rows), layer)
                out = batch.attend(layer, query)
                for at, row in enumerate(after):
                    assert torch.equal(out[at : at + 1], expected(row, layer, query[at : at + 1]))
            batch.advance([[step] if at % 2 else 1 for at in range(len(rows))])
            rows = after
        for row in rows:
            row.check()
        tokens = [3, 0, 1, 2, 0, 1]
        query = asked(7)
        for window in (None, 9):
            each = [
                expected(row, 0, part, window=window) if len(part) else part
                for part, row in zip(query.split(tokens), rows, strict=True)
            ]
            assert torch.equal(batch.attend(0, query, tokens=tokens, window=window), torch.cat(each))


def test_a_sequence_and_a_batch_that_has_it_both_see_what_is_appended(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(8)))
        batch = kvcluster.SequenceBatch([one.sequence])
        check(one)
        for step in range(6):
            one.append([step] * BLOCK, seed=step)
            query = asked(1)
            assert torch.equal(batch.attend(0, query), expected(one, 0, query))
            check(one)


def test_a_row_that_cannot_step_leaves_all_others_as_they_were(start: Start) -> None:
    with small(start, 9).client(SPEC) as client:
        one, two = grown(client, [1, 2, 3]), Grown(client.sequence(max_tokens=4), made(0, 0), made(0, 0))
        two.append([1, 2, 3, 4])
        batch = kvcluster.SequenceBatch([one.sequence, two.sequence])
        k = made(2, 1)
        with pytest.raises(LimitError, match="max_tokens=4"):
            batch.append(0, k[0], k[0])
        two.sequence.truncate(3)
        two.k, two.v = two.k[:, :3], two.v[:, :3]
        for layer in range(LAYERS):
            batch.append(layer, k[layer], k[layer])
        with pytest.raises(CallerError, match="2 tokens"):
            batch.advance([[4], [5, 6]])
        batch.advance([[4], [5]])
        for at, row in enumerate((one, two)):
            Grown(
                row.sequence, torch.cat([row.k, k[:, at : at + 1]], 1), torch.cat([row.v, k[:, at : at + 1]], 1)
            ).check()


WRONG = {
    "another layer": (lambda s, q: s.attend(2, q), "layer 2"),
    "a query of another dim": (lambda s, q: s.attend(0, q[..., :3]), "query"),
    "heads that make no groups": (lambda s, q: s.attend(0, q[:, :3]), "grouped"),
    "what is no tensor": (lambda s, q: s.attend(0, 5), "query"),
    "more tokens than there are": (lambda s, q: s.attend(0, torch.cat([q] * 40)), "append them"),
    "a window of nothing": (lambda s, q: s.attend(0, q, window=0), "window"),
    "sinks of other heads": (lambda s, q: s.attend(0, q, sinks=torch.zeros(3)), "sinks"),
    "values of a latent that is none": (lambda s, q: s.attend(0, q, latent_values=4), "latent"),
    "no sequences": (lambda s, q: kvcluster.SequenceBatch([]), "at least one"),
    "a sequence twice": (lambda s, q: kvcluster.SequenceBatch([s, s]), "twice"),
    "rows that do not add up": (lambda s, q: kvcluster.SequenceBatch([s]).attend(0, q, tokens=[2]), "add up"),
    "a row too many": (lambda s, q: kvcluster.SequenceBatch([s]).advance([[1], [2]]), "2 rows"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_by_name(cluster: MemoryCluster, what: str) -> None:
    call, named = WRONG[what]
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other, other.sequence() as theirs:
        one = grown(client, [1, 2, 3])
        with pytest.raises(CallerError, match=named):
            call(one.sequence, asked(1))
        with pytest.raises(CallerError, match="one client"):
            kvcluster.SequenceBatch([one.sequence, theirs])
        check(one)
        one.sequence.close()
        with pytest.raises(CallerError, match="closed"):
            one.sequence.attend(0, asked(1))


def test_threads_of_one_client_take_one_anothers_pages_and_no_bit_is_wrong(start: Start) -> None:
    """Each thread's sequence alone fits the resident set; together they have to give up pages all the time."""
    with small(start, 14).client(SPEC) as client:
        shared = grown(client, TOKENS[:20])
        assert shared.sequence.flush()
        failures: list[BaseException] = []

        def use(number: int) -> None:
            try:
                one = Grown(shared_fork[number], shared.k, shared.v)
                for step in range(25):
                    one.append([100 * number + step] * 3, seed=1_000 * number + step)
                    check(one)
                    if step % 5 == 4:
                        one.sequence.truncate(17)
                        one.k, one.v = one.k[:, :17], one.v[:, :17]
                        check(one, window=6)
                one.check()
                one.sequence.close()
            except BaseException as failed:
                failures.append(failed)

        shared_fork = [shared.sequence.fork() for _ in range(3)]
        threads = [threading.Thread(target=use, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        check(shared)


def test_no_query_is_attended_to_by_what_was_borrowed_before(desk: Desk) -> None:
    mine, theirs = desk.connect(SPEC), desk.connect(SPEC)
    one = grown(mine, TOKENS)
    assert one.sequence.flush()
    again = theirs.sequence(TOKENS)
    again.attend(0, asked(1))
    assert theirs.resident().borrowed_pages
    again.read(0, 0, again.length)
    again.resources.loads.sweep()
    assert not theirs.resident().borrowed_pages
    assert again.attend(0, asked(0)).shape == asked(0).shape
    again.close()
    one.sequence.close()
