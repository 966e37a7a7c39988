"""Engines whose KV lies in the memory of a twin, in vLLM's order of calls by both of its model runners: every text is
right, nothing is unordered, and faults that are planted in the connector are found.

    python -m tests.vllm.differential --twin --operations 400000 --seed 1
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcluster.client.client import Client
from kvcluster.core.miss import Loss
from kvcluster.device.device import NoMemory
from kvcluster.device.snapshots import Snapshot, Snapshots
from kvcluster.device.software_twin import Twin
from kvcluster.engines.vllm import kv_format, snapshot_stores, worker
from kvcluster.engines.vllm.scheduler import SchedulerSide
from kvcluster.engines.vllm.snapshot_stores import SnapshotStores
from kvcluster.engines.vllm.step_metadata import LoadReport, Step
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.transport.base import Deadline
from tests.client.build import BOUND_S
from tests.vllm import differential
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench
from tests.vllm.scripted import PATIENT
from tests.vllm.toy import Engine
from tests.vllm.twin_toy import TwinRank, twins
from tests.waiting import eventually

STAGING = 16 << 10
PROMPT = list(range(42))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    with differential.models(tmp_path_factory.mktemp("twins")) as made:
        yield made


def test_every_text_is_right_and_nothing_is_unordered(folders: dict[str, Path]) -> None:
    events = Counter[str]()
    for seed in range(6):
        events += differential.run_scenario(folders, seed, differential.TWIN_OPERATIONS, twin=True)
    assert events["loads"]
    assert events["sleeps"]


Start = Callable[..., Engine]


@pytest.fixture
def start(bench: Bench, llama: Path) -> Iterator[Start]:
    """Starts an engine over a twin, with staging for a few blocks."""
    with twins():

        def one(*, second: bool = True, settings: dict[str, Any] | None = None, **options: Any) -> Engine:
            extra = {"prefill_tokens_per_s": 1, "staging_bytes": STAGING, **PATIENT, **(settings or {})}
            options = {"at_once": True, "enable_prefix_caching": False} | options
            return bench.engine(llama, extra, rank=partial(TwinRank, second=second), **options)

        yield one


@pytest.mark.parametrize("second", [False, True])
def test_one_engine_loads_what_another_has_stored(start: Start, second: bool) -> None:
    one, other = start(second=second), start(second=not second)
    for engine in (one, other):
        engine.add("a", PROMPT, max_tokens=6)
        engine.run()
        engine.drain()
        assert engine.client.lookup(PROMPT).blocks == len(PROMPT) // BLOCK
    assert other.counts["loads"] == 1
    assert other.counts["loaded_bytes"] == (len(PROMPT) - 1) // BLOCK * one.client.spec.block_bytes


def test_a_prompt_of_many_times_the_staging_is_stored_whole(start: Start) -> None:
    """Its blocks are kept when it has ended, and taken by steps that compute nothing."""
    engine = start(settings={"staging_bytes": 4 << 10}, max_num_batched_tokens=64, blocks=100)
    engine.add("a", list(range(240)), max_tokens=1)
    engine.run()
    engine.drain(most=400)
    assert engine.client.lookup(list(range(240))).blocks == 240 // BLOCK
    assert not engine.counts["dropped_stores"]


def test_the_memory_of_a_sleeping_engine_is_let_alone(start: Start) -> None:
    engine, other = start(), start()
    engine.add("a", PROMPT)
    engine.run()
    connector = engine.ranks[0].connector
    for _ in range(2):
        connector.unregister_kv_caches()
    engine.drain()
    assert engine.ranks[0].side.wait_idle(Deadline.after_ms(0))
    for _ in range(2):
        connector.restore_kv_caches()
    for each in (engine, other):
        each.add("b", PROMPT)
        each.run()
        each.drain()
    assert other.counts["loads"] == 1


def test_what_was_enqueued_just_before_the_end_has_been_read_when_that_returns(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` is called while the thread of stores gives a slot back, and after the engine has enqueued more snapshots,
    which that thread has not taken over yet."""
    engine = start(settings={"staging_bytes": 64 << 10})
    engine.add("a", PROMPT)
    engine.run()
    engine.drain()
    stores, release = engine.ranks[0].side._stores, Snapshot.release
    reached, enough = threading.Event(), threading.Event()

    def released(self: Snapshot) -> None:
        release(self)
        reached.set()
        assert enough.wait(BOUND_S)

    monkeypatch.setattr(Snapshot, "release", released)
    engine.add("b", [1, *PROMPT])
    engine.add("c", [2, *PROMPT], max_tokens=4)
    engine.step()
    assert reached.wait(BOUND_S)
    for name in "def":
        engine.add(name, [*range(ord(name), ord(name) + 4), *PROMPT])
    engine.step()
    waiting = stores._new.qsize()
    assert waiting
    closing = threading.Thread(target=stores.close)
    closing.start()
    eventually(lambda: stores._new.qsize() > waiting)
    enough.set()
    closing.join(BOUND_S)
    assert stores._taken == stores._given_back


