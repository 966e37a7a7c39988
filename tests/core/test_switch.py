"""The operator's switch: while it is off nothing is granted and nothing is lost; once it is on, all is as before."""

from __future__ import annotations

import pytest

from kvcluster.core.ids import CallId
from kvcluster.core.messages import Done, KeepSettings, Refused, SetPolicy
from kvcluster.core.miss import MissReason
from tests.core.lone_coordinator import BLOCKS, C, LoneCoordinator, why
from tests.core.samples import attempt, ours, pages


def turn(coordinator: LoneCoordinator, cache: str) -> None:
    assert coordinator.ask(Done, ours(SetPolicy((("cache", cache),)))).ok


def test_off_grants_no_load_and_no_store_and_keeps_what_is_there() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:2]))
    assert coordinator.load(attempt(1), BLOCKS[:2]).blocks == 2
    turn(coordinator, "off")
    grant = coordinator.load(attempt(2), BLOCKS[:2])
    assert (grant.blocks, why(grant)) == (0, MissReason.OFF)
    [run] = coordinator.store(attempt(3), [C], first=2, parent=BLOCKS[1], run=BLOCKS[0])
    assert run.miss is not None and run.miss.reason is MissReason.OFF
    assert "kvcluster on" in run.miss.detail

    turn(coordinator, "on")
    assert coordinator.load(attempt(4), BLOCKS[:2]).blocks == 2


@pytest.mark.parametrize("turned", [False, True], ids=["on", "off"])
def test_an_attempt_that_was_answered_before_is_refused_while_it_is_off(turned: bool) -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS[:2]))
    coordinator.load(attempt(1), BLOCKS[:2])
    coordinator.store(attempt(2), [C], first=2, parent=BLOCKS[1], run=BLOCKS[0])
    if turned:
        turn(coordinator, "off")
    assert coordinator.load(attempt(1), BLOCKS[:2]).blocks == (0 if turned else 2)
    [run] = coordinator.store(attempt(2), [C], first=2, parent=BLOCKS[1], run=BLOCKS[0])
    assert (run.shard is None) == turned


def test_status_says_so_and_it_is_kept_for_the_next_coordinator() -> None:
    coordinator, _ = LoneCoordinator.serving()
    assert dict(coordinator.status().policy)["cache"] == "on"
    effects = coordinator.step(ours(SetPolicy((("cache", "off"), ("host.codec", "q4"))))(CallId(900)))
    [kept] = [effect for effect in effects if isinstance(effect, KeepSettings)]
    assert effects.index(kept) == 0, "before it is answered"
    assert kept.settings == coordinator.status().policy

    successor, _ = LoneCoordinator.serving()
    assert successor.core.admin_handler.apply_policy(kept.settings) is None
    assert successor.status().policy == kept.settings
    assert why(successor.load(attempt(1), BLOCKS[:1])) is MissReason.OFF


@pytest.mark.parametrize("settings", [(("cache", "maybe"),), (("cache", "off"), ("host.codec", "q5"))])
def test_what_is_refused_changes_nothing(settings: tuple[tuple[str, str], ...]) -> None:
    coordinator, _ = LoneCoordinator.serving()
    before = coordinator.status().policy
    assert coordinator.ask(Refused, ours(SetPolicy(settings))).detail
    assert coordinator.status().policy == before
