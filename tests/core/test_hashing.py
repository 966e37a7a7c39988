from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import hashing
from kvcluster.core.ids import HASH_BYTES, BlockHash, NamespaceId
from kvcluster.errors import CallerError

NAMESPACE = NamespaceId(bytes(range(32)))
OTHER = NamespaceId(bytes(range(1, 33)))
ROOT = hashing.root(NAMESPACE)

tokens = st.integers(0, 2**32 - 1)
token_lists = st.lists(tokens, max_size=40)


def test_golden_vectors_hold_for_ever() -> None:
    """Changing one of these throws away every cache in the world, or mixes two that must stay apart."""
    assert ROOT.hex() == "c7dfdba894a6c9d8285c5f8b50f95269c6fcc8cb77ebf1886741f60c6747d01e"
    assert hashing.root(NAMESPACE, b"salt").hex() == "722fc84d9e091c22723187931c467a448d57caba8c559ac3838f0fcaaa9e28a0"
    assert [block.hex() for block in hashing.chain(ROOT, range(40), 16)] == [
        "af0629c44b90ca30c2f2ace8144293fb16f27efc1357d4ea504d21c4dad6e152",
        "595e221179d1b68a92fe892f40667f5985a7bee63a97e928173ba60769c4efde",
    ]
    assert [block.hex() for block in hashing.chain(ROOT, [0, 1, 2**32 - 1, 128_000], 2, {1: b"image"})] == [
        "75dcbae5837e206b857926ce9b3ff2e590d1df52f134c373ba1f60e93419bd26",
        "401f045c762b9e92b65d9ba0eeaa90304a98dffc822bb3a72e0f0a94c1bced1f",
    ]
    assert [block.hex() for block in hashing.foreign(NAMESPACE, [bytes(16), b"e" * 32])] == [
        "194342e5ea05583e193682258179eb1d02a86ad7dfa9423447ea10643926e721",
        "0e8efe7195f70be7d9b3f00e686c29fa907c01cf14e4f09afcc3cb647c177deb",
    ]


