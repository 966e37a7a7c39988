"""The registry of live engines, and the weights under which those that have withdrawn are to cache."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.coordinator.engine_registry import RECORD_BYTES, EngineRegistry
from kvcluster.core.ids import Caller, CallId, Tenant
from kvcluster.core.messages import EngineInfo, Engines, GetEngines, Refused, Registered, RegisterEngine, SetWeights
from kvcluster.errors import LimitError
from kvcluster.replay.core_stepper import build_request
from kvcluster.wire.methods import COORDINATOR
from tests.core.lone_coordinator import LoneCoordinator
from tests.core.samples import OURS, SECOND, THEIRS, ours

ONE = EngineInfo("1", "host:1", "m", "sha256:old", (("dtype", "float32"),))
OTHER = replace(ONE, engine="2", name="host:2")


def private(info: EngineInfo, withdrawn: int = 1, *, ready: bool = True) -> EngineInfo:
    return replace(info, weights=f"private:{withdrawn}", private=True, withdrawn=withdrawn, ready=ready)


def told(coordinator: LoneCoordinator, info: EngineInfo) -> str:
    return coordinator.ask(Registered, ours(RegisterEngine(info))).weights


def set_weights(coordinator: LoneCoordinator, weights: str, *, model: str = "m", engine: str = "") -> list[str]:
    answer = coordinator.ask(Engines, ours(SetWeights(model, weights, engine)))
    return [info.engine for info, _ in answer.known]


def listed(coordinator: LoneCoordinator) -> list[str]:
    return [info.engine for info, _ in coordinator.ask(Engines, ours(GetEngines())).known]


def test_an_engine_is_listed_until_it_is_silent_for_too_long() -> None:
    coordinator = LoneCoordinator(expected=1)
    ttl_ns = coordinator.ask(Registered, ours(RegisterEngine(ONE))).ttl_ns
    told(coordinator, OTHER)
    coordinator.now += ttl_ns
    told(coordinator, OTHER)
    assert listed(coordinator) == ["1", "2"]
    coordinator.now += 1
    assert listed(coordinator) == ["2"]


def test_engines_of_other_tenants_are_neither_listed_nor_told() -> None:
    coordinator = LoneCoordinator(expected=1)
    coordinator.ask(Registered, build_request(RegisterEngine(private(ONE)), THEIRS))
    assert listed(coordinator) == []
    assert set_weights(coordinator, "sha256:new") == []
    assert coordinator.ask(Registered, build_request(RegisterEngine(private(ONE)), THEIRS)).weights == ""


def test_weights_are_for_engines_that_are_private_and_for_no_others() -> None:
    coordinator = LoneCoordinator(expected=1)
    for info in (private(ONE), OTHER, replace(private(ONE), engine="3", model="another")):
        told(coordinator, info)
    assert set_weights(coordinator, "sha256:new") == ["1"]
    assert told(coordinator, private(ONE)) == "sha256:new"
    assert told(coordinator, OTHER) == ""
    shared = replace(private(ONE), private=False, weights="sha256:new")
    assert told(coordinator, shared) == "", "it uses them already"


def test_an_order_does_not_stand_for_weights_that_change_later() -> None:
    coordinator = LoneCoordinator(expected=1)
    told(coordinator, private(ONE))
    assert set_weights(coordinator, "sha256:new") == ["1"]
    assert told(coordinator, private(ONE, withdrawn=2)) == "", "its weights are others by now"
    assert told(coordinator, private(OTHER)) == "", "it was not private when this was said"
    assert set_weights(coordinator, "sha256:newer") == ["1", "2"]
    assert told(coordinator, private(ONE, withdrawn=2)) == "sha256:newer"


def test_an_engine_that_still_holds_kv_of_the_weights_before_is_not_told() -> None:
    coordinator = LoneCoordinator(expected=1)
    told(coordinator, private(ONE, ready=False))
    assert set_weights(coordinator, "sha256:new") == []
    assert told(coordinator, private(ONE, withdrawn=2)) == ""
    assert set_weights(coordinator, "sha256:new") == ["1"]


def test_an_engine_whose_credential_is_read_only_changes_nothing_of_another() -> None:
    coordinator = LoneCoordinator(expected=1)

    def told_read_only(info: EngineInfo) -> str:
        asked = ours(RegisterEngine(info))
        return coordinator.ask(Registered, lambda call: replace(asked(call), read_only=True)).weights

    told(coordinator, private(ONE))
    told_read_only(private(ONE, withdrawn=2))
    assert set_weights(coordinator, "sha256:new") == ["1", "1"], "each is ordered for what it is itself"
    assert told(coordinator, private(ONE, withdrawn=2)) == "", "its weights are others by now"
    assert told_read_only(private(ONE, withdrawn=2)) == "sha256:new"
    told_read_only(replace(ONE, name="another"))
    assert sorted(info.name for info, _ in coordinator.ask(Engines, ours(GetEngines())).known) == ["another", "host:1"]


def test_engines_that_are_read_only_take_no_place_of_others_within_a_quota() -> None:
    registry = EngineRegistry(10, lambda tenant: 1)
    assert [registry.register(OURS, info, 0, read_only=True) for info in (ONE, OTHER)] == ["", None]
    assert [registry.register(OURS, info, 0) for info in (ONE, OTHER)] == ["", None]


@pytest.mark.parametrize("engine", ["2", "host:2"])
def test_one_engine_may_be_meant_by_id_or_name(engine: str) -> None:
    coordinator = LoneCoordinator(expected=1)
    told(coordinator, private(ONE))
    told(coordinator, private(OTHER))
    assert set_weights(coordinator, "sha256:new", engine=engine) == ["2"]


def test_as_many_are_known_as_may_be_and_one_that_is_gone_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENGINES_BYTES", 2 * (RECORD_BYTES + 100))
    coordinator = LoneCoordinator(expected=1)
    told(coordinator, ONE)
    assert "this one is still served" in coordinator.ask(Refused, ours(RegisterEngine(OTHER))).detail
    coordinator.now += 60 * SECOND
    assert told(coordinator, OTHER) == ""


def test_a_list_is_bounded_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LISTED_ENGINES", 2)
    book = EngineRegistry(10)
    for name in "cab":
        book.register(OURS, replace(ONE, engine=name, name=name), 1)
    assert [info.name for info, _ in book.living(OURS, 4)] == ["a", "b"]
    assert [ago for _, ago in book.living(OURS, 4)] == [3, 3]


WIDE = "\U0001f40e"
"""Four bytes a character; one of them makes each character of a Python text take four."""


@contextmanager
def memory() -> Iterator[list[int]]:
    """Appends the bytes that are kept of what the body has allocated."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield found
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


