from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.coordinator.eviction_history import EvictionHistory
from kvcluster.core.ids import NamespaceId
from kvcluster.core.miss import Miss, MissReason
from tests.core.build import SECOND_NS, block

SPACE, OTHER = NamespaceId(b"n" * 32), NamespaceId(b"o" * 32)
LOSSES = (MissReason.EVICTED, MissReason.SHARD_LOST, MissReason.CORRUPT)


def test_what_was_never_lost_has_no_reason() -> None:
    assert EvictionHistory().why(SPACE, block(1), 5) is None


def test_a_lost_block_is_explained_by_how_and_how_long_ago_in_whole_seconds() -> None:
    memory = EvictionHistory()
    memory.add(SPACE, block(1), 10 * SECOND_NS, MissReason.EVICTED)
    memory.add(SPACE, block(2), 11 * SECOND_NS, MissReason.SHARD_LOST)
    now = 52 * SECOND_NS - 1
    assert memory.why(SPACE, block(1), now) == Miss(MissReason.EVICTED, "41 s ago")
    assert memory.why(SPACE, block(2), now) == Miss(MissReason.SHARD_LOST, "40 s ago")


def test_a_block_that_is_cached_again_was_not_lost() -> None:
    memory = EvictionHistory()
    memory.add(SPACE, block(1), 0, MissReason.EVICTED)
    memory.forget(SPACE, block(1))
    memory.forget(SPACE, block(2))
    assert memory.why(SPACE, block(1), 0) is None


def test_a_loss_explains_no_block_of_another_namespace() -> None:
    memory = EvictionHistory()
    memory.add(SPACE, block(1), 0, MissReason.EVICTED)
    assert memory.why(OTHER, block(1), 0) is None
    memory.forget(OTHER, block(1))
    assert memory.why(SPACE, block(1), 0) is not None


def test_its_memory_is_bounded_by_the_limits_and_does_not_grow() -> None:
    assert limits.EVICTED_FINGERPRINTS >= limits.BLOCKS_PER_CALL, "a call's blocks, evicted together, are explained"
    memory = EvictionHistory(capacity=100)
    for number in range(10_000):
        memory.add(SPACE, block(number), number * SECOND_NS, MissReason.EVICTED)
    told = [number for number in range(10_000) if memory.why(SPACE, block(number), 0)]
    assert 50 < len(told) <= 100, "each cell tells of the last that was lost to it"


@given(history=st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.sampled_from(LOSSES))), max_size=40))
def test_where_none_shares_its_cell_every_loss_is_told(history: list[tuple[int, MissReason | None]]) -> None:
    memory = EvictionHistory()
    lost: dict[int, tuple[int, MissReason]] = {}
    for now, (number, reason) in enumerate(history):
        lost.pop(number, None)
        if reason is None:
            memory.forget(SPACE, block(number))
        else:
            memory.add(SPACE, block(number), now * SECOND_NS, reason)
            lost[number] = now, reason
    now = len(history)
    told = {n: Miss(reason, f"{now - at} s ago") for n, (at, reason) in lost.items()}
    assert {n: miss for n in range(7) if (miss := memory.why(SPACE, block(n), now * SECOND_NS))} == told


def test_what_is_lost_later_takes_the_cell_of_what_was_lost_before() -> None:
    memory = EvictionHistory(capacity=1)
    memory.add(SPACE, block(1), 0, MissReason.EVICTED)
    memory.add(SPACE, block(2), 0, MissReason.CORRUPT)
    memory.forget(SPACE, block(1))
    assert memory.why(SPACE, block(1), 0) is None
    assert memory.why(SPACE, block(2), 0) == Miss(MissReason.CORRUPT, "0 s ago")
