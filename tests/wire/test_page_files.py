"""The head and records of a page file are read back as they were written, and damaged ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcluster.core import codecs, limits
from kvcluster.core.codecs import Codec
from kvcluster.core.file_allocator import HEAD_BYTES, Shape
from kvcluster.core.groups import PREFIX, Group, Part, Plane, window
from kvcluster.core.ids import SUM_BYTES, BlockHash, Tenant
from kvcluster.core.messages import PageKey
from kvcluster.core.miss import Loss
from kvcluster.core.shard.disk_recovery import RecoveredPage
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, LimitError, ProtocolError, SpecError
from kvcluster.wire import checks, common, page_files
from kvcluster.wire.page_files import Head
from tests.wire import strategies as of

OPENING = struct.Struct("<16sIIQ")
"""Of a head, before its body: magic, version, the body's bytes and checksum."""
BODY = struct.Struct("<16sQQIH")
"""Of a body, before its tenant and spec: life, bytes of the file and of a page, layers, the tenant's bytes."""
RECORD = struct.Struct("<32s32sQI4IHBx")
"""Of a record, before its sums and checksum: block, parent, depth, group, part, codec, loss."""

SPEC = KVSpec(
    model="m",
    weights="sha256:1",
    block_tokens=4,
    groups=(
        Group((0, 2, 3), (Plane("k", 4, 32, "bfloat16"), Plane("v", 4, 32, "bfloat16")), PREFIX),
        Group((1,), (Plane("k", 2, 8, "float32"),), window(4)),
    ),
)
TENANT = Tenant("t\u00e9")
PART = Part(0, 2, 1, 3)
SLOTS = 3
NBYTES = codecs.page_bytes(Codec.Q8, SPEC, 0, PART)
SHAPE = Shape(NBYTES, PART.layers)
HEAD = Head(b"life" * 4, SHAPE.first_slot(SLOTS) + SLOTS * SHAPE.slot_bytes, SHAPE, TENANT, SPEC)
SPACE = SPEC.namespace(TENANT)


def page(slot: int) -> RecoveredPage:
    """The one that lies in that slot of the first file."""
    return RecoveredPage(
        namespace=SPACE,
        key=PageKey(BlockHash(bytes([slot + 1]) * 32), 0, PART),
        parent=BlockHash(bytes([slot]) * 32),
        depth=slot,
        loss=Loss.Q8,
        codec=Codec.Q8,
        nbytes=NBYTES,
        sums=bytes(range(slot, slot + 2 * SUM_BYTES)),
        offset=SHAPE.first_slot(SLOTS) + slot * SHAPE.slot_bytes,
    )


PAGES = [page(slot) for slot in range(SLOTS)]


def records(head: Head, found: Mapping[int, RecoveredPage]) -> bytes:
    """The records of these pages in their slots; zeros in the others."""
    none = bytes(head.shape.record_bytes)
    return b"".join(
        page_files.encode_record(head, slot, found[slot]) if slot in found else none for slot in range(head.slots)
    )


WHOLE = records(HEAD, dict(enumerate(PAGES)))


def read(data: bytes, head: Head = HEAD, at: int = 0) -> list[RecoveredPage]:
    return page_files.decode_records(head, head.namespace, data, at)


def sealed(content: bytes, slot: int = 0, head: Head = HEAD) -> bytes:
    """A record with this content and a valid checksum."""
    return content + struct.pack("<Q", xxh3_64_intdigest(head.life + content, slot))


def saying(
    *,
    depth: int = 0,
    group: int = 0,
    part: Part = PART,
    codec: int = Codec.Q8,
    loss: int = Loss.Q8,
) -> bytes:
    """The content of a record that says this of its page, and is right in all else."""
    key, parent = PAGES[0].key, PAGES[0].parent
    return RECORD.pack(key.hash, parent, depth, group, *part, codec, loss) + PAGES[0].sums


def resealed(body: bytes) -> bytes:
    """A head with this body, whatever it says."""
    return OPENING.pack(b"kvcluster-pages\0", 1, len(body), xxh3_64_intdigest(body)) + body


def body(
    *, file_bytes: int = HEAD.file_bytes, nbytes: int = NBYTES, layers: int = 2, spec: bytes | None = None
) -> bytes:
    tenant = TENANT.encode()
    fixed = BODY.pack(HEAD.life, file_bytes, nbytes, layers, len(tenant))
    return fixed + tenant + (common.encode_spec(SPEC) if spec is None else spec)


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


# ------------------------------------------------------------------------------------------ round trips


@given(of.page_files())
def test_a_head_is_read_as_it_was_written(file: tuple[Head, dict[int, RecoveredPage]]) -> None:
    head, _ = file
    data = page_files.encode_head(head)
    assert len(data) == HEAD_BYTES
    again = page_files.decode_head(data)
    assert again == head
    assert again.namespace == head.spec.namespace(head.tenant)


