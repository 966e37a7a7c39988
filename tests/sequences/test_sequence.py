"""A sequence over a real cluster in one process: what it holds, what others find of it, what is left when it closes."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.errors import CallerError, LimitError, LostTokens, ResidentSetFull
from kvcluster.testing import MemoryCluster
from tests.client.conftest import Start
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK = 8, 4
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
AT_ONCE = kvcluster.WindowPolicy(tail_tokens=0, migration_tokens=BLOCK)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    """Two shards and a coordinator, and room for 1,024 pages in a client."""
    return start(shards=2, ram_bytes="4MiB", config={"client": {"resident_bytes": 1_024 * PAGE}})


def small(start: Start, pages: int, **client: int) -> MemoryCluster:
    """A cluster whose clients have that many resident pages."""
    return start(shards=2, ram_bytes="4MiB", config={"client": {"resident_bytes": max(1, pages * PAGE), **client}})


@dataclass
class Grown:
    """A sequence and the KV that was appended to it: `[layers, tokens, heads, dim]`."""

    sequence: kvcluster.Sequence
    k: Tensor
    v: Tensor

    def append(self, ids: list[int] | int, seed: int = 0) -> None:
        tokens = ids if isinstance(ids, int) else len(ids)
        k, v = (made(tokens, seed + n) for n in (1, 2))
        for layer in range(LAYERS):
            self.sequence.append(layer, k[layer], v[layer])
        self.sequence.advance(ids)
        self.k, self.v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)

    def check(self) -> None:
        for layer in range(LAYERS):
            k, v = self.sequence.read(layer, 0, self.sequence.length)
            assert torch.equal(k, self.k[layer]) and torch.equal(v, self.v[layer])


def made(tokens: int, seed: int) -> Tensor:
    return torch.randn(LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()


def grown(client: kvcluster.Client, ids: list[int], policy: kvcluster.WindowPolicy = AT_ONCE, step: int = 3) -> Grown:
    """A sequence of these tokens, appended a few at a time."""
    new = Grown(client.sequence(policy=policy), made(0, 0), made(0, 0))
    for first in range(0, len(ids), step):
        new.append(ids[first : first + step], seed=first)
    return new


@dataclass
class Exported:
    """An array that has DLPack alone."""

    inner: Tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.inner.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


def bits(values: Tensor) -> np.ndarray:
    """The bits of bfloat16, which numpy lacks, over the same memory."""
    return values.view(torch.uint16).numpy()


@pytest.mark.parametrize("array", [bits, Exported])
def test_a_sequence_takes_arrays_of_other_libraries(cluster: MemoryCluster, array: Callable[[Tensor], Any]) -> None:
    values, other, q = made(9, 1), made(9, 2), torch.randn(3, 2 * HEADS, DIM)
    with cluster.client(SPEC) as client, client.sequence() as of_tensors, client.sequence() as of_arrays:
        for layer in range(LAYERS):
            of_tensors.append(layer, values[layer], other[layer])
            of_arrays.append(layer, array(values[layer]), array(other[layer]))
        for sequence in (of_tensors, of_arrays):
            sequence.advance(list(range(9)))
        for layer in range(LAYERS):
            of_tensors.write(layer, 2, other[layer, :1], values[layer, :1])
            of_arrays.write(layer, 2, array(other[layer, :1]), array(values[layer, :1]))
        assert torch.equal(torch.cat(of_arrays.read(0, 0, 9)), torch.cat(of_tensors.read(0, 0, 9)))
        query = Exported(q) if array is Exported else q.numpy()
        assert torch.equal(of_arrays.attend(0, query), of_tensors.attend(0, q))
        with pytest.raises(CallerError, match=r"is an array of|got torch"):
            of_arrays.append(0, np.zeros((1, HEADS, DIM), np.complex64), np.zeros((1, HEADS, DIM)))


@pytest.mark.parametrize("tokens", [1, 3])
def test_values_are_copied_and_never_their_graph(cluster: MemoryCluster, tokens: int) -> None:
    weight = torch.ones(DIM, requires_grad=True)
    q = torch.randn(1, 2 * HEADS, DIM, requires_grad=True)
    with cluster.client(SPEC) as client, client.sequence() as one, client.sequence() as two:
        rows = kvcluster.SequenceBatch([one, two])
        for layer in range(LAYERS):
            values = made(2 * tokens, layer)[0] * weight.bfloat16()
            rows.append(layer, values, values.clone())
            assert not one.attend(layer, q).requires_grad and not rows.attend(layer, q.repeat(2, 1, 1)).requires_grad
        rows.advance([tokens, tokens])
        one.write(0, 0, made(1, 9)[0] * weight.bfloat16(), torch.nn.Parameter(made(1, 8)[0]))
        k, v = one.update(0, made(1, 5)[0] * weight.bfloat16(), made(1, 6)[0])
        one.resident_pages[:1, 0] *= weight.bfloat16()
        for tensor in (k, v, *one.read(0, 0, 1), *two.read(1, 0, tokens), one.resident_pages, one.attend(0, q)):
            assert not tensor.requires_grad and tensor.grad_fn is None
        assert torch.equal(torch.stack(two.read(1, 0, tokens)), torch.stack([made(2 * tokens, 1)[0, tokens:]] * 2))


def test_values_that_lie_in_the_resident_set_are_read_before_they_are_overwritten(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, client.sequence() as one:
        k, v = made(BLOCK, 1), made(BLOCK, 2)
        for layer in range(LAYERS):
            one.append(layer, k[layer], v[layer])
        one.advance(BLOCK)
        keys, values = one.resident_pages[int(one.block_table[0]), 0]
        one.write(0, 0, values, keys)
        assert torch.equal(torch.stack(one.read(0, 0, BLOCK)), torch.stack([v[0], k[0]]))
        one.write(0, 1, keys[:-1], values[:-1])
        for read, was in zip(one.read(0, 0, BLOCK), (v[0], k[0]), strict=True):
            assert torch.equal(read, torch.cat([was[:1], was[:-1]]))


def test_pages_reserved_before_a_fork_are_written_by_one_sequence(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other:
        parent = grown(client, list(range(6)))
        parent.sequence.reserve(2 * BLOCK)
        child = Grown(parent.sequence.fork(), parent.k, parent.v)
        parent.append([20, 21, 22, 23, 24, 25], seed=20)
        child.append([30, 31, 32, 33, 34, 35], seed=30)
        for one, ids in ((parent, range(20, 26)), (child, range(30, 36))):
            one.check()
            assert one.sequence.flush()
            with other.sequence([*range(6), *ids]) as found:
                assert found.length == 12
                Grown(found, one.k, one.v).check()


@pytest.mark.parametrize("counts", [(0, 8), (8, 0), (3, 4)])
@pytest.mark.parametrize("batch", [False, True])
def test_every_layer_of_a_step_appends_as_many_tokens(
    cluster: MemoryCluster, counts: tuple[int, int], batch: bool
) -> None:
    with cluster.client(SPEC) as client, client.sequence() as one, client.sequence() as two:
        rows = kvcluster.SequenceBatch([one, two]) if batch else one
        first, second = (made(count * (1 + batch), 1)[0] for count in counts)
        rows.append(0, first, first)
        with pytest.raises(CallerError, match=f"other layers of this step {counts[0]}"):
            rows.append(1, second, second)
        for count in counts:
            with pytest.raises(CallerError, match="not in layer 1"):
                rows.advance([[5] * count] * 2 if batch else [5] * count)
        assert one.length == 0
        rows.append(1, first, first)
        rows.advance([[5] * counts[0]] * 2 if batch else [5] * counts[0])
        assert one.length == counts[0]


def blocks(cluster: MemoryCluster) -> int:
    return cluster.coordinator_core().state.namespaces.blocks


def claimed(cluster: MemoryCluster) -> int:
    return cluster.coordinator_core().state.tables.claimed_blocks


def test_a_sequence_reads_as_one_tensor(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(30)))
        one.check()
        assert (one.sequence.length, one.sequence.position, one.sequence.is_empty) == (30, 30, False)


def test_the_next_turn_begins_with_what_another_worker_sealed(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other:
        one = grown(client, list(range(30)))
        assert one.sequence.flush()
        again = other.sequence(list(range(30)))
        assert again.length == 28
        for layer in range(LAYERS):
            k, v = again.read(layer, 0, 28)
            assert torch.equal(k, one.k[layer, :28]) and torch.equal(v, one.v[layer, :28])


def test_update_returns_all_of_the_layer(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(6)))
        k, v = made(2, 8), made(2, 9)
        for layer in range(LAYERS):
            all_k, all_v = one.sequence.update(layer, k[layer], v[layer])
            assert torch.equal(all_k, torch.cat([one.k[layer], k[layer]]))
            assert torch.equal(all_v, torch.cat([one.v[layer], v[layer]]))
        one.sequence.advance([6, 7])
        assert one.sequence.length == 8


def test_forks_diverge_and_close_alone(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(10)))
        forks = [Grown(one.sequence.fork(), one.k, one.v) for _ in range(8)]
        for number, fork in enumerate(forks):
            fork.append([100 + number] * 5, seed=number)
        one.append([10], seed=77)
        one.sequence.close()
        for fork in forks:
            fork.check()
            fork.sequence.close()
        cluster.wait_until(lambda: client.resident().pages_used == 0)


def test_drafts_are_rolled_back_without_a_call(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(12)), kvcluster.WindowPolicy(tail_tokens=8, migration_tokens=BLOCK))
        assert one.sequence.flush()
        cluster.stop_coordinator()
        one.append([50, 51, 52], seed=5)
        one.sequence.truncate(13)
        one.k, one.v = one.k[:, :13], one.v[:, :13]
        one.append([60], seed=6)
        one.check()


def test_overwritten_tokens_are_read_back_and_never_found_by_others(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other:
        one = grown(client, list(range(16)))
        assert one.sequence.flush()
        k, v = made(1, 40), made(1, 41)
        for layer in range(LAYERS):
            one.sequence.write(layer, 5, k[layer], v[layer])
            one.k[layer, 5:6], one.v[layer, 5:6] = k[layer], v[layer]
        one.check()
        assert one.sequence.flush()
        again = other.sequence(list(range(16)))
        assert not torch.equal(again.read(0, 5)[0], k[0])
        one.check()


def test_tokens_advanced_by_count_are_stored_for_their_sequence_alone(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(8)))
        one.append(8, seed=3)
        assert one.sequence.flush() and client.lookup(list(range(16))).tokens == 8
        one.check()


def test_a_context_larger_than_the_resident_set_comes_back_from_the_cluster(start: Start) -> None:
    with small(start, 6).client(SPEC) as client:
        one = Grown(client.sequence(policy=AT_ONCE), made(0, 0), made(0, 0))
        for first in range(0, 80, 4):
            one.append(list(range(first, first + 4)) if first < 40 else 4, seed=first)
        for layer in range(LAYERS):
            for position in range(80):
                k, v = one.sequence.read(layer, position)
                assert torch.equal(k[0], one.k[layer, position]) and torch.equal(v[0], one.v[layer, position])


def test_a_full_resident_set_without_a_cluster_is_refused_by_name(start: Start) -> None:
    cluster = small(start, 2, deadline_ms=300)
    with cluster.client(SPEC) as client:
        one = grown(client, [])
        cluster.stop_coordinator()
        one.append([1] * 8)
        with pytest.raises(ResidentSetFull, match="resident_bytes"):
            one.sequence.append(0, made(1, 1)[0], made(1, 2)[0])
        one.check()


def test_what_the_cluster_has_lost_is_named_by_its_position(start: Start) -> None:
    with small(start, 4).client(SPEC) as client:
        one = grown(client, list(range(40)))
        assert one.sequence.flush()
        client.clear()
        with pytest.raises(LostTokens) as lost:
            one.sequence.read(0, 0, 4)
        assert lost.value.position == 0
        one.sequence.truncate(0)
        assert one.sequence.is_empty


def test_a_closed_sequence_leaves_its_public_blocks_and_none_of_its_own(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(8)))
        one.append(16, seed=3)
        assert one.sequence.flush() and client.flush()
        assert (blocks(cluster), client.status()["private_blocks"]) == (2, 4)
        one.sequence.close()
        cluster.wait_until(lambda: client.status()["private_blocks"] == 0)
        assert client.lookup(list(range(8))).tokens == 8


def test_tables_are_told_again_to_a_coordinator_that_restarts(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(8)))
        one.append(8, seed=3)
        assert one.sequence.flush()
        cluster.wait_until(lambda: claimed(cluster) == 4)
        cluster.stop_coordinator()
        cluster.start_coordinator()
        cluster.wait_until_up()
        one.append(4, seed=4)
        assert one.sequence.flush()
        cluster.wait_until(lambda: claimed(cluster) == 5)
        one.check()


def test_a_client_that_is_closed_closes_its_sequences(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    one = grown(client, list(range(8)))
    one.append(8, seed=3)
    fork = one.sequence.fork()
    assert one.sequence.flush()
    cluster.wait_until(lambda: claimed(cluster) == 4)
    client.close()
    assert claimed(cluster) == 0 and one.sequence.closed and fork.closed
    with pytest.raises(CallerError, match="closed"):
        one.sequence.read(0, 0)


MISUSE = {
    "a layer that is not there": lambda s, k: s.append(2, k, k),
    "one tensor for two planes": lambda s, k: s.append(0, k),
    "another dtype": lambda s, k: s.append(0, k.float(), k.float()),
    "heads missing": lambda s, k: s.append(0, k[:, :1], k[:, :1]),
    "K and V of different lengths": lambda s, k: s.append(0, k, torch.cat([k, k])),
    "what is no tensor": lambda s, k: s.append(0, [1], [1]),
    "a position beyond the end": lambda s, k: s.read(0, 6),
    "a negative position": lambda s, k: s.read(0, -1),
    "a layer of None": lambda s, k: s.read(None, 0),
    "a write beyond the end": lambda s, k: s.write(0, 6, k, k),
    "a truncation beyond the end": lambda s, k: s.truncate(7),
    "a truncation to a float": lambda s, k: s.truncate(1.5),
    "a token id that does not fit": lambda s, k: s.advance([-1]),
    "advance without append": lambda s, k: s.advance([1]),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_refused_and_changes_nothing(cluster: MemoryCluster, what: str) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(6)))
        with pytest.raises(CallerError):
            MISUSE[what](one.sequence, made(1, 1)[0])
        one.check()
        one.append([6])
        one.check()


def test_a_closed_sequence_is_refused_and_its_fork_is_not(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = grown(client, list(range(6)))
        fork = Grown(one.sequence.fork(), one.k, one.v)
        one.sequence.close()
        one.sequence.close()
        with pytest.raises(CallerError, match="closed"):
            one.sequence.fork()
        fork.check()


def test_more_than_max_tokens_is_refused(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        one = Grown(client.sequence(max_tokens=5), made(0, 0), made(0, 0))
        one.append([1, 2, 3, 4, 5])
        with pytest.raises(LimitError, match="max_tokens=5"):
            one.sequence.append(0, made(1, 1)[0], made(1, 2)[0])
        one.check()


def test_specs_that_no_tensor_holds_are_refused(cluster: MemoryCluster) -> None:
    opaque = kvcluster.KVSpec(
        model="m",
        weights="sha256:1",
        block_tokens=BLOCK,
        groups=(kvcluster.Group((0,), (kvcluster.Plane.opaque("state", 64),), kvcluster.PREFIX),),
    )
    with cluster.client(opaque) as client, pytest.raises(CallerError, match="opaque"):
        client.sequence()
    with cluster.client(SPEC) as client, pytest.raises(CallerError, match="extra_keys"):
        client.sequence(kvcluster.Prompt([1, 2, 3, 4], extra_keys={0: b"image"}))


def test_a_resident_set_without_a_page_is_refused(start: Start) -> None:
    with small(start, 0).client(SPEC) as client, pytest.raises(CallerError, match="resident_bytes"):
        client.sequence()


def test_an_update_returns_the_kept_tokens_and_their_positions(cluster: MemoryCluster) -> None:
    policy = kvcluster.WindowPolicy(tail_tokens=BLOCK, sink_tokens=BLOCK)
    with cluster.client(SPEC) as client, client.sequence(policy=policy, max_tokens=32, drop_oldest=True) as one:
        k, v, dropped = made(60, 1), made(60, 2), 0
        for at in range(0, 60, 3):
            for layer in range(LAYERS):
                found = one.update(layer, k[layer, at : at + 3], v[layer, at : at + 3])
                positions = one.positions
                kept = [*range(one.dropped.start), *range(one.dropped.stop, at + 3)]
                assert positions.tolist() == kept and len(kept) <= 32 and positions.dtype == torch.int64
                assert torch.equal(found[0], k[layer, kept]) and torch.equal(found[1], v[layer, kept])
            one.advance([at, at + 1, at + 2])
            dropped = max(dropped, len(one.dropped))
        assert dropped and one.length == 60


def test_an_update_that_raises_has_appended_nothing(start: Start) -> None:
    with small(start, 8, deadline_ms=2_000).client(SPEC) as client:
        one = grown(client, list(range(28)))
        assert one.sequence.flush()
        other = grown(client, [100])  # a page that stays, since its block is not full
        k = made(4, 5)[0]
        with pytest.raises(ResidentSetFull):
            one.sequence.update(0, k, k)
        assert one.sequence.length == 28 == len(one.sequence.positions)
        other.sequence.close()
        for layer in range(LAYERS):
            found = one.sequence.update(layer, k, k)
            assert torch.equal(found[0], torch.cat([one.k[layer], k]))
        one.sequence.advance(4)
        assert one.sequence.length == 32


def test_a_sequence_without_references_is_closed_with_a_warning(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        left, kept = grown(client, [1, 2, 3]).sequence, grown(client, [1, 2, 3]).sequence
        fork, batch = left.fork(), kvcluster.SequenceBatch([left])
        batch.attend(0, torch.randn(1, 2 * HEADS, DIM))
        assert client.resident().sequences == 3
        del left
        gc.collect()
        assert client.resident().sequences == 3, "the batch has it"
        with pytest.warns(ResourceWarning, match="a sequence of 3 tokens was not closed"):
            del batch
            gc.collect()
        assert client.resident().sequences == 2
        with pytest.warns(ResourceWarning):
            del fork
            gc.collect()
        assert (client.resident().sequences, client.resident().pages_used) == (1, 1)
        kept.close()
        del kept
        unclosed = grown(client, [4]).sequence
    del unclosed  # its client has closed it
    gc.collect()


def test_pages_of_sequences_without_references_are_freed_when_room_is_needed(start: Start) -> None:
    with small(start, 4, deadline_ms=1_000).client(SPEC) as client:
        for _ in range(5):
            one = grown(client, list(range(14)))
            one.check()
            with pytest.warns(ResourceWarning):
                del one
                gc.collect()


def test_a_sequence_that_is_collected_while_the_lock_is_held_is_closed_later(cluster: MemoryCluster) -> None:
    """The garbage collector runs anywhere, also in the middle of a change."""
    with cluster.client(SPEC) as client:
        one, kept = grown(client, [1, 2, 3]).sequence, grown(client, [1]).sequence
        runner = kept.resources.runner
        with runner.lock:
            with pytest.warns(ResourceWarning):
                del one
                gc.collect()
            assert len(runner.machine.open_states()) == 2, "nothing has changed beneath the caller"
        cluster.wait_until(lambda: len(runner.machine.open_states()) == 1)
        kept.close()


class OutsideWriter:
    """As an engine's kernel in a captured graph: it has addresses alone, and writes the pages that a table names."""

    def __init__(self, sequence: kvcluster.Sequence) -> None:
        self.pages, self.table = sequence.resident_pages, sequence.block_table

    def write(self, first: int, k: Tensor, v: Tensor, layers: range = range(LAYERS)) -> None:
        for at, layer in itertools.product(range(k.shape[1]), layers):
            page = self.pages[int(self.table[(first + at) // BLOCK]), layer]
            page[:, (first + at) % BLOCK] = torch.stack([k[layer, at], v[layer, at]])


def test_pages_that_another_writer_has_written_count_like_appended_ones(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, cluster.client(SPEC) as other:
        one = grown(client, list(range(6)))
        writer = OutsideWriter(one.sequence)
        for first in (6, 13, 20):
            k, v = made(7, first), made(7, first + 1)
            one.sequence.reserve(7)
            assert one.sequence.reserved >= 7
            writer.write(first, k, v)
            one.sequence.mark_written(7)
            one.k, one.v = torch.cat([one.k, k], 1), torch.cat([one.v, v], 1)
            assert torch.equal(one.sequence.read(1, first, 7)[0], k[1]), "seen before they count"
            assert one.sequence.length == first
            one.sequence.advance(list(range(first, first + 7)))
            one.check()
        one.append([27], seed=9)
        one.sequence.reserve(4)
        k, v = made(4, 50), made(4, 51)
        for layer in range(LAYERS):  # a writer that is not captured goes layer by layer
            writer.write(28, k, v, range(layer, layer + 1))
            one.sequence.mark_written(4, layer)
            assert torch.equal(one.sequence.read(layer, 28, 4)[1], v[layer])
        one.sequence.advance(list(range(28, 32)))
        one.k, one.v = torch.cat([one.k, k], 1), torch.cat([one.v, v], 1)
        assert one.sequence.flush()
        with other.sequence(list(range(32))) as found:
            assert found.length == 32
            Grown(found, one.k, one.v).check()
        one.sequence.close()


def test_rows_that_one_writer_has_written_count_together(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, client.sequence() as one, client.sequence() as two:
        rows = kvcluster.SequenceBatch([one, two])
        rows.reserve([3, 9])
        k, v = made(9, 1), made(9, 2)
        OutsideWriter(one).write(0, k[:, :3], v[:, :3])
        OutsideWriter(two).write(0, k, v)
        with pytest.raises(CallerError, match="reserved for"):
            rows.mark_written([3, 13])
        rows.mark_written([3, 9])
        rows.advance([3, [7] * 9])
        Grown(one, k[:, :3], v[:, :3]).check()
        Grown(two, k, v).check()


def test_only_reserved_pages_of_its_own_can_have_been_written(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, client.sequence(max_tokens=14) as one:
        with pytest.raises(CallerError, match="reserved for 0"):
            one.mark_written(1)
        one.reserve(7)
        assert one.reserved == 8
        with pytest.raises(CallerError, match="reserved for 8"):
            one.mark_written(9)
        with pytest.raises(CallerError, match="layer 2"):
            one.mark_written(1, 2)
        with pytest.raises(CallerError, match="expected a number"):
            one.mark_written(-1)
        writer, k, v = OutsideWriter(one), made(14, 1), made(14, 2)
        writer.write(0, k[:, :5], v[:, :5])
        one.mark_written(5, 0)
        with pytest.raises(CallerError, match="already"):
            one.mark_written(5)
        with pytest.raises(CallerError, match="other layers of this step 5"):
            one.mark_written(4, 1)
        with pytest.raises(CallerError, match="not in layer 1"):
            one.advance(5)
        one.mark_written(5, 1)
        one.advance(5)
        one.reserve(4)
        with one.fork() as fork:
            assert (one.reserved, fork.reserved) == (0, 0)
            writer.write(5, k[:, 5:9], v[:, 5:9])
            with pytest.raises(CallerError, match="again after a fork"):
                one.mark_written(4)
            one.reserve(9)  # with what was written
            assert one.reserved == 9, "max_tokens"
            writer.write(9, k[:, 9:], v[:, 9:])
            one.mark_written(9)
            one.advance(9)
            Grown(one, k, v).check()
            Grown(fork, k[:, :5], v[:, :5]).check()
            assert fork.reserved == 3


def test_private_blocks_that_a_fork_has_sealed_stay_for_the_others_when_it_closes(start: Start) -> None:
    cluster = small(start, 12)
    lazy = kvcluster.WindowPolicy(tail_tokens=0, migration_tokens=1_000)
    with cluster.client(SPEC) as client, client.sequence(policy=lazy) as plain:
        one = Grown(plain, made(0, 0), made(0, 0))
        one.append(2 * BLOCK)
        fork = plain.fork()
        assert fork.flush()
        cluster.wait_until(lambda: claimed(cluster) == 2)
        with client.sequence(policy=AT_ONCE) as other:
            Grown(other, made(0, 0), made(0, 0)).append(11 * BLOCK)
            assert plain.statistics().resident < 2 * BLOCK and other.flush()
            state = cluster.coordinator_core().state

            def knows_the_close_and_has_erased() -> bool:
                return len(state.tables) == 2 and state.namespaces.private_blocks == state.tables.claimed_blocks

            assert state.namespaces.private_blocks == 13
            fork.close()
            cluster.wait_until(knows_the_close_and_has_erased)
            one.check()
