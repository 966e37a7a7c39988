"""What the connector counts and measures, from a worker's report to vLLM's log and Prometheus endpoint."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import prometheus_client
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.prometheus import get_prometheus_registry

from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.engines.vllm import KVClusterConnector
from kvcluster.engines.vllm.connector import KVClusterMetadata, Reported
from kvcluster.engines.vllm.kv_hints import KINDS, MALFORMED, UNKNOWN, HintAnswer, HintAnswers
from kvcluster.engines.vllm.stats import DESCRIBED, LEAST_TOKENS, PrefillRate, Stats, TransferStats
from kvcluster.engines.vllm.step_metadata import LoadReport, Step, StepReport
from kvcluster.transport.base import Unavailable
from tests.client.build import prompt
from tests.vllm.build import BLOCK, engine_config
from tests.vllm.conftest import Bench
from tests.vllm.scripted import BESIDE

S = 1_000_000_000
LOST = Miss(MissReason.SHARD_LOST, "gone")
FULL = Miss(MissReason.FULL)


# ------------------------------------------------------------------------------------------------ reports of ranks


def load(
    blocks: int = 3, nbytes: int = 10, took_ns: int = 5, loss: Loss = Loss.EXACT, miss: Miss | None = None
) -> LoadReport:
    return LoadReport(blocks, nbytes, took_ns, loss, miss)


def test_of_a_load_at_two_ranks_the_worse_counts_and_the_bytes_of_both() -> None:
    one = StepReport(4, {"a": load(blocks=3, took_ns=7, miss=LOST)})
    one.merge(StepReport(4, {"a": load(blocks=5, nbytes=20, loss=Loss.Q8), "b": load()}))
    assert one.loads == {"a": LoadReport(3, 30, 7, Loss.Q8, LOST, ranks=2, most_bytes=20), "b": load()}


def test_a_reason_is_kept_whichever_rank_tells_it() -> None:
    one = StepReport(4, {"a": load()})
    one.merge(StepReport(4, {"a": load(miss=FULL)}))
    assert one.loads["a"].miss == FULL


def test_everything_else_is_added_up() -> None:
    one = StepReport(5, drained=Counter({1: 1}), stored=2, store_bytes=30, dropped=1, store_misses=Counter({"full": 1}))
    one.opened_breakers = 1
    other = StepReport(4, drained=Counter({1: 1, 2: 1}), stored=1, store_bytes=4, opened_breakers=2)
    other.store_misses.update({"full": 2, "x": 1})
    one.merge(other)
    assert one.step == 4
    assert one.drained == {1: 2, 2: 1}
    assert (one.stored, one.store_bytes, one.dropped) == (3, 34, 1)
    assert one.store_misses == {"full": 3, "x": 1}
    assert one.opened_breakers == 3


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (StepReport(7), False),
        (StepReport(7, {"a": load()}), True),
        (StepReport(7, drained=Counter({1: 1})), True),
        (StepReport(7, stored=1), True),
        (StepReport(7, dropped=1), True),
        (StepReport(7, store_misses=Counter({"full": 1})), True),
        (StepReport(7, opened_breakers=1), True),
    ],
)
def test_a_report_knows_whether_it_says_anything(report: StepReport, says: bool) -> None:
    assert bool(report) is says


def test_vllm_aggregates_reports_with_our_own_merge() -> None:
    one = Reported(StepReport(4, {"a": load()}))
    merged = one.aggregate(Reported(StepReport(4, {"a": load(blocks=2)})))
    assert isinstance(merged, Reported)
    assert (merged.report.loads["a"].blocks, merged.report.loads["a"].ranks) == (2, 2)
    assert merged, "whatever it says: vLLM drops what is false"
    assert Reported(StepReport(4))


def test_orders_and_reports_travel_between_processes() -> None:
    step = Step(3, "sha256:1", chains=(("a", 0, ()),), written=(1, 2), gone=("b",))
    assert pickle.loads(pickle.dumps(KVClusterMetadata(step))).step == step
    report = StepReport(3, {"a": load(miss=LOST)}, Counter({1: 1}))
    assert pickle.loads(pickle.dumps(Reported(report))).report == report


# ------------------------------------------------------------------------------------------------------- counts


def test_every_count_has_a_description() -> None:
    stats = Stats()
    stats.loaded(load(miss=LOST))
    stats.reported(
        StepReport(1, stored=1, store_bytes=1, dropped=1, store_misses=Counter({"full": 1}), opened_breakers=1)
    )
    for kind in (*KINDS, UNKNOWN, MALFORMED):
        stats.answered(HintAnswers("m", (HintAnswer("a", kind, "refused: not carried out yet"),)))
    assert set(stats.take()) == set(DESCRIBED)


def test_counts_are_taken_once() -> None:
    stats = Stats()
    stats.loaded(load(nbytes=10, took_ns=S))
    stats.loaded(load(nbytes=5, took_ns=S // 2, miss=LOST))
    stats.reported(
        StepReport(1, stored=2, store_bytes=8, dropped=1, store_misses=Counter({"full": 2, "x": 1}), opened_breakers=2)
    )
    assert stats.take() == {
        "loads": 2,
        "loaded_bytes": 15,
        "load_seconds": 1.5,
        "failed_loads": 1,
        "stored_pages": 2,
        "store_bytes": 8,
        "dropped_stores": 1,
        "failed_stores": 3,
        "opened_breakers": 2,
    }
    assert stats.take() == {}


def test_counts_of_intervals_add_up() -> None:
    one = KVClusterConnector.build_kv_connector_stats({"loads": 1, "load_seconds": 0.25})
    assert isinstance(one, TransferStats) and not one.is_empty()
    one.aggregate(TransferStats({"loads": 2, "stored_pages": 4}))
    assert one.data == {"loads": 3, "load_seconds": 0.25, "stored_pages": 4}
    one.reset()
    assert one.is_empty()
    empty = KVClusterConnector.build_kv_connector_stats()
    assert empty is not None and empty.is_empty()


def test_vllms_log_has_them_in_one_line(llama: Path) -> None:
    config = engine_config(llama)
    lines: list[str] = []
    logging = KVConnectorLogging(config.kv_transfer_config)
    logging.observe({"load_seconds": 0.12345, "loads": 1})
    logging.observe({"loads": 2})
    logging.log(lambda text, *values: lines.append(text % values))
    logging.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: loads=3, load_seconds=0.123"]


def test_prometheus_has_a_counter_for_each_by_engine(llama: Path) -> None:
    registry = get_prometheus_registry()
    kinds = {
        prometheus_client.Gauge: prometheus_client.Gauge,
        prometheus_client.Counter: prometheus_client.Counter,
        prometheus_client.Histogram: prometheus_client.Histogram,
    }
    labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    made = KVClusterConnector.build_prom_metrics(engine_config(llama), kinds, ["model_name", "engine"], labels)
    assert made is not None
    made.observe({"loads": 2, "load_seconds": 0.5}, engine_idx=1)
    made.observe({"loads": 1}, engine_idx=1)

    def value(name: str, engine: str) -> float | None:
        return registry.get_sample_value(f"kvcluster:{name}_total", {"model_name": "tiny", "engine": engine})

    assert (value("loads", "1"), value("load_seconds", "1"), value("loads", "0")) == (3, 0.5, 0)
    assert all(value(name, "0") == 0 for name in DESCRIBED)


def test_what_an_engine_does_is_counted_as_it_is(bench: Bench, llama: Path) -> None:
    one, other = bench.engine(llama, BESIDE), bench.engine(llama, BESIDE)
    tokens = prompt(6, block_tokens=BLOCK, rest=2)
    for engine in (one, other):
        engine.add("a", tokens)
        engine.run()
        engine.drain()
        engine.step()  # which tells of the last
    page = one.client.spec.page_bytes(0, one.client.spec.whole(0))
    assert {name: one.counts[name] for name in ("stored_pages", "store_bytes", "loads")} == {
        "stored_pages": 6,
        "store_bytes": 6 * page,
        "loads": 0,
    }
    assert (other.counts["loads"], other.counts["loaded_bytes"], other.counts["stored_pages"]) == (1, 6 * page, 0)


def test_a_breaker_that_opens_in_a_rank_is_counted_by_its_engine(bench: Bench, llama: Path) -> None:
    one, other = bench.engine(llama, BESIDE), bench.engine(llama, BESIDE)
    prompts = [prompt(3, seed=seed, block_tokens=BLOCK, rest=2) for seed in range(4)]
    for number, tokens in enumerate(prompts):
        one.add(str(number), tokens)
    one.run()
    one.drain()

    def fail() -> None:
        raise Unavailable(LOST)

    bench.steps.read = fail
    counted = []
    for number, tokens in enumerate(prompts):
        other.add(str(number), tokens)
        other.run()
        counted.append(other.counts["opened_breakers"])
    assert counted[:3] == [0, 0, 1], "three failures open it"
    assert counted[3] in (1, 2), "it may have tried the shard again by then"
    assert other.counts["failed_loads"] == 4 and one.counts["opened_breakers"] == 0


# -------------------------------------------------------------------------------------------------- prefill's rate


def test_a_rate_is_learnt_from_steps_that_are_large_enough() -> None:
    rate = PrefillRate()
    assert rate.known() is None
    rate.began(1, LEAST_TOKENS - 1, 0)
    rate.ended(1, S)
    assert rate.known() is None, "its time is not that of computing"
    rate.began(2, 1_000, S)
    rate.ended(2, 6 * S)
    assert rate.known() == 250, "a second is what any step takes"


def test_what_any_step_takes_is_that_of_the_shortest_and_never_most_of_a_large_one() -> None:
    rate = PrefillRate()
    rate.began(1, 1_000, 0)
    rate.ended(1, S)
    assert rate.known() == 1_000, "before a small step there is nothing to leave out"
    for step, seconds in enumerate((5, 0.5, 9), 2):
        rate.began(step, 1, 0)
        rate.ended(step, round(seconds * S))
    assert rate.known() == 2_000
    rate.began(9, 1, 0)
    rate.ended(9, S // 10)
    assert rate.known() == 1_111
    slow = PrefillRate()
    slow.began(1, 1, 0)
    slow.ended(1, S)
    slow.began(2, 1_000, 0)
    slow.ended(2, S)
    assert slow.known() == 4_000


def test_later_steps_count_for_more() -> None:
    rate = PrefillRate()
    for step, seconds in enumerate((1, 1, 1, 1, 10, 10, 10, 10)):
        rate.began(step, 1_000, 0)
        rate.ended(step, seconds * S)
    known = rate.known()
    assert known is not None and 100 < known < 150


def test_a_rate_that_is_given_is_not_doubted() -> None:
    rate = PrefillRate(777)
    rate.began(1, 1_000, 0)
    rate.ended(1, S)
    assert rate.known() == 777


def test_a_step_that_ends_ends_those_before_it() -> None:
    rate = PrefillRate()
    rate.began(1, 1_000, 0)
    rate.began(2, 1_000, 0)
    rate.ended(2, S)
    rate.ended(1, 100 * S)
    assert rate.known() == 1_000, "nothing was heard of the first"


def test_steps_whose_end_is_never_reported_are_bounded() -> None:
    rate = PrefillRate()
    for step in range(100):
        rate.began(step, 1_000, 0)
    assert len(rate._begun) <= 8
    rate.ended(100, S)
    assert not rate._begun
    assert rate.known() is None


def test_a_rate_is_never_nothing() -> None:
    rate = PrefillRate()
    rate.began(1, LEAST_TOKENS, 0)
    rate.ended(1, 10**6 * S)
    assert rate.known() == 1
