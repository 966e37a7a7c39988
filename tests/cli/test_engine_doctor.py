"""`kvcluster doctor --engine vllm`: the process that examines, and what is shown of its findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcluster.cli import doctor, engine_doctor
from kvcluster.cli.main import main
from kvcluster.transport.credentials import CONNECTION, Credentials

FOUND: dict[str, Any] = {
    "releases": {
        "vllm": "0.32.0",
        "tried": "engines of this release are run by the tests",
        "torch": "2.13.0+cpu",
        "kvcluster": "0.3.0",
        "python": "3.11.7",
        "device": "cpu",
    },
    "settings": {
        "mode": "observe",
        "address": "",
        "token_file": "",
        **dict.fromkeys(CONNECTION, ""),
        "trace_dir": "~/.cache/kvcluster/traces",
    },
    "model": {
        "path": "/models/llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "max_tokens": 131_072,
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
    },
    "layout": {
        "model": "llama",
        "block_tokens": 128,
        "token_bytes": 131_072.0,
        "groups": "32 layers",
        "kv_format": "cpu vec, K transposed",
    },
    "identity": {"weights": "commit:" + "a" * 40, "how": "the commit in its path", "bytes": 16},
    "features": [
        ["tensor parallel ranks", "not used", "1; each moves its own heads"],
        ["vLLM's own prefix cache", "served", "sha256; it is asked first, and the cluster for what it lacks"],
    ],
    "refused": [],
    "unknown": [],
}

TEXT = """\
vLLM 0.32.0, torch 2.13.0+cpu, on cpu
kvcluster 0.3.0, Python 3.11.7
engines of this release are run by the tests

model    /models/llama
         LlamaForCausalLM, bfloat16, up to 131,072 tokens
         32 layers, 8 KV heads of 128
KV       32 layers; 128.0 KiB a token, blocks of 128 tokens
         cpu vec, K transposed
weights  commit:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
         the commit in its path

tensor parallel ranks    not used  1; each moves its own heads
vLLM's own prefix cache  served    sha256; it is asked first, and the cluster
                                   for what it lacks

observe mode: traces go to ~/.cache/kvcluster/traces

kvcluster serves this engine; its mode is 'observe'
"""


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine's process finds, and `asked` of it."""
    found = json.loads(json.dumps(FOUND))

    def examined(engine: str, request: Mapping[str, Any]) -> dict[str, Any]:
        found["asked"] = dict(request)
        return found

    monkeypatch.setattr(engine_doctor, "examined", examined)
    return found


def run(*arguments: str) -> int:
    return main(["doctor", "--engine", "vllm", "--model", "/models/llama", *arguments])


