"""What the coordinator lists as pinned, to whom, and how much of it in one answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcluster.core import limits
from kvcluster.core.messages import (
    Attach,
    Attached,
    BlocksPinned,
    GetPins,
    PinBlocks,
    PinList,
    PinnedRun,
    Purge,
    Purged,
)
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_coordinator import BLOCKS, A, B, C, D, LoneCoordinator, pin, unpin
from tests.core.pulling import others
from tests.core.samples import OURS, PAGE, SECOND, SPEC, THEIRS, chain, gone, ours, page, pages, root


def listed(coordinator: LoneCoordinator, question: GetPins | None = None, *, operator: bool = False) -> PinList:
    return coordinator.ask(PinList, build_request(question or GetPins(), OURS, operator=operator))


def run(first: int, *blocks: bytes, nbytes: int = PAGE, left_ns: int = 60 * SECOND) -> PinnedRun:
    before = BLOCKS[first - 1] if first else root()
    return PinnedRun(OURS, SPEC, before, first, blocks, nbytes, left_ns)  # type: ignore[arg-type]


def test_blocks_that_are_pinned_together_are_one_run() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    assert listed(coordinator) == PinList(())
    assert pin(coordinator, [A, B, C], ttl_ns=60 * SECOND) == 3
    coordinator.now += SECOND
    assert listed(coordinator) == PinList((run(0, A, B, C, left_ns=59 * SECOND),))


def test_a_run_ends_where_another_pin_or_other_bytes_begin_and_where_a_block_is_lost_or_unpinned() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS))
    pin(coordinator, BLOCKS[:8], ttl_ns=60 * SECOND)
    pin(coordinator, [A], ttl_ns=90 * SECOND)
    [other] = others(coordinator, "b")
    other.report(page(C, parent=B, depth=2))  # a second copy
    voice.report(gone(BLOCKS[4]))
    unpin(coordinator, [BLOCKS[6]])
    assert listed(coordinator).runs == (
        run(0, A, left_ns=90 * SECOND),
        run(1, B),
        run(2, C, nbytes=2 * PAGE),
        run(3, D),
        run(5, BLOCKS[5]),
        run(7, BLOCKS[7]),
    )


def test_a_pin_that_has_ended_or_was_purged_is_not_listed() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    pin(coordinator, [A], ttl_ns=SECOND)
    pin(coordinator, [B], ttl_ns=9 * SECOND)
    coordinator.now += SECOND
    assert listed(coordinator).runs == (run(1, B, left_ns=8 * SECOND),)
    coordinator.ask(Purged, ours(Purge()))
    assert listed(coordinator) == PinList(())


def test_a_tenant_sees_its_own_pins_and_an_operator_all() -> None:
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS))
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    [first, *_] = chain(1, tenant=THEIRS)
    space = SPEC.namespace(THEIRS)
    voice.report(page(first)._replace(namespace=space, parent=root(tenant=THEIRS)))
    coordinator.ask(BlocksPinned, build_request(PinBlocks((first,), SECOND), THEIRS, space))
    pin(coordinator, [A])
    assert [one.tenant for one in listed(coordinator).runs] == [OURS]
    assert [(one.tenant, one.blocks) for one in listed(coordinator, operator=True).runs] == [
        (OURS, (A,)),
        (THEIRS, (first,)),
    ]


def test_pins_of_one_model_can_be_asked_for() -> None:
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    other = replace(SPEC, model="other")
    coordinator.ask(Attached, ours(Attach(other)))
    assert listed(coordinator, GetPins(model="other")) == PinList(())
    pin(coordinator, [A])
    assert listed(coordinator, GetPins(model="other")) == PinList(())
    assert listed(coordinator, GetPins(model="m")).runs == (run(0, A),)


def test_an_answer_is_bounded_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCKS_PER_CALL", 3)
    coordinator, _ = LoneCoordinator.serving(*pages(BLOCKS))
    pin(coordinator, BLOCKS[:8])
    first = listed(coordinator)
    assert (first.next, first.more, [len(one.blocks) for one in first.runs]) == (3, 5, [3])
    second = listed(coordinator, GetPins(skip=first.next))
    third = listed(coordinator, GetPins(skip=second.next))
    assert (second.next, second.more, third.next, third.more) == (6, 2, 0, 0)
    assert [block for each in (first, second, third) for one in each.runs for block in one.blocks] == [*BLOCKS[:8]]
    assert listed(coordinator, GetPins(skip=2**62)) == PinList((), 0, 0), "pins have ended meanwhile"


def test_an_answer_names_a_bounded_number_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LISTED_NAMESPACES", 2)
    coordinator, voice = LoneCoordinator.serving()
    for model in "abc":
        spec = replace(SPEC, model=model)
        coordinator.ask(Attached, ours(Attach(spec)))
        [block] = chain(1, spec=spec)
        voice.report(page(block, spec=spec, parent=root(spec)))
        coordinator.ask(BlocksPinned, ours(PinBlocks((block,), SECOND), spec.namespace(OURS)))
    first = listed(coordinator)
    second = listed(coordinator, GetPins(skip=first.next))
    assert [[one.spec.model for one in each.runs] for each in (first, second)] == [["a", "b"], ["c"]]
    assert (first.next, first.more, second.next, second.more) == (2, 1, 0, 0)
