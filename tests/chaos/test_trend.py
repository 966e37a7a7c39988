"""A slope and its error, from samples whose line is known."""

from __future__ import annotations

import math

import pytest

from tests.chaos.trend import averaged, fit


def test_a_straight_line_is_found_exactly_and_surely() -> None:
    trend = fit([(float(at), 5.0 + 0.25 * at) for at in range(100)])
    assert trend.slope == pytest.approx(0.25)
    assert trend.error == pytest.approx(0.0, abs=1e-12)
    assert trend.mean == pytest.approx(5.0 + 0.25 * 49.5)
    assert trend.span_s == 99.0


def test_the_error_is_that_of_the_textbook() -> None:
    # 0, 1, 2 against 0, 1, 0: slope 0, residuals -1/3, 2/3, -1/3, so sqrt(2/3 / 1 / 2).
    trend = fit([(0.0, 0.0), (1.0, 1.0), (2.0, 0.0)])
    assert trend.slope == pytest.approx(0.0)
    assert trend.error == pytest.approx(math.sqrt(1 / 3))


def test_noise_does_not_rise_and_a_leak_in_the_same_noise_does() -> None:
    noise = [(float(at), float((at * 7919) % 13)) for at in range(400)]
    assert not fit(noise).rises(1.0)
    leaking = [(at, value + 0.05 * at) for at, value in noise]
    assert fit(leaking).rises(1.0)
    assert not fit(leaking).rises(100.0)


def test_stretches_are_averaged_and_keep_the_slope() -> None:
    samples = [(float(at), 3.0 * at) for at in range(100)]
    assert averaged(samples, 4) == [(12.0, 36.0), (37.0, 111.0), (62.0, 186.0), (87.0, 261.0)]
    assert fit(averaged(samples, 7)).slope == pytest.approx(3.0)
    assert averaged(samples[:3], 30) == samples[:3]


def test_what_wanders_is_not_taken_for_a_leak() -> None:
    wandering = [(float(at), math.sin(at / 40.0) * 20.0) for at in range(340)]
    alone, together = fit(wandering), fit(averaged(wandering, 10))
    assert together.error > 2 * alone.error