def test_pages_that_continue_one_another_are_stored_together(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(settings={"staging_bytes": 64 << 10}, max_num_batched_tokens=64, blocks=100)
    stores = engine.ranks[0].side._stores
    monkeypatch.setattr(snapshot_stores, "_AT_ONCE", 0)  # nothing is stored yet
    engine.add("a", list(range(20)), max_tokens=6)
    engine.add("b", list(range(100, 120)), max_tokens=6)
    engine.run()
    eventually(lambda: sum(piece.stop - piece.first for _, piece in stores._arrived) == 12)
    monkeypatch.setattr(snapshot_stores, "_AT_ONCE", 1)
    begun: list[tuple[int, int]] = []
    begin = Client.begin_store

    def watched(self: Client, hashes: Any, *given: Any, **named: Any) -> Any:
        begun.append((named["first"], len(hashes)))
        return begin(self, hashes, *given, **named)

    monkeypatch.setattr(Client, "begin_store", watched)
    engine.drain()
    assert begun == [(0, 6), (0, 6)]


def test_blocks_are_kept_while_they_are_read_and_the_engine_has_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = start().ranks[0].side
    reads = SimpleNamespace(before=lambda written: None, progressed=lambda: {"a", "other"})
    monkeypatch.setattr(side, "_stores", reads)
    side._held = {"a": 1, "b": 1}
    side.before(Step(1, "", few_blocks=True))
    assert side._held == {"a": 1, "b": 1}
    side.before(Step(2, ""))
    assert side._held.keys() == {"a", "b"}
    assert side._held["a"] > 1 == side._held["b"]
    side._held = {}


def test_an_engine_with_few_free_blocks_says_so(start: Start) -> None:
    engine = start(blocks=24, max_model_len=92)
    engine.add("a", list(range(40)), max_tokens=2)
    engine.step()
    assert not engine.steps[-1].few_blocks
    engine.add("b", list(range(100, 144)), max_tokens=2)
    engine.step()
    assert engine.steps[-1].few_blocks


def test_a_device_that_fails_switches_the_cache_off_and_no_more(start: Start) -> None:
    engine = start()
    engine.add("a", PROMPT)
    engine.run()
    engine.drain()
    rank = engine.ranks[0]
    broken = Twin(rank.device.machine, nbytes=1 << 18, pinnable=1 << 18)
    broken.fail()
    rank.side._stores._snapshots.device = broken  # as if CUDA answered with an error
    for number, name in enumerate("bcd"):
        engine.add(name, [number, *PROMPT])
        engine.run()
    engine.drain()
    assert engine.counts["failed_stores"]
    assert not engine.side._loads and not engine.side._stores
    asked = engine.counts["lookups"]
    engine.add("e", PROMPT)
    engine.run()
    assert engine.counts["lookups"] == asked


def test_staging_that_is_refused_is_said_and_stores_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Twin, nbytes: int) -> Any:
        raise NoMemory("the device is full")

    engine = start()
    monkeypatch.setattr(Twin, "allocate", refuse)
    for number, name in enumerate("ab"):
        engine.add(name, [number, *PROMPT])
        engine.run()
        engine.drain()
    assert not engine.counts["stored_pages"]
    assert engine.counts["failed_stores"] == 2
    assert not engine.ranks[0].side._stores.failed, "it is tried again, after a while"


def test_engines_share_where_the_same_kernels_compute(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        @staticmethod
        def get_name() -> str:
            return "ANOTHER"

    one, like = start(), start()
    assert dict(one.client.spec.extra)["attention"] == "CPU_ATTN"
    assert one.client.spec == like.client.spec
    monkeypatch.setattr(kv_format, "get_attn_backend", lambda *given, **named: Other)
    assert start().client.spec != one.client.spec
    spec = start(settings={"share_across_devices": True}).client.spec
    assert not {"device", "attention"} & {name for name, _ in spec.extra}


# --------------------------------------------------------------------------------------------------- planted faults


def _stores_read_blocks_that_were_given_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotStores, "before", lambda self, written: self.begun())


def _what_a_step_takes_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "_computed_into", lambda self, scheduled: [])


def _loads_are_received_before_their_event(patch: pytest.MonkeyPatch) -> None:
    def all_came(self: Any) -> LoadReport:
        return LoadReport(self.order.first + len(self.order.into[0]), 0, 1, Loss.EXACT, None)

    patch.setattr(worker._Load, "over", lambda self: True)
    patch.setattr(worker._Load, "report", all_came)


def _nothing_waits_for_an_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Twin, "wait", lambda self, stream, event: None)


def _loads_go_on_when_their_request_has_gone(patch: pytest.MonkeyPatch) -> None:
    before = WorkerSide.before

    def forgets(self: WorkerSide, step: Step) -> None:
        for load in self._loads:
            if load.order.request in step.gone:
                load.transfer = None
        before(self, step)

    patch.setattr(WorkerSide, "before", forgets)


def _a_slot_is_given_back_early(patch: pytest.MonkeyPatch) -> None:
    take = Snapshots.take

    def early(self: Snapshots, blocks: Any) -> Any:
        made = take(self, blocks)
        if made is not None:
            self.give_back(made._slot)
        return made

    patch.setattr(Snapshots, "take", early)


def _blocks_are_overwritten_while_they_are_read_beside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotStores, "_keep_behind", lambda self, blocks: False)


def _blocks_are_read_beside_before_they_are_filled(patch: pytest.MonkeyPatch) -> None:
    take = SnapshotStores._take_one_beside

    def early(self: SnapshotStores) -> bool:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(self._snapshots.device, "done", lambda event: True)
            return take(self)

    patch.setattr(SnapshotStores, "_take_one_beside", early)


FAULTS = [
    _blocks_are_overwritten_while_they_are_read_beside,
    _blocks_are_read_beside_before_they_are_filled,
    _stores_read_blocks_that_were_given_away,
    _what_a_step_takes_is_not_told,
    _loads_are_received_before_their_event,
    _nothing_waits_for_an_event,
    _loads_go_on_when_their_request_has_gone,
    _a_slot_is_given_back_early,
]


def found_at(folders: dict[str, Path], most: int) -> int | None:
    """Returns the first seed whose scenario finds something."""
    for seed in range(most):
        try:
            differential.run_scenario(folders, seed, differential.TWIN_OPERATIONS, twin=True)
        except Exception:
            return seed
    return None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_found(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert found_at(folders, 200) is not None
