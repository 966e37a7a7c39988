"""The codecs: one definition, the same bytes from each implementation, and a documented outcome for every page."""

from __future__ import annotations

import math
from hashlib import sha256

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcluster.core.codecs import Codec, Coding, coding, layer_bytes
from kvcluster.core.groups import Group, Plane
from kvcluster.core.miss import Loss
from kvcluster.memory import codec, native
from kvcluster.memory.codec import Coder
from kvcluster.memory.codec_torch import TorchCoder
from kvcluster.memory.native import Kernels
from tests.memory.layers import DTYPES, GOLDEN, LOSSY, drawn, group_of, layer_of, plane_bytes


def numbers_of(group: Group, layer: bytes) -> torch.Tensor:
    """The inverse: float32 `[planes, numbers]`, for planes of one dtype."""
    (dtype,) = {DTYPES[plane.dtype] for plane in group.planes}
    return torch.frombuffer(bytearray(layer), dtype=dtype).float().view(len(group.planes), -1)


class Coded:
    """One shape under one codec, with whatever implementation is chosen."""

    def __init__(self, which: Codec, group: Group, tokens: int, heads: int = 2) -> None:
        self.coder: Coder = codec.coder(which, group, block_tokens=tokens, heads=heads)
        self.raw_bytes = group.layer_bytes(block_tokens=tokens, heads=heads)
        self.coded_bytes = layer_bytes(which, group, block_tokens=tokens, heads=heads)

    def encode(self, raw: bytes) -> bytes | None:
        layers = len(raw) // self.raw_bytes
        into = bytearray(layers * self.coded_bytes)
        return bytes(into) if self.coder.encode(memoryview(raw), memoryview(into), layers) else None

    def decode(self, coded: bytes) -> bytes:
        layers = len(coded) // self.coded_bytes
        into = bytearray(layers * self.raw_bytes)
        self.coder.decode(memoryview(coded), memoryview(into), layers)
        return bytes(into)


# ------------------------------------------------------------------------------------------------------ names


@given(st.integers(0, 2**16 - 1))
@example(codec.RAW)
@example(0x0102)
def test_an_unknown_codec_is_a_reason_and_not_an_exception(number: int) -> None:
    reason = codec.check_codec(number)
    if number in set(Codec):
        assert reason is None
    else:
        assert reason is not None
        assert f"codec {number // 256} version {number % 256}" in reason


def test_without_a_decoder_an_encoded_page_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KERNELS", None)
    monkeypatch.setattr(codec, "find_spec", lambda name: None)
    assert codec.check_codec(Codec.RAW) is None
    for each in LOSSY:
        assert "install either" in (codec.check_codec(each) or "")


def test_each_codec_says_what_it_loses() -> None:
    assert [each.loss for each in Codec] == [Loss.EXACT, Loss.Q8, Loss.Q4]


# ------------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(("tokens", "q8", "q4"), [(16, 1.94, 3.37), (32, 1.94, 3.56), (64, 1.94, 3.66)])
def test_an_encoded_page_is_so_much_smaller_with_everything_counted(tokens: int, q8: float, q4: float) -> None:
    group = group_of(128, heads=8)
    raw = group.layer_bytes(block_tokens=tokens, heads=8)
    ratios = [raw / layer_bytes(each, group, block_tokens=tokens, heads=8) for each in LOSSY]
    assert ratios == [pytest.approx(q8, abs=0.005), pytest.approx(q4, abs=0.005)]


