"""KV events in vLLM's format: those that a coordinator publishes, and those that an engine in this format publishes.

A message is three frames: topic, sequence (u64, big-endian), payload. The payload is msgpack, as in vLLM's
`vllm/distributed/kv_events.py`, so that subscribers to vLLM can read it:

    [time in s, [event...], data-parallel rank]     a batch; fields after the events are ignored when read
    event     a map with its name under "type", or an array that begins with it, as older versions of vLLM write it
    BlockStored        block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name ...
    BlockRemoved       block_hashes, medium ...
    AllBlocksCleared

    replay    a request is an empty frame, the first sequence wanted, and, only in kvcluster, an optional topic. The
              answer is a message for each batch, an empty frame first, and ends with one whose sequence is END

Our hashes are the 32 bytes that identify a block everywhere else. Other engines may send any bytes, or an integer of 64
bits, which is read as its 8 bytes, big-endian, a negative one as its two's complement: equal integers give equal
hashes, and this covers vLLM, which makes such integers of the end of a hash. `medium` is "GPU", "CPU" or "STORAGE", in
any case; none means the engine's own memory. Blocks in a medium that is unknown here are skipped, and fields beyond
those above are ignored. Groups are not distinguished: a block is in a tier if at least one of its groups is.

Every decoder raises ProtocolError or LimitError for malformed input, including an event of an unknown name: its effect
on a subscriber's state cannot be guessed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream, KVEvent
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import TEXT_CHARS, at_most, must

BATCH_BYTES = 16 * 1024 * 1024
"""A step of an engine produces at most a million tokens of five bytes each."""

BATCH_EVENTS = 65_536
"""Events of one batch: one for each block of a million tokens, if no two blocks share an event."""

EVENT_HASHES = 65_536
"""Hashes of one event: as BATCH_EVENTS."""

EVENT_TOKENS = 2**21
"""Token ids of one event: twice the longest context in use."""

HASH_BYTES_MOST = 64
"""Size of a foreign hash: SHA-512, the longest in use."""

NAMESPACE_DIGITS = 16
"""Hex digits of a namespace in a topic: 64 bits, which no two namespaces of a cluster share by chance."""

TOPIC_BYTES = 4 * TEXT_CHARS + NAMESPACE_DIGITS + 4
"""The name of a model, in UTF-8, behind the namespace."""

OWNERSHIP = "kvcluster"
END = b"\xff" * 8
"""The sequence after the last batch of a replay: -1, as in vLLM."""

_SEQUENCE = struct.Struct(">Q")
_OURS = re.compile(rf"kv@([0-9a-f]{{{NAMESPACE_DIGITS}}})@(.*)", re.DOTALL)
_DIGIT = rb"[0-9a-f]"
_BEGINNING = re.compile(
    rb"(k(v(@(%b{0,%d}|%b{%d}@.*))?)?)?" % (_DIGIT, NAMESPACE_DIGITS, _DIGIT, NAMESPACE_DIGITS), re.DOTALL
)
_TIERS = {tier.spec.medium: tier for tier in Tier}

# -------------------------------------------------------------------------------------------- input

_Hash = Annotated[bytes, msgspec.Meta(min_length=1, max_length=HASH_BYTES_MOST)] | int
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=EVENT_HASHES)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Medium = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS)]


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: Annotated[list[_Token], msgspec.Meta(max_length=EVENT_TOKENS)]
    block_size: Annotated[int, msgspec.Meta(ge=0)]
    lora_id: int | None = None
    medium: _Medium | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: _Medium | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredRow(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    at_s: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=BATCH_EVENTS)]


_BATCH = msgspec.msgpack.Decoder(_Batch)
_MAP = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_ROWS = (*range(0x90, 0xA0), 0xDC, 0xDD)
"""The possible first bytes of a msgpack array."""

_encoder = msgspec.msgpack.Encoder()

# ---------------------------------------------------------------------------------------------- batches


def encode(stream: EventStream, events: Sequence[KVEvent], at_s: float) -> bytes:
    """Returns the payload with these events of that stream. `at_s` is seconds since 1970 on the publisher's clock;
    subscribers should not compute with it."""
    return _encoder.encode((at_s, [_words(stream, event) for event in events], 0))  # rank 0: as a vLLM of one rank


def decode(payload: bytes) -> list[KVEvent]:
    """Returns the events of a batch from kvcluster, vLLM or an engine with its format, in order. Token ids are left out
    unless there are `block_size` for each hash: vLLM sends those of a whole range, of which it may have cached a
    part."""
    at_most(len(payload), BATCH_BYTES, "bytes in a batch of KV events")
    try:
        batch = _BATCH.decode(payload)
        found = [(_ROW if memoryview(raw)[0] in _ROWS else _MAP).decode(raw) for raw in batch.events]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"this is not a batch of KV events: {error}") from None
    events = [_event(one) for one in found]
    return [event for event in events if event is not None]


def _words(stream: EventStream, event: KVEvent) -> dict[str, object]:
    if isinstance(event, BlocksStored):
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": list(event.tokens),
            "block_size": stream.block_tokens,
            "lora_id": None,
            "medium": event.tier.spec.medium,
            "lora_name": stream.adapter or None,
            "ownership": OWNERSHIP,
        }
    if isinstance(event, BlocksRemoved):
        medium = event.tier.spec.medium
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": medium, "ownership": OWNERSHIP}
    return {"type": "AllBlocksCleared"}


def _event(found: _Stored | _Removed | _Cleared) -> KVEvent | None:
    """Returns the event, or None if it has no hashes or its medium is not known here."""
    if isinstance(found, _Cleared):
        return AllBlocksCleared()
    tier = _TIERS.get((found.medium or "GPU").upper())
    if tier is None or not found.block_hashes:
        return None
    hashes = tuple(_hash(one) for one in found.block_hashes)
    if isinstance(found, _Removed):
        return BlocksRemoved(tier, hashes)
    parent = None if found.parent_block_hash is None else _hash(found.parent_block_hash)
    whole = len(found.token_ids) == found.block_size * len(hashes)
    return BlocksStored(tier, parent, hashes, tuple(found.token_ids) if whole else ())


def _hash(word: bytes | int) -> BlockHash:
    return BlockHash(word if isinstance(word, bytes) else _SEQUENCE.pack(word & 2**64 - 1))


# ----------------------------------------------------------------------------------------------- topics


def topic_of(stream: EventStream) -> str:
    """Returns the topic of the stream of one namespace: `kv@NAMESPACE@MODEL`. llm-d has a pod in place of the
    namespace."""
    return f"kv@{stream.namespace.hex()[:NAMESPACE_DIGITS]}@{stream.model}"


def parse_topic(topic: str) -> tuple[str, str] | None:
    """Returns the first digits of the namespace, and the model; None if it is not a topic of kvcluster."""
    ours = _OURS.fullmatch(topic)
    return None if ours is None else (ours[1], ours[2])


def encode_topic(topic: str) -> bytes:
    """Returns the first frame of a message. Subscribers receive all topics that begin with their subscription."""
    return topic.encode()


def may_begin_topic(prefix: bytes) -> bool:
    """Whether a topic of kvcluster may begin with these bytes, of a subscription."""
    return len(prefix) <= TOPIC_BYTES and _BEGINNING.fullmatch(prefix) is not None


def _topic(frame: bytes) -> str:
    at_most(len(frame), TOPIC_BYTES, "topic bytes")
    try:
        return frame.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a topic that is not UTF-8") from None


# --------------------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Batch:
    """One message: the batch of a topic with that sequence number. `decode` reads its payload."""

    topic: str
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Asks for every batch from the number `start` on: of one topic, or of all."""

    start: int
    topic: str | None = None