def flood(registry: EngineRegistry, text: str, tenant: Tenant = OURS) -> int:
    """Registers engines with these texts until one is refused, and returns how many were not."""
    for number in range(100_000):
        facts = tuple((str(fact), text) for fact in range(limits.ENGINE_FACTS))
        if registry.register(tenant, EngineInfo(f"{text}{number}", text, text, text, facts), 0) is None:
            return number
    raise AssertionError("100,000 engines of one tenant are known")


@pytest.mark.parametrize("text", ["", 100 * "a", 7 * WIDE, WIDE + 200 * "a"])
def test_engines_of_a_tenant_take_no_more_memory_than_its_share(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(limits, "ENGINES_BYTES", 2**21)
    registry = EngineRegistry(10)
    with memory() as kept:
        flood(registry, text)
    assert 0.4 * registry.nbytes <= kept[0] <= registry.nbytes <= 2**20


@pytest.mark.parametrize("text", ["", WIDE + 200 * "a"])
def test_engines_of_as_many_runs_take_no_more_memory_either(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(limits, "ENGINES_BYTES", 2**21)
    registry, number = EngineRegistry(10), 0
    with memory() as kept:
        while registry.register(OURS, run_engine(text, number), 0) is not None:
            number += 1
    assert number > 100 and len(registry.versions) == number
    assert 0.3 * registry.nbytes <= kept[0] <= registry.nbytes <= 2**20


def run_engine(text: str, number: int) -> EngineInfo:
    """An engine of a run of its own."""
    return EngineInfo(str(number), "", f"{text}{number}", f"run:{text}{number}/1{text}")


def test_engines_of_one_tenant_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENGINES_BYTES", 2**18)
    registry = EngineRegistry(10)
    ours = flood(registry, "a")
    theirs = flood(registry, "a", THEIRS)
    assert ours > 2 and theirs == pytest.approx(ours / 2, abs=1)


def test_what_an_engine_says_later_is_charged_in_place_of_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENGINES_BYTES", 2 * (RECORD_BYTES + 200))
    registry = EngineRegistry(10)
    for _ in range(5):
        assert registry.register(OURS, replace(ONE, facts=(("a", 100 * "b"),)), 0) == ""
        assert registry.register(OURS, ONE, 0) == ""
    assert registry.register(OURS, replace(ONE, facts=(("a", 300 * "b"),)), 1) is None
    assert registry.living(OURS, 1) == ((ONE, 1),), "what it said before is still known"
    assert registry.register(OURS, OTHER, 12) == "" and registry.nbytes < RECORD_BYTES + 100


def test_an_engine_with_more_to_say_is_refused_before_it_is_registered() -> None:
    method = COORDINATOR["RegisterEngine"]
    encoded = method.encode_request(RegisterEngine(replace(ONE, facts=(("a", 1_024 * WIDE),) * 2)), None)
    with pytest.raises(LimitError, match="bytes of an engine's texts"):
        method.decode_request(encoded, CallId(1), Caller(OURS))


def test_texts_are_listed_as_they_were_registered() -> None:
    said = EngineInfo("id\0", WIDE, "", "é", (("", "\0"), ("\x7f", "\n")), ready=False, protocol=3)
    registry = EngineRegistry(10)
    registry.register(OURS, said, 0)
    assert registry.living(OURS, 0) == ((said, 0),)


def test_all_engines_that_are_meant_are_ordered_though_not_all_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LISTED_ENGINES", 2)
    registry = EngineRegistry(10)
    names = [str(number) for number in range(5)]
    for name in names:
        registry.register(OURS, private(replace(ONE, engine=name)), 0)
    assert len(registry.set_weights(OURS, "m", "sha256:new", "", 0)) == 2
    assert {registry.register(OURS, private(replace(ONE, engine=name)), 0) for name in names} == {"sha256:new"}
