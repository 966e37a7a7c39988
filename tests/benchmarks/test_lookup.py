"""`python -m benchmarks lookup`: what it measures is what it says."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


@pytest.mark.nightly
@pytest.mark.cluster
def test_it_prints_its_setting_and_its_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", "--json", "--blocks", "10000"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["setting"].keys() >= {"python", "machine", "cores"}
    (core,) = figures["core"]
    assert core["blocks"] == 10_000
    assert all(core[name] > 0 for name in ("blocks_per_s", "bare_blocks_per_s", "ratio"))
    assert core.keys() >= {"bytes_per_block", "bare_bytes_per_block"}
    assert all(figures["grpc"][name] > 0 for name in ("calls", "lookup_ms", "empty_ms", "ratio", "lookup_p99_ms"))
