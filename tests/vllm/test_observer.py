"""Mode "observe" over vLLM's own scheduler: nothing moves, everything is noted, and what is noted predicts rightly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams

from kvcluster.core.breakeven import LinkRate
from kvcluster.engines.vllm import KVClusterConnector, compat, observer
from kvcluster.engines.vllm.idle import IdleScheduler
from kvcluster.errors import CallerError
from kvcluster.observe.reuse_prediction import LoadCost, outcome, predict
from kvcluster.observe.trace_file import UNREAD_WEIGHTS, EngineTrace, read_traces
from tests.client.build import prompt
from tests.vllm.build import BLOCK, WEIGHTS, engine_config, kv_config
from tests.vllm.conftest import Bench
from tests.vllm.scripted import BESIDE
from tests.vllm.toy import Engine, Rank
from tests.vllm.twin_toy import TwinRank, Work, twins

SIX = prompt(6, block_tokens=BLOCK, rest=2)
OTHER = prompt(6, block_tokens=BLOCK, rest=2, seed=3)


class IdleRank(Rank):
    """A worker that moves nothing."""

    @property
    def member(self) -> None:
        return None

    def wait_idle(self) -> None:
        """It never moves anything."""


class IdleTwinRank(TwinRank, IdleRank):
    """The same with its KV on a device."""


Observe = Callable[..., Engine]


@pytest.fixture
def observe(bench: Bench, tmp_path: Path) -> Observe:
    """An engine in mode "observe", whose trace lies in the test's folder."""

    def begin(model: Path, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        given = {"mode": "observe", "address": "", "trace_dir": str(tmp_path), **(extra or {})}
        return bench.engine(model, given, rank=IdleRank, joined=False, **options)

    return begin


def traces(folder: Path, *engines: Engine) -> list[EngineTrace]:
    """What the engines have noted, in their order."""
    for engine in engines:
        engine.side.close()
    by_id = {trace.header.id: trace for trace in read_traces([folder])[0]}
    return [by_id[engine.side._writer.path.stem.rpartition("-")[2]] for engine in engines]  # type: ignore[union-attr]


def trace_of(folder: Path, engine: Engine) -> EngineTrace:
    return traces(folder, engine)[0]


# --------------------------------------------------------------------------------------------------- what is noted


def test_nothing_is_loaded_or_stored_and_the_request_is_noted(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama)
    engine.add("a", SIX, max_tokens=7)
    engine.run()
    assert not any(step.loads or step.stores or step.chains for step in engine.steps)
    assert "a" not in engine.params, "the answer says nothing of us"
    trace = trace_of(tmp_path, engine)
    (one,) = trace.requests
    assert (one.prompt_tokens, one.asked, one.local) == (26, 6, 0)
    (prefilled, first), (ended, all_of_it) = one.computed
    assert (first, all_of_it) == (6, 8), "32 tokens have KV: the last that was said has none"
    assert one.at_ns < prefilled < ended
    assert len(one.chain) == len(set(one.chain)) == 8
    assert trace.spec is not None and trace.spec.weights == WEIGHTS
    assert (trace.cost.requests, trace.dropped, trace.notes) == (1, [], [])
    assert trace.cost.steps >= 7 and trace.cost.step_ns >= trace.cost.worst_step_ns > 0 < trace.cost.request_ns


@pytest.mark.parametrize("second", [False, True])
def test_nothing_on_a_gpu_is_touched(bench: Bench, llama: Path, tmp_path: Path, second: bool) -> None:
    given = {"mode": "observe", "address": "", "trace_dir": str(tmp_path)}
    with twins():
        engine = bench.engine(llama, given, rank=partial(IdleTwinRank, second=second), joined=False)
        device = engine.ranks[0].device
        launched, memory = list[object](), dict(device._allocated)
        with patch.object(device, "launch", side_effect=device.launch) as launch, patch.object(device, "copy") as copy:
            for name in "ab":
                engine.add(name, SIX, max_tokens=7)
                engine.run()
            launched += [call.args[0] for call in launch.call_args_list]
    assert launched and all(isinstance(kernel, Work) for kernel in launched), "the engine's own work"
    copy.assert_not_called()
    assert device._allocated == memory
    assert [request.asked for request in trace_of(tmp_path, engine).requests] == [6, 6]


def test_equal_prompts_have_equal_hashes_at_every_engine(observe: Observe, llama: Path, tmp_path: Path) -> None:
    one, other = observe(llama), observe(llama)
    for engine in (one, other):
        engine.add("a", SIX)
        engine.run()
    first, second = traces(tmp_path, one, other)
    assert first.header.id != second.header.id
    assert first.spec == second.spec
    assert first.requests[0].chain == second.requests[0].chain


def test_what_separates_requests_in_a_cluster_separates_them_here(
    observe: Observe, llama: Path, tmp_path: Path
) -> None:
    engine = observe(llama, enable_prefix_caching=False)
    for name, salt in (("a", None), ("b", "one"), ("c", "other"), ("d", "one")):
        engine.add(name, SIX, cache_salt=salt)
    engine.add("e", OTHER)
    engine.run()
    by_name = [one.chain[0] for one in trace_of(tmp_path, engine).requests]
    assert len(set(by_name)) == 4


def test_what_the_engine_has_itself_is_noted(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama)
    for name, tokens in (("a", SIX[: 3 * BLOCK + 1]), ("b", SIX)):
        engine.add(name, tokens)
        engine.run()
    assert [(one.asked, one.local) for one in trace_of(tmp_path, engine).requests] == [(3, 0), (6, 3)]


def test_a_request_that_may_not_read_the_cache_asks_for_nothing(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama)
    engine.add("a", SIX, sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True))
    engine.run()
    (one,) = trace_of(tmp_path, engine).requests
    assert (one.asked, one.computed[-1][1]) == (0, 6)


