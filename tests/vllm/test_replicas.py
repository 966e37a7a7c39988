"""Whole engines over a cluster: what one has computed others load, and nobody ever reads a wrong byte."""

from __future__ import annotations

from pathlib import Path

from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench


def test_what_one_engine_computed_another_loads(bench: Bench, llama: Path) -> None:
    tokens = prompt(5, rest=2, block_tokens=BLOCK)
    first, second = bench.engine(llama), bench.engine(llama, {"report": True})
    first.add("a", tokens, max_tokens=4)
    first.run()
    first.drain()
    second.add("b", tokens, max_tokens=4)
    second.run()
    second.drain()
    print(second.params, first.steps, first.reports)
    assert [load.blocks for report in second.reports for load in report.loads.values()] == [5]
