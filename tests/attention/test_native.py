"""The native core computes what the definition in torch says: `plain` to the last bit, and the instruction sets with a
fused multiply-add to the last bit of one another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcluster.attention import ROOT, PageAddresses, PageSpan, QueryRow, Subtree, native_kernel, torch_kernel
from kvcluster.attention.arithmetic import merge_pair, plain
from kvcluster.attention.call import AttentionCall, Scoring, check_call
from kvcluster.core.codecs import Codec
from kvcluster.memory import native
from kvcluster.memory.native import Kernels
from tests.attention.references import context, layout_of

NEAR = 2e-6  # of numbers of about 1: what two orders of rounding differ in
LAYOUTS = [
    layout_of(heads=2, dim=64),
    layout_of(heads=3, dim=40, value_dim=8, dtype="float16", block_tokens=9),
    layout_of(heads=1, dim=72, latent_values=24, dtype="float32", block_tokens=32),
    layout_of(heads=2, dim=17, dtype="float32", block_tokens=600, layers=1),
]


def each_set(core: Kernels, call: AttentionCall, threads: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    before, made = core.chosen(), {}
    for name in core.names():
        core.choose(name)
        made[name] = native_kernel.attend(core, call, threads)
    core.choose(before)
    return made


@pytest.mark.parametrize("core", [] if native.KERNELS is None else [native.KERNELS])
@settings(max_examples=25)
@given(st.data())
def test_instruction_sets_agree_with_the_definition_and_one_another(core: Kernels, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS), label="layout")
    tokens = data.draw(st.integers(1, 1_200), label="tokens")
    of = context(layout, tokens, tokens, data.draw(st.lists(st.sampled_from(Codec), max_size=3), label="codecs"))
    positions = data.draw(st.lists(st.integers(0, tokens + 9), min_size=1, max_size=6), label="positions")
    scoring = Scoring(
        data.draw(st.sampled_from([0.125, 1.0]), label="scale"),
        data.draw(st.sampled_from([None, 4.0]), label="softcap"),
        data.draw(st.none() | st.integers(1, tokens), label="window"),
    )
    query = torch.randn(
        len(positions), 2 * layout.heads, layout.key.dim, generator=torch.Generator().manual_seed(tokens)
    )
    cut = data.draw(st.integers(0, len(positions)), label="cut")
    rows = [QueryRow(mine, [of.span()]) for mine in (positions[:cut], positions[cut:])]
    one = st.sampled_from([ROOT, Subtree(0, 0), Subtree(0, 1), Subtree(1, 0), Subtree(1, 1)])
    withins = data.draw(st.lists(one, min_size=2, max_size=2), label="withins")
    call = check_call(layout, of.layer, query, rows, None, scoring, withins)
    expected, made = torch_kernel.attend(call), each_set(core, call, data.draw(st.integers(1, 3), label="threads"))
    for name, (out, lse) in made.items():
        if name == "plain":
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])
        else:
            near = NEAR * max(
                [1.0, *lse[lse.isfinite()].abs().flatten().tolist()]
            )  # the roundings of the largest score
            torch.testing.assert_close(out, expected[0], rtol=near, atol=near)
            torch.testing.assert_close(lse, expected[1], rtol=NEAR, atol=NEAR)
    fused = [made[name] for name in core.names() if name != "plain"]
    for out, lse in fused[1:]:
        assert torch.equal(out, fused[0][0])
        assert torch.equal(lse, fused[0][1])


@pytest.mark.parametrize("width", [1, 16, 33])
def test_merging_natively_is_merging(kernels: str, width: int) -> None:
    assert native.KERNELS is not None
    generator = torch.Generator().manual_seed(width)
    infinite = torch.tensor([0.0, 1.0, -1.0, -torch.inf, 80.0, 3.0])
    left = torch.randn(6, width, generator=generator), infinite[torch.arange(6)]
    right = torch.randn(6, width, generator=generator), infinite[torch.tensor([0, 3, 2, 3, 1, 4])]
    left[0][3] = right[0][1] = right[0][3] = 0
    expected, again = merge_pair(plain, left, right), merge_pair(plain, merge_pair(plain, left, right), right)
    outs, lses = torch.stack([left[0], left[0], right[0]]), torch.stack([left[1], left[1], right[1]])
    native_kernel.merge_pairs(native.KERNELS, outs, lses, [(1, 2), (0, 2), (0, 2)])
    pairs = [(outs[1], expected[0]), (lses[1], expected[1]), (outs[0], again[0]), (lses[0], again[1])]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=NEAR, atol=NEAR)
        assert kernels != "plain" or torch.equal(one, other)


WRONG = {
    "a dtype that is none": ("empty page", {"shape": (3, 16, 2, 32, 32)}),
    "heads that pages have not": ("heads", {"heads": (0, 3)}),
    "query heads without groups": ("groups", {"query_heads": 3}),
    "keys of another size": ("keys", {"shape": (0, 16, 2, 24, 32)}),
    "values of another size": ("values", {"shape": (0, 16, 2, 32, 24)}),
    "rows of other tokens": ("rows", {"starts": [0, 2]}),
    "a span that is not there": ("order", {"row_spans": [[1]]}),
    "a span twice": ("order", {"row_spans": [[0, 0]]}),
    "no coder": ("coder", {"coders": []}),
    "no threads": ("range", {"threads": 0}),
    "a subtree that is none": ("range", {"subtree": (32, 0)}),
    "a row's subtree that is none": ("range", {"row_subtrees": [(3, 1 << 29)]}),
    "a row outside the subtree": ("outside", {"subtree": (2, 1), "row_subtrees": [(0, 3)]}),
    "subtrees of other rows": ("other rows", {"row_subtrees": []}),
    "an empty span": ("span", {"tokens_of_span": 0}),
    "more tokens than pages": ("pages", {"tokens_of_span": 17}),
}


@pytest.mark.parametrize("pair", [(0, 2), (2, 0), (1, 1)])
def test_merging_refuses_results_that_are_not_there(pair: tuple[int, int], kernels: str) -> None:
    assert native.KERNELS is not None
    with pytest.raises(ValueError, match="no such results"):
        native_kernel.merge_pairs(native.KERNELS, torch.zeros(2, 1, 4), torch.zeros(2, 1), [pair])


@pytest.mark.parametrize("what", WRONG)
def test_the_binding_refuses_what_contradicts(what: str, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """The check behind those of Python: no argument that passes it leads a kernel astray."""
    layout = layout_of()
    pages = PageAddresses.from_pool(layout, torch.zeros(1, 2, 2, 16, 2, 32, dtype=torch.bfloat16), torch.zeros(1).int())
    call = check_call(
        layout, 1, torch.zeros(1, 4, 32), [QueryRow([0], [PageSpan(pages, 0, 16)])], None, Scoring(1.0), [ROOT]
    )
    named, changed = WRONG[what]
    core: Kernels = native.KERNELS  # type: ignore[assignment]

    class Changed:
        def attend(self, **arguments: object) -> None:
            if "tokens_of_span" in changed:
                (span,) = arguments["spans"]  # type: ignore[misc]
                core.attend(**{**arguments, "spans": [(*span[:4], changed["tokens_of_span"])]})  # type: ignore[arg-type]
            else:
                core.attend(**{**arguments, **changed})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=named):
        native_kernel.attend(Changed(), call, 1)  # type: ignore[arg-type]