def test_the_findings_are_shown(finds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert capsys.readouterr().out == TEXT


def test_no_line_is_wider_than_80_columns(finds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    finds["refused"] = ["its KV " + "is of a kind that is not served " * 6]
    finds["unknown"] = ["its draft model, " + "which only its start will tell " * 6]
    finds["features"].append(["speculative decoding", "unknown", "eagle: " + "a draft model's KV is refused " * 4])
    assert run() == 1
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_arguments_of_the_engine_are_handed_on(finds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"kv_connector": "KVClusterConnector"}'
    assert run("--kv-transfer-config", config, "--read-weights", "--json", "--", "--block-size", "32") == 0
    assert finds["asked"] == {
        "model": "/models/llama",
        "transfer": {"kv_connector": "KVClusterConnector"},
        "arguments": ["--block-size", "32"],
        "read_weights": True,
    }
    assert json.loads(capsys.readouterr().out)["healthy"] is True


def test_what_is_refused_fails_and_is_said(finds: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    finds["refused"] = ["decode_context_parallel_size is 2; only 1 is served"]
    assert run() == 1
    text = capsys.readouterr().out
    assert "refused: decode_context_parallel_size is 2; only 1 is served\n" in text
    assert text.endswith("kvcluster does not serve this engine; what is refused stands above\n")


def test_what_is_unknown_until_the_start_is_said_and_no_failure(
    finds: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    finds["unknown"] = ["its draft model"]
    assert run() == 0
    assert "serves this engine, as far as its configuration tells; its mode" in capsys.readouterr().out


@pytest.mark.parametrize(("healthy", "status"), [(True, 0), (False, 1)])
def test_a_cluster_that_the_settings_name_is_examined(
    finds: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    healthy: bool,
    status: int,
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n", encoding="utf-8")
    finds["settings"] |= {"mode": "on", "address": "head:7070", "token_file": str(token), "encryption": "network"}
    asked: list[tuple[str, Credentials]] = []

    def examine(address: str, given: Credentials) -> dict[str, Any]:
        asked.append((address, given))
        return {"address": address, "healthy": healthy, "verdict": "all 2 shard(s) can be reached: 2 by shm"}

    monkeypatch.setattr(doctor, "examine", examine)
    assert run() == status
    assert asked == [("head:7070", Credentials("secret"))]
    text = capsys.readouterr().out
    assert "cluster at head:7070: all 2 shard(s) can be reached: 2 by shm\n" in text
    assert ("but its cluster cannot be used" in text) is not healthy


def test_a_cluster_that_the_command_names_is_examined_whatever_the_mode(
    finds: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda address, token: {"address": address, "healthy": True, "verdict": "v"})
    assert run("--address", "other:7070", "--encryption", "network") == 0
    assert "cluster at other:7070: v\n" in capsys.readouterr().out


def test_a_token_that_cannot_be_read_is_the_clusters_trouble(
    finds: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    finds["settings"] |= {"mode": "on", "address": "head:7070", "token_file": "/nowhere/token"}
    assert run() == 1
    assert "cannot read token_file /nowhere/token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--engine needs --model"),
        (["foo"], "foo belongs to the examination of an engine: give --engine vllm, too"),
        (["--model", "m", "--read-weights"], "--read-weights belongs to the examination of an engine"),
        (["--read-weights"], "--read-weights belongs to the examination of an engine"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config belongs to the examination of an engine"),
        (["--engine", "vllm", "--model", "m", "--kv-transfer-config", "{"], "--kv-transfer-config is not JSON"),
        (["--engine", "vllm", "--model", "m", "--kv-transfer-config", "[]"], "must be a JSON object"),
    ],
)
def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["doctor", *arguments]) == 1
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ the engine's process


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in place of the one that examines, for an engine that is installed: `json`."""
    monkeypatch.setitem(engine_doctor.ENGINES, "json", "an_examiner")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "an_examiner.py"


def test_the_process_is_handed_the_request_and_answers_beside_what_it_prints(program: Path) -> None:
    program.write_text(
        "import json, os, sys\n"
        "print('INFO what an engine prints')\n"
        "request = json.load(sys.stdin)\n"
        "with os.fdopen(int(sys.argv[1]), 'w') as out:\n"
        "    json.dump({'asked': request, 'long': 'x' * 200_000}, out)\n",
        encoding="utf-8",
    )
    found = engine_doctor.examined("json", {"model": "m"})
    assert found["asked"] == {"model": "m"} and len(found["long"]) == 200_000


@pytest.mark.parametrize("ending", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "pass"])
def test_a_process_that_ends_without_an_answer_is_told_with_its_last_words(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    program.write_text(f"import os, sys\nprint('Illegal instruction', flush=True)\n{ending}\n", encoding="utf-8")
    monkeypatch.setitem(engine_doctor.ENGINES, "vllm", "an_examiner")
    monkeypatch.setattr(engine_doctor, "find_spec", lambda name: object())
    assert run() == 1
    message = capsys.readouterr().err
    assert "vllm could not be examined" in message and "Illegal instruction" in message


def test_an_engine_that_is_not_installed_is_told_with_the_python_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_doctor, "find_spec", lambda name: None)
    assert run() == 1
    assert f"vllm is not installed beside this kvcluster ({sys.executable})" in capsys.readouterr().err
