"""Attention over pages is as exact as one float32 kernel over all keys: its error against float64 is at most twice that
kernel's, for every shape, split, codec and scoring."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcluster.attention import PageAddresses, PageSpan, QueryRow, merge, partial
from kvcluster.core.codecs import Codec
from tests.attention.references import Context, context, flash, layout_of, reference

pytestmark = pytest.mark.usefixtures("implementation")
ulp = torch.finfo(torch.float32).eps
few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])

SHAPES = {  # query heads, layout
    "MHA": (3, layout_of(heads=3, dim=24)),
    "GQA": (8, layout_of(heads=2, dim=64)),
    "GQA of five": (10, layout_of(heads=2, dim=16, dtype="float16", block_tokens=32)),
    "MQA": (7, layout_of(heads=1, dim=40, dtype="float32", block_tokens=7)),
    "values of another dim": (4, layout_of(heads=2, dim=48, value_dim=20)),
    "MLA": (16, layout_of(heads=1, dim=72, latent_values=64)),
    "pages longer than a cut": (4, layout_of(heads=2, dim=16, block_tokens=700, layers=1)),
}


def seen_by(positions: list[int], keys: Tensor, window: int | None, causal: bool) -> Tensor:
    at = torch.tensor(positions)[:, None]
    seen = keys[None] <= at if causal else torch.ones(len(positions), len(keys), dtype=torch.bool)
    return seen if window is None else seen & (keys[None] > at - window)


def assert_exact(out: Tensor, lse: Tensor, exact: tuple[Tensor, Tensor], unsplit: tuple[Tensor, Tensor]) -> None:
    """The bound: twice the unsplit float32 kernel's error; where that kernel was lucky, twice four roundings of the
    largest number. A score that is rounded by some amount changes weights by that factor, so that `out` is allowed the
    roundings of the largest score, too."""
    most_out, most_lse = (max([1.0, *each[each.isfinite()].abs().flatten().tolist()]) for each in exact)
    least = [4 * ulp * most_out * most_lse, 4 * ulp * most_lse]
    for ours, best, other, floor in zip((out, lse), exact, unsplit, least, strict=True):
        finite = best.isfinite()
        assert torch.equal(ours[~finite].double(), best[~finite])
        error = (ours.double() - best)[finite].abs().amax() if finite.any() else torch.tensor(0.0)
        allowed = (other.double() - best)[finite].abs().amax() if finite.any() else torch.tensor(0.0)
        assert error <= 2 * max(float(allowed), floor)


def divided(of: Context, cuts: list[int]) -> list[PageSpan]:
    """The context as spans that begin at these blocks."""
    tokens, block = len(of.key), of.layout.block_tokens
    at = [0, *sorted({cut * block for cut in cuts if 0 < cut * block < tokens}), tokens]
    return [of.span(0, start, stop) for start, stop in itertools.pairwise(at)]


@pytest.mark.parametrize("shape", SHAPES)
@few
@given(st.data())
def test_the_error_is_at_most_twice_that_of_an_unsplit_kernel(shape: str, data: st.DataObject) -> None:
    heads, layout = SHAPES[shape]
    tokens = data.draw(st.integers(1, 1_400), label="tokens")
    codecs = data.draw(st.lists(st.sampled_from(Codec), max_size=3), label="codecs")
    of = context(layout, tokens, data.draw(st.integers(0, 9)), codecs)
    spans = divided(of, data.draw(st.lists(st.integers(0, 90), max_size=4), label="spans begin at blocks"))
    positions = data.draw(st.lists(st.integers(0, tokens + 50), min_size=1, max_size=5), label="positions")
    causal = data.draw(st.booleans(), label="causal")
    window = data.draw(st.none() | st.integers(1, tokens), label="window") if causal else None
    softcap = data.draw(st.sampled_from([None, 2.0, 30.0]), label="softcap")
    scale = data.draw(st.sampled_from([None, 0.05, 1.0]), label="scale")
    sinks = torch.randn(heads) if data.draw(st.booleans(), label="sinks") else None
    query = torch.randn(len(positions), heads, layout.key.dim, generator=torch.Generator().manual_seed(tokens))
    made = partial(
        query,
        [QueryRow(positions, spans)],
        layout,
        of.layer,
        scale=scale,
        softcap=softcap,
        window=window,
        causal=causal,
    )
    made = merge([made], sinks=sinks)
    seen = seen_by(positions, torch.arange(tokens), window, causal)
    how = {"scale": scale, "softcap": softcap, "sinks": sinks}
    exact = reference(query, of.key, of.value, seen, **how)
    unsplit = reference(query, of.key, of.value, seen, **how, dtype=torch.float32)
    assert_exact(made.out, made.lse, exact, unsplit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_error_is_at_most_twice_that_of_torchs_flash_kernel(dtype: str) -> None:
    layout = layout_of(heads=2, dim=64, dtype=dtype)
    of, positions = context(layout, 1_200, 5), [0, 17, 511, 512, 1_100, 1_199]
    query = torch.randn(len(positions), 8, 64, generator=torch.Generator().manual_seed(1))
    made = partial(query, [QueryRow(positions, [of.span()])], layout, 1)
    seen = seen_by(positions, torch.arange(1_200), None, True)
    assert_exact(made.out, made.lse, reference(query, of.key, of.value, seen), flash(query, of.key, of.value, seen))


def test_what_sees_no_key_gives_zero_and_minus_infinity() -> None:
    layout = layout_of()
    of = context(layout, 40, 1)
    rows = [
        QueryRow([5], []),
        QueryRow([3], [PageSpan(of.span().pages, 7, 0)]),
        QueryRow([9, 10], [of.span(10)]),
    ]
    made = partial(torch.randn(4, 4, 32), rows, layout, 1)
    assert not made.out[:3].any()
    assert bool((made.lse[:3] == -math.inf).all())
    assert bool(made.lse[3].isfinite().all())


def test_a_sink_of_a_query_that_sees_nothing_takes_all_the_weight() -> None:
    made = merge([partial(torch.randn(1, 4, 32), [QueryRow([0], [])], layout_of(), 1)], sinks=torch.arange(4.0))
    assert not made.out.any()
    assert torch.equal(made.lse[0], torch.arange(4.0))


def test_heads_of_a_rank_are_those_of_the_pages() -> None:
    layout = layout_of(heads=4)
    of, query = context(layout, 600, 3, [Codec.Q4, Codec.RAW, Codec.Q8]), torch.randn(2, 8, 32)
    rows = [QueryRow([599, 10], [of.span()])]
    whole = partial(query, rows, layout, 1)
    rank = partial(query[:, 2:6], rows, layout, 1, heads=(1, 3))
    assert torch.equal(rank.out, whole.out[:, 2:6])
    assert torch.equal(rank.lse, whole.lse[:, 2:6])


def test_encoded_pages_give_the_bits_of_the_pages_that_decoding_gives() -> None:
    layout = layout_of(heads=2, dim=64)
    of = context(layout, 700, 8, [Codec.Q8, Codec.Q4])
    blocks = -(-700 // 16)
    pool = torch.zeros(blocks, 2, 2, 16, 2, 64, dtype=torch.bfloat16)
    for plane, numbers in enumerate((of.key, of.value)):
        padded = torch.zeros(blocks * 16, 2, 64)
        padded[:700] = numbers
        pool[:, 1, plane] = padded.view(blocks, 16, 2, 64).bfloat16()
    decoded = PageSpan(PageAddresses.from_pool(layout, pool, torch.arange(blocks, dtype=torch.int32)), 0, 700)
    query = torch.randn(3, 8, 64)
    made = [partial(query, [QueryRow([699, 5, 300], [span])], layout, 1) for span in (of.span(), decoded)]
    assert torch.equal(made[0].out, made[1].out)
    assert torch.equal(made[0].lse, made[1].lse)


def test_numbers_behind_a_mask_or_the_last_token_reach_no_result() -> None:
    layout = layout_of(heads=2, dim=32, dtype="float32")
    of = context(layout, 48, 2)
    clean = partial(torch.ones(2, 4, 32), [QueryRow([20, 30], [of.span(0, 0, 40)])], layout, 1)
    poisoned = [bytearray(page) for page in of.pages]
    for page, first in ((1, 15), (2, 8)):  # positions 31 and, behind the last token, 40 to 47
        numbers = torch.frombuffer(poisoned[page], dtype=torch.float32).view(2, 2, 16, 2, 32)
        numbers[:, :, first:] = math.nan
    pages = PageAddresses.from_buffers(layout, [memoryview(page) for page in poisoned])
    again = partial(torch.ones(2, 4, 32), [QueryRow([20, 30], [PageSpan(pages, 0, 40)])], layout, 1)
    assert torch.equal(again.out, clean.out)
    seen = partial(torch.ones(1, 4, 32), [QueryRow([31], [PageSpan(pages, 0, 40)])], layout, 1)
    assert bool(seen.out.isnan().all())
