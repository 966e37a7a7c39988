"""`kvcluster bench paths`: whole calls of a running cluster by every path, which are right and leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcluster.cli import measured_paths
from kvcluster.cli.main import main
from kvcluster.cli.measured_memory import MeasuredMemory
from kvcluster.client.client import Client
from kvcluster.config import TRANSPORTS
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.transfer import Stored
from tests.cli.served import Served
from tests.cli.test_breakeven import TINY, written
from tests.waiting import eventually

SMALL = ["--tokens", "64", "--rounds", "1"]


@pytest.fixture
def served() -> Iterator[Served]:
    with Served("127.0.0.1") as served:
        yield served


@pytest.fixture
def arguments(served: Served, tmp_path: Path) -> list[str]:
    return ["bench", "paths", "--model", written(tmp_path, TINY), "--address", served.coordinator, *SMALL]


def test_every_path_has_the_figures_of_its_calls_or_says_why_not(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert figures["setting"].keys() >= {"python", "machine", "cores"}
    assert figures["block_bytes"] == 16 * 2048 and figures["lookup_ms"] > 0
    assert [path["path"] for path in figures["paths"]] == list(TRANSPORTS)
    measured = [path for path in figures["paths"] if path["why"] is None]
    assert measured[-1]["path"] == "grpc" and all(path["why"] for path in figures["paths"] if path not in measured)
    for path in measured:
        assert 0 < path["measured_bytes"] <= 64 * 2048
        for call in ("load", "store"):
            assert all(path[f"{call}_{what}"] > 0 for what in ("bytes_per_s", "of_copy", "block_ms"))


def test_it_prints_a_row_for_each_path_and_purges_what_it_stored(
    served: Served, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "blocks of 32 KiB; a lookup of all of them takes " in printed[1]
    assert [line.split()[0] for line in printed if line.startswith(TRANSPORTS)] == list(TRANSPORTS)
    core = served._coordinator.core
    eventually(lambda: not core.state.namespaces.blocks)


def test_without_a_model_blocks_have_the_size_of_a_well_known_one(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "paths", "--address", served.coordinator, "--tokens", "16", "--rounds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block_bytes"] == 2 * 2**20


def test_a_load_that_brings_nothing_is_noticed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although a copy of the same blocks, which is measured beside it, has filled the room."""
    monkeypatch.setattr(MeasuredMemory, "room", lambda memory, blocks: memory.source(blocks))
    assert main(arguments) == 1
    assert "loaded bytes differ from the stored bytes" in capsys.readouterr().err


def test_without_a_cluster_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paths", "--port", "1"]) == 1
    assert "this measures a running cluster: `kvcluster up` starts one" in capsys.readouterr().err


def test_a_path_that_moves_nothing_says_why(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured_paths.MeasuredPath, "_refused", lambda path: "it is not what it was")
    monkeypatch.setattr(Client, "begin_store", _nothing_is_stored)
    monkeypatch.setattr(measured_paths, "_PATIENCE_MS", 0)
    assert main(arguments) == 1
    assert capsys.readouterr().out.count("it is not what it was") == len(TRANSPORTS)


def _nothing_is_stored(client: Client, hashes: Any, source: Any) -> Any:
    class Ended:
        def result(self) -> Any:
            return Stored(0, 0, 0, 0, Miss(MissReason.SHARD_LOST))

    return Ended()