@given(token_lists, st.integers(1, 5), st.binary(max_size=8), st.dictionaries(st.integers(0, 8), st.binary(max_size=8)))
def test_a_chain_is_what_the_module_says_it_is(
    token_ids: list[int], block_tokens: int, salt: bytes, extra: dict[int, bytes]
) -> None:
    def frame(data: bytes) -> bytes:
        return len(data).to_bytes(4, "little") + data

    parent = hashlib.sha256(b"kvcluster-root-v1" + NAMESPACE + frame(salt)).digest()
    expected = []
    for i in range(len(token_ids) // block_tokens):
        block = token_ids[i * block_tokens : (i + 1) * block_tokens]
        words = b"".join(token.to_bytes(4, "little") for token in block)
        parent = hashlib.sha256(parent + frame(extra.get(i, b"")) + words).digest()
        expected.append(parent)
    assert hashing.chain(hashing.root(NAMESPACE, salt), token_ids, block_tokens, extra) == expected


@given(token_lists, st.integers(1, 5), st.data())
def test_a_chain_goes_on_from_any_of_its_blocks(token_ids: list[int], block_tokens: int, data: st.DataObject) -> None:
    whole = hashing.chain(ROOT, token_ids, block_tokens)
    at = data.draw(st.integers(0, len(whole)))
    parent = [ROOT, *whole][at]
    assert hashing.chain(parent, token_ids[at * block_tokens :], block_tokens) == whole[at:]


@given(token_lists, token_lists)
def test_two_chains_agree_exactly_as_far_as_their_tokens(one: list[int], other: list[int]) -> None:
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    pairs = zip(hashing.chain(ROOT, one, 2), hashing.chain(ROOT, other, 2), strict=False)
    assert [a == b for a, b in pairs] == [(i + 1) * 2 <= common for i in range(min(len(one), len(other)) // 2)]


def test_everything_that_must_keep_blocks_apart_does() -> None:
    """Namespace, salt, tokens, their order, extra keys, which block these belong to, and whose hash it is."""
    roots = [ROOT, hashing.root(OTHER), hashing.root(NAMESPACE, b"a"), hashing.root(NAMESPACE, b"a\0")]
    calls: list[tuple[list[int], dict[int, bytes] | None]] = [
        ([1, 2, 3, 4], None),
        ([1, 2, 4, 3], None),
        ([1, 2, 3, 4], {0: b"cat"}),
        ([1, 2, 3, 4], {0: b"dog"}),
        ([1, 2, 3, 4], {1: b"cat"}),
        ([1, 2, 3, 4], {0: b"c", 1: b"at"}),
    ]
    last = [hashing.chain(root, token_ids, 2, extra)[-1] for root in roots for token_ids, extra in calls]
    last += hashing.foreign(NAMESPACE, [ROOT, last[0]]) + hashing.foreign(OTHER, [ROOT, last[0]])
    assert len({*last, *roots}) == len(last) + len(roots)
    assert {len(block) for block in last} == {HASH_BYTES}


def test_tokens_cannot_pose_as_extra_keys() -> None:
    word = 5
    posing = hashing.chain(ROOT, [word], 1, {0: (7).to_bytes(4, "little")})
    assert posing != hashing.chain(ROOT, [7, word], 2)


@pytest.mark.parametrize("count", [0, 1, 15])
def test_tokens_that_fill_no_block_have_no_hash(count: int) -> None:
    assert hashing.chain(ROOT, [1] * count, 16) == []


@pytest.mark.parametrize(
    "token_ids", [[1, 2, 3], (1, 2, 3), range(1, 4), array("q", [1, 2, 3]), memoryview(array("I", [1, 2, 3]))]
)
def test_any_flat_sequence_of_integers_serves(token_ids: Sequence[int]) -> None:
    assert hashing.token_bytes(token_ids) == b"\1\0\0\0\2\0\0\0\3\0\0\0"


def test_an_integer_of_another_library_serves() -> None:
    class Int32:
        def __index__(self) -> int:
            return 7

    foreign: Any = [Int32()]
    assert hashing.token_bytes(foreign) == b"\7\0\0\0"


@pytest.mark.parametrize(
    ("token_ids", "named"),
    [
        ([5, -1], "-1"),
        ([5, 2**32], "4294967296"),
        ([5, 1.0], "1.0"),
        ([5, "six"], "'six'"),
        ([5, None], "None"),
        ([[5, 6], [7, 8]], r"\[5, 6\]"),
        ("tokens", "'t"),
        (None, "None"),
        (7, "7"),
        (b"\5\0\0\0", "b'"),
        ([True, False], "True"),
    ],
    ids=[
        "negative",
        "too large",
        "float",
        "text",
        "none",
        "nested",
        "a text",
        "nothing",
        "one token",
        "bytes",
        "a mask",
    ],
)
def test_what_is_no_token_id_is_refused_by_name(token_ids: Any, named: str) -> None:
    with pytest.raises(CallerError, match=rf"flat sequence of integers from 0 to 2\*\*32-1, not {named}"):
        hashing.chain(ROOT, token_ids, 1)


def test_a_complaint_about_tokens_is_short() -> None:
    with pytest.raises(CallerError) as caught:
        hashing.token_bytes([["x" * 10_000]])  # type: ignore[list-item]
    assert len(str(caught.value)) < 300


@given(st.lists(st.binary(min_size=16, max_size=64), unique=True))
def test_an_engines_own_hashes_are_bound_one_by_one_to_the_namespace(engine_hashes: list[bytes]) -> None:
    ours = hashing.foreign(NAMESPACE, engine_hashes)
    assert ours == [hashing.foreign(NAMESPACE, [engine_hash])[0] for engine_hash in engine_hashes]
    theirs = hashing.foreign(OTHER, engine_hashes)
    assert len({*ours, *theirs, *map(BlockHash, engine_hashes)}) == 3 * len(engine_hashes)


def test_a_hash_too_short_to_be_cryptographic_is_refused() -> None:
    with pytest.raises(CallerError, match="engine hash of 8 bytes cannot name shared blocks: use a cryptographic"):
        hashing.foreign(NAMESPACE, [bytes(16), bytes(8)])
