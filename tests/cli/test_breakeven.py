"""`kvcluster breakeven` as a person meets it, and on both sides of the crossing over a link that is really slow."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcluster
from kvcluster.cli import measured_paths
from kvcluster.cli.breakeven import lines
from kvcluster.cli.main import main
from kvcluster.config import TRANSPORTS
from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.spec import KVSpec
from tests.cli.served import Served
from tests.cli.throttled import Link, OneHost, throttled
from tests.waiting import eventually

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 2048
SLOW, FAST = 1_000_000, 200_000_000
PREFILL = 8_000
"""Sixteen times what the slow link brings, and a twelfth of what the fast one would."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return written(tmp_path, TINY)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served("127.0.0.1") as served:
        yield served


def written(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return str(folder)


def figures(served: Served, model: str, capsys: pytest.CaptureFixture[str], prefill: str, *more: str) -> dict[str, Any]:
    arguments = ["breakeven", "--model", model, "--prefill", prefill, "--address", served.coordinator, "--rounds", "1"]
    assert main([*arguments, "--json", *more]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def measured(said: dict[str, Any]) -> list[dict[str, Any]]:
    """The paths that have figures. gRPC always has."""
    paths = [path for path in said["paths"] if path["why"] is None]
    assert paths[-1]["path"] == "grpc"
    return paths


# ------------------------------------------------------------------------------------------ what it measures


def test_every_path_is_measured_or_says_why_not(served: Served, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = figures(served, model, capsys, "1000")
    assert [path["path"] for path in said["paths"]] == list(TRANSPORTS)
    assert (said["token_bytes"], said["block_tokens"], said["prefill_tokens_per_s"]) == (TOKEN_BYTES, 16, 1_000)
    for path in measured(said):
        assert path["bytes_per_s"] > 0
        assert path["fixed_ms"] >= 0
        assert path["loaded_tokens_per_s"] == path["bytes_per_s"] / TOKEN_BYTES
        assert 16 <= path["measured_tokens"] <= 1_024
    assert all(path["why"] for path in said["paths"] if path not in measured(said))


def test_its_verdict_is_the_decision_of_connectors(
    served: Served, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = figures(served, model, capsys, "3000")
    spec = KVSpec.uniform(
        model="m", weights="sha256:1", num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=16
    )
    even = Breakeven(spec, [spec.whole(0)], 3_000)
    for path in measured(said):
        link = LinkRate(round(path["fixed_ms"] * 1e6), path["bytes_per_s"])
        assert path["pays_from_tokens"] == even.least_tokens(link)


@pytest.mark.parametrize(("prefill", "pays"), [("1", True), ("1e15", False)])
def test_an_engine_that_is_slow_enough_loads_and_one_that_is_fast_enough_computes(
    served: Served, model: str, capsys: pytest.CaptureFixture[str], prefill: str, pays: bool
) -> None:
    for path in measured(figures(served, model, capsys, prefill)):
        assert (path["pays_from_tokens"] is not None) == pays


def test_it_measures_with_no_more_tokens_than_it_may(
    served: Served, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = figures(served, model, capsys, "1000", "--tokens", "40", "--block-tokens", "8")
    assert all(path["measured_tokens"] <= 40 for path in measured(said))
    said = figures(served, model, capsys, "1000", "--tokens", "1")
    assert all(path["measured_tokens"] == 16 for path in measured(said)), "a block is the least"


def test_latent_and_windowed_kv_are_measured_as_they_are(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    latent = {**TINY, "kv_lora_rank": 192, "qk_rope_head_dim": 64, "layer_types": types, "sliding_window": 64}
    said = figures(served, written(tmp_path, latent), capsys, "1000")
    assert said["token_bytes"] == 4 * 256 * 2
    assert said["groups"] == [
        "2 layers of latent [1 x 256, bfloat16]",
        "2 layers of latent [1 x 256, bfloat16] over a window of 64 tokens",
    ]
    assert measured(said)


def test_it_leaves_nothing_behind_and_touches_nothing_of_others(
    served: Served, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = KVSpec.uniform(
        model="theirs", weights="sha256:1", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16", block_tokens=4
    )
    page = b"t" * spec.page_bytes(0, spec.whole(0))
    with kvcluster.connect(served.coordinator, spec, config=kvcluster.ClientConfig(deadline_ms=10_000)) as client:
        assert client.store([1, 2, 3, 4], kvcluster.Buffers([page])).blocks == 1
        assert client.flush()
        for _ in range(2):
            figures(served, model, capsys, "1000")
        eventually(lambda: served.pages() == 1)
        assert served.tombstones() == 1, "each run takes the place of the one before"
        assert client.lookup([1, 2, 3, 4]).blocks == 1


def test_runs_leave_nothing_to_warn_of_in_status(
    served: Served, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        figures(served, model, capsys, "1000")
    assert main(["status", "--address", served.coordinator]) == 0
    assert "never shared" not in capsys.readouterr().out


def test_a_run_right_after_another_waits_until_its_blocks_are_forgotten(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Served("127.0.0.1", report_interval_ms=1_000) as slow_to_report:
        for _ in range(2):
            assert measured(figures(slow_to_report, model, capsys, "1000"))


# ----------------------------------------------------------------------------------------------- what it says


def test_a_person_reads_a_line_for_each_path_and_a_verdict(
    served: Served, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["breakeven", "--model", model, "--prefill", "1", "--address", served.coordinator, "--rounds", "1"]
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{model}: 4 layers of k [2 x 64, bfloat16] and v [2 x 64, bfloat16]"
    assert said[1] == "  head_dim is not given: hidden_size / num_attention_heads is assumed"
    assert said[2] == "2.0 KiB a token, 32.0 KiB a block of 16; computed: 1 tokens/s, as given"
    assert [line.split()[0] for line in said if line.startswith(TRANSPORTS)] == list(TRANSPORTS)
    assert said[-1].startswith("a client here takes ")
    assert said[-1].endswith("; loads pay from 16 tokens on")


def test_never_is_said_and_so_is_why_a_path_has_no_figures() -> None:
    paths: list[dict[str, Any]] = [
        {"path": "shm", "why": "another host"},
        {
            "path": "tcp",
            "why": None,
            "bytes_per_s": 10**9,
            "fixed_ms": 1.5,
            "loaded_tokens_per_s": 7_629.4,
            "pays_from_tokens": None,
        },
    ]
    figures = {
        "model": "m",
        "groups": ["32 layers of kv"],
        "assumed": [],
        "block_tokens": 16,
        "token_bytes": 131_072.0,
        "prefill_tokens_per_s": 12_000,
        "paths": paths,
    }
    said = "\n".join(lines(figures)).splitlines()
    assert said[-4].split() == ["shm", "-", "-", "-", "-", "another", "host"]
    assert said[-3].split() == ["tcp", "1.000", "1.50", "7,629", "0.64", "never:", "computing", "is", "faster"]
    assert said[-1] == "a client here takes tcp; never: computing is faster"


@pytest.mark.slow
def test_without_a_cluster_it_says_what_to_do(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Served("127.0.0.1") as gone:
        address = gone.coordinator
    assert main(["breakeven", "--model", model, "--prefill", "1000", "--address", address]) == 1
    said = capsys.readouterr().err
    assert f"nothing listens at {address}" in said
    assert "kvcluster up" in said
    assert "--address" in said


def test_where_no_shard_is_to_be_reached_every_path_says_why(
    served: Served, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served.cut_off_shard()
    assert main(["breakeven", "--model", model, "--prefill", "1", "--address", served.coordinator]) == 1
    *_, shm, tcp, grpc, _, verdict = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in (shm, tcp, grpc)] == [[name, *"----"] for name in TRANSPORTS]
    assert "shard_lost" in grpc
    assert verdict == "no path could be measured: see `kvcluster status`"


def test_the_command_line_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["breakeven", "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kvcluster breakeven ")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ({**TINY, "layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ({"torch_dtype": "float16"}, "num_attention_heads is missing"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_before_anything_is_asked(
    tmp_path: Path, config: object, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "breakeven",
                "--model",
                written(tmp_path, config),
                "--prefill",
                "1000",
                "--address",
                "nowhere:1",
                "--encryption",
                "none",
            ]
        )
        == 1
    )
    assert sentence in capsys.readouterr().err


def test_a_config_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["breakeven", "--model", str(tmp_path), "--prefill", "1000"]) == 1
    assert f"cannot read {tmp_path / 'config.json'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--prefill", "0"], ["--prefill", "inf"], ["--prefill", "nan"], ["--prefill", "fast"], []]
)
def test_the_prefill_rate_is_asked_for(model: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["breakeven", "--model", model, *arguments])
    assert end.value.code == 2
    assert "--prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ram_bytes", "sentence"), [("2MiB", "no room for 4 blocks"), ("512KiB", "a page of 1048576 bytes never fits")]
)
def test_a_cluster_without_room_says_so(
    tmp_path: Path,
    ram_bytes: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measured_paths, "_LONG_NS", 10**15)  # however slow this machine is, it goes on to larger loads
    large = {**TINY, "num_hidden_layers": 16, "head_dim": 512}
    with Served("127.0.0.1", ram_bytes=ram_bytes) as small:
        arguments = ["--model", written(tmp_path, large), "--prefill", "1000", "--address", small.coordinator]
        assert main(["breakeven", *arguments]) == 1
    assert sentence in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- a link that is slow


@pytest.mark.slow
def test_the_verdict_turns_with_the_rate_of_the_link(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with throttled() as link:
        with capsys.disabled():
            print(f"\nbreakeven: {link.form}")
        both_sides(link, model)


@pytest.mark.slow
def test_it_turns_where_there_are_no_namespaces_as_well(model: str) -> None:
    with OneHost("it is asked for") as link:
        both_sides(link, model)


def both_sides(link: Link, model: str) -> None:
    """Over a slow link every path computes and over a fast one every path loads, by the same command."""
    verdicts: dict[int, dict[str, Any]] = {}
    for rate in (SLOW, FAST):
        link.throttle(rate)
        command = [sys.executable, "-m", "kvcluster.cli.main", "breakeven", "--json", "--rounds", "3"]
        done = link.run(
            [
                *command,
                "--model",
                model,
                "--prefill",
                str(PREFILL),
                "--address",
                link.coordinator,
                "--encryption",
                "none",
            ]
        )
        assert done.returncode == 0, done.stderr
        verdicts[rate] = {path["path"]: path for path in measured(json.loads(done.stdout))}
    assert tuple(verdicts[SLOW]) == tuple(verdicts[FAST]) == link.paths
    for name, path in verdicts[SLOW].items():
        assert path["bytes_per_s"] < 2 * SLOW
        assert path["pays_from_tokens"] is None, name
        assert verdicts[FAST][name]["pays_from_tokens"] is not None, name