@pytest.mark.parametrize(("role", "asked", "computed"), [("kv_producer", 0, True), ("kv_consumer", 6, False)])
def test_engines_that_only_store_or_only_load_are_noted_so(
    observe: Observe, llama: Path, tmp_path: Path, role: str, asked: int, computed: bool
) -> None:
    engine = observe(llama, role=role)
    engine.add("a", SIX)
    engine.run()
    (one,) = trace_of(tmp_path, engine).requests
    assert (one.asked, bool(one.computed)) == (asked, computed)


def test_a_preempted_request_is_noted_each_time_it_runs(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama, blocks=17, max_model_len=48, enable_prefix_caching=False)
    for name, tokens in (("a", SIX), ("b", OTHER)):
        engine.add(name, tokens, max_tokens=12)
    engine.run()
    noted = trace_of(tmp_path, engine).requests
    assert sum(request.num_preemptions for request in engine.requests.values()) == len(noted) - 2 > 0
    again = next(one for one in noted if one.asked > 6)
    assert again.prompt_tokens == 26
    predicted, _ = predict(noted)
    resumed = next(one for one in predicted if one.request is again)
    assert resumed.found(None) >= 6, "it would have loaded its own blocks back"


def test_an_aborted_request_is_noted_as_far_as_it_came(observe: Observe, llama: Path, tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    engine = observe(llama, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add("a", SIX)
    engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    (one,) = trace_of(tmp_path, engine).requests
    assert one.computed[-1][1] == 2 and len(one.computed) == 1


def test_after_a_reset_nothing_is_shared_with_what_came_before(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama, enable_prefix_caching=False)
    engine.add("a", SIX)
    engine.run()
    assert engine.scheduler.connector is not None and engine.scheduler.connector.reset_cache() is True
    engine.add("b", SIX)
    engine.run()
    before, after = trace_of(tmp_path, engine).requests
    assert set(before.chain).isdisjoint(after.chain)


@pytest.mark.parametrize("overlap", [False, True])
def test_windows_and_overlapping_steps_are_observed(
    observe: Observe, gemma: Path, tmp_path: Path, overlap: bool
) -> None:
    engine = observe(gemma, overlap=overlap)
    for name in "ab":
        engine.add(name, SIX, max_tokens=9)
        engine.run()
    trace = trace_of(tmp_path, engine)
    assert len(trace.requests) == 2 and trace.spec is not None and len(trace.spec.groups) > 1
    assert trace.requests[0].chain == trace.requests[1].chain


def test_the_engines_rate_is_noted_once_it_is_known(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama, enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, prompt(16, block_tokens=BLOCK))
        engine.run()
    first, second = trace_of(tmp_path, engine).requests
    assert (first.prefill_tokens_per_s == 0) is (first.prefill_tokens_per_s != second.prefill_tokens_per_s)
    assert second.prefill_tokens_per_s > 0


def test_weights_are_those_of_the_checkpoint(observe: Observe, llama: Path, tmp_path: Path) -> None:
    read = patch.object(observer.weights, "fingerprint", lambda path: "sha256:read")
    with read:
        engine = observe(llama, {"weights": ""})
        assert engine.side._writer is not None  # type: ignore[union-attr]
        trace = trace_of(tmp_path, engine)
        while not trace.weights:  # its thread may not have begun
            engine = observe(llama, {"weights": ""})
            engine.add("a", SIX)
            engine.run()
            trace = trace_of(tmp_path, engine)
    assert trace.header.spec is not None and trace.header.spec.weights == UNREAD_WEIGHTS
    assert trace.spec is not None and trace.spec.weights == "sha256:read"


# ---------------------------------------------------------------------------------------- what it predicts, and costs


def workload(rounds: int) -> list[tuple[int, str, list[int]]]:
    """Which engine is asked what: two prompts that share a prefix, in turn at both."""
    asked = []
    for number in range(rounds):
        shared = SIX if number % 3 else OTHER
        own = prompt(2, block_tokens=BLOCK, rest=1, seed=10 + number // 2)
        asked.append((number % 2, f"r{number}", [*shared[: 4 * BLOCK], *own]))
    return asked


def test_what_is_predicted_is_what_is_then_loaded(bench: Bench, observe: Observe, llama: Path, tmp_path: Path) -> None:
    observing = [observe(llama, {"prefill_tokens_per_s": 1}, blocks=70) for _ in range(2)]
    serving = [bench.engine(llama, {"report": True, **BESIDE}, blocks=70) for _ in range(2)]
    loaded = {}
    for at, name, tokens in workload(24):
        for engines in (observing, serving):
            engines[at].add(name, tokens, max_tokens=2)
            engines[at].run(name)
        serving[at].drain()  # visible to the other
        loaded[name] = serving[at].params[name]["kvcluster"]["loaded_tokens"]
    noted = [one for trace in traces(tmp_path, *observing) for one in trace.requests]
    predicted, _ = predict(noted)
    spec = serving[0].client.spec
    found = outcome(predicted, LoadCost(spec, spec.whole_parts(), LinkRate(0, 2**40)), None)
    assert found.loaded_tokens == sum(loaded.values()) > 0
    by_time = sorted(zip(noted, found.requests, strict=True), key=lambda pair: pair[0].at_ns)
    assert [one.loaded_tokens for _, one in by_time] == list(loaded.values())


# --------------------------------------------------------------------------------------------------- never in the way


def test_a_mistake_of_the_observer_ends_the_observing_and_nothing_else(
    observe: Observe, llama: Path, tmp_path: Path
) -> None:
    engine = observe(llama)
    told: list[str] = []
    engine.side._log = told.append  # type: ignore[union-attr]
    with patch.object(observer.compat, "extra_keys", side_effect=RuntimeError("a mistake")):
        for name in "abc":
            engine.add(name, SIX, max_tokens=3)
            engine.run()
    assert all(request.is_finished() for request in engine.requests.values())
    assert told == ["observes nothing more, after a mistake of its own: RuntimeError: a mistake"]
    assert trace_of(tmp_path, engine).requests == []


def test_a_folder_that_cannot_be_written_is_not_in_the_way(observe: Observe, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    engine = observe(llama, {"trace_dir": str(tmp_path / "file")})
    engine.add("a", SIX, max_tokens=3)
    engine.run()
    assert engine.requests["a"].is_finished()
    engine.side.close()
    assert engine.side._writer.cost.dropped > 0  # type: ignore[union-attr]


def test_an_engine_that_is_not_served_starts_and_its_trace_says_why(llama: Path, tmp_path: Path) -> None:
    extra = {"mode": "observe", "trace_dir": str(tmp_path)}
    config = engine_config(llama, extra, prefix_caching_hash_algo="xxhash")
    kv = kv_config(config)
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv)
    assert isinstance(made, KVClusterConnector)
    made.shutdown()
    (trace,), _ = read_traces([tmp_path])
    assert trace.spec is None and trace.requests == []
    (note,) = trace.notes
    assert "is not observed: kvcluster does not serve this engine: prefix_caching_hash_algo is xxhash" in note
    with pytest.raises(CallerError, match="prefix_caching_hash_algo is xxhash"):
        compat.layout(config, kv)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_off_does_nothing_at_all(bench: Bench, llama: Path, tmp_path: Path, role: KVConnectorRole) -> None:
    config = engine_config(llama, {"mode": "off", "trace_dir": str(tmp_path)}, prefix_caching_hash_algo="xxhash")
    with patch.object(bench, "connect", side_effect=AssertionError("it connects")):
        made = KVConnectorFactory.create_connector(config, role, kv_config(config))
    made.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_off_answers_as_without_a_connector(bench: Bench, llama: Path) -> None:
    engine = bench.engine(llama, {"mode": "off"}, rank=IdleRank, joined=False)
    assert type(engine.side) is IdleScheduler
    for name in "ab":
        engine.add(name, SIX, max_tokens=3)
        engine.run()
    assert not engine.params and not engine.counts["loads"]


def test_only_mode_on_needs_failed_loads_to_be_recomputed(llama: Path, tmp_path: Path) -> None:
    for mode in ("observe", "off"):
        config = engine_config(llama, {"mode": mode, "trace_dir": str(tmp_path)})
        config.kv_transfer_config.kv_load_failure_policy = "fail"
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config(config)).shutdown()


def test_requests_that_no_other_continues_from_are_not_noted(observe: Observe, llama: Path, tmp_path: Path) -> None:
    engine = observe(llama)
    with patch.object(observer.compat, "is_private", lambda request: True):
        engine.add("a", SIX)
        engine.run()
    trace = trace_of(tmp_path, engine)
    assert (trace.requests, trace.cost.requests) == ([], 1)
