"""Reading any input from outside ends in a value or in a documented error, in bounded time and memory.

Two thousand inputs a parser look for what a change has just broken; `make nightly` draws a hundred thousand (`make
fuzz`), and `make fuzz FUZZ_INPUTS=1000000 FUZZ_SEED=7` goes further, elsewhere.
"""

from __future__ import annotations

import pytest

from kvcluster.wire.methods import COORDINATOR, SHARD
from tests.fuzz.fuzzer import Fuzz
from tests.fuzz.parsers import PARSERS

INPUTS = 2_000


@pytest.mark.parametrize("parser", PARSERS)
def test_whatever_comes_in_is_read_or_refused(parser: str) -> None:
    tally = Fuzz(PARSERS[parser], seed=0).run(INPUTS)
    assert tally.accepted > INPUTS // 50, "inputs that are all refused at the door look at nothing behind it"
    assert tally.refused > INPUTS // 50


def test_every_method_is_fuzzed_both_ways() -> None:
    methods = [("coordinator", method) for method in COORDINATOR] + [("shard", method) for method in SHARD]
    assert all(f"{service} {method} {half}" in PARSERS for service, method in methods for half in ("request", "reply"))
