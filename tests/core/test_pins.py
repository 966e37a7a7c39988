"""The pins of users: what tenants are charged for them, and that no step looks at all of them."""

from __future__ import annotations

import random

from kvcluster.core.coordinator.pins import PinnedBlocks, PinTable
from kvcluster.core.ids import BlockHash, Tenant

SECOND = 1_000_000_000
BLOCKS = [BlockHash(bytes([at])) for at in range(12)]


def table(most: int, share: float = 0.5) -> PinTable:
    made = PinTable(share)
    made.charged.most = most
    return made


def test_a_block_that_is_pinned_again_is_charged_once() -> None:
    pins = table(100)
    some = PinnedBlocks(pins, Tenant("one"))
    assert some.pin(BLOCKS[0], SECOND, 30) and some.pin(BLOCKS[0], 9 * SECOND, 40)
    assert (pins.charged.held(Tenant("one")), some.until(BLOCKS[0]), len(some)) == (40, 9 * SECOND, 1)
    assert not some.pin(BLOCKS[1], SECOND, 20), "beyond half of all"
    assert some.until(BLOCKS[1]) == 0
    assert some.discard(BLOCKS[0]) and not some.discard(BLOCKS[0])
    assert pins.charged.total == 0


def test_a_block_that_has_grown_beyond_the_share_keeps_the_pin_that_it_has() -> None:
    pins = table(100)
    some = PinnedBlocks(pins, Tenant("one"))
    assert some.pin(BLOCKS[0], SECOND, 30)
    assert not some.pin(BLOCKS[0], 2 * SECOND, 60)
    assert some.until(BLOCKS[0]) == SECOND and pins.charged.total == 30


def test_ended_and_purged_pins_are_forgotten_in_slices_and_count_at_once_for_nothing() -> None:
    pins = table(1_000)
    some, others = PinnedBlocks(pins, Tenant("one")), PinnedBlocks(pins, Tenant("two"))
    for block in BLOCKS:
        assert some.pin(block, SECOND, 1) and others.pin(block, 5 * SECOND, 1)
    assert pins.count(SECOND - 1) == 24 and pins.count(2 * SECOND) == 12
    pins.purge(others)
    assert pins.count(2 * SECOND) == 0
    for left in (19, 14, 9, 4, 0, 0):
        pins.forget_ended(2 * SECOND, 5)
        assert pins.charged.total == left
        pins.check()


def test_it_agrees_with_a_dict_over_random_pins() -> None:
    """Against a plain dict of ends and bytes."""
    for seed in range(200):
        draw, pins, now = random.Random(seed), table(60), 0
        spaces = [PinnedBlocks(pins, Tenant(tenant)) for tenant in ("one", "one", "two")]
        expected: dict[tuple[int, BlockHash], tuple[int, int]] = {}
        for _ in range(60):
            which, block = draw.randrange(3), draw.choice(BLOCKS)
            act = draw.random()
            if act < 0.5:
                until, nbytes = now + draw.randrange(1, 8 * SECOND), draw.randrange(1, 6)
                if spaces[which].pin(block, until, nbytes):
                    expected[which, block] = until, nbytes
            elif act < 0.7:
                assert spaces[which].discard(block) == (expected.pop((which, block), None) is not None)
            elif act < 0.75:
                pins.purge(spaces[which])
                spaces[which] = PinnedBlocks(pins, Tenant("one" if which < 2 else "two"))
                expected = {name: pin for name, pin in expected.items() if name[0] != which}
            else:
                now += draw.randrange(2 * SECOND)
                pins.forget_ended(now, 100)
                for name in [name for name, (until, _) in expected.items() if until <= now]:
                    expected.pop(name)
            pins.check()
            assert {(at, one): space.until(one) for at, space in enumerate(spaces) for one in space} == {
                name: until for name, (until, _) in expected.items()
            }
            pins.forget_ended(0, 100)  # what was purged
            assert pins.charged.total == sum(nbytes for _, nbytes in expected.values())
