from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.groups import LAST, PREFIX, Group, Part, Plane, Reuse, chunk, window
from kvcluster.core.ids import Tenant
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.errors import SpecError

TENANT = Tenant("default")
K, V = Plane("k", 8, 128, "bfloat16"), Plane("v", 8, 128, "bfloat16")
SPEC = KVSpec.uniform(
    model="llama-3-8b", weights="sha256:1234", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)

# Few letters and small numbers, so that two specs are often equal, or equal but for where one field ends.
words = st.text("ab", min_size=1, max_size=3)
planes = st.builds(
    Plane, st.sampled_from(["k", "v", "kv"]), st.just(1), st.integers(1, 3), st.sampled_from(["uint8", "opaque"])
) | st.builds(lambda nbytes, packing: Plane.opaque("kv", nbytes, packing=packing), st.integers(1, 3), words)
reuses = st.sampled_from([PREFIX, LAST, window(1), window(2), chunk(1), chunk(2)])


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    layers = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True))
    cut = draw(st.integers(0, len(layers) - 1))
    return KVSpec(
        model=draw(words),
        weights=draw(words),
        adapter=draw(words | st.just("")),
        rope=draw(words | st.just("")),
        block_tokens=draw(st.integers(1, 2)),
        groups=tuple(
            Group(
                tuple(sorted(own)),
                tuple(draw(st.lists(planes, min_size=1, max_size=2, unique_by=lambda p: p.name))),
                draw(reuses),
            )
            for own in (layers[:cut], layers[cut:])
            if own
        ),
        extra=tuple(sorted(draw(st.dictionaries(words, words, max_size=2)).items())),
        private=draw(st.booleans()),
    )


# ------------------------------------------------------------------------------------------- identity


def test_the_golden_namespace_holds_for_ever() -> None:
    assert SPEC.namespace(TENANT).hex() == "b121b49734f36976563ed00b968cb1a92cc888aa30f89ade8236260f48dbb268"


@given(specs(), specs())
def test_canonical_bytes_are_equal_exactly_when_the_specs_are(one: KVSpec, other: KVSpec) -> None:
    assert (one.canonical() == other.canonical()) == (one == other)
    assert (one.namespace(TENANT) == other.namespace(TENANT)) == (one == other)


@given(specs(), specs(), words, words)
def test_no_spec_of_one_tenant_meets_one_of_another(one: KVSpec, other: KVSpec, a: str, b: str) -> None:
    assert (one.namespace(Tenant(a)) == other.namespace(Tenant(b))) == ((one, a) == (other, b))


def test_whether_pages_are_private_is_true_or_false() -> None:
    with pytest.raises(SpecError, match="private must be true or false, not 1"):
        dataclasses.replace(SPEC, private=1)


def with_group(**changes: Any) -> KVSpec:
    return dataclasses.replace(SPEC, groups=(dataclasses.replace(SPEC.groups[0], **changes),))


VARIANTS: dict[str, tuple[KVSpec, str]] = {
    "model": (dataclasses.replace(SPEC, model="llama-3-8B"), "model"),
    "weights": (dataclasses.replace(SPEC, weights="sha256:1235"), "weights"),
    "adapter": (dataclasses.replace(SPEC, adapter="sha256:lora"), "adapter"),
    "rope": (dataclasses.replace(SPEC, rope="theta=500000"), "rope"),
    "private": (dataclasses.replace(SPEC, private=True), "private"),
    "block size": (dataclasses.replace(SPEC, block_tokens=32), "block_tokens"),
    "extra": (dataclasses.replace(SPEC, extra=(("attention", "v2"),)), "extra.attention"),
    "extra value": (dataclasses.replace(SPEC, extra=(("attention", "v3"),)), "extra.attention"),
    "layer": (with_group(layers=(*range(31), 32)), "layout"),
    "fewer layers": (with_group(layers=tuple(range(31))), "layout"),
    "reuse": (with_group(reuse=LAST), "layout"),
    "window": (with_group(reuse=window(4096)), "layout"),
    "other window": (with_group(reuse=window(4097)), "layout"),
    "chunk": (with_group(reuse=chunk(4096)), "layout"),
    "other chunk": (with_group(reuse=chunk(4097)), "layout"),
    "plane name": (with_group(planes=(K, dataclasses.replace(V, name="w"))), "layout"),
    "plane order": (with_group(planes=(V, K)), "layout"),
    "heads": (with_group(planes=tuple(dataclasses.replace(p, heads=4) for p in (K, V))), "layout"),
    "dim": (with_group(planes=(K, dataclasses.replace(V, dim=64))), "layout"),
    "dtype": (with_group(planes=tuple(dataclasses.replace(p, dtype="float16") for p in (K, V))), "dtype"),
    "dtype of one plane": (with_group(planes=(K, dataclasses.replace(V, dtype="float8_e4m3fn"))), "dtype"),
    "grouping": (
        dataclasses.replace(SPEC, groups=(Group(tuple(range(16)), (K, V)), Group(tuple(range(16, 32)), (K, V)))),
        "layout",
    ),
}


