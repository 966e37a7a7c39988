"""What a tenant can learn of another's blocks by asking for them in its own namespace: nothing.

The names of blocks are no secret: they follow from a spec, a tenant's name and the tokens. So the other tenant asks, in
a drawn order, for blocks that we store and for blocks that do not exist. The answers must be the same, and so must the
number of lines of Python that each takes. That number does not depend on the machine, so one difference is enough.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvcluster.core.coordinator.eviction_history import EvictionHistory
from kvcluster.core.ids import HASH_BYTES, BlockHash, NamespaceId
from kvcluster.core.messages import Attach, Attached, Explain, PrepareLoad, Reply
from kvcluster.core.miss import Miss, MissReason
from kvcluster.replay.core_stepper import build_request
from tests.core.counted_lines import counted
from tests.core.lone_coordinator import BLOCKS, LoneCoordinator
from tests.core.samples import SECOND, SPEC, THEIRS, attempt, chain, gone, pages, whole

SAMPLES = 1_000
"""Of each kind of question, for each side."""

KINDS: dict[str, Callable[[int, BlockHash], Any]] = {
    "lookup": lambda number, block: PrepareLoad(attempt(number, 9), (block,), whole(), hold=False),
    "load": lambda number, block: PrepareLoad(attempt(number, 9), (block,), whole(), hold=True),
    "explain": lambda number, block: Explain((block,), whole()),
}


def cluster() -> LoneCoordinator:
    """Of our blocks some are cached, some promised, some evicted and some being written. The others know the spec."""
    coordinator, voice = LoneCoordinator.serving(*pages(BLOCKS))
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    coordinator.load(attempt(1), BLOCKS[:4])
    voice.report(*map(gone, BLOCKS[:7:-1]))
    coordinator.now += SECOND
    coordinator.store(attempt(2), chain(4, seed=5))
    return coordinator


def work(coordinator: LoneCoordinator, question: Any) -> tuple[Reply, int]:
    """The answer to the other tenant's question, and the lines that were executed for it."""
    build = build_request(question, THEIRS, SPEC.namespace(THEIRS), operator=False)
    return counted(lambda: coordinator.ask_now(build))


def difference(kind: str) -> bool:
    """Whether the other tenant gets another answer, or costs other work, for our blocks than for ones that do not
    exist."""
    coordinator, draw = cluster(), random.Random(kind)
    work(coordinator, KINDS[kind](0, BlockHash(bytes(HASH_BYTES))))  # what is made once is made now
    known = [*BLOCKS, *chain(4, seed=5)]
    asked = [(block, True) for block in draw.choices(known, k=SAMPLES)]
    asked += [(BlockHash(draw.randbytes(HASH_BYTES)), False) for _ in range(SAMPLES)]
    draw.shuffle(asked)
    seen: dict[bool, Counter[tuple[Reply, int]]] = {True: Counter(), False: Counter()}
    for number, (block, ours) in enumerate(asked, 1):
        seen[ours][work(coordinator, KINDS[kind](number, block))] += 1
    return set(seen[True]) != set(seen[False])


@pytest.mark.parametrize("kind", KINDS)
def test_another_tenant_s_block_cannot_be_told_from_one_that_does_not_exist(kind: str) -> None:
    assert not difference(kind)


def test_a_leak_that_is_planted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was evicted is remembered without its namespace, as it once was."""
    evicted: dict[BlockHash, None] = {}
    add = EvictionHistory.add

    def remember(self: EvictionHistory, space: NamespaceId, block: BlockHash, now: int, why: MissReason) -> None:
        evicted[block] = None
        add(self, space, block, now, why)

    def tell(self: EvictionHistory, space: NamespaceId, block: BlockHash, now: int) -> Miss | None:
        return Miss(MissReason.EVICTED) if block in evicted else None

    monkeypatch.setattr(EvictionHistory, "add", remember)
    monkeypatch.setattr(EvictionHistory, "why", tell)
    assert all(difference(kind) for kind in KINDS)


def test_a_leak_in_the_work_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same, and takes one line more if any tenant has lost the block."""
    evicted: dict[BlockHash, None] = {}
    asked: list[BlockHash] = []
    add, why = EvictionHistory.add, EvictionHistory.why

    def remember(self: EvictionHistory, space: NamespaceId, block: BlockHash, now: int, how: MissReason) -> None:
        evicted[block] = None
        add(self, space, block, now, how)

    def look(self: EvictionHistory, space: NamespaceId, block: BlockHash, now: int) -> Miss | None:
        if block in evicted:
            asked.append(block)
        return why(self, space, block, now)

    monkeypatch.setattr(EvictionHistory, "add", remember)
    monkeypatch.setattr(EvictionHistory, "why", look)
    assert all(difference(kind) for kind in KINDS)
