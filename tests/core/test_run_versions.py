"""Superseded versions of a training run's weights: which they are, and that their blocks are evicted first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core.coordinator.engine_registry import EngineRegistry
from kvcluster.core.coordinator.run_versions import RunVersions
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Attach, Attached, EngineInfo, Registered, RegisterEngine
from kvcluster.core.spec import KVSpec, run_of
from tests.core.lone_coordinator import LoneCoordinator, carry_out
from tests.core.samples import OURS, SPEC, THEIRS, attempt, chain, ours, pages
from tests.core.samples import SECOND as SECOND_NS

FIRST, SECOND, THIRD = (f"run:one/{number}/abc" for number in (1, 2, 3))
ENGINE = EngineInfo("1", "host:1", SPEC.model, FIRST)


def spec(weights: str) -> KVSpec:
    return replace(SPEC, weights=weights)


def superseded(versions: RunVersions) -> list[str]:
    return [weights for weights in (FIRST, SECOND, THIRD) if versions.superseded(OURS, spec(weights))]


@pytest.mark.parametrize(
    ("weights", "run"),
    [(FIRST, "run:one"), ("run:one", ""), ("run:one/", ""), ("sha256:1/2", ""), ("private:run:one/1", "")],
)
def test_versions_of_a_run_are_told_from_other_weights(weights: str, run: str) -> None:
    assert run_of(weights) == run


def test_a_version_is_superseded_once_no_engine_uses_it_and_another_is_used() -> None:
    versions = RunVersions()
    assert superseded(versions) == [], "no engine of the run is known"
    for weights in (FIRST, FIRST, SECOND):
        versions.add(OURS, SPEC.model, weights)
    assert superseded(versions) == [THIRD]
    versions.remove(OURS, SPEC.model, FIRST)
    assert superseded(versions) == [THIRD], "one engine still uses the first"
    versions.remove(OURS, SPEC.model, FIRST)
    assert superseded(versions) == [FIRST, THIRD]
    versions.remove(OURS, SPEC.model, SECOND)
    assert superseded(versions) == [] and not len(versions), "all are silent"


def test_neither_another_run_nor_model_nor_tenant_supersedes_it() -> None:
    versions = RunVersions()
    versions.add(OURS, SPEC.model, "run:other/9/abc")
    versions.add(OURS, "another", SECOND)
    versions.add(THEIRS, SPEC.model, SECOND)
    versions.add(OURS, SPEC.model, "sha256:2")
    assert superseded(versions) == []
    assert not versions.superseded(OURS, spec("sha256:1"))


def test_a_change_is_reported_once() -> None:
    versions = RunVersions()
    assert not versions.take_changed()
    versions.add(OURS, "m", FIRST)
    assert versions.take_changed() and not versions.take_changed()
    versions.add(OURS, "m", FIRST)
    versions.remove(OURS, "m", FIRST)
    assert not versions.take_changed(), "the same versions are in use"
    versions.remove(OURS, "m", FIRST)
    assert versions.take_changed()


def test_engines_that_change_version_or_fall_silent_are_counted_once() -> None:
    registry = EngineRegistry(10)
    for now, weights in enumerate((FIRST, FIRST, SECOND)):
        registry.register(OURS, replace(ENGINE, weights=weights), now)
    assert superseded(registry.versions) == [FIRST, THIRD]
    registry.register(OURS, replace(ENGINE, engine="2", weights="sha256:1"), 20)
    assert superseded(registry.versions) == [] and not len(registry.versions)


def test_an_engine_whose_credential_is_read_only_supersedes_nothing() -> None:
    registry = EngineRegistry(10)
    registry.register(OURS, ENGINE, 0)
    registry.register(OURS, replace(ENGINE, weights=SECOND), 1, read_only=True)
    assert superseded(registry.versions) == [SECOND, THIRD]
    registry.register(OURS, replace(ENGINE, engine="2", weights="sha256:1"), 20)
    assert not len(registry.versions)


def test_the_coordinator_asks_what_engines_have_registered() -> None:
    coordinator = LoneCoordinator(expected=1)
    state = coordinator.core.state
    first, second = (state.namespaces.attach(OURS, spec(weights)) for weights in (FIRST, SECOND))
    assert first is not None and second is not None
    for weights, expected in ((FIRST, (False, True)), (SECOND, (True, False)), (FIRST, (False, True))):
        coordinator.ask(Registered, ours(RegisterEngine(replace(ENGINE, weights=weights))))
        assert (state.superseded(first.id), state.superseded(second.id)) == expected
    assert not state.superseded(NamespaceId(bytes(32)))


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_blocks_of_a_superseded_version_are_evicted_first_however_recent_they_are(policy: str) -> None:
    specs = [spec(weights) for weights in (FIRST, SECOND)]
    chains = [chain(8, spec=one) for one in specs]
    coordinator = LoneCoordinator(
        expected=1, spec=specs[0], low_free=0.1, high_free=0.3, hold_ms=0, eviction_policy=policy
    )
    for one in specs:
        coordinator.ask(Attached, ours(Attach(one)))
    voice = coordinator.voice("a", capacity_pages=20)
    voice.join(*(page for one, blocks in zip(specs, chains, strict=True) for page in pages(blocks, spec=one)))
    coordinator.now += SECOND_NS
    coordinator.load(attempt(1), chains[0])  # the first version's are the most recently used

    def victims(weights: str) -> set[NamespaceId]:
        coordinator.ask(Registered, ours(RegisterEngine(replace(ENGINE, weights=weights))))
        voice.free(1)
        heard = voice.report()
        assert heard.evict is not None
        taken = {space for space, _ in heard.evict.blocks}
        voice.free(20)
        carry_out(voice, heard)
        return taken

    spaces = [one.namespace(OURS) for one in specs]
    assert victims(FIRST) == {spaces[1]}
    assert victims(SECOND) == {spaces[0]}, "its last engine has left it"
