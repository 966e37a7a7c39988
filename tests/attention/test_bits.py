"""The same bits every time: a result depends on its own queries and keys, and on nothing else."""

from __future__ import annotations

import itertools
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcluster.attention import (
    CUT_TOKENS,
    ROOT,
    PageAddresses,
    PageSpan,
    Partial,
    QueryRow,
    Scoring,
    Subtree,
    SubtreeRow,
    merge,
    partial,
    subtree_partials,
    subtrees,
)
from kvcluster.core.codecs import Codec
from kvcluster.core.position_tree import subtrees_of
from tests.attention.references import Context, context, layout_of

pytestmark = pytest.mark.usefixtures("implementation")
few = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
LAYOUT = layout_of(heads=2, dim=48, value_dim=32)
TOKENS = 2_300


@pytest.fixture(scope="module")
def prefix() -> Context:
    return context(LAYOUT, TOKENS, 4, [Codec.RAW, Codec.Q8, Codec.RAW, Codec.Q4])


def queries(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 8, 48, generator=torch.Generator().manual_seed(seed))


def assert_same(one: Partial, other: Partial) -> None:
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)


@few
@given(st.lists(st.integers(1, 143), max_size=6), st.booleans())
def test_bits_do_not_depend_on_how_spans_are_split(prefix: Context, blocks: list[int], windowed: bool) -> None:
    window = 700 if windowed else None
    query, positions = queries(3), [TOKENS - 1, 1_000, 600]
    at = [0, *sorted({16 * block for block in blocks}), TOKENS]
    spans = [prefix.span(0, start, stop) for start, stop in itertools.pairwise(at)]
    whole = partial(query, [QueryRow(positions, [prefix.span()])], LAYOUT, 1, window=window)
    assert_same(partial(query, [QueryRow(positions, spans)], LAYOUT, 1, window=window), whole)


@few
@given(st.permutations(range(5)), st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(0, 1_000))
def test_bits_do_not_depend_on_the_other_rows_of_a_batch(
    prefix: Context, order: list[int], tokens: list[int], later: int
) -> None:
    shared = prefix.span(0, 0, 1_600)
    tails = [[prefix.span(0, 1_600)], [], [prefix.span(16 * 7 + later, 1_600)], [], [prefix.span(0, 1_600, 1_605)]]
    rows = [
        QueryRow(range(2_100 + i, 2_100 + i + count), [shared, *tail] if i != 3 else [prefix.span()])
        for i, (count, tail) in enumerate(zip(tokens, tails, strict=True))
    ]
    each = [queries(count, i) for i, count in enumerate(tokens)]
    made = partial(torch.cat([each[i] for i in order]), [rows[i] for i in order], LAYOUT, 1, threads=2)
    alone = [partial(each[i], [rows[i]], LAYOUT, 1) for i in order]
    assert torch.equal(made.out, torch.cat([one.out for one in alone]))
    assert torch.equal(made.lse, torch.cat([one.lse for one in alone]))


