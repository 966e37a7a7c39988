"""`python -m benchmarks attend`: what it measures is what it says."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcluster
from benchmarks.__main__ import main
from benchmarks.attention import baselines, generations_table, table
from benchmarks.attention.contexts import filled, model
from benchmarks.attention.links import Direction, LinkProcess, link
from kvcluster.testing import MemoryCluster

PNG = b"\x89PNG"


def test_it_prints_and_draws_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "picture.png"
    arguments = ["--quick", "--rounds", "1", "--tokens", "256", "64", "--forks", "3", "--plot", str(drawn)]
    assert main(["attend", "--json", *arguments]) == 0
    assert drawn.read_bytes().startswith(PNG)
    figures = json.loads(capsys.readouterr().out)
    assert [context["tokens"] for context in figures["contexts"]] == [64, 256]
    for context in figures["contexts"]:
        assert context["raw_bytes"] == context["tokens"] * 4_096
        ways = [row["way"] for row in context["rows"]]
        assert ways == [
            "reading the raw KV",
            *(f"sequence, {form}" for form in ("raw", "q8", "q4", "borrowed", "raw, 2 threads", "raw, 3 forks")),
            *(f"torch flash, {form}" for form in ("bfloat16", "float32", "pages gathered")),
            *(f"transformers {form}" for form in ("DynamicCache", "QuantizedCache, fp8")),
        ]
        assert all(row["ms"] > 0 and row["gb_per_s"] > 0 for row in context["rows"])
    assert figures["prefill"]["context"] == 64 and len(figures["prefill"]["rows"]) == 3
    assert any("3 forks" in line for line in table.lines(figures))


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3"])
def test_the_ways_compute_the_same(name: str) -> None:
    of, tokens = model(name), 96
    values = of.values(tokens)
    query = of.query(1)
    with MemoryCluster(ram_bytes="8MiB", config={"client": {"resident_bytes": "8MiB"}}) as cluster:
        client = cluster.client(of.spec)
        sequence = filled(client, of, "raw", values).sequence
        ours = sequence.attend(0, query, latent_values=of.latent_values).float()
        assert sequence.length == tokens and isinstance(sequence, kvcluster.Sequence)
    key, value = (plane.transpose(0, 1)[None].float() for plane in (values[0], values[-1]))
    step = query.float().view(1, of.heads, -1, of.dim)
    theirs = torch.nn.functional.scaled_dot_product_attention(step, key, value)
    assert torch.allclose(ours.flatten(), theirs.view(of.query_heads, -1)[:, : ours.shape[-1]].flatten(), atol=2e-2)
    flash = baselines.flash(of, values, torch.float32)()
    assert isinstance(flash, tuple) and flash[0].shape == theirs.shape


@pytest.mark.parametrize(("option", "named"), [(["--model", "gpt"], "deepseek-v3"), (["--tokens", "0"], "--tokens")])
def test_wrong_options_are_refused_by_name(option: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["attend", *option]))
    assert ended.value.code and named in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ over links


@pytest.mark.nightly
def test_generations_over_a_link_are_measured_in_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "picture.png"
    arguments = ["--links", "1gbit/200us", "--tokens", "1024", "--new", "2", "1", "--batch", "2", "--plot", str(drawn)]
    assert main(["attend", "--json", *arguments]) == 0
    assert drawn.read_bytes().startswith(PNG)
    figures = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["new"]) for row in figures["rows"]] == [(2, 1), (2, 2)] * 2
    llama, deepseek = figures["rows"][1], figures["rows"][3]
    for row, context_bytes in ((llama, 1_024 * 1_024), (deepseek, 1_024 * 2_304)):
        assert row["fetch_bytes"] > context_bytes, "all of it has passed the link"
        assert row["ship_bytes"] > 0 and row["ship_seconds"] > 0 and row["of_fetch"] > 0
    assert any("deepseek-v3" in line for line in generations_table.lines(figures))


@pytest.mark.parametrize("text", ["1gbit", "fast/1ms", "0mbit/1ms", "1gbit/1s"])
def test_a_link_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attend", "--links", text]) != 0
    assert f"--links {text}: expected a speed and a round trip" in capsys.readouterr().err


def test_a_link_passes_bytes_on_and_counts_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, LinkProcess(link("800mbit/2ms")) as through:
        address = through.through(f"127.0.0.1:{listening.getsockname()[1]}")
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as near:
            far, _ = listening.accept()
            with far:
                near.sendall(b"x" * 100_000)
                near.shutdown(socket.SHUT_WR)
                assert far.makefile("rb").read() == b"x" * 100_000
                far.sendall(b"answer")
                far.shutdown(socket.SHUT_WR)
                assert near.makefile("rb").read() == b"answer"
        assert through.counted() == 100_006


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_bytes_leave_one_after_the_other_and_arrive_after_the_delay(sizes: list[int]) -> None:
    direction = Direction(1e6, 0.5)
    times = [direction.arrival(size) for size in sizes]
    for (left, arrives), (after, _), size in zip(times, times[1:], sizes[1:], strict=False):
        assert arrives == pytest.approx(left + 0.5) and after >= left + size / 1e6 * 0.999
    assert direction.nbytes == sum(sizes)