def test_every_field_keeps_namespaces_apart() -> None:
    namespaces = {SPEC.namespace(TENANT), SPEC.namespace(Tenant("other"))}
    namespaces |= {variant.namespace(TENANT) for variant, _ in VARIANTS.values()}
    assert len(namespaces) == 2 + len(VARIANTS)


@pytest.mark.parametrize(("variant", "field"), VARIANTS.values(), ids=VARIANTS.keys())
def test_what_differs_is_named_as_a_person_would(variant: KVSpec, field: str) -> None:
    assert differing_fields(SPEC, variant) == differing_fields(variant, SPEC) == (field,)


@given(specs(), specs())
def test_specs_without_a_difference_are_equal(one: KVSpec, other: KVSpec) -> None:
    names = differing_fields(one, other)
    assert (names == ()) == (one == other)
    assert len(set(names)) == len(names)


def test_a_spec_made_from_lists_is_the_one_made_from_tuples() -> None:
    pairs = (("a", "b"),)
    listed = dataclasses.replace(SPEC, groups=list(SPEC.groups), extra=[list(pair) for pair in pairs])
    assert listed == dataclasses.replace(SPEC, extra=pairs)
    assert hash(listed) == hash(dataclasses.replace(SPEC, extra=pairs))


def test_all_that_differs_is_named() -> None:
    other = dataclasses.replace(VARIANTS["dtype"][0], weights="sha256:9", rope="theta=1")
    assert differing_fields(SPEC, other) == ("weights", "rope", "dtype")


def packed(packing: str, **changes: Any) -> KVSpec:
    kv = Plane.opaque("kv", 16 * 2 * 128 * 2, heads=8, packing=packing)
    return with_group(**{"planes": (kv,), **changes})


def test_engines_that_pack_kv_in_another_order_or_not_at_all_never_share() -> None:
    plain, amx, neon = SPEC, packed("cpu amx"), packed("cpu neon")
    assert len({spec.namespace(TENANT) for spec in (plain, amx, neon)}) == 3
    for one, other in ((plain, amx), (amx, plain), (amx, neon)):
        assert differing_fields(one, other) == ("packing",)
    assert differing_fields(amx, packed("cpu neon", layers=tuple(range(31)))) == ("packing", "layout")
    assert differing_fields(amx, packed("cpu amx", layers=tuple(range(31)))) == ("layout",)


def test_each_pair_of_extra_that_differs_is_named() -> None:
    one, other = (
        dataclasses.replace(SPEC, extra=extra) for extra in ((("a", "1"), ("b", "")), (("a", "2"), ("c", "")))
    )
    assert differing_fields(one, other) == ("extra.a", "extra.b", "extra.c")


# --------------------------------------------------------------------------------------------- geometry


def test_a_uniform_spec_is_one_group_of_k_and_v() -> None:
    assert SPEC.groups == (Group(tuple(range(32)), (K, V), PREFIX),)
    assert (SPEC.block_tokens, SPEC.adapter, SPEC.rope, SPEC.extra) == (16, "", "", ())
    kwargs: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "uint8"}
    spec = KVSpec.uniform(model="m", weights="w", extra={"b": "2", "a": "1"}, **kwargs)
    assert spec.extra == (("a", "1"), ("b", "2"))


def test_sizes_are_those_of_the_tensors() -> None:
    """Llama 3 8B: 2 planes x 16 tokens x 8 heads x 128 x 2 bytes a layer, and 32 of them a page."""
    assert SPEC.layer_bytes(0, SPEC.whole(0)) == 65_536
    assert SPEC.page_bytes(0, SPEC.whole(0)) == 2 * 2**20
    assert SPEC.page_bytes(0, Part(0, 16, 0, 2)) == 2 * 2**20 // 8
    assert packed("cpu amx").page_bytes(0, Part(0, 16, 0, 2)) == 2 * 2**20 // 8, "opaque heads are as large"
    assert SPEC.token_bytes == 131_072


