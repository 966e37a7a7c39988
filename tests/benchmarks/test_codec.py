"""`python -m benchmarks codec`: what it measures is what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.__main__ import main
from benchmarks.codec import logits, synthetic, table
from kvcluster.cli import picture
from kvcluster.cli.demo.engine import llama

ROOT = Path(__file__).parents[2]
HIDE = "import sys; sys.modules[{0!r}] = None; from benchmarks.__main__ import main; sys.exit(main(sys.argv[1:]))"
PNG = b"\x89PNG"


def without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks codec ARGUMENTS` where a package is not installed."""
    command = [sys.executable, "-c", HIDE.format(package), "codec", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_it_prints_and_draws_speeds_errors_and_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "picture.png"
    assert main(["codec", "--quick", "--dims", "8", "--json", "--plot", str(drawn)]) == 0
    assert drawn.read_bytes().startswith(PNG)
    figures = json.loads(capsys.readouterr().out)
    assert [(row["codec"], row["operation"]) for row in figures["speed"]] == [
        ("memcpy", "copy"),
        *((codec, operation) for codec in ("q8", "q4") for operation in ("encode", "decode")),
    ]
    assert all(row["gb_per_s"] > 0 for row in figures["speed"])
    errors = {(row["codec"], row["block_tokens"]): row for row in figures["errors"]}
    assert errors.keys() == {(codec, tokens) for codec in ("q8", "q4") for tokens in (16, 32, 64)}
    for what in ("k", "v", "output"):
        assert 0 < errors["q8", 16][what] < errors["q4", 16][what] < 0.5
    # A longer page has its keys share steps among more tokens, and nothing else differs.
    assert errors["q4", 16]["k"] < errors["q4", 64]["k"]
    assert errors["q4", 16]["v"] == errors["q4", 64]["v"]
    codings = [("raw", 0), ("q8", 0), ("q4", 0), ("q4", 1)]
    assert [(row["codec"], row["raw_blocks"]) for row in figures["logits"]] == codings
    assert {(row["prefix_tokens"], row["tokens"]) for row in figures["logits"]} == {(256, 256)}
    printed = "\n".join(table.lines(figures))
    assert "  8  q4      decode " in printed
    assert f"  8  q4               64   {errors['q4', 64]['ratio']:.2f}" in printed
    assert "\nraw                  0.0000    0.0000                  100.0%" in printed
    assert f"\nq4, first block raw  {figures['logits'][3]['error']:.4f}" in printed


def test_what_no_codec_encodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codec", "--dims", "12"]) == 1
    assert "multiple of 8" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["codec", "--plot", "no/such/folder/picture.png"]) == 1
    assert "cannot draw into no/such/folder/picture.png" in capsys.readouterr().err
    done = without("matplotlib", "--plot", "picture.png")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("benchmarks: this needs matplotlib")
    assert done.stderr.endswith("which is not installed: pip install 'kvcluster[bench]'\n")


def test_without_transformers_there_are_no_logits_and_a_line_says_so() -> None:
    done = without("transformers", "--quick", "--rounds", "1", "--dims", "8")
    assert done.returncode == 0, done.stderr
    *measured, last = done.stdout.splitlines()
    assert last.startswith("logits: left out") and last.endswith("pip install 'kvcluster[transformers]'")
    assert any("attention output" in line for line in measured)


def test_a_picture_has_room_for_quanto_for_one_dim_and_for_no_logits(tmp_path: Path) -> None:
    error = {"dim": 64, "block_tokens": 16, "ratio": 3.4, "k": 0.1, "v": 0.1, "output": 0.2}
    speed = {"dim": 64, "gb_per_s": 1.0, "of_memcpy": 0.5}
    coding = [{**speed, "codec": "q4", "operation": operation} for operation in ("encode", "decode")]
    figures: dict[str, Any] = {
        "setting": {"machine": "m", "cores": 1},
        "implementation": "torch",
        "kernels": "none",
        "rounds": 1,
        "seeds": 1,
        "speed": [{**speed, "codec": "memcpy", "operation": "copy"}, *coding],
        "errors": [{**error, "codec": "q4"}, {**error, "codec": "quanto", "block_tokens": None}],
        "logits": [],
    }
    picture.draw(*table.panels(figures), str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)


# ------------------------------------------------------------------------------------------------------ logits


def test_raw_changes_no_logit_and_q8_changes_them_less_than_q4() -> None:
    raw, q8, q4, first_raw = logits.measure(prefix_tokens=64, tokens=32)
    assert (raw["error"], raw["kl_nats"], raw["same_token"]) == (0, 0, 1)
    for what in ("error", "kl_nats"):
        assert 0 < q8[what] < q4[what]
        assert 0 < q8[what] < first_raw[what]
    assert 0 < q4["same_token"] <= q8["same_token"] <= 1
    assert q4["error"] < 1 and first_raw["error"] != q4["error"]


def test_pages_hold_the_kv_of_the_cache_token_by_token() -> None:
    model = llama(48)
    ids = torch.arange(48)[None]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        pages = logits.prefilled(model, ids)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    layer: Any = cache.layers[5]
    _, heads, _, dim = layer.keys.shape
    assert pages.shape == (3, 8, 2, 16, heads, dim) and pages.is_contiguous() and pages.dtype is torch.float32
    for plane, tensor in enumerate((layer.keys, layer.values)):
        assert torch.equal(pages[2, 5, plane, 3], tensor[0, :, 2 * 16 + 3])


def test_logits_that_are_all_larger_mean_the_same() -> None:
    meant = torch.tensor([[1.0, 2.0, 4.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    assert logits.difference(meant, meant) == {"error": 0, "kl_nats": 0, "same_token": 1}
    moved = logits.difference(meant + 7, meant)
    assert moved["error"] > 1 and moved["kl_nats"] == pytest.approx(0, abs=1e-12) and moved["same_token"] == 1
    swapped = logits.difference(meant[:, [0, 2, 1]], meant)
    assert swapped["same_token"] == 0 and swapped["kl_nats"] > 0.5
    even = torch.zeros(1, 2, dtype=torch.float64)
    sure = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()
    assert logits.difference(sure, even)["kl_nats"] == pytest.approx(0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25))


# --------------------------------------------------------------------------------------------------- sequences


def test_a_seed_is_a_sequence_and_another_is_another() -> None:
    first, again, other = (synthetic.attention(seed, tokens=32, heads=2, dim=16, queries=4) for seed in (1, 1, 2))
    assert torch.equal(first.k, again.k)
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.k, other.k)


def test_attention_is_that_of_torch() -> None:
    given = synthetic.attention(3, tokens=64, heads=2, dim=16, queries=8)
    q, k, v = given.q.float(), given.k.float().transpose(0, 1), given.v.float().transpose(0, 1)
    allowed = torch.ones(8, 64, dtype=torch.bool).tril(64 - 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    assert torch.allclose(synthetic.output(given), expected, atol=1e-5)


def test_keys_have_a_few_channels_that_are_large_and_scores_are_moderate() -> None:
    given = synthetic.attention(4)
    size = given.k.float().square().mean(0).sqrt()
    assert bool((size.sort(-1).values[:, -synthetic.OUTLIERS] > 3 * size.median(-1).values).all())
    scores = given.q.float() @ given.k.float().permute(1, 2, 0) / 128**0.5
    assert float(scores.std()) == pytest.approx(1.2, abs=0.2)
