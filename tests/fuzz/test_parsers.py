"""Whatever comes from outside, reading it ends in a value or in a documented error, in bounded time and memory.

The few inputs of `make check` look for what a change has just broken; the hundred thousand a parser of `make test`
are the promise (docs/reliability.md). `make fuzz FUZZ_INPUTS=1000000` goes further, with another FUZZ_SEED elsewhere.
"""

from __future__ import annotations

import pytest

from kvcluster.wire.methods import COORDINATOR, SHARD
from tests.fuzz.fuzzer import Fuzz
from tests.fuzz.parsers import PARSERS


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("inputs", [500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_whatever_comes_in_is_read_or_refused(parser: str, inputs: int) -> None:
    tally = Fuzz(PARSERS[parser], seed=0).run(inputs)
    assert tally.accepted > inputs // 50, "inputs that are all refused at the door look at nothing behind it"
    assert tally.refused > inputs // 50


def test_every_method_is_fuzzed_both_ways() -> None:
    methods = [("coordinator", method) for method in COORDINATOR] + [("shard", method) for method in SHARD]
    assert all(f"{service} {method} {half}" in PARSERS for service, method in methods for half in ("request", "reply"))
