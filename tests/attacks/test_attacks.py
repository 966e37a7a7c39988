"""The attacks in their short form: each does something, and none of them costs the honest tenant a block. How fast they
are answered is measured by `python -m tests.attacks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.__main__ import Stage, stage
from tests.attacks.attackers import ATTACKS
from tests.attacks.telling import superiority
from tests.attacks.verdict import HIT_POINTS, KINDS, Outcome, Sample, percentile, rate, table

SECONDS = 1.5


@pytest.fixture(scope="module", params=[False, True], ids=["in the clear", "within TLS"])
def played(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with stage(tls=request.param) as played:
        yield played


@pytest.mark.cluster
@pytest.mark.nightly
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_the_honest_tenant_no_block(played: Stage, name: str) -> None:
    outcome = played.play(name, SECONDS, turns=1, memory_s=0.0)
    assert outcome.done + outcome.refused, "the attacker did something"
    for kind in KINDS:
        assert rate(outcome.attacked, kind) >= rate(outcome.control, kind) - HIT_POINTS


def samples(*ms: float, blocks: int = 16) -> list[Sample]:
    return [Sample(0.0, "load", each, blocks, 16) for each in ms]


def test_each_bound_that_an_attack_breaks_is_named() -> None:
    good = Outcome("a", "an attack", 1.0, 1, 0, 0.1, samples(1, 2, 3), samples(1, 2, 3), (100, 200, 109))
    assert good.failures() == []
    bad = Outcome("b", "another", 1.0, 0, 0, 0.1, samples(1, 2, 10, blocks=15), samples(1, 2, 3), (100, 200, 111))
    bad.growth = 65 * 2**20, "coordinator"
    assert [failure.split()[0] for failure in bad.failures()] == ["the", "p99", "done", "memory", "growth"]
    assert "b: p99 10.0 ms exceeds 9.0 ms" in table([good, bad])
    assert Outcome("c", "a third").failures() == ["the honest tenant made no request"]


def test_a_percentile_is_one_of_the_samples() -> None:
    assert percentile(samples(*range(1, 101)), 99) == 100
    assert percentile(samples(*range(1, 101)), 50) == 51
    assert rate(samples(1, blocks=8), "load") == 50 and rate([], "store") == 100


def test_draws_that_cannot_be_told_apart_are_larger_half_the_time() -> None:
    assert superiority([1, 2, 3], [1, 2, 3]) == 0.5
    assert superiority([4, 5], [1, 2, 3]) == 1.0
    assert superiority([1, 3], [2]) == 0.5
