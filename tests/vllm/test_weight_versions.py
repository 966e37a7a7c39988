"""Weights that change in memory, each version of them under a name of its own: what is shared, and what never is."""

from __future__ import annotations

import gc
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from kvcluster.core import limits
from kvcluster.engines.vllm import weight_versions, weights
from kvcluster.engines.vllm.connector import KVClusterConnector
from kvcluster.engines.vllm.registration import Registration
from kvcluster.engines.vllm.scheduler import SchedulerSide
from kvcluster.engines.vllm.settings import parse_settings, run_fault
from kvcluster.engines.vllm.weight_versions import VERSION_BYTES, version_fault, version_weights
from kvcluster.errors import ConfigError, LimitError
from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE
from tests.vllm.toy import Picture
from tests.vllm.versions import Trained

RUN = "run:one"
VERSIONS = 10


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints are not kept where a user's are."""
    monkeypatch.setattr(weights, "_user_cache", lambda: tmp_path / "cache")


class Loop:
    """Engines of a training run over one cluster."""

    def __init__(self, bench: Bench, model: Path) -> None:
        self.bench = bench
        self.model = model
        self._names = 0

    def engine(self, run: str = RUN, **more: Any) -> Trained:
        extra = {"weights": run, "report": True, **ALWAYS, **BESIDE}
        return Trained(self.bench.engine(self.model, extra, **more))

    def settle(self, one: Trained) -> None:
        """Until every process of the engine caches under what its scheduler wants."""
        members = [one.engine.side._registration, *(rank.member for rank in one.engine.ranks)]
        assert members[0].wanted
        one.engine.step()  # from which workers learn what to cache under
        self.bench.cluster.wait_until(
            lambda: all(m.spec is not None and m.spec.weights == members[0].wanted for m in members)
        )

    def ask(self, one: Trained, tokens: list[int], *, max_tokens: int = 2) -> int:
        """Returns how many tokens were loaded for a request, once all that it stored is visible."""
        self._names += 1
        name = f"asked-{self._names}"
        one.add(name, tokens, max_tokens=max_tokens)
        one.engine.run(name)
        one.engine.drain()
        return int(one.engine.params[name]["kvcluster"]["loaded_tokens"])


@pytest.fixture
def loop(bench: Bench, llama: Path) -> Loop:
    return Loop(bench, llama)


# ------------------------------------------------------------------------------------------------- ten versions


def train(loop: Loop, *, clear_cache: bool, versions: int = VERSIONS) -> list[tuple[int, int, int]]:
    """Two engines whose weights change so often, the second always later, with a request under way at each change.
    Returns by version what each loaded: the first engine after the change of what it had stored before, the second
    meanwhile of the version that only it still has, and then of what the first has stored under the new one. Whatever
    is read is compared by the toy."""
    loop.bench.start(ram_bytes="32MiB")
    own = {} if clear_cache else {"enable_prefix_caching": False}
    first, second = loop.engine(**own), loop.engine(**own)
    found = []
    for version in range(versions):
        asked, early = (prompt(6, 10 * version + seed, block_tokens=BLOCK, rest=2) for seed in (1, 2))
        loop.ask(first, asked)
        loop.ask(first, early)
        running = f"running-{version}"
        for one in (first, second):
            one.add(running, prompt(3, 10 * version + 3, block_tokens=BLOCK), max_tokens=12)
            for _ in range(3):
                one.engine.step()
        change(loop, first, version, clear_cache=clear_cache)
        stale = loop.ask(first, early)
        own_version = loop.ask(second, asked)
        first.engine.run(running)
        loop.ask(first, asked)
        change(loop, second, version, clear_cache=clear_cache)
        second.engine.run(running)
        found.append((stale, own_version, loop.ask(second, asked)))
    return found


def change(loop: Loop, one: Trained, version: int, *, clear_cache: bool) -> None:
    one.pause("keep", clear_cache=clear_cache)
    one.update(f"step-{version + 1}", by=1)
    one.resume()
    loop.settle(one)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_ten_versions_are_each_shared_and_never_taken_for_one_another(loop: Loop, clear_cache: bool) -> None:
    assert train(loop, clear_cache=clear_cache) == [(0, 6 * BLOCK, 6 * BLOCK)] * VERSIONS


