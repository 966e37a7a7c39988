"""Memory that the CPU does not address reaches neither a memoryview nor an executor that works by the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from kvcluster.copies.batch import HOST, CopyBatch, CopyStatus, ForeignMemory, RunRecords
from kvcluster.copies.native_verified_copies import NativeCopies
from kvcluster.errors import CallerError
from kvcluster.transfers import bound_memory, python_verified_copies
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.python_verified_copies import PythonCopies
from kvcluster.transport.base import ExchangeCopies
from tests.client.build import kv, room, same
from tests.client.test_batch_loads import Grant
from tests.client.test_batch_stores import Reserved
from tests.client.test_load_sink import BLOCKS, Bench


class Elsewhere(ForeignMemory):
    """An endpoint of a kind that the product does not know. Whoever asks it for a view, or takes its offsets as
    addresses, has overlooked what it is."""


ELSEWHERE = Elsewhere()


def of_a_load() -> CopyBatch:
    """A batch that both executors open."""
    return caught(lambda: Grant(Bench(room(BLOCKS))).open())


def of_a_store() -> CopyBatch:
    return caught(lambda: Reserved(kv(BLOCKS)).open())


def caught(opened: Callable[[], ExchangeCopies]) -> CopyBatch:
    """The batch that is offered to executors."""
    batches: list[CopyBatch] = []

    class Catches:
        def open(self, batch: CopyBatch) -> None:
            batches.append(batch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(python_verified_copies, "EXECUTORS", (Catches(),))
        opened()
    return batches[0]


@pytest.mark.parametrize("made", [of_a_load, of_a_store])
@pytest.mark.parametrize("end", ["source", "target"])
def test_neither_executor_opens_what_the_cpu_does_not_address(made: Callable[[], CopyBatch], end: str) -> None:
    batch = made()
    python = PythonCopies(next(each for each in batch.keeps if isinstance(each, BoundMemory)))
    for executor in (NativeCopies(), python):
        assert executor.open(batch) is not None, "but for its end, both would open it"
        assert executor.open(replace(batch, **{end: ELSEWHERE})) is None


@pytest.fixture
def lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of every call."""
    monkeypatch.setattr(bound_memory, "_endpoint", lambda memories: ELSEWHERE)


@pytest.mark.usefixtures("lies_elsewhere")
def test_a_load_that_nothing_carries_out_is_refused_by_name_and_moves_nothing() -> None:
    into = room(BLOCKS)
    grant = Grant(Bench(into))
    with pytest.raises(CallerError, match="copies from HostMemory to Elsewhere"):
        grant.open()
    assert same(into, room(BLOCKS)) and not grant.bench.so_far().nbytes


@pytest.mark.usefixtures("lies_elsewhere")
def test_a_store_that_nothing_carries_out_is_refused_by_name_and_moves_nothing() -> None:
    reserved = Reserved(kv(BLOCKS))
    with pytest.raises(CallerError, match="copies from Elsewhere to HostMemory"):
        reserved.open()
    assert not any(map(any, reserved.pages)) and not reserved.source.nbytes


@pytest.mark.usefixtures("lies_elsewhere")
def test_an_executor_that_reaches_it_is_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load goes there by an executor that is listed, and by nothing else of the product."""

    class Reaches:
        def open(self, batch: CopyBatch) -> RunRecords | None:
            return partial(self.run, batch) if batch.target is ELSEWHERE else None

        def run(self, batch: CopyBatch, start: int, stop: int) -> None:
            batch.status[start:stop] = bytes([CopyStatus.DONE]) * (stop - start)

    monkeypatch.setattr(python_verified_copies, "EXECUTORS", (*python_verified_copies.EXECUTORS, Reaches()))
    grant = Grant(Bench(room(BLOCKS)))
    grant.load()
    assert not any(grant.bench.ranges.left(item) for item in range(BLOCKS))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bound_memory, "_endpoint", lambda memories: HOST)
        plain = Grant(Bench(room(BLOCKS)))
        plain.load()
        assert plain.bench.so_far() == grant.bench.so_far()
