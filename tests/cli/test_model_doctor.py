"""`kvcluster doctor --model PATH`: what is read of a checkpoint's folder, and what is said where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcluster.cli.main import main

CHECKPOINTS = Path(__file__).parents[1] / "vllm" / "checkpoints"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a checkpoint of Llama 3.1 8B, without its weights."""
    (tmp_path / "config.json").write_bytes((CHECKPOINTS / "Llama-3.1-8B.json").read_bytes())
    return tmp_path


def checkpoint(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_bytes((CHECKPOINTS / f"{name}.json").read_bytes())
    return str(tmp_path)


def test_a_served_checkpoint_is_shown_with_its_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "full attention" in shown
    assert "32 layers: K of 8 x 128 bfloat16 and V of 8 x 128 bfloat16" in shown
    assert "128.0 KiB a token" in shown
    assert "2 MiB for 16 tokens" in shown


def test_a_refused_one_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", checkpoint(tmp_path, "Nemotron-H-8B-Base-8K")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "refused: a group (MAMBA2) writes the state of a boundary in the middle of a chunk" in shown
    assert "KiB a token" not in shown


def test_an_architecture_that_vllm_has_not_is_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Nobodys"]}), encoding="utf-8")
    assert main(["doctor", "--model", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["served"], found["token_bytes"]) == ("unknown", False, None)


def test_json_has_what_the_page_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(folder), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["token_bytes"] == 131_072
    assert found["block_bytes"] == 16 * 131_072
    assert [kind["kind"] for kind in found["kinds"]] == ["full attention"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is none"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must hold a JSON object, not a list"),
        (b"{}", "names no architectures"),
        (b'{"architectures": "Llama"}', "names no architectures"),
        (b" " * (100 * 2**20), "has more than 16 MiB"),
    ],
    ids=["missing", "cut", "bytes", "deep", "list", "empty", "text", "100 MiB"],
)
def test_a_bad_file_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "config.json" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("path", ["nowhere/at/all", "Qwen/Qwen3-0.6B", "a\0b"])
def test_what_is_no_folder_is_an_error_that_says_what_to_do(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", path]) == 1
    assert "folder" in capsys.readouterr().err


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").mkdir()
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_it_imports_no_engine_and_no_torch(folder: Path) -> None:
    code = f"""import sys
from kvcluster.cli.main import main
assert main(["doctor", "--model", {str(folder)!r}]) == 0
assert not {{"vllm", "torch", "transformers", "kvcluster.engines.vllm"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