def encode_batch(batch: Batch) -> list[bytes]:
    """Returns its three frames."""
    return [encode_topic(batch.topic), _SEQUENCE.pack(batch.sequence), batch.payload]


def decode_batch(frames: Sequence[bytes]) -> Batch:
    """The inverse."""
    must(len(frames) == 3, f"a message of KV events has 3 frames, not {len(frames)}")
    must(frames[1] != END, "a batch of KV events has the sequence number that ends a replay")
    return Batch(_topic(frames[0]), _sequence(frames[1]), frames[2])


def encode_answer(batch: Batch | None) -> list[bytes]:
    """Encodes one message of a replay; None as the one that ends it."""
    return [b"", b"", END, b""] if batch is None else [b"", *encode_batch(batch)]


def decode_answer(frames: Sequence[bytes]) -> Batch | None:
    """The inverse."""
    must(len(frames) == 4 and not frames[0], "a message of a replay is an empty frame and three more")
    return None if frames[2] == END else decode_batch(frames[1:])


def encode_request(request: ReplayRequest) -> list[bytes]:
    """Encodes a request for a replay. vLLM answers only requests without a topic."""
    frames = [b"", _SEQUENCE.pack(request.start)]
    return frames if request.topic is None else [*frames, encode_topic(request.topic)]


def decode_request(frames: Sequence[bytes]) -> ReplayRequest:
    """The inverse."""
    must(
        len(frames) in (2, 3) and not frames[0],
        "a request for a replay is an empty frame, a number, and perhaps a topic",
    )
    return ReplayRequest(_sequence(frames[1]), _topic(frames[2]) if len(frames) == 3 else None)


def _sequence(frame: bytes) -> int:
    must(len(frame) == _SEQUENCE.size, f"a sequence has {_SEQUENCE.size} bytes, not {len(frame)}")
    (number,) = _SEQUENCE.unpack(frame)
    return int(number)