def test_planes_of_a_group_may_differ_in_all_but_heads() -> None:
    latent = Group((0, 2), (Plane("latent", 1, 512, "bfloat16"), Plane("rope", 1, 64, "float32")))
    state = Group((1,), (Plane.opaque("state", 1_000),), LAST)
    spec = KVSpec(model="m", weights="w", block_tokens=4, groups=(latent, state))
    assert spec.layer_bytes(0, spec.whole(0)) == 4 * (512 * 2 + 64 * 4)
    assert spec.page_bytes(1, spec.whole(1)) == 1_000  # whatever the number of tokens
    assert spec.token_bytes == (2 * 4 * (512 * 2 + 64 * 4) + 1_000) / 4


ranges = st.tuples(st.integers(0, 5), st.integers(0, 5))
parts = st.builds(lambda layers, heads: Part(*layers, *heads), ranges, ranges)


def cells(part: Part) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer in range(part.layer_start, part.layer_stop)
        for head in range(part.head_start, part.head_stop)
    }


@given(parts, parts)
def test_parts_meet_in_the_cells_that_both_hold(one: Part, other: Part) -> None:
    both = one.intersect(other)
    assert (cells(both) if both else set()) == cells(one) & cells(other)


@given(parts)
def test_a_part_lies_within_its_group_or_is_refused(part: Part) -> None:
    spec = KVSpec.uniform(model="m", weights="w", num_layers=3, num_kv_heads=4, head_dim=8, dtype="uint8")
    inside = bool(cells(part)) and cells(part) <= cells(spec.whole(0))
    try:
        spec.check_part(0, part)
    except SpecError as error:
        assert not inside
        assert str(part) in str(error)
        assert "layers 0:3, heads 0:4" in str(error)
    else:
        assert inside
        assert spec.page_bytes(0, part) == len(cells(part)) * 2 * 16 * 8


@pytest.mark.parametrize("group", [-1, 1])
def test_a_part_of_no_group_is_refused(group: int) -> None:
    with pytest.raises(SpecError, match=f"group {group} does not exist; the spec has 1"):
        SPEC.check_part(group, SPEC.whole(0))