def test_the_toy_finds_a_version_that_is_ignored(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_versions, "version_weights", lambda run, base, version: f"{run}/any/1")
    with pytest.raises(AssertionError, match="told nonsense"):
        train(loop, clear_cache=True, versions=3)


def test_the_toy_finds_a_change_that_is_noticed_one_step_late(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []
    for name in ("before_rpc", "weight_version_set"):
        on_time = getattr(SchedulerSide, name)

        def put_off(side: Any, given: object, on_time: Any = on_time) -> None:
            late.append(lambda: on_time(side, given))

        monkeypatch.setattr(SchedulerSide, name, put_off)
    build = KVClusterConnector.build_connector_meta

    def after(connector: Any, output: Any) -> Any:
        made = build(connector, output)
        while late:
            late.pop(0)()
        return made

    monkeypatch.setattr(KVClusterConnector, "build_connector_meta", after)
    with pytest.raises(AssertionError, match="told nonsense"):
        first = loop.engine(enable_prefix_caching=False, at_once=True)
        loop.ask(first, prompt(6, 1, block_tokens=BLOCK, rest=2))
        first.update("step-1")
        loop.ask(first, prompt(6, 1, block_tokens=BLOCK, rest=2))


# ------------------------------------------------------------------------------------------ requests that run across


def test_a_request_that_runs_across_shares_what_it_computed_before_and_nothing_later(loop: Loop) -> None:
    first, second = (loop.engine(enable_prefix_caching=False) for _ in range(2))
    tokens = prompt(4, 1, block_tokens=BLOCK)
    first.add("across", tokens, max_tokens=5 * BLOCK)
    while first.engine.requests["across"].num_output_tokens < 2 * BLOCK:
        first.engine.step()
    first.engine.wait_idle()
    first.engine.flush()
    before = list(first.engine.requests["across"].all_token_ids)
    first.pause("keep", clear_cache=False)
    first.update("step-1")
    first.resume()
    loop.settle(first)
    first.engine.run("across")
    first.engine.drain()
    stored = (len(before) - 1) // BLOCK
    everything = list(first.engine.requests["across"].all_token_ids)
    assert len(everything) // BLOCK > stored
    assert loop.ask(second, [*everything, 1]) == stored * BLOCK, "under the version before"
    second.update("step-1")
    loop.settle(second)
    assert loop.ask(second, [*everything, 2]) == 0, "nothing under the version behind"


def test_a_version_is_used_once_no_request_holds_kv_of_earlier_weights(loop: Loop) -> None:
    one = loop.engine()
    registration = one.engine.side._registration
    one.add("across", prompt(4, 1, block_tokens=BLOCK), max_tokens=20)
    one.engine.step()
    one.pause("keep", clear_cache=False)
    one.update("step-1")
    one.resume()
    one.add("beside", prompt(4, 2, block_tokens=BLOCK))
    one.engine.step()
    assert registration.wanted == "" and registration.client is None
    one.engine.run()
    one.engine.drain()
    assert registration.wanted == "", "its own cache still has KV of both"
    one.add("next", prompt(4, 1, block_tokens=BLOCK, rest=1)[::-1])
    one.engine.step()
    assert registration.wanted.startswith("run:one/step-1/")
    one.engine.run("next")
    loop.settle(one)
    for loaded in (0, 0):  # and the toy judges what its own cache has
        assert loop.ask(one, prompt(4, 1, block_tokens=BLOCK, rest=1)) == loaded


def test_blocks_that_are_kept_for_stores_of_ended_requests_put_nothing_off(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loop.engine()
    tokens = prompt(6, 1, block_tokens=BLOCK, rest=1)
    with monkeypatch.context() as slow:
        slow.setattr(type(one.engine.ranks[0].side._stores), "reads", lambda stores, request: True)
        one.add("ended", tokens)
        one.engine.run("ended")
        one.engine.step()
        assert one.engine.side.keeps_blocks
        one.update("step-1")
        assert not stopped(one)
    loop.settle(one)
    assert loop.ask(one, tokens) == 0, "and the toy judges what its own cache has"


def test_aborted_requests_leave_nothing_behind(loop: Loop) -> None:
    one = loop.engine()
    tokens = prompt(6, 1, block_tokens=BLOCK, rest=1)
    one.add("aborted", tokens, max_tokens=20)
    one.engine.step()
    one.pause("abort")
    one.update("step-1")
    one.resume()
    loop.settle(one)
    assert loop.ask(one, tokens) == 0


def test_pictures_are_not_cached_in_a_run_as_they_may_be_encoded_with_earlier_weights(loop: Loop) -> None:
    one = loop.engine()
    one.engine.add("pictured", prompt(6, 1, block_tokens=BLOCK), pictures=[Picture("cat", 1, 4 * BLOCK, 2)])
    one.engine.on_step = lambda output: None
    one.engine.run("pictured")
    assert "pictured" not in one.engine.params, "it ran without the cluster"


# ------------------------------------------------------------------------------------------------- who may share


def test_runs_that_both_have_a_version_of_one_name_share_nothing(loop: Loop) -> None:
    one, same, other = loop.engine(), loop.engine(), loop.engine("run:other")
    tokens = prompt(6, 1, block_tokens=BLOCK, rest=1)
    for number, each in enumerate((one, same, other)):
        each.update("7", by=7 if each is not other else 70)
        loop.settle(each)
        assert loop.ask(each, tokens) == (0, 6 * BLOCK, 0)[number]


def test_engines_of_a_run_share_what_they_start_with_with_engines_of_that_checkpoint(loop: Loop) -> None:
    tokens = prompt(6, 1, block_tokens=BLOCK, rest=1)
    assert loop.ask(loop.engine(""), tokens) == 0
    assert loop.ask(loop.engine(), tokens) == 6 * BLOCK


def test_an_engine_that_starts_with_random_weights_caches_from_its_first_version_on(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = loop.engine(load_format="dummy", joined=False)
    tokens = prompt(6, 1, block_tokens=BLOCK, rest=1)
    one.add("before", tokens)
    one.engine.run("before")
    one.engine.drain()
    assert one.engine.side._registration.wanted == ""
    one.update("step-1")
    loop.settle(one)
    assert loop.ask(one, tokens) == 0
    assert loop.ask(one, [*tokens[:-1], 1]) in (0, 6 * BLOCK), "its own cache, or the cluster"


@pytest.mark.parametrize("same", [0, 1, 2])
def test_a_weights_id_is_equal_exactly_if_run_base_and_version_are(same: int) -> None:
    given = [["run:a", "sha256:1", "7"], ["run:a", "sha256:1", "7"]]
    assert version_weights(*given[0]) == version_weights(*given[1])
    given[1][same] += "x"
    assert version_weights(*given[0]) != version_weights(*given[1])


def test_texts_do_not_move_from_one_part_of_a_weights_id_to_the_next() -> None:
    assert version_weights("run:a", "b", "c7") != version_weights("run:a", "bc", "7")
    assert version_weights("run:a", "", "7/8").startswith("run:a/-/"), "it has two slashes whatever the version is"
    assert len(version_weights("run:" + "a" * 128, "x" * 999, "v" * VERSION_BYTES)) < 256


# --------------------------------------------------------------------------------------------- what is not provable


def stopped(one: Trained) -> bool:
    registration: Registration = one.engine.side._registration
    return registration.wanted == "" and registration.client is None


@pytest.mark.parametrize("method", ["update_weights", "reload_weights", "nudge", lambda model: None])
def test_a_call_to_the_workers_of_a_run_ends_sharing_until_a_version_is_set(loop: Loop, method: Any) -> None:
    one = loop.engine()
    one.core.collective_rpc(method)
    assert stopped(one)
    one.core.set_weight_version("step-1")
    assert not stopped(one)


@pytest.mark.parametrize("method", sorted(weight_versions._HARMLESS))
def test_calls_that_leave_the_weights_alone_change_nothing(loop: Loop, method: str) -> None:
    one = loop.engine()
    client = one.engine.client
    one.core.collective_rpc(method)
    assert one.engine.client is client


def test_an_update_without_a_run_makes_the_engine_private_though_it_was_not_reset(loop: Loop) -> None:
    one, other = loop.engine("sha256:1"), loop.engine("sha256:1")
    tokens = prompt(6, 1, block_tokens=BLOCK, rest=1)
    loop.ask(one, tokens)
    for each in (one, other):
        each.core.collective_rpc("nudge", kwargs={"by": 0})
        assert each.engine.client.spec.weights == "sha256:1", "only a name that says so is taken for a change"
    other.update("step-1")
    loop.settle(other)
    assert other.engine.client.spec.weights.startswith("private:")
    assert loop.ask(other, tokens) == 0
    assert other.engine.side._registration._ready


def test_a_reset_of_a_run_ends_sharing_and_the_same_version_resumes_it(loop: Loop) -> None:
    one = loop.engine()
    one.update("step-1")
    loop.settle(one)
    wanted = one.engine.side._registration.wanted
    one.pause("keep")
    assert stopped(one)
    one.core.set_weight_version("step-1")
    assert one.engine.side._registration.wanted == wanted, "nothing has changed the weights"
    client = one.engine.side._registration.client
    one.core.set_weight_version("step-1")
    assert one.engine.side._registration.client is client


def test_weights_that_changed_under_the_version_before_are_not_cached(loop: Loop) -> None:
    one = loop.engine()
    one.update("latest")
    loop.settle(one)
    one.update("latest")
    assert stopped(one)
    one.update("step-2")
    assert not stopped(one)


@pytest.mark.parametrize("version", ["", "x" * (VERSION_BYTES + 1), "é" * VERSION_BYTES, "x" * 1_000_000, 7, None])
def test_a_version_that_is_no_short_text_is_refused_and_told(loop: Loop, version: Any) -> None:
    one = loop.engine()
    logged: list[str] = []
    one.engine.side._versions._log = logged.append
    one.core.set_weight_version(version)
    assert stopped(one)
    assert len(logged) == 1 and len(logged[0]) < 300
    assert version_fault(version) in logged[0]


def test_a_text_that_is_no_unicode_is_a_version_too() -> None:
    assert version_fault("\udc80") == ""
    assert version_weights("run:a", "", "\udc80") != version_weights("run:a", "", "\udc81")


@pytest.mark.parametrize("name", ["run:", "run:a/b", "run:a b", "run:" + "a" * 129, "run:é"])
def test_a_run_is_named_by_a_short_plain_name(name: str) -> None:
    assert run_fault(name)
    with pytest.raises(ConfigError, match="must name a run"):
        parse_settings({"address": "host:1", "weights": name})


def test_a_cluster_without_room_for_a_namespace_is_asked_again(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    one = loop.engine()
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 0)

    def full(spec: Any) -> None:
        if limits.NAMESPACES_PER_TENANT == 0:
            raise LimitError("the limit of namespaces is reached; purge one")

    loop.bench.on_connect = full
    one.update("step-1")
    registration = one.engine.side._registration
    loop.bench.cluster.wait_until(lambda: "limit of namespaces" in registration.why)
    monkeypatch.undo()
    loop.bench.on_connect = lambda spec: None
    loop.settle(one)


# ------------------------------------------------------------------------------------------------ vLLM's own core


class Listener:
    def __init__(self) -> None:
        self.told: list[object] = []

    def before_rpc(self, method: object) -> None:
        self.told.append(method)

    def weight_version_set(self, version: object) -> None:
        self.told.append(version)


class Other:
    """A connector of another make, or of several."""

    def __init__(self, *connectors: object) -> None:
        self._connectors = connectors


def core_with(connector: object) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(connector=connector))


def test_the_core_tells_connectors_within_another_and_none_while_it_is_made() -> None:
    listener, inner = Listener(), Other()
    weight_versions.watch(inner, listener)
    for core in (core_with(inner), core_with(Other(Other(), inner)), core_with(Other()), core_with(None), Other()):
        weight_versions._each(core, lambda one: one.before_rpc("seen"))
    assert listener.told == ["seen", "seen"]


def test_an_engine_that_has_ended_is_told_nothing_and_not_kept() -> None:
    listener, inner = Listener(), Other()
    weight_versions.watch(inner, listener)
    del listener
    gc.collect()
    weight_versions._each(core_with(inner), lambda one: pytest.fail("it is gone"))
    del inner
    gc.collect()
    assert not any(isinstance(one, Other) for one in weight_versions._LISTENERS)


def test_the_core_keeps_the_signatures_by_which_vllm_converts_arguments() -> None:
    weight_versions._watch_cores()
    once = EngineCore.set_weight_version
    weight_versions._watch_cores()
    assert EngineCore.set_weight_version is once
    assert list(signature(EngineCore.set_weight_version).parameters) == ["self", "weight_version"]
    assert list(signature(EngineCore.collective_rpc).parameters) == ["self", "method", "timeout", "args", "kwargs"]
