"""`kvcluster bench codec`: what it measures is what it says."""

from __future__ import annotations

import json

import pytest
import torch

from kvcluster.cli.bench.codec import synthetic, table
from kvcluster.cli.main import main


def test_it_prints_speeds_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--quick", "--dims", "8", "--json"]) == 0
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
    printed = "\n".join(table.lines(figures))
    assert "   8  q4      decode " in printed
    assert f"   8  q4               64   {errors['q4', 64]['ratio']:.2f}" in printed


def test_what_no_codec_encodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--dims", "12"]) == 1
    assert "multiple of 8" in capsys.readouterr().err


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
