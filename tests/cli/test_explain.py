"""`kvcluster lookup` and `explain` ask a running cluster about a prompt, by the name of its model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from kvcluster import Client
from kvcluster.cli.explain import MEANINGS
from kvcluster.cli.measured_model import MODEL
from kvcluster.cli.prompt_args import layout_id
from kvcluster.core.miss import MissReason
from tests.cli.front import Served
from tests.client.build import BLOCK, DIM, HEADS, LAYERS, kv, prompt, spec_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The eight blocks that are cached, another one that is not, and a token of the next."""
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps([*prompt(8, 0), *range(1, 2 + BLOCK)]), encoding="utf-8")
    return file


def test_a_lookup_says_how_much_is_cached_and_why_no_more(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("lookup", "--prompt-file", str(file)) == 0
    head, cached, miss = capsys.readouterr().out.splitlines()
    assert head == f"tiny  weights sha256:1; {9 * BLOCK + 1} tokens in blocks of {BLOCK}"
    assert cached == f"{8 * BLOCK} of {9 * BLOCK + 1} tokens are cached"
    assert miss == f"block 8 is a miss: never_seen: {MEANINGS[MissReason.NEVER_SEEN]}"


def test_explain_has_a_row_for_each_run_of_blocks(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("explain", "--prompt-file", str(file)) == 0
    _, _, *rows, total = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows][-2:] == ["8", "9"]
    assert rows[0].split()[2:] == ["hit", "ram", "tier", "of", "shard-0"] or "shard-1" in rows[0]
    assert "miss  never_seen: no engine has stored it" in rows[-2]
    assert f"miss  below_block (1 tokens fill no block of {BLOCK})" in rows[-1]
    assert total == "8 blocks of 10 can be loaded"


def test_for_machines_both_are_json(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("lookup", "--prompt-file", str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["tokens"], found["cached_blocks"]) == ("tiny", 9 * BLOCK + 1, 8)
    assert found["miss"]["reason"] == "never_seen"
    assert served.run("explain", "--prompt-file", str(file), "--json") == 0
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    assert [block["hit"] for block in blocks] == [True] * 8 + [False] * 2
    assert blocks[0]["tier"] == "ram"
    assert blocks[8] == {"block": 8, "hit": False, "reason": "never_seen", "detail": ""}


def test_a_prompt_may_come_from_standard_input(
    served: Served, client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(prompt(8, 0))))
    assert served.run("lookup", "--prompt-file", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cached_blocks"] == 8


def test_what_is_cached_under_other_weights_is_named(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.cluster.client(spec_of(weights="sha256:2")).store(prompt(2, 77), kv(2, 77))
    assert served.run("explain", "--weights", "sha256:2", "--prompt-file", str(file)) == 0
    assert "miss  namespace (weights): it is stored by engines that differ in this" in capsys.readouterr().out


def test_two_layouts_of_one_model_are_told_apart_and_each_can_be_named(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = spec_of(extra={"engine": "another"})
    served.cluster.client(other).store(prompt(2, 77), kv(2, 77))
    for command in ("lookup", "explain", "pin", "unpin"):
        assert served.run(command, "--prompt-file", str(file)) == 1
        said = capsys.readouterr().err
        assert f"{layout_id(other)} (extra.engine another; 2 blocks)" in said and "give one of them as --layout" in said
    for command in (["lookup", "--json"], ["pin"], ["unpin"]):
        assert served.run(*command, "--layout", layout_id(client.spec)[:8], "--prompt-file", str(file)) == 0
    out = capsys.readouterr().out
    assert '"cached_blocks": 8' in out and f"{8 * BLOCK} of {9 * BLOCK + 1} tokens are pinned" in out


def test_a_pin_takes_a_whole_spec(
    served: Served, client: Client, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"model": "tiny", "weights": "sha256:1", "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM}
    whole = tmp_path / "spec.json"
    whole.write_text(json.dumps({**about, "dtype": "float32", "block_tokens": BLOCK}), encoding="utf-8")
    assert served.run("pin", "--spec", str(whole), "--prompt-file", str(file)) == 0
    assert "tokens are pinned" in capsys.readouterr().out


def test_the_model_is_asked_for_where_there_are_several(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.cluster.client(spec_of(model="big")).store(prompt(2), kv(2))
    assert served.run("lookup", "--prompt-file", str(file)) == 1
    assert "give one of them as --model: " in capsys.readouterr().err
    assert served.run("lookup", "--prompt-file", str(file), "--model", "tiny") == 0


def test_the_blocks_of_a_measurement_are_no_engines(
    served: Served, client: Client, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.cluster.client(spec_of(model=MODEL)).store(prompt(2), kv(2))
    assert served.run("explain", "--prompt-file", str(file)) == 0
    assert served.run("explain", "--prompt-file", str(file), "--model", "other") == 1
    assert "known models: tiny" in capsys.readouterr().err
    assert served.run("explain", "--prompt-file", str(file), "--model", MODEL) == 0


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """The spec of the cached blocks."""
    sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "block_tokens": BLOCK}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"model": "tiny", "weights": "sha256:1", "dtype": "float32"} | sizes), encoding="utf-8")
    return file


def test_a_whole_spec_may_be_given_in_a_file(
    served: Served, client: Client, file: Path, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("lookup", "--prompt-file", str(file), "--spec", str(spec_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["cached_blocks"] == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "bfloat16"}, "the most similar one, of tiny with weights sha256:1, differs in dtype"),
        ({"weights": "sha256:7", "rope": "yarn"}, "differs in weights, rope"),
        ({"num_layers": "3"}, "must be a JSON object of model, weights"),
        ({"layers": 3}, "must be a JSON object of model, weights"),
        ({"weights": "main"}, "must be a JSON object of model, weights"),
    ],
)
def test_a_spec_that_no_engine_uses_is_told_by_how_it_differs(
    served: Served,
    client: Client,
    file: Path,
    spec_file: Path,
    change: dict[str, str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec_file.write_text(json.dumps(json.loads(spec_file.read_text()) | change), encoding="utf-8")
    assert served.run("explain", "--prompt-file", str(file), "--spec", str(spec_file)) == 1
    assert said.lower() in capsys.readouterr().err.lower()
    assert client.status()["namespaces"] == 1, "asking has not made it known"


def test_asking_leaves_nothing_behind(served: Served, client: Client, file: Path, spec_file: Path) -> None:
    before = client.status()
    assert served.run("explain", "--prompt-file", str(file), "--spec", str(spec_file)) == 0
    assert served.run("lookup", "--prompt-file", str(file)) == 0
    after = client.status()
    for name in ("blocks", "namespaces", "tickets"):
        assert after[name] == before[name]


def test_a_cluster_that_knows_no_engine_says_so(served: Served, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.run("explain", "--prompt-file", str(file)) == 1
    assert "no client has connected with a model" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_one_line(
    served: Served, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("be kind", encoding="utf-8")
    assert served.run("lookup", "--prompt-file", str(text), "--tokenizer", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kvcluster: no tokenizer can be read from {tmp_path}") and said.count("\n") == 1


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == set(MissReason)
