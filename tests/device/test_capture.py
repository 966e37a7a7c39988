"""While an engine captures a graph, no thread of ours calls a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from random import Random

import pytest

from kvcluster.copies.batch import CopyBatch, CopyDirection, CopyStatus
from kvcluster.device import batch_run, software_twin
from kvcluster.device.capture import CaptureGate
from kvcluster.device.copies import DeviceCopies
from tests.device.test_copies import Case

Run = Callable[[CopyBatch], None]


@contextmanager
def captured(case: Case, gate: CaptureGate) -> Iterator[None]:
    """A graph is captured by this thread."""
    with gate.capturing():
        case.twin.machine.captures = threading.get_ident()
        try:
            yield
        finally:
            case.twin.machine.captures = None


def runs(case: Case) -> Run:
    def run(batch: CopyBatch) -> None:
        opened = DeviceCopies(case.staging).open(batch)
        assert opened is not None
        opened(0, len(batch.records))

    return run


def test_batches_and_captures_take_turns() -> None:
    case = Case(3, CopyDirection.LOAD)
    case.engine_writes()
    batches = [replace(case.batch, status=bytearray(len(case.batch.records))) for _ in range(60)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(runs(case), batch) for batch in batches]
        while not all(each.done() for each in running):
            with captured(case, software_twin.GATE):
                case.twin.record(case.twin.current())  # the engine itself may
        for each in running:
            each.result()
    assert all(set(batch.status) == {CopyStatus.DONE} for batch in batches)


def test_a_call_while_a_graph_is_captured_is_noticed_without_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, CopyDirection.LOAD)
    case.engine_writes()
    monkeypatch.setattr(software_twin.GATE, "passed", nullcontext)
    monkeypatch.setattr(batch_run.GATE, "wait", lambda timeout_s: True)
    with captured(case, software_twin.GATE), ThreadPoolExecutor(1) as pool:
        call = pool.submit(runs(case), case.batch)
        assert "while a graph is captured" in str(call.exception())


def test_a_batch_that_waits_for_a_capture_ends_when_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    case, waits, wait = Case(3, CopyDirection.LOAD), threading.Event(), software_twin.GATE.wait
    case.engine_writes()

    def waited(timeout_s: float) -> bool:
        waits.set()
        return wait(timeout_s)

    monkeypatch.setattr(software_twin.GATE, "wait", waited)
    with ThreadPoolExecutor(1) as pool, captured(case, software_twin.GATE):
        call = pool.submit(runs(case), case.batch)
        assert waits.wait(20)
        case.batch.cancel[0] = 1
        call.result(timeout=20)
    assert set(case.batch.status) == {CopyStatus.STOPPED}


def test_a_gate_is_closed_by_one_thread_at_a_time_and_only_when_nobody_is_inside() -> None:
    gate, inside, lock, most = CaptureGate(), [0, 0], threading.Lock(), [0]

    def touch(kind: int, delta: int) -> None:
        with lock:
            inside[kind] += delta
            assert not (inside[1] and inside[0]) and inside[1] <= 1
            most[0] = max(most[0], inside[0])

    def work(seed: int) -> None:
        rng = Random(seed)
        for _ in range(300):
            kind = int(rng.random() < 0.2)
            with gate.capturing() if kind else gate.passed():
                touch(kind, 1)
                touch(kind, -1)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert gate.wait(0)
