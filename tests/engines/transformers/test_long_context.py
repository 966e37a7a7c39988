"""A generation over a context that is many times larger than the resident set has the ids of a run in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcluster.engines.transformers import SequenceCache, generate
from kvcluster.errors import ResidentSetFull
from kvcluster.sequences.streamed_attention import StreamedAttention
from tests.engines.transformers.models import Settings, batch, connect, logits, model_of, prompt

LONG: Settings = {"num_hidden_layers": 4, "hidden_size": 32, "max_position_embeddings": 16_384}
GREEDY: Settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The absent blocks of each call of attention that streams."""
    calls: list[int] = []
    stream = StreamedAttention._stream

    def noted(self: StreamedAttention, call: Any, absent: Any, scratch: Any) -> Any:
        calls.append(len(absent))
        return stream(self, call, absent, scratch)

    monkeypatch.setattr(StreamedAttention, "_stream", noted)
    return calls


def test_a_context_of_sixteen_resident_sets_prefill_included(start: Any, streamed: list[int]) -> None:
    model = model_of(**LONG)
    ids, mask = batch(prompt(8_200))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    client = connect(start(resident_tokens=512, model=model), model, block_tokens=16)
    out = generate(client, model, ids, mask, offload=True, planner=None, **GREEDY)
    assert torch.equal(out.sequences, expected.sequences)
    assert len(set(out.sequences[0, 8_200:].tolist())) > 3
    assert (logits(out) - logits(expected)).abs().max() <= 1e-4 * logits(expected).abs().max()
    use = client.resident()
    assert (use.pages, use.pages_used) == (32, 0) and use.pages_peak <= 32
    assert max(streamed) > 15 * 32
    assert client.flush() and client.lookup(ids[0].tolist()).tokens == 8_192


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"num_beams": 3}),
        ("mistral", {"sliding_window": 700}),
        ("gemma2", {"sliding_window": 700, "do_sample": True, "num_return_sequences": 2}),
    ],
)
def test_beams_windows_and_padded_samples_over_a_context_that_is_streamed(
    start: Any, streamed: list[int], kind: str, settings: Settings
) -> None:
    window = {"sliding_window": settings.pop("sliding_window")} if "sliding_window" in settings else {}
    model = model_of(kind, **{**LONG, **window})
    ids, mask = batch(prompt(2_500, 1), prompt(1_700, 2))
    settings = {**GREEDY, **settings}
    torch.manual_seed(5)
    expected = model.generate(ids, attention_mask=mask, **settings)
    client = connect(start(resident_tokens=800, model=model), model, block_tokens=16)
    for _ in range(2):
        torch.manual_seed(5)
        out = generate(client, model, ids, mask, offload=True, planner=None, **settings)
        assert torch.equal(out.sequences, expected.sequences)
        assert client.resident().pages_used == 0
    assert max(streamed) > 50


def test_a_cached_context_is_streamed_without_a_prefill(start: Any, streamed: list[int]) -> None:
    model = model_of(**LONG)
    ids, mask = batch(prompt(3_000))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    client = connect(start(resident_tokens=640, model=model), model, block_tokens=16)
    generate(client, model, ids, mask, **GREEDY)
    assert client.flush() and not streamed
    with SequenceCache.from_inputs(client, model, ids, mask) as cache:
        assert cache.cached_tokens == [2_992]
    out = generate(client, model, ids, mask, offload=True, planner=None, **GREEDY)
    assert torch.equal(out.sequences, expected.sequences) and streamed


@pytest.mark.parametrize(("codec", "bound"), [("q8", 0.02), ("q4", 0.3)])
def test_a_context_that_shards_have_encoded_changes_logits_within_a_bound(
    start: Any, streamed: list[int], codec: str, bound: float
) -> None:
    model = model_of(**LONG, head_dim=32)
    ids, mask = batch(prompt(2_000))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    tiers = {"host_codec": codec, "host_raw_blocks": 0, "hold_ms": 0, "low_free": 0.9, "high_free": 0.9}
    shard = {"host_bytes": "16MiB"}
    cluster = start(resident_tokens=640, model=model, ram="2MiB", coordinator=tiers, shard=shard)
    client = connect(cluster, model, block_tokens=16)
    out = generate(client, model, ids, mask, offload=True, planner=None, **GREEDY)
    assert streamed
    cluster.wait_until(lambda: [block.tier for block in client.explain(ids[0].tolist())].count("host") > 100)
    out = generate(client, model, ids, mask, offload=True, planner=None, **GREEDY)
    difference = (logits(out)[0] - logits(expected)[0]).abs().max() / logits(expected)[0].abs().max()
    assert 1e-4 < difference < bound


def test_a_resident_set_that_is_too_small_is_refused_and_nothing_is_left(start: Any) -> None:
    model = model_of(**LONG)
    client = connect(start(resident_tokens=128, model=model), model, block_tokens=16)
    with pytest.raises(ResidentSetFull, match="resident_bytes"):
        generate(client, model, *batch(prompt(2_000)), offload=True, planner=None, **GREEDY)
    assert client.resident().sequences == client.resident().pages_used == 0
