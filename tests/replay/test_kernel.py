from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.replay.kernel import MS, TIMED_OUT, Clock, Kernel, Process, Promise, Script


def process(kernel: Kernel) -> Process:
    return Process(kernel, "p", 0, Clock(0, 0))


@given(st.integers(-(10**10), 10**10), st.integers(-10_000, 10_000), st.integers(0, 10**12))
def test_a_clock_shows_what_was_waited_for_and_not_before(offset_ns: int, ppm: int, wait_ns: int) -> None:
    clock = Clock(offset_ns, ppm)
    shown = offset_ns + wait_ns
    at = clock.when(shown)
    assert clock.read(at) >= shown > clock.read(at - 1)


def test_two_clocks_drift_apart_by_what_a_shards_term_allows_for() -> None:
    fast, slow = Clock(0, 10_000), Clock(0, -10_000)
    term = 1_000_000_000
    assert slow.when(term - term // 50) <= fast.when(term), "the shard's own term ends first"
    assert slow.when(term) > fast.when(term), "and would not without its margin"


def test_events_of_one_instant_come_in_the_order_in_which_they_were_made() -> None:
    kernel, seen = Kernel(), list[str]()
    kernel.at(5, None, seen.append, "late")
    kernel.at(3, None, seen.append, "one")
    kernel.at(3, None, seen.append, "two")
    kernel.run(5)
    assert seen == ["one", "two"]
    kernel.run(6)
    assert seen == ["one", "two", "late"]


def test_a_stopped_process_hears_in_order_of_arrival_when_it_goes_on() -> None:
    kernel, seen = Kernel(), list[str]()
    p = process(kernel)
    p.stop()
    kernel.at(1, p, seen.append, "one")
    kernel.at(2, p, seen.append, "two")
    kernel.run(10)
    assert seen == []
    p.resume()
    assert seen == ["one", "two"]


def test_a_killed_process_hears_and_does_nothing_more() -> None:
    kernel, seen = Kernel(), list[str]()
    p = process(kernel)

    def script() -> Script:
        yield None, 5
        seen.append("went on")

    p.start(script())
    kernel.at(7, p, seen.append, "heard")
    p.stop()
    kernel.run(6)
    p.kill()
    p.resume()
    kernel.run(10)
    assert seen == [] and p.dead


def test_a_script_is_sent_what_comes_first_the_value_or_the_time() -> None:
    kernel, got = Kernel(), list[object]()
    p = process(kernel)
    soon, never = Promise(), Promise()

    def script() -> Script:
        got.append((yield soon, 10 * MS))
        got.append((yield never, 10 * MS))
        got.append((yield soon, 10 * MS))
        return "over"

    done = p.start(script())
    kernel.at(MS, p, soon.fulfil, "value")
    kernel.at(2 * MS, p, soon.fulfil, "the same answer again")
    kernel.run(100 * MS)
    assert got == ["value", TIMED_OUT, "value"]
    assert (done.ready, done.value) == (True, "over")


def test_a_wait_is_measured_by_the_process_own_clock() -> None:
    kernel, woke = Kernel(), list[int]()
    p = Process(kernel, "p", 0, Clock(0, -10_000))

    def script() -> Script:
        yield None, 990 * MS
        woke.append(kernel.now)

    p.start(script())
    kernel.run(2_000 * MS)
    assert woke == [1_000 * MS]


def test_settling_runs_what_is_due_and_what_follows_at_once_and_no_time_passes() -> None:
    kernel, seen = Kernel(), list[str]()

    def letter() -> None:
        seen.append("letter")
        kernel.at(kernel.now, None, seen.append, "answer")
        kernel.at(kernel.now + 1, None, seen.append, "later")

    kernel.run(5)
    kernel.at(5, None, letter)
    kernel.settle()
    assert (seen, kernel.now) == (["letter", "answer"], 5)


def test_settling_ends_where_events_follow_one_another_without_end() -> None:
    kernel = Kernel()

    def again() -> None:
        kernel.at(kernel.now, None, again)

    again()
    with pytest.raises(AssertionError, match="without an end"):
        kernel.settle()
