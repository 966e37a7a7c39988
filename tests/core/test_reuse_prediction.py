"""A prediction says what a plain simulation of engines over one LRU cache finds, and judges loads as connectors do."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.spec import KVSpec
from kvcluster.observe.reuse_prediction import LoadCost, ObservedRequest, PredictedRequest, outcome, predict

BLOCK = 16
MS = 1_000_000
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", block_tokens=BLOCK
)
FAST = LinkRate(0, 10**12)


def chain_of(path: list[int]) -> tuple[bytes, ...]:
    return tuple(bytes(path[: end + 1]) for end in range(len(path)))


@st.composite
def observed(draw: st.DrawFn) -> ObservedRequest:
    chain = chain_of(draw(st.lists(st.integers(0, 2), max_size=6)))
    at = draw(st.integers(0, 40))
    asked = draw(st.integers(0, len(chain)))
    times = sorted(draw(st.lists(st.integers(at, at + 20), max_size=2)))
    blocks = sorted(draw(st.lists(st.integers(0, len(chain)), min_size=len(times), max_size=len(times))))
    return ObservedRequest(
        engine=draw(st.sampled_from("ab")),
        at_ns=at,
        prompt_tokens=BLOCK * asked + 1,
        asked=asked,
        local=draw(st.integers(0, asked)),
        computed=tuple(zip(times, blocks, strict=True)),
        chain=chain,
    )


def simulated(requests: list[ObservedRequest], capacity: int) -> list[int]:
    """Blocks behind the own ones that each request finds in an LRU cache, one event after the other."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = [0] * len(requests)
    for now in range(100):
        for one in requests:
            for at, blocks in one.computed:
                for block in reversed(one.chain[:blocks] if at == now else ()):
                    cache[block] = None
                    cache.move_to_end(block)
                while len(cache) > capacity:
                    cache.popitem(last=False)
        for number, one in enumerate(requests):
            if one.at_ns == now:
                asked = one.chain[: one.asked]
                leading = next((at for at, block in enumerate(asked) if block not in cache), len(asked))
                found[number] = max(0, leading - one.local)
    return found


@given(st.lists(observed(), max_size=12), st.integers(1, 20))
def test_each_request_finds_what_it_finds_in_a_simulated_cache(requests: list[ObservedRequest], capacity: int) -> None:
    predicted, distinct = predict(requests)
    assert [one.found(capacity) for one in predicted] == simulated(requests, capacity)
    assert [one.found(None) for one in predicted] == simulated(requests, 1_000)
    assert distinct == len({block for one in requests for _, blocks in one.computed for block in one.chain[:blocks]})


def request(at_ns: int, path: str, *, computed_ns: int | None = None, local: int = 0, rate: int = 0) -> ObservedRequest:
    chain = chain_of([ord(letter) for letter in path])
    done = at_ns + 1 if computed_ns is None else computed_ns
    return ObservedRequest("a", at_ns, BLOCK * len(path) + 1, len(path), local, ((done, len(path)),), chain, rate)


def test_a_block_that_is_still_being_computed_is_not_found() -> None:
    predicted, _ = predict([request(0, "abc", computed_ns=10), request(5, "abc"), request(10, "abc")])
    assert [one.found(None) for one in predicted] == [0, 0, 3]


def test_what_the_engine_has_itself_is_no_hit_of_the_cluster() -> None:
    predicted, _ = predict([request(0, "abcd"), request(5, "abcd", local=3)])
    assert [one.found(None) for one in predicted] == [0, 1]


def test_a_cluster_that_lost_the_root_gives_nothing_of_what_follows() -> None:
    # "X" pushes out the end of "abc" first; of what is left, the engine has all itself.
    predicted, _ = predict([request(0, "abc"), request(5, "X"), request(9, "abc", local=2)])
    assert [one.found(3) for one in predicted] == [0, 0, 0]
    assert [one.found(4) for one in predicted] == [0, 0, 1]


def costs(link: LinkRate = FAST, rate: int = 0) -> LoadCost:
    return LoadCost(SPEC, SPEC.whole_parts(), link, rate)


def predicted_pair(rate: int) -> list[PredictedRequest]:
    return predict([request(0, "abcd"), request(5, "abcd", rate=rate)])[0]


def test_a_load_that_pays_saves_the_prefill_less_the_load() -> None:
    link = LinkRate(2 * MS, 10**9)
    even = Breakeven(SPEC, SPEC.whole_parts(), 1_000)
    seen = outcome(predicted_pair(1_000), costs(link), None)
    assert (seen.found_tokens, seen.loaded_tokens) == (64, 64)
    assert seen.saved_ns == even.prefill_ns(64) - link.load_ns(even.nbytes(64))
    assert [one.loaded_tokens for one in seen.requests] == [0, 64]


def test_a_load_that_does_not_pay_is_found_and_not_loaded() -> None:
    seen = outcome(predicted_pair(1_000_000), costs(LinkRate(2 * MS, 10**9)), None)
    assert (seen.found_tokens, seen.loaded_tokens, seen.saved_ns) == (64, 0, 0)


@pytest.mark.parametrize(("measured", "given_rate", "saves"), [(0, 0, 0), (0, 64, 1), (128, 64, 0.5)])
def test_a_rate_that_is_given_stands_in_for_one_that_was_not_measured(
    measured: int, given_rate: int, saves: float
) -> None:
    seen = outcome(predicted_pair(measured), costs(LinkRate(0, 10**15), given_rate), None)
    assert seen.loaded_tokens == 64, "an engine that does not know its rate loads"
    assert seen.saved_ns == pytest.approx(saves * 1e9, rel=1e-3)


def test_a_smaller_cluster_gives_less() -> None:
    predicted, _ = predict([request(0, "abcd"), request(5, "XY"), request(9, "abcd")])
    assert [outcome(predicted, costs(), capacity).found_tokens for capacity in (2, 3, 5, 6, None)] == [
        0,
        BLOCK,
        3 * BLOCK,
        4 * BLOCK,
        4 * BLOCK,
    ]


def test_tokens_of_a_prompt_are_the_engines_own_the_clusters_and_computed() -> None:
    predicted, _ = predict([request(0, "abcd"), request(5, "abcd", local=1)])
    seen = outcome(predicted, costs(), None)
    assert (seen.prompt_tokens, seen.local_tokens, seen.found_tokens) == (130, 16, 48)


def test_prefill_time_is_that_of_what_the_engines_did_not_have() -> None:
    predicted, _ = predict([replace(request(0, "abcd"), local=1, prefill_tokens_per_s=48)])
    assert outcome(predicted, costs(), None).prefill_ns == 10**9
