"""Mode "observe": SGLang's calls are noted, answered with misses, and predict what a cluster would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcluster.errors import ConfigError
from kvcluster.observe.reuse_prediction import predict
from kvcluster.observe.trace_file import EngineTrace, read_traces
from tests.engines.sglang.pools import CONFIG, TOKENS, create, keys_of, mha_pool, slots, untouched

Open = Callable[..., Any]


def refuse(*arguments: Any, **settings: Any) -> Any:
    raise AssertionError("it connects")


@pytest.fixture
def open_storage(sglang: SimpleNamespace, tmp_path: Path) -> Iterator[Open]:
    """A storage that must not connect, over a pool; closed at the end."""
    made: list[Any] = []

    def begin(mode: str = "observe", pool: Any = None, **settings: Any) -> Any:
        pool = mha_pool(sglang) if pool is None else pool
        made.append(create(sglang, pool, refuse, mode=mode, trace_dir=str(tmp_path), **settings))
        return made[-1]

    yield begin
    for storage in made:
        storage.close()


def only(folder: Path) -> EngineTrace:
    (trace,), _ = read_traces([folder])
    return trace


def extra(sglang: SimpleNamespace, prefix: list[str] | None) -> Any:
    return SimpleNamespace(prefix_keys=prefix)


def test_every_lookup_misses_every_store_succeeds_and_nothing_moves(
    sglang: SimpleNamespace, open_storage: Open, tmp_path: Path
) -> None:
    pool = mha_pool(sglang)
    storage = open_storage(pool=pool)
    keys = keys_of(3)
    assert storage.batch_set_v1(keys, slots([0, 1, 2])) == [True] * 3
    assert storage.batch_exists(keys) == 0 and not storage.exists(keys[0])
    assert storage.batch_get_v1(keys, slots([0, 1, 2])) == [False] * 3
    assert storage.batch_get(keys) == [None] * 3
    assert storage.batch_set(keys, [None] * 3)
    storage.clear()
    storage.close()
    assert all(untouched(pool, number) for number in range(3))
    trace = only(tmp_path)
    assert trace.weights == CONFIG["weights"] and trace.spec is not None and trace.spec.block_tokens == TOKENS
    assert (trace.cost.requests, trace.dropped) == (len(trace.requests), [])


def test_what_is_noted_predicts_what_another_engine_would_find(
    sglang: SimpleNamespace, open_storage: Open, tmp_path: Path
) -> None:
    one, other = open_storage(), open_storage()
    keys = keys_of(6)
    one.batch_set_v1(keys[:2], slots([0, 1]), extra(sglang, []))
    one.batch_set_v1(keys[2:5], slots([2, 3, 4]), extra(sglang, keys[:2]))
    other.batch_exists(keys[1:], extra(sglang, keys[:1]))
    for storage in (one, other):
        storage.close()
    traces, _ = read_traces([tmp_path])
    assert len({trace.spec for trace in traces}) == 1
    predicted, distinct = predict([request for trace in traces for request in trace.requests])
    (lookup,) = [one for one in predicted if one.request.asked]
    assert (lookup.request.asked, lookup.request.local, lookup.request.prompt_tokens) == (6, 1, 6 * TOKENS)
    assert lookup.found(None) == 4 and distinct == 5


def test_of_several_ranks_the_first_one_notes(open_storage: Open, tmp_path: Path) -> None:
    for rank in range(2):
        storage = open_storage(rank=rank, ranks=2)
        assert storage.batch_set_v1(keys_of(2), slots([0, 1])) == [True, True]
        storage.close()
    assert len(only(tmp_path).requests) == 1


def test_off_notes_nothing_and_needs_no_other_setting(open_storage: Open, tmp_path: Path) -> None:
    storage = open_storage("off", address="", weights="")
    assert storage.batch_set_v1(keys_of(2), slots([0, 1])) == [True, True]
    assert storage.batch_exists(keys_of(2)) == 0
    storage.clear()
    storage.close()
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_no_hash_costs_a_line_and_nothing_else(open_storage: Open, tmp_path: Path) -> None:
    storage = open_storage()
    assert storage.batch_exists(["no hash"]) == 0
    assert storage.batch_exists(keys_of(1)) == 0
    storage.close()
    assert len(only(tmp_path).requests) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "of"}, "mode must be one of on, observe, off, not 'of'"),
        ({"mode": "observe", "weights": ""}, 'lacks "weights"'),
        ({"mode": "observe", "trace_bytes": 1}, "trace_bytes must be an integer of at least 8388608"),
    ],
)
def test_a_mistake_is_named(sglang: SimpleNamespace, given: dict[str, Any], message: str) -> None:
    from kvcluster.engines.sglang.settings import parse_settings  # beside SGLang's own modules, not before them

    with pytest.raises(ConfigError, match=message):
        parse_settings(CONFIG | given, "llama")


def test_observing_needs_no_address(sglang: SimpleNamespace) -> None:
    from kvcluster.engines.sglang.settings import parse_settings

    given = {key: value for key, value in CONFIG.items() if key != "address"} | {"mode": "observe"}
    assert parse_settings(given, "llama").mode == "observe"