@few
@given(st.lists(st.integers(0, 6), max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_bits_do_not_depend_on_who_attends_to_which_subtree(
    prefix: Context, at: list[int], random: object, early: bool
) -> None:
    query, rows = queries(2), [QueryRow([TOKENS - 1, 800], [prefix.span()])]
    edges = [0, *sorted({cut for cut in at if cut}), 8]
    found = [
        subtree
        for start, stop in itertools.pairwise(edges)
        for subtree in subtrees(start * CUT_TOKENS, stop * CUT_TOKENS)
    ]
    random.shuffle(found)  # type: ignore[attr-defined]
    parts = [partial(query, rows, LAYOUT, 1, within=subtree) for subtree in found]
    if early:  # one process merges what it has of a subtree first
        left = [part for part in parts if Subtree(2, 0).contains(part.subtree)]
        if sum(1 << part.subtree.level for part in left) == 4:
            parts = [merge(left), *(part for part in parts if part not in left)]
    assert_same(merge(parts), partial(query, rows, LAYOUT, 1))


@few
@given(st.lists(st.lists(st.integers(0, 7), unique=True), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_bits_do_not_depend_on_which_subtrees_are_computed_together(
    prefix: Context, wanted: list[list[int]], threads: int, together: bool
) -> None:
    span, positions = prefix.span(), range(TOKENS - 3, TOKENS)
    rows = [SubtreeRow(positions, [span], subtrees_of(sorted(cuts))) for cuts in wanted]
    query = queries(3 * len(rows))
    with patch.object(sys.modules[subtree_partials.__module__], "_TOGETHER", 1 << 20 if together else 0):
        made = subtree_partials(query, rows, LAYOUT, 1, Scoring(0.25), threads=threads)
    for number, (row, results) in enumerate(zip(rows, made, strict=True)):
        assert [result.subtree for result in results] == list(row.subtrees)
        for result in results:
            one = [QueryRow(positions, [span])]
            mine = query[3 * number : 3 * number + 3]
            assert_same(result, partial(mine, one, LAYOUT, 1, scale=0.25, within=result.subtree))


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_bits_do_not_depend_on_the_number_of_threads(prefix: Context, threads: int, tokens: int) -> None:
    query, rows = queries(tokens), [QueryRow(range(TOKENS - tokens, TOKENS), [prefix.span()])]
    assert_same(partial(query, rows, LAYOUT, 1, threads=threads), partial(query, rows, LAYOUT, 1))


def test_bits_do_not_depend_on_the_memory_that_pages_lie_in() -> None:
    layout = layout_of(dim=32)
    of, query = context(layout, 900, 6), queries(2)[:, :4, :32]
    blocks = len(of.pages)
    pool = torch.zeros(blocks + 3, 2, 2, 16, 2, 32, dtype=torch.bfloat16)
    ids = torch.randperm(blocks + 3, generator=torch.Generator().manual_seed(0))[:blocks].int()
    for number, page in zip(ids.tolist(), of.pages, strict=True):
        pool[number] = torch.frombuffer(bytearray(page), dtype=torch.bfloat16).view(pool.shape[1:])
    odd = [memoryview(bytearray(b"x" + bytes(page)))[1:] for page in of.pages]
    places = [
        of.span().pages,
        PageAddresses.from_pool(layout, pool, ids),
        PageAddresses.from_buffers(layout, odd),
        PageAddresses.from_buffers(layout, [pool[number] for number in ids.tolist()]),
    ]
    made = [partial(query, [QueryRow([899, 530], [PageSpan(pages, 0, 900)])], layout, 1) for pages in places]
    for each in made[1:]:
        assert_same(each, made[0])


def test_a_prefilled_token_has_the_bits_of_a_decoded_one(prefix: Context) -> None:
    query, positions = queries(70), range(1_500, 1_570)
    prefill = partial(query, [QueryRow(positions, [prefix.span()])], LAYOUT, 1)
    for token in (0, 1, 33, 69):
        row = QueryRow([positions[token]], [prefix.span()])
        decode = partial(query[token : token + 1], [row], LAYOUT, 1)
        assert torch.equal(decode.out[0], prefill.out[token])
        assert torch.equal(decode.lse[0], prefill.lse[token])


def test_a_selection_of_pages_is_attended_to_as_if_the_others_were_not_there(prefix: Context) -> None:
    query, keep = queries(1), [0, 1, 2, 40, 41, 100, 143]
    selected = partial(query, [QueryRow([TOKENS], prefix.span().select(keep))], LAYOUT, 1)
    ends = [min(16 * page + 16, TOKENS) for page in keep]
    pieces = [prefix.span(0, 16 * page, end) for page, end in zip(keep, ends, strict=True)]
    assert_same(partial(query, [QueryRow([TOKENS], pieces)], LAYOUT, 1), selected)
    assert_same(
        partial(query, [QueryRow([TOKENS], prefix.span().select(range(144)))], LAYOUT, 1),
        partial(query, [QueryRow([TOKENS], [prefix.span()])], LAYOUT, 1),
    )


def test_merging_with_nothing_changes_no_bit(prefix: Context) -> None:
    query = queries(2)
    rows = [QueryRow([500, 511], [prefix.span()])]
    first, second = (partial(query, rows, LAYOUT, 1, within=Subtree(0, cut)) for cut in (0, 1))
    assert_same(merge([second, first]), partial(query, rows, LAYOUT, 1, within=ROOT))
    assert_same(merge([first]), first)
