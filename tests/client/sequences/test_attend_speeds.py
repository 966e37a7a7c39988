"""How long attention takes, as measured: what was measured, and what is taken from what is alike."""

from __future__ import annotations

import pytest

from kvcluster.client.sequences.attend_speeds import GUESSED_PRODUCTS_PER_S, READ_BYTES_PER_S, AttendSpeeds
from kvcluster.core.breakeven import LinkRate

KEYS = 4096
HERE_S_PER_KEY = 1e-7


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_speeds_of_shards_are_told_apart_from_the_way_there(factor: float) -> None:
    speeds = AttendSpeeds()
    speeds.link = LinkRate(0, 100_000_000)
    for keys in (KEYS, 8 * KEYS):
        speeds.computed({1: keys}, keys * HERE_S_PER_KEY, 0)
        speeds.computed_at("shard-0", {1: keys}, keys * HERE_S_PER_KEY * factor, 0)
    speeds.shipped("shard-0", 10_000, 1e-3 + 10_000 / 100_000_000)
    assert speeds.shard_s("shard-0", 1, 4 * KEYS) == pytest.approx(4 * KEYS * HERE_S_PER_KEY * factor, rel=0.01)
    assert speeds.here_s(1, 4 * KEYS) == pytest.approx(4 * KEYS * HERE_S_PER_KEY, rel=0.01)
    assert speeds.way_s("shard-0") == pytest.approx(1e-3, rel=0.01)
    assert speeds.transfer_s(1_000_000) == pytest.approx(1e-2, rel=0.01)


def test_before_a_load_the_fastest_message_tells_the_link() -> None:
    speeds = AttendSpeeds()
    assert speeds.load_s(10**9) == pytest.approx(1.0, rel=0.01), "a guess"
    speeds.shipped("shard-0", 1_000, 0.01)
    speeds.shipped("shard-0", 50_000_000, 0.5)
    assert speeds.load_s(10**8) == pytest.approx(1.0)
    assert speeds.way_s("shard-0") == pytest.approx(0.005, rel=0.01)


def test_fewer_query_tokens_take_less_arithmetic_but_read_as_much() -> None:
    speeds = AttendSpeeds(key_bytes=1024)
    reading_s = KEYS * 1024 / READ_BYTES_PER_S
    speeds.computed({64: KEYS}, reading_s + 0.64, 0)
    assert speeds.here_s(1, KEYS) == pytest.approx(reading_s + 0.01, rel=0.01)
    assert speeds.here_s(32, KEYS) == pytest.approx(reading_s + 0.32, rel=0.01)
    assert speeds.here_s(128, KEYS) == pytest.approx(2 * (reading_s + 0.64), rel=0.01), "more take more in proportion"


def test_a_compute_that_was_faster_than_reading_is_believed() -> None:
    speeds = AttendSpeeds(key_bytes=1 << 20)
    speeds.computed({64: KEYS}, 0.001, 0)
    assert speeds.here_s(1, KEYS) == pytest.approx(0.001, rel=0.01)


def test_a_shard_that_has_computed_of_few_keys_is_taken_to_be_like_one_that_has_of_many() -> None:
    """A few keys take most of their time for what is fixed."""
    speeds = AttendSpeeds()
    speeds.computed_at("shard-0", {1: KEYS}, 0.004, 0)
    speeds.computed_at("shard-1", {1: KEYS}, 0.008, 0)
    speeds.computed_at("shard-2", {1: 64}, 0.004, 0)
    assert speeds.shard_s("shard-1", 1, 2 * KEYS) == pytest.approx(0.016, rel=0.01)
    for other in ("shard-2", "unknown"):
        assert speeds.shard_s(other, 1, KEYS) == pytest.approx(0.004, rel=0.01)


def test_before_this_process_has_computed_of_many_keys_it_is_guessed_or_as_fast_as_the_fastest_shard() -> None:
    """Shards that others keep busy say nothing of this process, and it would never find out."""
    speeds, guess_s = AttendSpeeds(key_bytes=512), KEYS * 256 / GUESSED_PRODUCTS_PER_S
    speeds.products = 256
    guess_s += KEYS * 512 / READ_BYTES_PER_S
    speeds.computed({1: 64}, 0.001, 0)
    speeds.computed_at("busy", {1: KEYS}, 100 * guess_s, 0)
    assert speeds.here_s(1, KEYS) == pytest.approx(guess_s, rel=0.01)
    assert speeds.here_s(1, 4 * KEYS) == pytest.approx(4 * guess_s, rel=0.01)
    speeds.computed_at("idle", {1: KEYS}, guess_s / 4, 0)
    assert speeds.here_s(1, KEYS) == pytest.approx(guess_s / 4, rel=0.01)
    speeds.computed({1: KEYS}, 0.001 + 3 * guess_s, 0)
    assert speeds.here_s(1, 2 * KEYS) == pytest.approx(2 * 3 * guess_s, rel=0.05), "a line, without its fixed part"


def test_before_the_first_compute_all_places_are_alike() -> None:
    speeds = AttendSpeeds(key_bytes=400)
    speeds.products = 100
    assert speeds.here_s(2, KEYS) == speeds.shard_s("shard-0", 2, KEYS) > speeds.here_s(1, KEYS) > 0


def test_a_compute_of_twice_as_many_keys_as_before_is_worth_measuring() -> None:
    speeds = AttendSpeeds()
    assert speeds.to_measure(1, 64) and not speeds.to_measure(1, 0)
    for _ in range(3):
        assert speeds.to_measure(1, KEYS), "one of three"
        speeds.computed({1: KEYS}, KEYS * HERE_S_PER_KEY, 0)
    assert not speeds.to_measure(1, KEYS)
    assert not speeds.to_measure(1, 2 * KEYS)
    assert speeds.to_measure(1, 2 * KEYS + 1)
    assert speeds.to_measure(64, 64), "of that size nothing was measured"
