"""The workers' side of the connector: bytes from one engine's blocks arrive in another's, or a failure is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcluster.core.ids import ShardId
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.engines.vllm.step_metadata import LoadOrder, StoreOrder
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline, Unavailable
from tests.client.build import BOUND_S, Hold, Steps, prompt
from tests.client.conftest import Start
from tests.vllm.build import BLOCK, WINDOW
from tests.vllm.moving import Mover, same

SHARD = ShardId("shard-0")
TOKENS = prompt(6, block_tokens=BLOCK)
MINE = (5, 9, 2, 7, 3, 11)
YOURS = (40, 31, 22, 35, 50, 44)
LOST = Miss(MissReason.SHARD_LOST, "gone")

Make = Callable[..., Mover]


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=1, ram_bytes="8MiB")


@pytest.fixture
def make(cluster: MemoryCluster) -> Iterator[Make]:
    """Makes ranks over the cluster, which end with the test."""
    with ExitStack() as stack:

        def one(model: Path, **options: Any) -> Mover:
            mover = Mover(cluster, model, **options)
            stack.callback(mover.close)
            return mover

        yield one


def in_window(blocks: tuple[int, ...], boundary: int, first: int = 0) -> tuple[int, ...]:
    """Those that a group with a window needs before that boundary, of blocks that begin with number `first`."""
    needed = -(-(WINDOW - 1) // BLOCK)
    return tuple(block for at, block in enumerate(blocks, first) if at >= boundary - needed)


# ------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_load_puts_anothers_blocks_where_it_was_told_and_nothing_else(
    make: Make, llama: Path, layerwise: bool
) -> None:
    one, other = make(llama, seed=1), make(llama)
    report = one.stored(TOKENS, (MINE,))
    assert (report.stored, report.dropped, report.store_misses) == (6, 0, {})
    outcome = other.loaded(other.order(TOKENS, (YOURS,), layerwise=layerwise))
    load = outcome.report.loads["b"]
    nbytes = 6 * one.spec.page_bytes(0, one.layout.parts[0])
    assert (load.blocks, load.nbytes, load.loss, load.miss) == (6, nbytes, Loss.EXACT, None)
    assert (outcome.received, outcome.failed, outcome.invalid) == (set() if layerwise else {"b"}, set(), set())
    assert same(other.blocks(YOURS), one.blocks(MINE))
    assert other.unwritten([block for block in range(160) if block not in YOURS])


def test_a_load_begins_behind_what_the_engine_has(make: Make, llama: Path) -> None:
    one, other = make(llama, seed=1), make(llama)
    one.stored(TOKENS, (MINE,))
    outcome = other.do(loads=(other.order(TOKENS, (YOURS[2:],), first=2, layerwise=True),))
    assert outcome.report.loads["b"].blocks == 6
    assert same(other.blocks(YOURS[2:]), one.blocks(MINE[2:]))
    assert other.unwritten(YOURS[:2])


def test_a_store_begins_behind_what_others_have(make: Make, llama: Path) -> None:
    one, other, third = make(llama, seed=1), make(llama, seed=2), make(llama)
    one.stored(TOKENS[: 2 * BLOCK], (MINE[:2],))
    assert other.stored(TOKENS, (YOURS[2:],), first=2).stored == 4
    third.do(loads=(third.order(TOKENS, (MINE,), layerwise=True),))
    assert same(third.blocks(MINE[:2]), one.blocks(MINE[:2]))
    assert same(third.blocks(MINE[2:]), other.blocks(YOURS[2:]))


def test_groups_with_a_window_are_loaded_where_the_window_reaches(make: Make, gemma: Path) -> None:
    one, other = make(gemma, seed=1), make(gemma)
    sources = tuple(tuple(block + 20 * group for block in MINE) for group in range(3))
    into = tuple(tuple(block + 40 * group for block in YOURS) for group in range(3))
    one.stored(TOKENS, sources)
    needed = in_window(tuple(range(6)), 6)
    assert needed == (2, 3, 4, 5)
    # What a window has left behind stands as the null block in the engine's table, however often.
    into = tuple(tuple(0 if at < 2 and group < 2 else b for at, b in enumerate(ids)) for group, ids in enumerate(into))
    outcome = other.loaded(other.order(TOKENS, into))
    assert outcome.failed == outcome.invalid == set()
    for group in (0, 1):
        assert same(other.blocks(into[group][2:], group), one.blocks(sources[group][2:], group))
    assert same(other.blocks(into[2], 2), one.blocks(sources[2], 2))
    assert other.unwritten([0])


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_block_is_a_hit_when_every_rank_has_stored_its_part(make: Make, llama: Path, layerwise: bool) -> None:
    stored = [make(llama, seed=rank, rank=rank, ranks=2) for rank in (0, 1)]
    loading = [make(llama, rank=rank, ranks=2) for rank in (0, 1)]
    hashes = loading[0].hashes(TOKENS)
    assert stored[0].stored(TOKENS, (MINE,)).stored == 6
    with loading[0].client.prepare_load(hashes, whole=True) as ticket:
        assert ticket.blocks == 0
    assert stored[1].stored(TOKENS, (MINE,)).stored == 6
    order = loading[0].order(TOKENS, (YOURS,), layerwise=layerwise)
    for rank in (0, 1):
        assert stored[rank].layout.parts[0].heads == 1
        assert not loading[rank].loaded(order).invalid
        assert same(loading[rank].blocks(YOURS), stored[rank].blocks(MINE))


# ---------------------------------------------------------------------------------------------------- what failed


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("first", [0, 2])
def test_a_load_that_comes_in_part_names_exactly_the_blocks_that_did_not(
    cluster: MemoryCluster, make: Make, llama: Path, layerwise: bool, first: int
) -> None:
    one, other = make(llama, seed=1), make(llama)
    one.stored(TOKENS, (MINE,))
    order = other.order(TOKENS, (YOURS[first:],), first=first, layerwise=layerwise)
    cluster.corrupt(SHARD, block=one.hashes(TOKENS)[4])
    outcome = other.loaded(order)
    load = outcome.report.loads["b"]
    assert load.blocks == 4
    assert load.miss is not None and load.miss.reason is MissReason.CORRUPT
    assert outcome.invalid == set(YOURS[4:])
    assert outcome.failed == set()
    assert same(other.blocks(YOURS[first:4]), one.blocks(MINE[first:4]))


def test_with_several_groups_a_load_that_came_in_part_is_a_failed_request(
    cluster: MemoryCluster, make: Make, gemma: Path
) -> None:
    one, other = make(gemma, seed=1), make(gemma)
    one.stored(TOKENS, (MINE, MINE, MINE))
    order = other.order(TOKENS, (YOURS, YOURS, YOURS))
    cluster.corrupt(SHARD, block=one.hashes(TOKENS)[5])
    outcome = other.loaded(order)
    assert (outcome.received, outcome.failed, outcome.invalid) == ({"b"}, {"b"}, set())
    assert outcome.report.loads["b"].miss is not None


def test_a_load_of_which_nothing_comes_names_all_its_blocks(make: Make, llama: Path) -> None:
    def refuse() -> None:
        raise Unavailable(LOST)

    one, other = make(llama, seed=1), make(llama, steps=Steps(read=refuse))
    one.stored(TOKENS, (MINE,))
    outcome = other.do(loads=(other.order(TOKENS, (YOURS,), layerwise=True),))
    assert outcome.invalid == set(YOURS)
    assert outcome.report.loads["b"].blocks == 0
    assert outcome.report.loads["b"].miss == LOST


@pytest.mark.parametrize("ticket", [b"", b"not a ticket"])
def test_a_ticket_that_is_none_is_a_failed_load(make: Make, llama: Path, ticket: bytes) -> None:
    rank = make(llama)
    outcome = rank.do(loads=(LoadOrder("b", "", ticket, 0, (YOURS,), True, 1_000),))
    assert outcome.invalid == set(YOURS)
    assert outcome.report.loads["b"].miss is not None


def test_a_rank_without_a_cluster_fails_its_loads_and_stores_and_says_why(make: Make, llama: Path) -> None:
    one, rank = make(llama, seed=1), make(llama, joined=False)
    rank.member.why = "the weights are being read"
    one.stored(TOKENS, (MINE,))
    store = StoreOrder(7, "c", "", 0, (MINE,), Loss.EXACT)
    chains = (("c", 0, tuple(one.hashes(TOKENS))),)
    outcome = rank.do(loads=(one.order(TOKENS, (YOURS,), layerwise=True),), stores=(store,), chains=chains)
    load = outcome.report.loads["b"]
    assert load.miss is not None and "the weights are being read" in load.miss.detail
    assert outcome.invalid == set(YOURS)
    assert outcome.report.drained == {7: 1}
    assert list(outcome.report.store_misses) == ["a worker has no cluster"]


def test_orders_under_other_weights_move_nothing(make: Make, llama: Path) -> None:
    one, rank = make(llama, seed=1), make(llama)
    one.stored(TOKENS, (MINE,))
    order = rank.order(TOKENS, (YOURS,), layerwise=True)
    rank.spec = type(rank.spec)(**{**_fields(rank.spec), "weights": "private:1"})
    outcome = rank.do(loads=(order,))
    assert rank.member.used == ["private:1"]
    assert outcome.invalid == set(YOURS)
    assert rank.unwritten(YOURS)


def _fields(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


# -------------------------------------------------------------------------------------------- while it goes on


def test_a_layer_is_waited_for_until_it_is_there(make: Make, llama: Path) -> None:
    hold = Hold()
    one, rank = make(llama, seed=1), make(llama, steps=Steps(receive=hold))
    one.stored(TOKENS[: 2 * BLOCK], (MINE[:2],))
    step = rank.step(loads=(rank.order(TOKENS[: 2 * BLOCK], (YOURS[:2],), layerwise=True),))
    rank.side.before(step)
    rank.side.load(step)
    hold.wait_reached()
    waiting, seen = threading.Event(), []

    def attend() -> None:
        waiting.set()
        rank.side.wait_layer(rank.layout.layers[0][1])
        seen.append(rank.blocks(YOURS[:2])[1])

    thread = threading.Thread(target=attend)
    thread.start()
    assert waiting.wait(BOUND_S)
    hold.let_go()
    thread.join(BOUND_S)
    assert same(seen, one.blocks(MINE[:2])[1:])
    assert not rank.end(step).invalid


def test_a_load_beside_the_passes_keeps_no_layer_waiting(make: Make, llama: Path) -> None:
    hold = Hold()
    one, rank = make(llama, seed=1), make(llama, steps=Steps(receive=hold))
    one.stored(TOKENS, (MINE,))
    outcome = rank.do(loads=(rank.order(TOKENS, (YOURS,)),))
    rank.side.wait_layer(rank.layout.layers[0][0])
    assert not outcome.received and not outcome.report.loads
    hold.let_go()
    outcome = rank.until_idle()
    assert outcome.received == {"b"}
    assert outcome.report.loads["b"].blocks == 6


def test_a_load_whose_request_is_gone_ends_and_is_reported(make: Make, llama: Path) -> None:
    hold = Hold()
    one, rank = make(llama, seed=1), make(llama, steps=Steps(receive=hold))
    one.stored(TOKENS, (MINE,))
    rank.do(loads=(rank.order(TOKENS, (YOURS,)),))
    hold.wait_reached()
    outcome = rank.do(gone=("b",))
    assert outcome.received == {"b"}, "its blocks are written no more, though its shard has yet to notice"
    assert outcome.report.loads["b"].blocks == 0
    hold.let_go()
    rank.until_idle()
    assert rank.unwritten(YOURS)


def test_a_report_is_told_once(make: Make, llama: Path) -> None:
    one, rank = make(llama, seed=1), make(llama)
    one.stored(TOKENS, (MINE,))
    outcome = rank.do(loads=(rank.order(TOKENS, (YOURS,), layerwise=True),))
    assert outcome.report.loads and outcome.report.step == 1
    again = rank.do()
    assert not again.report
    assert again.report.step == 2
    assert again.received == again.invalid == again.sent == set()


# ---------------------------------------------------------------------------------------------------- its limits


def test_a_layout_that_is_not_known_is_refused_by_name(make: Make, llama: Path) -> None:
    rank = make(llama)
    caches = {name: cache[:, :, :2] for name, cache in rank.caches.items()}
    with pytest.raises(CallerError, match=r"does not know the layout of model\.layers\.0"):
        rank.side.register(caches)


def test_nothing_is_left_of_a_rank_that_is_closed_in_the_midst(make: Make, llama: Path) -> None:
    sending, receiving = Hold(), Hold()
    one, rank = make(llama, seed=1), make(llama, seed=2, steps=Steps(receive=receiving, send=sending))
    one.stored(TOKENS, (MINE,))
    others = prompt(3, seed=9, block_tokens=BLOCK)
    rank.store(others, (MINE[:3],), loads=(rank.order(TOKENS, (YOURS,)),))
    sending.wait_reached()
    receiving.wait_reached()
    closing = threading.Thread(target=rank.close)
    closing.start()
    sending.let_go()
    receiving.let_go()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert rank.side.wait_idle(Deadline.after_ms(0))
    # That no lease, ticket or half-written page is left says the bill of the cluster.
