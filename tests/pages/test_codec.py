from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvcluster.pages import codec


@given(st.binary())
def test_raw_is_the_identity_and_copies_nothing(data: bytes) -> None:
    page = memoryview(data)
    assert codec.encode(codec.RAW, page) is page
    assert codec.decode(codec.RAW, page) is page


@given(st.integers(0, 2**16 - 1))
@example(codec.RAW)
def test_an_unknown_codec_is_a_reason_and_not_an_exception(number: int) -> None:
    reason = codec.check_codec(number)
    if number == codec.RAW:
        assert reason is None
    else:
        assert reason is not None
        assert f"codec {number // 256} version {number % 256}" in reason