# ---------------------------------------------------------------------------------------- rules of reuse


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 60))
def test_a_window_needs_the_blocks_that_its_next_token_looks_back_at(boundary: int, block: int, tokens: int) -> None:
    """Token t attends to itself and the `tokens` - 1 before it."""
    next_token = boundary * block
    seen = range(max(0, next_token - tokens + 1), next_token)
    assert window(tokens).blocks_needed(boundary, block) == len({token // block for token in seen})


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 60))
def test_a_chunk_needs_the_blocks_of_its_next_token_alone(boundary: int, block: int, tokens: int) -> None:
    """Token t attends to those of its own chunk up to itself."""
    next_token = boundary * block
    seen = [token for token in range(next_token) if token // tokens == next_token // tokens]
    assert chunk(tokens).blocks_needed(boundary, block) == len({token // block for token in seen})


some_reuses = st.sampled_from([PREFIX, LAST, window(7), window(64), chunk(7), chunk(64)])


@given(some_reuses, st.integers(0, 40), st.integers(1, 8))
def test_the_most_that_is_needed_never_falls(reuse: Reuse, boundary: int, block: int) -> None:
    needed = [reuse.blocks_needed(each, block) for each in range(boundary + 1)]
    most = [reuse.most_needed(each, block) for each in range(boundary + 1)]
    assert most == sorted(most)
    assert max(needed) <= most[-1] <= max(needed) + (reuse.kind == "chunk"), "chunks may begin within blocks"


@given(st.integers(0, 20), st.integers(1, 8))
def test_a_prefix_needs_every_block_and_a_state_only_the_last(boundary: int, block: int) -> None:
    assert PREFIX.blocks_needed(boundary, block) == boundary
    assert LAST.blocks_needed(boundary, block) == (1 if boundary else 0)


# ------------------------------------------------------------------------------------------- validation


def uniform(**changes: Any) -> Callable[[], object]:
    arguments: dict[str, Any] = {"model": "m", "weights": "w", "num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
    return lambda: KVSpec.uniform(**{**arguments, "dtype": "float16", **changes})


def grouped(*groups: Group) -> Callable[[], object]:
    return lambda: KVSpec(model="m", weights="w", block_tokens=16, groups=groups)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (uniform(model=""), "model must be named"),
        (uniform(weights=""), "weights='' does not pin the weights: give a digest or commit"),
        (uniform(weights=" Main "), "under a name that can move, stale KV would be used as if it were current"),
        (uniform(weights="latest"), "weights='latest' does not pin"),
        (uniform(block_tokens=0), "block_tokens must be an integer of at least 1 and below 2**63, not 0"),
        (uniform(block_tokens=4097), "block_tokens must be at most 4096, not 4097"),
        (uniform(num_layers=0), "num_layers must be an integer of at least 1 and below 2**63, not 0"),
        (uniform(num_kv_heads=0), "num_kv_heads must be an integer of at least 1"),
        (uniform(head_dim=-1), "head_dim must be an integer of at least 1"),
        (uniform(dtype="bf16"), "plane 'k': dtype 'bf16' is not one of float32, bfloat16, "),
        (
            uniform(head_dim=2**20, block_tokens=32),
            "one layer of a block would take more than 32 MiB; lower block_tokens",
        ),
        (
            uniform(model="m" * 10_000),
            "the spec takes more than 8 KiB: `model` is too long, with 10,000 bytes; shorten it",
        ),
        (uniform(adapter="a" * 10_000), "the spec takes more than 8 KiB: `adapter` is too long, with 10,000 bytes"),
        (uniform(rope="x" * limits.SPEC_BYTES), "the spec takes more than 8 KiB: `rope` is too long, with 8,192 bytes"),
        (
            lambda: dataclasses.replace(SPEC, extra=tuple((f"{n:04}", "x" * 96) for n in range(100))),
            "the spec takes more than 8 KiB: `extra` is too long, with 10,000 bytes",
        ),
        (grouped(*(Group((n,), (K,)) for n in range(900))), "the spec takes more than 8 KiB: its 900 groups of layers"),
        (grouped(), "a spec needs at least one group of layers"),
        (grouped(Group((0, 1), (K,)), Group((1, 2), (K,))), "a layer belongs to one group only"),
        (lambda: dataclasses.replace(SPEC, extra=(("b", ""), ("a", ""))), "extra must be sorted pairs without repeats"),
        (lambda: dataclasses.replace(SPEC, extra=(("a", ""), ("a", ""))), "extra must be sorted pairs without repeats"),
        (lambda: Plane("", 1, 1, "uint8"), "a plane needs a name, such as 'k'"),
        (lambda: Plane("k", 2, 8, "uint8", "amx"), "plane 'k': packing 'amx' is allowed for opaque planes only"),
        (lambda: Plane.opaque("kv", 8, packing="\ud800"), "cannot be encoded as UTF-8"),
        (lambda: Plane.opaque("state", 0), "plane 'state': dim must be an integer of at least 1"),
        (lambda: Reuse("suffix"), "reuse 'suffix' is not one of prefix, window, chunk, last"),
        (lambda: window(0), "reuse 'window' and 'chunk' need their number of tokens; the others take none"),
        (lambda: chunk(0), "reuse 'window' and 'chunk' need their number of tokens; the others take none"),
        (lambda: chunk(-4), "the tokens of a chunk must be an integer of at least 0"),
        (lambda: window(-4), "the tokens of a window must be an integer of at least 0"),
        (lambda: Reuse("prefix", 16), "reuse 'window' and 'chunk' need their number of tokens; the others take none"),
        (lambda: Group((), (K,)), "distinct, ascending layer numbers, at least one"),
        (lambda: Group((1, 0), (K,)), "distinct, ascending layer numbers, at least one"),
        (lambda: Group((0, 0), (K,)), "distinct, ascending layer numbers, at least one"),
        (lambda: Group((-1, 0), (K,)), "a layer number must be an integer of at least 0"),
        (uniform(block_tokens=16.0), "block_tokens must be an integer"),
        (uniform(head_dim=True), "dim must be an integer"),
        (uniform(model="\ud800"), "cannot be encoded as UTF-8"),
        (uniform(rope=None), "rope must be text, not None"),
        (lambda: Group((0,), ()), "a group needs at least one plane, and their names must differ"),
        (lambda: Group((0,), (K, K)), "a group needs at least one plane, and their names must differ"),
        (
            lambda: Group((0,), (K, Plane("v", 4, 128, "bfloat16"))),
            "must have the same number of heads; use two groups",
        ),
    ],
)
def test_an_impossible_spec_is_refused_with_what_to_do(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "name", ["main", "master", "latest", "head", "default", "dev", "prod", "stable", "current", "HEAD", " main "]
)
def test_weights_named_by_what_can_move_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="does not pin the weights"):
        dataclasses.replace(SPEC, weights=name)


@pytest.mark.parametrize("weights", ["sha256:1234", "8c22764a7e3675c50d4c7c9a4edb474456022b16", "maintained", "main-2"])
def test_weights_that_are_pinned_are_accepted(weights: str) -> None:
    assert dataclasses.replace(SPEC, weights=weights).weights == weights


def test_the_largest_layer_that_fits_a_frame_is_accepted() -> None:
    spec = KVSpec.uniform(model="m", weights="w", num_layers=1, num_kv_heads=1, head_dim=2**19, dtype="float16")
    assert spec.page_bytes(0, spec.whole(0)) == limits.LAYER_BYTES
