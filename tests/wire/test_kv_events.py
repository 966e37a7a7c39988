"""KV events are encoded in vLLM's vocabulary; all other input from a network is refused with our own errors."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream, KVEvent
from kvcluster.errors import KVClusterError, LimitError, ProtocolError
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest

STREAM = EventStream(NamespaceId(bytes(range(32))), "org/llama@3", "", 2)
pack = msgspec.msgpack.encode

hashes = st.binary(min_size=32, max_size=32).map(BlockHash)
streams = st.builds(EventStream, hashes, st.text(max_size=20), st.text(max_size=8), st.integers(1, 4))


@st.composite
def stored(draw: st.DrawFn, block_tokens: int) -> BlocksStored:
    blocks = tuple(draw(st.lists(hashes, min_size=1, max_size=5)))
    told = draw(st.booleans())
    ids = st.lists(st.integers(0, 2**32 - 1), min_size=len(blocks) * block_tokens, max_size=len(blocks) * block_tokens)
    return BlocksStored(draw(st.sampled_from(Tier)), draw(st.none() | hashes), blocks, tuple(draw(ids)) if told else ())


def events(block_tokens: int) -> st.SearchStrategy[KVEvent]:
    removed = st.builds(BlocksRemoved, st.sampled_from(Tier), st.lists(hashes, min_size=1, max_size=5).map(tuple))
    return st.one_of(stored(block_tokens), removed, st.just(AllBlocksCleared()))


@st.composite
def batches(draw: st.DrawFn) -> tuple[EventStream, list[KVEvent]]:
    stream = draw(streams)
    return stream, draw(st.lists(events(stream.block_tokens), max_size=6))


@given(batches(), st.floats(0, 2e9))
def test_what_was_told_is_what_is_heard(told: tuple[EventStream, list[KVEvent]], at_s: float) -> None:
    assert kv_events.decode(kv_events.encode(*told, at_s)) == told[1]


def test_a_block_that_is_stored_is_told_as_vllm_tells_it() -> None:
    parent, block = BlockHash(b"p" * 32), BlockHash(b"b" * 32)
    stream = EventStream(STREAM.namespace, STREAM.model, "sha256:lora", 2)
    told = msgspec.msgpack.decode(
        kv_events.encode(stream, [BlocksStored(Tier.HOST, parent, (block,), (7, 8)), AllBlocksCleared()], 1.5)
    )
    assert told == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [block],
                "parent_block_hash": parent,
                "token_ids": [7, 8],
                "block_size": 2,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": "sha256:lora",
                "ownership": "kvcluster",
            },
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


@pytest.mark.parametrize(("tier", "medium"), [(Tier.RAM, "GPU"), (Tier.HOST, "CPU"), (Tier.DISK, "STORAGE")])
def test_tiers_are_vllms_media(tier: Tier, medium: str) -> None:
    removed = BlocksRemoved(tier, (BlockHash(b"b" * 32),))
    payload = kv_events.encode(STREAM, [removed], 0.0)
    assert msgspec.msgpack.decode(payload)[1][0]["medium"] == medium
    assert kv_events.decode(pack([0.0, [{"type": "BlockRemoved", "block_hashes": [b"b" * 32], "medium": medium}]])) == [
        removed
    ]


def test_events_as_arrays_are_read_as_vllm_once_wrote_them() -> None:
    rows = [["BlockStored", [1], 2, [5, 6], 2, None, "cpu"], ["BlockRemoved", [1]], ["AllBlocksCleared"]]
    assert kv_events.decode(pack([0, rows])) == [
        BlocksStored(Tier.HOST, integer(2), (integer(1),), (5, 6)),
        BlocksRemoved(Tier.RAM, (integer(1),)),
        AllBlocksCleared(),
    ]


def test_what_a_newer_vllm_adds_is_passed_over() -> None:
    stored = {"block_hashes": [b"h"], "parent_block_hash": None, "token_ids": [], "block_size": 1, "lora_id": None}
    newer: list[dict[str, Any]] = [
        {"type": "BlockStored", "colour": {"red": [1]}, **stored},
        {"type": "AllBlocksCleared", "because": "so"},
    ]
    rows = [["BlockStored", [b"h"], None, [], 1, None, "GPU", "lora", [["x"]], {"deep": [[]]}]]
    assert kv_events.decode(pack([0.0, newer, 3, {"more": 1}])) == [
        BlocksStored(Tier.RAM, None, (BlockHash(b"h"),)),
        AllBlocksCleared(),
    ]
    assert kv_events.decode(pack([0.0, rows])) == [BlocksStored(Tier.RAM, None, (BlockHash(b"h"),))]


@given(st.integers(-(2**63), 2**64 - 1))
def test_an_integer_hash_is_its_eight_bytes(number: int) -> None:
    (removed,) = kv_events.decode(pack([0.0, [["BlockRemoved", [number]]]]))
    assert removed == BlocksRemoved(Tier.RAM, (BlockHash(struct.pack(">q" if number < 0 else ">Q", number)),))


def test_the_end_of_a_hash_as_an_integer_is_the_end_of_that_hash() -> None:
    whole = bytes(range(100, 132))
    as_vllm_shortens_it = int.from_bytes(whole, "big") & (2**64 - 1)
    (removed,) = kv_events.decode(pack([0.0, [["BlockRemoved", [as_vllm_shortens_it]]]]))
    assert removed == BlocksRemoved(Tier.RAM, (BlockHash(whole[-8:]),))


def test_tokens_that_are_not_those_of_the_blocks_are_left_out() -> None:
    rows = [["BlockStored", [1, 2], None, tokens, size, None] for tokens, size in (([1, 2, 3], 2), ([1, 2, 3, 4], 2))]
    told = kv_events.decode(pack([0.0, rows]))
    assert [event.tokens for event in told if isinstance(event, BlocksStored)] == [(), (1, 2, 3, 4)]


def test_what_lies_where_we_have_no_tier_is_passed_over() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "MOON"}
    assert kv_events.decode(pack([0.0, [removed, ["AllBlocksCleared"]]])) == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [],
        [0.0],
        ["now", []],
        [0.0, {}],
        [0.0, [None]],
        [0.0, [[]]],
        [0.0, [{}]],
        [0.0, [{"type": "BlockMoved"}]],
        [0.0, [["BlockMoved", [1]]]],
        [0.0, [["BlockRemoved"]]],
        [0.0, [["BlockRemoved", ["text"]]]],
        [0.0, [["BlockRemoved", [b""]]]],
        [0.0, [["BlockRemoved", [b"h" * (kv_events.HASH_BYTES_MOST + 1)]]]],
        [0.0, [["BlockRemoved", [1], "x" * 2_000]]],
        [0.0, [["BlockRemoved", [1], 5]]],
        [0.0, [["BlockRemoved", [1] * (kv_events.EVENT_HASHES + 1)]]],
        [0.0, [["BlockStored", [1], None, [-1], 1, None]]],
        [0.0, [["BlockStored", [1], None, [2**32], 1, None]]],
        [0.0, [["BlockStored", [1], None, [1], -1, None]]],
        [0.0, [["AllBlocksCleared"]] * (kv_events.BATCH_EVENTS + 1)],
    ],
)
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(ProtocolError, match="not a batch of KV events"):
        kv_events.decode(pack(batch))


def test_a_batch_that_is_too_large_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(LimitError, match="bytes in a batch"):
        kv_events.decode(bytes(kv_events.BATCH_BYTES + 1))


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\x92\x00\xdd\xff\xff\xff\xff",
        b"\x92\x00\x91\x92\xacBlockRemoved\xdd\xff\xff\xff\xff",
        b"\x92\x00\x91\x92\xacBlockRemoved\x91\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x92\x00\x91" + b"\x91" * 100_000,
    ],
)
def test_what_only_claims_to_be_large_costs_nothing(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            kv_events.decode(payload)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.sampled_from(["type", "BlockStored", "BlockRemoved", "AllBlocksCleared", "medium", "GPU", "block_hashes"]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4) | st.just("type"), inner),
    max_leaves=20,
)
rows = st.builds(
    lambda name, rest: [name, *rest],
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    st.lists(values, max_size=7),
)


def read(payload: bytes) -> None:
    try:
        heard = kv_events.decode(payload)
    except KVClusterError:
        return
    for event in heard:
        assert isinstance(event, AllBlocksCleared) or (event.hashes and all(map(bytes, event.hashes)))
    assert kv_events.decode(kv_events.encode(STREAM, [e for e in heard if not getattr(e, "tokens", ())], 0.0)) == [
        e for e in heard if not getattr(e, "tokens", ())
    ]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    read(payload)


@given(values | st.lists(rows, max_size=3).map(lambda some: [0.0, some]))
def test_any_value_of_msgpack_is_read_or_refused(value: Any) -> None:
    read(pack(value))


@given(batches(), st.data())
def test_a_batch_with_a_byte_changed_is_read_or_refused(
    told: tuple[EventStream, list[KVEvent]], data: st.DataObject
) -> None:
    payload = bytearray(kv_events.encode(*told, 0.0))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    read(bytes(payload))


# ------------------------------------------------------------------------------------------ topics, frames


def test_a_topic_names_a_namespace_and_a_model() -> None:
    assert kv_events.topic_of(STREAM) == "kv@0001020304050607@org/llama@3"
    assert kv_events.parse_topic(kv_events.topic_of(STREAM)) == ("0001020304050607", "org/llama@3")


@pytest.mark.parametrize("topic", ["", "kv@", "kv@10.0.0.1@llama", "kv@0001020304050607", "KV@0001020304050607@x"])
def test_topics_of_others_say_nothing_to_us(topic: str) -> None:
    assert kv_events.parse_topic(topic) is None


@given(st.text(max_size=20), st.integers(0, 2**64 - 2), st.binary())
def test_messages_and_answers_are_read_as_they_were_written(topic: str, sequence: int, payload: bytes) -> None:
    batch = Batch(topic, sequence, payload)
    assert kv_events.decode_batch(kv_events.encode_batch(batch)) == batch
    assert kv_events.decode_answer(kv_events.encode_answer(batch)) == batch
    assert kv_events.decode_answer(kv_events.encode_answer(None)) is None
    for request in (ReplayRequest(sequence), ReplayRequest(sequence, topic)):
        assert kv_events.decode_request(kv_events.encode_request(request)) == request


@given(st.lists(st.binary(max_size=10) | st.sampled_from([b"", kv_events.END, bytes(8), b"kv@"]), max_size=5))
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    for decode in (kv_events.decode_batch, kv_events.decode_answer, kv_events.decode_request):
        try:
            decode(frames)
        except (ProtocolError, LimitError):
            continue


def test_the_number_that_ends_a_replay_is_no_batchs() -> None:
    with pytest.raises(ProtocolError, match="ends a replay"):
        kv_events.decode_batch([b"kv@", kv_events.END, b""])


def test_a_topic_beyond_any_name_is_refused() -> None:
    with pytest.raises(LimitError, match="topic"):
        kv_events.decode_batch([b"k" * (kv_events.TOPIC_BYTES + 1), bytes(8), b""])


def integer(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "big"))
