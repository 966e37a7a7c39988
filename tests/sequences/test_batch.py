"""A batch does for all of its rows what each would do alone, or, if it raises, nothing for any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.errors import CallerError, ResidentSetFull
from kvcluster.testing import MemoryCluster
from tests.client.conftest import Start
from tests.sequences.small_spec import LAYERS
from tests.sequences.test_sequence import PAGE, SPEC, Grown, grown, made, small

LENGTHS = (3, 0, 9, 6)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=2, ram_bytes="4MiB", config={"client": {"resident_bytes": 1_024 * PAGE}})


def rows_of(client: kvcluster.Client) -> list[Grown]:
    return [grown(client, list(range(100 * at, 100 * at + length))) for at, length in enumerate(LENGTHS)]


def batch_of(rows: list[Grown]) -> kvcluster.SequenceBatch:
    return kvcluster.SequenceBatch([row.sequence for row in rows])


def test_each_row_is_read_updated_and_cut_as_it_would_be_alone(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        rows = rows_of(client)
        with batch_of(rows) as batch:
            assert batch.lengths == [*LENGTHS]
            for layer in range(LAYERS):
                found = batch.read(layer, [1, 0, 2, 5], [2, 0, 7, 1])
                for row, (k, v), first, count in zip(rows, found, (1, 0, 2, 5), (2, 0, 7, 1), strict=True):
                    assert torch.equal(k, row.k[layer, first : first + count])
                    assert torch.equal(v, row.v[layer, first : first + count])
            k, v, tokens = made(11, 60), made(11, 61), [5, 4, 2, 0]
            for layer in range(LAYERS):
                kept = batch.update(layer, k[layer], v[layer], tokens=tokens)
                for row, planes, new in zip(rows, kept, k[layer].split(tokens), strict=True):
                    assert torch.equal(planes[0], torch.cat([row.k[layer], new]))
            batch.advance([[7] * count for count in tokens])
            for row, new_k, new_v in zip(rows, k.split(tokens, 1), v.split(tokens, 1), strict=True):
                row.k, row.v = torch.cat([row.k, new_k], 1), torch.cat([row.v, new_v], 1)
            assert batch.flush()
            batch.load()
            batch.truncate([8, 2, 5, 6])
            for row, length in zip(rows, (8, 2, 5, 6), strict=True):
                row.k, row.v = row.k[:, :length], row.v[:, :length]
                assert row.sequence.length == length
                row.check()
            batch.truncate(1)
            assert batch.lengths == [1, 1, 1, 1]
            batch.reset()
            assert all(row.sequence.is_empty for row in rows)
        assert all(row.sequence.closed for row in rows) and client.resident().pages_used == 0


def test_rows_are_forked_and_overwritten_together(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        rows = rows_of(client)
        rows.pop(1).sequence.close()
        batch = batch_of(rows)
        with batch.fork() as forks:
            k, v = made(5, 60), made(5, 61)
            for layer in range(LAYERS):
                forks.write(layer, [0, 4, 2], k[layer], v[layer], tokens=[1, 3, 1])
            for at, (row, first, count) in enumerate(zip(rows, (0, 4, 2), (1, 3, 1), strict=True)):
                new = row.k.clone(), row.v.clone()
                source = slice(sum((1, 3, 1)[:at]), sum((1, 3, 1)[: at + 1]))
                new[0][:, first : first + count], new[1][:, first : first + count] = k[:, source], v[:, source]
                Grown(forks.sequences[at], *new).check()
                row.check()
            assert forks.lengths == batch.lengths
        batch.close()


WRONG: dict[str, Callable[[kvcluster.SequenceBatch], Any]] = {
    "read": lambda batch: batch.read(0, 0, [3, 0, 10, 6]),
    "write": lambda batch: batch.write(0, [0, 0, 9, 0], made(3, 1)[0], made(3, 1)[0], tokens=[1, 0, 1, 1]),
    "truncate": lambda batch: batch.truncate([1, 0, 2, 7]),
    "load": lambda batch: batch.load(0, [3, 1, 9, 6]),
    "reserve": lambda batch: batch.reserve([1, 1, 1]),
    "a number": lambda batch: batch.truncate([1, 0, 2, -1]),
    "mark_written": lambda batch: batch.mark_written([0, 1, 0, 0]),
    "update": lambda batch: batch.update(0, made(3, 1)[0], made(3, 1)[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_one_row_refuses_changes_none(cluster: MemoryCluster, name: str) -> None:
    with cluster.client(SPEC) as client:
        rows = rows_of(client)
        with batch_of(rows) as batch:
            with pytest.raises(CallerError):
                WRONG[name](batch)
            assert batch.lengths == [*LENGTHS]
            for row in rows:
                row.check()
                row.append([5], seed=3)
                row.check()


def test_no_row_is_forked_in_the_middle_of_a_step_of_another(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client, batch_of(rows_of(client)) as batch:
        batch.sequences[2].append(0, made(1, 1)[0], made(1, 1)[0])
        with pytest.raises(CallerError, match="middle"):
            batch.fork()
        assert client.resident().sequences == 4


@pytest.mark.parametrize("call", ["truncate", "write", "update", "reserve"])
def test_what_finds_no_room_for_one_row_changes_none(start: Start, call: str) -> None:
    """Two forks share two blocks in a set of five pages: there is room for the copies of one row, not for both."""
    with small(start, 5, deadline_ms=300).client(SPEC) as client:
        policy = kvcluster.WindowPolicy(tail_tokens=64)
        first = grown(client, list(range(7)), policy)
        rows = [first, *(Grown(first.sequence.fork(), first.k, first.v) for _ in range(2))]
        blocker = grown(client, [100], policy)
        with batch_of(rows) as batch:
            new = made(27, 5)[0]
            with pytest.raises(ResidentSetFull):
                if call == "truncate":
                    batch.truncate([3, 2, 1])
                elif call == "write":
                    batch.write(0, 0, new[:3], new[:3])
                elif call == "update":
                    batch.update(0, new[:9], new[:9])
                else:
                    batch.reserve(3)
            assert batch.lengths == [7, 7, 7]
            for row in rows:
                row.check()
            blocker.sequence.close()
            assert client.resident().pages_used == 2, "nothing was copied"
            batch.truncate([7, 7, 4])
            assert batch.lengths == [7, 7, 4]