@pytest.mark.parametrize(
    "plane",
    [
        Plane.opaque("state", 100),
        Plane("k", 2, 64, "float8_e4m3fn"),
        Plane("k", 2, 64, "uint8"),
        Plane("k", 2, 36, "bfloat16"),
    ],
)
@pytest.mark.parametrize("which", LOSSY)
def test_a_plane_that_cannot_be_encoded_stays_as_it_is(which: Codec, plane: Plane, implementation: str) -> None:
    group = Group(layers=(0,), planes=(plane, Plane("v", plane.heads, 64, "bfloat16")))
    assert coding(which, plane) is Coding.RAW
    coded = Coded(which, group, 8, heads=plane.heads)
    nbytes = plane.nbytes(block_tokens=8, heads=plane.heads)
    raw = bytes(range(256)) * (nbytes // 256 + 1)
    layer = raw[:nbytes] + bytes(coded.raw_bytes - nbytes)
    encoded = coded.encode(layer)
    assert encoded is not None
    assert encoded[:nbytes] == layer[:nbytes]
    assert coded.decode(encoded) == layer


# -------------------------------------------------------------------------------------------- one definition

values = st.sampled_from(["normal", "offset", "outliers", "wide", "tiny", "same", "zeros", "mixed signs"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(LOSSY),
    st.sampled_from(list(DTYPES)),
    st.integers(1, 24).map(lambda eights: 8 * eights),
    st.sampled_from([1, 8, 16, 33]),
    st.integers(1, 3),
    st.integers(1, 3),
    values,
    st.integers(0, 2**32),
)
@example(Codec.Q4, "bfloat16", 40, 8, 1, 1, "offset", 0)
@example(Codec.Q4, "float16", 24, 8, 2, 2, "outliers", 0)
@example(Codec.Q8, "float32", 8, 1, 1, 1, "zeros", 0)
def test_the_native_core_makes_the_bytes_of_the_definition(
    kernels: str, which: Codec, dtype: str, dim: int, tokens: int, heads: int, layers: int, kind: str, seed: int
) -> None:
    group = group_of(dim, dtype, heads)
    raw = b"".join(layer_of(group, drawn(kind, (2, tokens, heads, dim), seed + i)) for i in range(layers))
    definition = TorchCoder(which, group, block_tokens=tokens, heads=heads)
    ours = Coded(which, group, tokens, heads)
    expected = bytearray(layers * ours.coded_bytes)
    assert definition.encode(memoryview(raw), memoryview(expected), layers)
    assert ours.encode(raw) == expected
    back = bytearray(len(raw))
    definition.decode(memoryview(expected), memoryview(back), layers)
    assert ours.decode(bytes(expected)) == back


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(LOSSY), st.sampled_from([8, 24, 64, 128]), st.sampled_from(list(DTYPES)), st.randoms())
def test_any_bytes_decode_alike_in_every_implementation(
    kernels: str, which: Codec, dim: int, dtype: str, random: object
) -> None:
    # Verified bytes were produced by an encoder; but no input makes a decoder read or write beyond its buffers.
    group = group_of(dim, dtype)
    ours = Coded(which, group, 8)
    coded = random.randbytes(ours.coded_bytes)  # type: ignore[attr-defined]
    expected = bytearray(ours.raw_bytes)
    TorchCoder(which, group, block_tokens=8, heads=2).decode(memoryview(coded), memoryview(expected), 1)
    came, meant = numbers_of(group, ours.decode(coded)), numbers_of(group, bytes(expected))
    assert torch.equal(came.nan_to_num(7.0), meant.nan_to_num(7.0))


# Of bfloat16: zero (more often than others), the least and greatest subnormal and normal numbers, and ordinary ones.
FINITE = [0, 0, 0, 1, 2, 0x7F, 0x80, 0x81, 0x3380, 0x3800, 0x3F80, 0x3FFF, 0x4780, 0x7F00, 0x7F7F]
halves = st.sampled_from(FINITE + [each | 0x8000 for each in FINITE]) | st.integers(0, 0x7F7F)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from([8, 24, 32, 56, 72, 128]), st.sampled_from(list(DTYPES)), st.integers(0, 2**32))
def test_extremes_of_scale_decode_to_the_bits_of_the_definition(
    kernels: str, data: st.DataObject, dim: int, dtype: str, seed: int
) -> None:
    """Subnormal numbers are neither flushed nor rounded in another way, and what is too large becomes an infinity."""
    group, rows = group_of(dim, dtype, 1), 4
    codes = torch.randint(256, (rows, dim), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    codes[:, ::7] = 0  # of which the minimum is left, with its sign
    scales, minima = (torch.tensor(data.draw(st.lists(halves, min_size=rows, max_size=rows))) for _ in range(2))
    q8 = b"".join(plane_bytes(part) for part in (scales.to(torch.uint16), minima.to(torch.uint16), codes))
    steps = st.sampled_from([0, 1, 7, 8, 127, 128, 254, 255])
    channels = bytes(data.draw(st.lists(steps, min_size=2 * dim, max_size=2 * dim)))
    groups = bytes(data.draw(st.lists(steps, min_size=rows, max_size=rows))) * 2 * -(-dim // 32)
    nibbles = plane_bytes(codes)[: rows * dim // 2]
    for which, coded in ((Codec.Q8, 2 * q8), (Codec.Q4, channels + nibbles + groups + nibbles)):
        ours = Coded(which, group, rows, heads=1)
        expected = bytearray(ours.raw_bytes)
        definition = TorchCoder(which, group, block_tokens=rows, heads=1)
        definition.decode(memoryview(coded), memoryview(expected), 1)
        assert ours.decode(coded) == expected


@pytest.mark.parametrize(("which", "dtype"), GOLDEN)
def test_the_bytes_are_those_that_were_ever_written(which: Codec, dtype: str, implementation: str) -> None:
    """Of numbers that follow from nothing but this line, so that any implementation can be held to it."""
    group = group_of(72, dtype)
    numbers = torch.tensor([((i * i + 7 * i) % 509 - 254) / 16 for i in range(2 * 8 * 2 * 72)]).view(2, 8, 2, 72)
    encoded = Coded(which, group, 8).encode(layer_of(group, numbers))
    assert encoded is not None
    assert sha256(encoded).hexdigest()[:16] == GOLDEN[which, dtype]


def test_the_layout_is_the_one_that_is_documented(implementation: str) -> None:
    group = Group(layers=(0,), planes=(Plane("k", 1, 8, "bfloat16"), Plane("v", 1, 8, "bfloat16")))
    ramp = torch.arange(8.0)
    layer = layer_of(group, torch.stack([torch.stack([ramp, ramp + 15]), torch.stack([2 * ramp, -ramp])])[:, :, None])
    q8 = Coded(Codec.Q8, group, 2, heads=1).encode(layer)
    assert q8 is not None
    k, v = q8[:24], q8[24:]
    assert k[:4].hex() == "e13ce13c"  # bfloat16, little-endian: 7 / 255 rounded up, twice
    assert k[4:8].hex() == "00007041"  # minima 0 and 15
    assert list(k[8:16]) == list(k[16:24]) == [0, 36, 73, 109, 146, 182, 218, 255]
    assert v[4:8].hex() == "0000e0c0"  # minima 0 and -7
    q4 = Coded(Codec.Q4, group, 2, heads=1).encode(layer)
    assert q4 is not None
    k, v = q4[:24], q4[24:]
    assert list(k[:8]) == [20 << 3] * 8  # 15 / 15: a scale of 1
    assert list(k[8:16]) == [0, 255, 254, 253, 252, 251, 250, 249]  # zero points 0 to -7, as int8
    assert k[16:20].hex() == "00000000"  # the lowest code of each channel, channels 0-3 low and 4-7 high nibbles
    assert k[20:24].hex() == "ffffffff"
    assert len(v) == 2 + 2 + 8  # two rows of one group: scales, zeros, codes


def test_a_single_layer_may_have_planes_at_odd_addresses(implementation: str) -> None:
    group = Group((0,), (Plane.opaque("o", 7), Plane("k", 1, 8, "bfloat16"), Plane("v", 1, 8, "bfloat16")))
    numbers = drawn("normal", (2, 8, 1, 8), 1)
    layer = bytes(range(7)) + layer_of(Group((0,), group.planes[1:]), numbers)
    for which in LOSSY:
        coded = Coded(which, group, 8, heads=1)
        encoded = coded.encode(layer)
        assert encoded is not None
        plain = Coded(which, Group((0,), group.planes[1:]), 8, heads=1)
        assert encoded == layer[:7] + (plain.encode(layer[7:]) or b"")
        assert coded.decode(encoded) == layer[:7] + plain.decode(encoded[7:])


# ------------------------------------------------------------------------------------------------------ errors


@settings(deadline=None)
@given(st.sampled_from(["normal", "offset", "outliers", "wide"]), st.sampled_from(list(DTYPES)), st.integers(0))
def test_what_was_lost_is_told_of_the_plane_that_has_lost_most(kind: str, dtype: str, seed: int) -> None:
    planes = (Plane("k", 1, 64, dtype), Plane.opaque("o", 7), Plane("v", 1, 64, dtype))
    numbers = drawn(kind, (2, 16, 1, 64), seed % 2**32)
    k, v = (plane_bytes(plane.to(DTYPES[dtype])) for plane in numbers)
    layer, group = k + bytes(7) + v, Group((0,), planes)
    for which in LOSSY:
        coded = Coded(which, group, 16, heads=1)
        encoded = coded.encode(2 * layer)
        assert encoded is not None
        back = coded.decode(encoded)[: len(layer)]
        x, y = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (layer, back))
        lost = []
        for at in (0, len(k) + 7):
            before, after = (some[at : at + len(k)].clone().view(DTYPES[dtype]).double() for some in (x, y))
            lost.append(float((after - before).norm() / before.norm()))
        assert coded.coder.error(memoryview(2 * layer), memoryview(encoded), 2) == pytest.approx(max(lost), rel=1e-9)


def test_nothing_is_lost_of_zeros_and_of_what_stays_raw(implementation: str) -> None:
    group = Group((0,), (Plane("k", 1, 8, "bfloat16"), Plane.opaque("o", 5)))
    coded = Coded(Codec.Q4, group, 8, heads=1)
    layer = bytes(2 * 8 * 8 + 5)
    assert coded.coder.error(memoryview(layer), memoryview(coded.encode(layer) or b""), 1) == 0


kinds = st.sampled_from(["normal", "offset", "outliers", "wide", "same"])


def there_and_back(which: Codec, tokens: int, kind: str, dtype: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[planes, tokens, heads, dim]`: some numbers, and what they are once encoded and decoded."""
    group, shape = group_of(64, dtype), (2, tokens, 2, 64)
    layer = layer_of(group, drawn(kind, shape, seed % 2**32))
    coded = Coded(which, group, tokens)
    encoded = coded.encode(layer)
    assert encoded is not None
    return numbers_of(group, layer).view(shape), numbers_of(group, coded.decode(encoded)).view(shape)


@settings(deadline=None)
@given(kinds, st.sampled_from(list(DTYPES)), st.integers(0))
def test_q8_is_within_half_a_step_of_every_number(kind: str, dtype: str, seed: int) -> None:
    before, after = (numbers.view(-1, 64) for numbers in there_and_back(Codec.Q8, 8, kind, dtype, seed))
    low, high = torch.aminmax(before, dim=1)
    # A step is at most 1/128 wider than the 255th of the range, which begins at most 1/128 of its magnitude lower.
    step = (high - low + low.abs() / 128) / 255 * (1 + 2**-7)
    rounding = before.abs().amax(dim=1) * torch.finfo(DTYPES[dtype]).eps
    assert bool(((after - before).abs() <= (step / 2 + rounding)[:, None]).all())


@settings(deadline=None)
@given(kinds, st.sampled_from(list(DTYPES)), st.integers(0))
def test_q4_is_within_half_a_step_of_every_number(kind: str, dtype: str, seed: int) -> None:
    before, after = there_and_back(Codec.Q4, 16, kind, dtype, seed)
    error = (after - before).abs()
    eps = torch.finfo(DTYPES[dtype]).eps
    for numbers, wrong, dim in (
        (before[0], error[0], 0),
        (before[1].unflatten(-1, (2, 32)), error[1].unflatten(-1, (2, 32)), -1),
    ):
        low, high = torch.aminmax(numbers, dim=dim, keepdim=True)
        far = torch.maximum(high.abs(), low.abs())
        step = torch.maximum((high - low) / 15, far / 127).clamp(min=2.0**-20) * 1.125
        assert bool((wrong <= step / 2 + far * eps).all())


def test_what_is_decoded_is_exact_where_steps_are(implementation: str) -> None:
    group = group_of(64)
    steps = (torch.arange(16)[:, None, None] + torch.arange(64)) % 16  # all of them in every row, channel and group
    numbers = steps.float().expand(2, 16, 2, 64)
    for which in LOSSY:
        coded = Coded(which, group, 16)
        layer = layer_of(group, numbers * (0.25 if which is Codec.Q4 else 17))
        encoded = coded.encode(layer)
        assert encoded is not None
        assert coded.decode(encoded) == layer


# ------------------------------------------------------------------------------------------- pages of a kind


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, "too large", "too small"])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("which", LOSSY)
def test_a_page_with_what_is_no_number_or_too_large_is_not_encoded(
    which: Codec, plane: int, wrong: float | str, dtype: str, implementation: str
) -> None:
    most = torch.finfo(DTYPES[dtype]).max / 4
    value = {"too large": most * 1.01, "too small": -most * 1.01}.get(wrong, wrong) if isinstance(wrong, str) else wrong
    group = group_of(64, dtype)
    numbers = torch.zeros(2, 8, 2, 64)
    numbers[plane, 5, 1, 17] = float(value)
    assert Coded(which, group, 8).encode(layer_of(group, numbers)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_that_q4_has_no_scale_for_is_not_encoded_by_it(dtype: str, implementation: str) -> None:
    group = group_of(64, dtype)
    numbers = torch.zeros(2, 8, 2, 64)
    numbers[1, 0, 0, 0] = 57_344.0  # 15 steps of 3,840, less the room for a zero point
    assert Coded(Codec.Q4, group, 8).encode(layer_of(group, numbers)) is not None
    numbers[1, 0, 0, 0] = 65_536.0
    assert Coded(Codec.Q4, group, 8).encode(layer_of(group, numbers)) is None
    assert Coded(Codec.Q8, group, 8).encode(layer_of(group, numbers)) is not None


@pytest.mark.parametrize("which", LOSSY)
def test_equal_values_and_zeros_come_back_as_they_were(which: Codec, implementation: str) -> None:
    group = group_of(64)
    coded = Coded(which, group, 8)
    for value in (0.0, 1.0, -3.5) if which is Codec.Q8 else (0.0,):
        layer = layer_of(group, torch.full((2, 8, 2, 64), value))
        encoded = coded.encode(layer)
        assert encoded is not None
        assert coded.decode(encoded) == layer


@pytest.mark.parametrize("which", LOSSY)
def test_denormal_numbers_become_nothing(which: Codec, implementation: str) -> None:
    group = group_of(64, "float32")
    numbers = torch.full((2, 8, 2, 64), 2.0**-140)
    numbers[:, ::2] *= -1
    coded = Coded(which, group, 8)
    encoded = coded.encode(layer_of(group, numbers))
    assert encoded is not None
    assert not numbers_of(group, coded.decode(encoded)).any()


@pytest.mark.parametrize("which", LOSSY)
def test_an_outlier_costs_its_own_row_or_channel_and_no_other(which: Codec, implementation: str) -> None:
    group = group_of(64)
    numbers = drawn("normal", (2, 16, 2, 64), 3)
    coded = Coded(which, group, 16)
    plain = coded.encode(layer_of(group, numbers))
    numbers[0, 5, 1, 17] = numbers[1, 5, 1, 17] = 10_000.0
    hurt = coded.encode(layer_of(group, numbers))
    assert plain is not None
    assert hurt is not None
    same = (numbers_of(group, coded.decode(plain)) == numbers_of(group, coded.decode(hurt))).view(2, 16, 2, 64)
    k, v = ~same
    if which is Codec.Q8:
        assert set(k.nonzero()[:, :2].unique(dim=0).flatten().tolist()) == {5, 1}
    else:
        assert set(k.nonzero()[:, 1:].unique(dim=0).flatten().tolist()) == {1, 17}
        assert v.nonzero()[:, 2].max() < 32
    assert set(v.nonzero()[:, :2].unique(dim=0).flatten().tolist()) == {5, 1}


@pytest.mark.parametrize("kernels", [] if native.KERNELS is None else [native.KERNELS])
def test_the_native_core_refuses_other_lengths(kernels: Kernels) -> None:
    coder = kernels.Coder(8, 1, [("rows", "bfloat16", 8, 128, 96)])
    for data, into, layers in ((127, 96, 1), (128, 95, 1), (128, 96, 2), (0, 0, 0)):
        with pytest.raises(ValueError, match="not so many layers"):
            coder.encode(bytes(data), bytearray(into), layers)
        with pytest.raises(ValueError, match="not so many layers"):
            coder.decode(bytes(into), bytearray(data), layers)
    with pytest.raises(BufferError):
        coder.encode(bytes(128), bytes(96), 1)
    for plane in (
        ("rows", "bfloat16", 8, 128, 97),
        ("rows", "bfloat16", 12, 192, 128),
        ("rows", "int8", 8, 64, 96),
        ("columns", "bfloat16", 8, 128, 96),
        ("raw", "opaque", 8, 128, 96),
    ):
        with pytest.raises(ValueError, match=r"sizes|no '|as many"):
            kernels.Coder(8, 1, [plane])
