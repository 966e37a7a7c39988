"""A shard's messages about its arena are decoded as they were encoded, and places outside of the mapping are
refused."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import NewPage, PageKey, PageSlot, PageWant, ReadRequest, Tier, Written
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import LimitError, ProtocolError
from kvcluster.memory.checksum import pack_sums, unpack_sums
from kvcluster.wire import shm_frames
from kvcluster.wire.shm_frames import NO_PROCESSOR, Progress, Welcome
from tests.wire import strategies as of

ARENA_BYTES = 2**30
STARTS = {Tier.RAM: 0, Tier.HOST: 2**29}


def slot(draw: st.DrawFn, key: PageKey) -> PageSlot:
    layers = key.part.layers
    nbytes = layers * draw(st.integers(1, 4_096))
    offset = draw(st.integers(0, ARENA_BYTES // 2 - nbytes))
    sums = pack_sums(sums_of(offset, layers))
    return PageSlot(
        *(key, offset, nbytes, 1, Loss.EXACT, sums), draw(st.sampled_from(Codec)), draw(st.sampled_from(list(STARTS)))
    )


def sums_of(seed: int, layers: int) -> tuple[int, ...]:
    """Any: there may be very many, which no strategy should draw one by one."""
    return unpack_sums(random.Random(seed).randbytes(8 * layers))


@given(st.data(), of.read_requests)
def test_what_a_reader_was_granted_is_read_as_it_was_meant(data: st.DataObject, request: ReadRequest) -> None:
    outcome = [data.draw(st.none() | of.misses) for _ in request.wants]
    granted = {item: slot(data.draw, want.key) for item, want in enumerate(request.wants) if outcome[item] is None}
    body = shm_frames.encode_read_grant(request.wants, outcome, granted, STARTS)
    assert len(body) <= shm_frames.read_grant_bytes(request.wants)
    read, places = shm_frames.decode_read_grant(body, request.wants, ARENA_BYTES)
    assert read == outcome
    assert list(places.items) == list(granted)
    sums = iter(places.sums)
    for item, offset, layer_bytes, codec in zip(*places[:4], strict=True):
        want, page = request.wants[item], granted[item]
        assert (offset, layer_bytes * want.key.part.layers, codec) == (
            STARTS[page.tier] + page.offset,
            page.nbytes,
            page.codec,
        )
        own = list(itertools.islice(sums, want.layer_stop - want.layer_start))
        assert pack_sums(own) == page.sums[8 * want.layer_start : 8 * want.layer_stop]


@given(st.data(), of.new_pages)
def test_what_a_writer_was_granted_and_says_to_have_written_likewise(
    data: st.DataObject, pages: tuple[NewPage, ...]
) -> None:
    outcome = [data.draw(st.none() | st.sampled_from(Written)) for _ in pages]
    granted = {item: slot(data.draw, page.key) for item, page in enumerate(pages) if outcome[item] is None}
    body = shm_frames.encode_write_grant(outcome, granted, STARTS)
    assert len(body) <= shm_frames.write_grant_bytes(len(pages))
    read, places = shm_frames.decode_write_grant(body, pages, ARENA_BYTES)
    assert read == outcome
    assert list(places.items) == list(granted)
    assert list(places.offsets) == [STARTS[page.tier] + page.offset for page in granted.values()]
    assert list(places.layer_bytes) == [page.nbytes // page.key.part.layers for page in granted.values()]
    sums = [layer_sum for item in granted for layer_sum in sums_of(item, pages[item].key.part.layers)]
    progress = Progress(tuple(granted), tuple(sums), data.draw(st.integers(0, NO_PROCESSOR)))
    assert shm_frames.decode_written(shm_frames.encode_written(progress), pages) == progress


@given(st.builds(Welcome, of.quantities, of.quantities))
def test_a_welcome_is_read_as_it_was_meant(welcome: Welcome) -> None:
    assert shm_frames.decode_welcome(shm_frames.encode_welcome(welcome)) == welcome


KEY = PageKey(BlockHash(bytes(32)), 0, Part(0, 3, 0, 1))
WANTS = [PageWant(KEY, 1, 3)]
PAGES = [NewPage(KEY, KEY.hash, 1)]
GONE = Miss(MissReason.EVICTED)


def test_the_layout_is_the_one_that_is_documented() -> None:
    page = PageSlot(KEY, 0x0102, 24, 1, Loss.EXACT, pack_sums((1, 2, 3)), Codec.Q8)
    head = shm_frames.encode_read_grant(WANTS, [None], {}, STARTS)[4:]
    assert shm_frames.encode_read_grant(WANTS, [None], {0: page}, STARTS) == (
        struct.pack("<I", len(head)) + head + struct.pack("<5Q", 0x0102, 24, Codec.Q8, 2, 3)
    )
    assert shm_frames.encode_written(Progress([7], [1, 2**64 - 1], 5)) == struct.pack(
        "<2H2I2Q", 5, 65_530, 1, 7, 1, 2**64 - 1
    )
    assert shm_frames.encode_welcome(Welcome(5, 6)) == struct.pack("<2Q", 5, 6)
    assert [shm_frames.encode_renew(answer=answer) for answer in (False, True)] == [b"\0", b"\1"]


def grant(*numbers: int, outcome: list[Miss | None] | None = None) -> bytes:
    head = shm_frames.encode_read_grant(WANTS, [None] if outcome is None else outcome, {}, STARTS)
    return head + struct.pack(f"<{len(numbers)}Q", *numbers)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "before it says"),
        (b"\xff" * 4, "before it says"),
        (grant(0, 24, 1, 1, 2, outcome=[]), "0 pages of 1"),
        (grant(0, 24, 1, 1, 2, outcome=[None, None]), "2 pages of 1"),
        (grant(), "cannot say where 1 pages lie"),
        (grant(0), "cannot say where 1 pages lie"),
        (grant(0, 24, 1, 1), "announced as one of"),
        (grant(0, 24, 1, 1, 2, 3), "announced as one of"),
        (grant(0, outcome=[GONE]), "announced as one of"),
        (grant(0, 0, 1, 1, 2), "is invalid"),
        (grant(0, 25, 1, 1, 2), "is invalid"),
        (grant(0, 3 * (limits.LAYER_BYTES + 1), 1, 1, 2), "is invalid"),
        (grant(80, 24, 1, 1, 2), "outside an arena of 100"),
        (grant(2**64 - 24, 24, 1, 1, 2), "outside an arena of 100"),
    ],
)
def test_a_grant_that_cannot_be_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        shm_frames.decode_read_grant(body, WANTS, 100)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is too short"),
        (bytes(7), "is too short"),
        (struct.pack("<2HI", 9, 9, 0), "names processor 9, and 9"),
        (struct.pack("<2HI", 9, 65_526, 1), "cannot name 1"),
        (struct.pack("<2HI", 9, 65_526, 2**32 - 1), "cannot name"),
        (struct.pack("<2H2I", 9, 65_526, 1, 1), "beyond the 1"),
        (struct.pack("<2H2I", 9, 65_526, 1, 0), "one sum for each of 3"),
        (struct.pack("<2H2I2Q", 9, 65_526, 1, 0, 1, 2), "one sum for each of 3"),
        (struct.pack("<2H2I4Q", 9, 65_526, 1, 0, 1, 2, 3, 4), "one sum for each of 3"),
        (struct.pack("<2HIQ", 9, 65_526, 0, 1), "one sum for each of 0"),
    ],
)
def test_a_word_of_pages_that_cannot_be_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        shm_frames.decode_written(body, PAGES)


@pytest.mark.parametrize("body", [b"", b"\2", b"\0\0"])
def test_a_renewal_says_one_thing(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="whether an answer is wanted"):
        shm_frames.decode_renew(body)


@pytest.mark.parametrize(
    ("offset", "says"),
    [(76, ""), (100, ""), (126, ""), (77, "ends outside"), (99, "ends outside"), (127, "a pool of 50")],
)
def test_a_page_lies_in_the_arena_or_in_the_pool_behind_it(offset: int, says: str) -> None:
    body = grant(offset, 24, 1, 1, 2)
    if says:
        with pytest.raises(ProtocolError, match=says):
            shm_frames.decode_read_grant(body, WANTS, 100, 50)
    else:
        assert list(shm_frames.decode_read_grant(body, WANTS, 100, 50)[1].offsets) == [offset]


@pytest.mark.parametrize("body", [b"", bytes(7), bytes(9)])
def test_a_pool_has_one_length(body: bytes) -> None:
    assert shm_frames.decode_pool(shm_frames.encode_pool(2**40)) == 2**40
    with pytest.raises(ProtocolError, match="a POOL has"):
        shm_frames.decode_pool(body)


@pytest.mark.parametrize("body", [b"", bytes(15), bytes(17)])
def test_a_welcome_has_one_length(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="a WELCOME has"):
        shm_frames.decode_welcome(body)


def test_a_grant_is_no_larger_than_a_frame_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PageSlot(KEY, 0, 24, 1, Loss.EXACT, pack_sums((1, 2, 3)), Codec.Q8)
    nbytes = len(shm_frames.encode_read_grant(WANTS, [None], {0: page}, STARTS))
    monkeypatch.setattr(limits, "MESSAGE_BYTES", nbytes - 1)
    with pytest.raises(LimitError, match="ask for fewer"):
        shm_frames.encode_read_grant(WANTS, [None], {0: page}, STARTS)


def test_a_grant_says_no_more_than_was_asked_for() -> None:
    """Protobuf makes many times its bytes of a head that claims to answer for millions."""
    head = b"\n\x02x\0" * (1 << 20)
    body = len(head).to_bytes(4, "little") + head
    with pytest.raises(ProtocolError, match=r"says 4194304 bytes about 0 pages"):
        shm_frames.decode_read_grant(body, [], ARENA_BYTES)
    with pytest.raises(ProtocolError, match=r"says 4194304 bytes about 0 pages"):
        shm_frames.decode_write_grant(body, [], ARENA_BYTES)
