"""How many bytes encoded pages take, and which loss a codec adds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.codecs import Codec, Coding, coding, layer_bytes, page_bytes, plane_bytes
from kvcluster.core.groups import Plane
from kvcluster.core.miss import Loss
from tests.core.samples import CODED, LEFT, MIXED, RIGHT, SPEC, WHOLE

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"]


def test_codecs_by_rising_loss() -> None:
    assert [(codec.name, codec.loss) for codec in Codec] == [("RAW", Loss.EXACT), ("Q8", Loss.Q8), ("Q4", Loss.Q4)]
    assert [codec.value >> 8 for codec in Codec] == [0, 1, 2]


def test_a_raw_page_is_as_long_as_its_spec_says() -> None:
    for spec in (SPEC, CODED, MIXED):
        for group in range(len(spec.groups)):
            part = spec.whole(group)
            assert page_bytes(Codec.RAW, spec, group, part) == spec.page_bytes(group, part)


@pytest.mark.parametrize(("codec", "nbytes"), [(Codec.RAW, 512), (Codec.Q8, 192), (Codec.Q4, 144)])
def test_an_encoded_page_is_its_planes_one_after_the_other(codec: Codec, nbytes: int) -> None:
    # 2 layers of 2 planes of 4 rows of 8 channels. q8: a row has a scale, a minimum and 8 codes. q4: of k each of 2
    # heads has 8 channels with a scale and a minimum of a byte, of v each row one of each; and half a byte a code.
    assert page_bytes(codec, CODED, 0, WHOLE) == nbytes
    assert {Codec.RAW: 2 * 2 * 4 * 8 * 4, Codec.Q8: 2 * 2 * 4 * (4 + 8), Codec.Q4: 2 * (2 * 16 + 16 + 4 * (2 + 4))}[
        codec
    ] == nbytes


@pytest.mark.parametrize("codec", Codec)
def test_parts_of_a_page_are_as_long_as_the_page(codec: Codec) -> None:
    assert sum(page_bytes(codec, CODED, 0, part) for part in (LEFT, RIGHT)) == page_bytes(codec, CODED, 0, WHOLE)
    layer = layer_bytes(codec, CODED.groups[0], block_tokens=2, heads=2)
    assert page_bytes(codec, CODED, 0, WHOLE) == 2 * layer


@pytest.mark.parametrize("codec", Codec)
def test_what_no_codec_encodes_is_as_long_as_before(codec: Codec) -> None:
    assert page_bytes(codec, SPEC, 0, WHOLE) == SPEC.page_bytes(0, WHOLE), "four channels"
    opaque = Plane("state", 2, 8, "uint8")
    assert coding(codec, opaque) is Coding.RAW
    assert plane_bytes(codec, opaque, block_tokens=4, heads=2) == 4 * 2 * 8


def test_keys_share_their_scales_by_channel_and_all_else_by_token() -> None:
    assert [coding(Codec.Q4, Plane(name, 2, 64, "bfloat16")) for name in ("k", "v", "c")] == [
        Coding.CHANNELS,
        Coding.GROUPS,
        Coding.GROUPS,
    ]
    assert {coding(Codec.Q8, Plane(name, 2, 64, "bfloat16")) for name in ("k", "v", "c")} == {Coding.ROWS}


@given(
    name=st.sampled_from("kv"),
    dim=st.integers(1, 33).map(lambda eighths: 8 * eighths),
    dtype=st.sampled_from(DTYPES[:3]),
    tokens=st.sampled_from([16, 32, 64]),
    heads=st.integers(1, 8),
)
def test_planes_of_usual_blocks_shrink_with_each_codec(
    name: str, dim: int, dtype: str, tokens: int, heads: int
) -> None:
    plane = Plane(name, heads, dim, dtype)
    raw, q8, q4 = (plane_bytes(codec, plane, block_tokens=tokens, heads=heads) for codec in Codec)
    assert q4 < q8 < raw
    assert [plane_bytes(codec, plane, block_tokens=tokens, heads=1) * heads for codec in Codec] == [raw, q8, q4], (
        "heads are encoded each by itself"
    )