@given(of.page_files(), st.integers(0, 2**40))
def test_records_are_read_as_they_were_written_each_in_its_slot(
    file: tuple[Head, dict[int, RecoveredPage]], at: int
) -> None:
    head, found = file
    assert read(records(head, found), head) == list(found.values())
    moved = [page._replace(offset=at + page.offset) for page in found.values()]
    assert read(records(head, found), head, at) == moved, "offsets count from the first file's beginning"


@given(of.page_files())
def test_records_and_pages_lie_beside_each_other_within_their_file(file: tuple[Head, dict[int, RecoveredPage]]) -> None:
    head, found = file
    assert HEAD_BYTES + head.records_bytes <= head.shape.first_slot(head.slots)
    ends = [page.offset + page.nbytes for page in found.values()]
    assert all(end <= page.offset for end, page in zip(ends, list(found.values())[1:], strict=False))
    assert max(ends, default=0) <= head.file_bytes


def test_the_bytes_of_version_1_are_those_that_its_description_draws() -> None:
    """Files outlive the release that wrote them: a change of this needs a new version."""
    head = resealed(body())
    assert page_files.encode_head(HEAD) == head + bytes(HEAD_BYTES - len(head))
    assert page_files.encode_record(HEAD, 0, PAGES[0]) == sealed(saying())
    assert len(sealed(saying())) == 104 + 2 * SUM_BYTES


def test_the_longest_tenant_and_the_largest_spec_fit_a_head() -> None:
    room = limits.SPEC_BYTES - len(SPEC.canonical())
    longest = Tenant("\U0001f600" * checks.TEXT_CHARS)
    head = replace(HEAD, tenant=longest, spec=replace(SPEC, rope="r" * room))
    data = page_files.encode_head(head)
    assert len(data) == HEAD_BYTES
    assert page_files.decode_head(data) == head


def test_a_tenant_s_file_is_of_no_other_tenant() -> None:
    other = page_files.decode_head(page_files.encode_head(replace(HEAD, tenant=Tenant("t"))))
    assert other.namespace != HEAD.namespace


# ------------------------------------------------------------------------------------------------ heads


def test_every_bit_of_a_head_counts_but_for_those_that_fill_it_up() -> None:
    data = page_files.encode_head(HEAD)
    said = OPENING.size + OPENING.unpack_from(data)[2]
    assert not any(data[said:])
    for bit in range(8 * said):
        with pytest.raises(KVClusterError):
            page_files.decode_head(flipped(data, bit))
    for bit in range(8 * said, 8 * HEAD_BYTES, 101):
        assert page_files.decode_head(flipped(data, bit)) == HEAD


def test_a_head_that_was_cut_off_is_none() -> None:
    data = page_files.encode_head(HEAD)
    said = OPENING.size + OPENING.unpack_from(data)[2]
    for cut in range(said):
        with pytest.raises(ProtocolError):
            page_files.decode_head(data[:cut])
    assert page_files.decode_head(data[:said]) == HEAD


def test_a_file_that_says_it_holds_nothing_has_no_head() -> None:
    assert len(page_files.NO_HEAD) == HEAD_BYTES
    with pytest.raises(ProtocolError, match="does not begin like a page file of version 1"):
        page_files.decode_head(page_files.NO_HEAD)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_a_head_of_another_version_is_not_understood_whatever_follows(version: int) -> None:
    data = bytearray(page_files.encode_head(HEAD))
    struct.pack_into("<I", data, 16, version)
    with pytest.raises(ProtocolError, match="of version 1"):
        page_files.decode_head(bytes(data))


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (body(nbytes=0), ProtocolError, "pages without bytes or layers"),
        (body(layers=0), ProtocolError, "pages without bytes or layers"),
        (body(nbytes=2**40 + 1), LimitError, "bytes of a page"),
        (body(layers=2**20 + 1), LimitError, "layers of a page"),
        (body(file_bytes=2**62 + 1), LimitError, "bytes of a file"),
        (body(spec=b""), SpecError, "model must be named"),
        (body(spec=b"\xff"), ProtocolError, "not a valid Spec of kvcluster"),
        (body(spec=bytes(limits.SPEC_BYTES + 1)), LimitError, "bytes of a spec"),
        (body()[: BODY.size - 1], ProtocolError, "does not match its checksum"),
        (b"", ProtocolError, "does not match its checksum"),
        (BODY.pack(HEAD.life, HEAD.file_bytes, NBYTES, 2, 1) + b"\xff", ProtocolError, "is not UTF-8"),
        (BODY.pack(HEAD.life, HEAD.file_bytes, NBYTES, 2, 9_999) + TENANT.encode(), SpecError, "model must be named"),
    ],
)
def test_a_head_that_is_whole_and_says_what_cannot_be_is_refused(
    said: bytes, error: type[KVClusterError], words: str
) -> None:
    assert page_files.decode_head(resealed(body())) == HEAD, "so it is its content alone that is wrong"
    with pytest.raises(error, match=words):
        page_files.decode_head(resealed(said))


# ---------------------------------------------------------------------------------------------- records


def test_every_bit_of_a_record_counts_and_spoils_no_other() -> None:
    size = SHAPE.record_bytes
    for slot in range(SLOTS):
        others = [page for page in PAGES if page is not PAGES[slot]]
        for bit in range(8 * slot * size, 8 * (slot + 1) * size):
            assert read(flipped(WHOLE, bit)) == others


def test_records_of_an_earlier_life_of_their_file_are_none() -> None:
    for bit in range(8 * page_files.LIFE_BYTES):
        assert read(WHOLE, replace(HEAD, life=flipped(HEAD.life, bit))) == []


def test_a_record_counts_in_its_own_slot_alone() -> None:
    size = SHAPE.record_bytes
    first, second, third = (WHOLE[at : at + size] for at in range(0, 3 * size, size))
    assert read(second + first + third) == [PAGES[2]]
    assert read(first + first + first) == [PAGES[0]]


def test_where_nothing_was_written_there_are_no_pages() -> None:
    assert read(b"") == []
    assert read(bytes(len(WHOLE))) == []
    assert read(b"\xff" * len(WHOLE)) == []
    assert read(records(HEAD, {1: PAGES[1]})) == [PAGES[1]]


@pytest.mark.parametrize("cut", [1, 2 * SUM_BYTES, SHAPE.record_bytes - 1])
def test_records_that_were_cut_off_are_those_that_are_whole(cut: int) -> None:
    for slot in range(SLOTS):
        assert read(WHOLE[: slot * SHAPE.record_bytes + cut]) == PAGES[:slot]


def test_what_lies_behind_the_last_record_is_no_record() -> None:
    beyond = sealed(saying(), slot=SLOTS)
    assert read(WHOLE + beyond) == PAGES


def test_a_file_that_has_room_for_no_slot_holds_nothing() -> None:
    head = replace(HEAD, file_bytes=HEAD_BYTES)
    assert (head.slots, head.records_bytes) == (0, 0)
    assert read(WHOLE, head) == []


@pytest.mark.parametrize(
    "said",
    [
        saying(codec=0x0102),
        saying(codec=0x0301, loss=Loss.Q4),
        saying(codec=0),
        saying(loss=3),
        saying(loss=255),
        saying(loss=Loss.EXACT),
        saying(group=2),
        saying(group=2**32 - 1),
        saying(part=Part(0, 4, 1, 2)),
        saying(part=Part(2, 4, 1, 3)),
        saying(part=Part(0, 2, 3, 5)),
        saying(part=Part(2, 0, 1, 3)),
        saying(part=Part(0, 2**32 - 1, 0, 2**32 - 1)),
        saying(part=Part(0, 2, 0, 4)),
        saying(part=Part(0, 1, 0, 4)),
        saying(part=Part(0, 0, 0, 0)),
        saying(codec=Codec.RAW),
        saying(codec=Codec.Q4, loss=Loss.Q4),
        saying(depth=limits.TOKENS_PER_SEQUENCE + 1),
        saying(depth=2**64 - 1),
    ],
    ids=[
        *("a later version of a codec", "a later codec", "no codec", "a loss of a later version", "no loss"),
        *("less than its codec loses", "a group too far", "a group too far by much", "a layer too many"),
        *("layers too far", "heads too far", "no layers", "everything", "heads that make it longer"),
        *("another shape of the same length", "nothing", "raw pages among encoded ones", "a denser codec"),
        *("too deep", "too deep by much"),
    ],
)
def test_a_record_that_is_whole_and_says_what_its_file_cannot_hold_is_passed_over(said: bytes) -> None:
    second = sealed(saying(), slot=1)
    assert [page.key for page in read(sealed(saying()) + second)] == [PAGES[0].key] * 2
    found = read(sealed(said) + second)
    assert [page.offset for page in found] == [PAGES[1].offset], "and the next is not"


def test_a_page_may_have_lost_more_than_its_codec_loses() -> None:
    [found] = read(sealed(saying(loss=Loss.Q4)))
    assert (found.codec, found.loss) == (Codec.Q8, Loss.Q4)


def test_the_deepest_block_is_found() -> None:
    [found] = read(sealed(saying(depth=limits.TOKENS_PER_SEQUENCE)))
    assert found.depth == limits.TOKENS_PER_SEQUENCE
