"""KV events against vLLM's own classes and its own publisher: each side reads what the other writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed import kv_events as theirs

from kvcluster.client.event_gaps import RESTARTED
from kvcluster.client.events import Event, EventSubscriber
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, EventStream
from kvcluster.wire import kv_events
from tests.client.test_events import BOUND_S
from tests.runtime.events import block, connected, effect, published, receive, stream
from tests.waiting import eventually

decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
A, B = block(1), block(2)
FIRST_LIFE = 200
"""Batches of a publisher that then restarts."""


def stored(**given: Any) -> theirs.BlockStored:
    below: dict[str, Any] = {"block_hashes": [A], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    return theirs.BlockStored(**(below | {"lora_id": None, "medium": theirs.MEDIUM_GPU, "lora_name": None} | given))


def test_vllm_reads_what_we_write() -> None:
    lora = EventStream(stream().namespace, "llama", "sha256:lora", 2)
    told = decoder.decode(
        kv_events.encode(
            lora,
            [
                AllBlocksCleared(),
                BlocksStored(Tier.RAM, None, (A, B), (1, 2, 3, 4)),
                BlocksStored(Tier.HOST, A, (B,)),
                BlocksRemoved(Tier.DISK, (A,)),
            ],
            12.5,
        )
    )
    of = {"lora_name": "sha256:lora", "ownership": "kvcluster"}
    assert (told.ts, told.data_parallel_rank) == (12.5, 0)
    assert told.events == [
        theirs.AllBlocksCleared(),
        stored(block_hashes=[A, B], token_ids=[1, 2, 3, 4], **of),
        stored(block_hashes=[B], parent_block_hash=A, token_ids=[], medium=theirs.MEDIUM_CPU, **of),
        theirs.BlockRemoved(block_hashes=[A], medium=theirs.MEDIUM_STORAGE, ownership="kvcluster"),
    ]


def test_we_read_what_vllm_writes() -> None:
    everything: dict[str, Any] = {
        "extra_keys": [("lora", ("image", 3)), None],
        "group_idx": 1,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": 4_096,
        "locality": "REMOTE",
        "ownership": "disk",
    }
    batch = theirs.KVEventBatch(
        ts=1.0,
        events=[
            stored(),
            stored(block_hashes=[A, B], parent_block_hash=5, session_id="s", medium=theirs.MEDIUM_CPU, **everything),
            stored(block_hashes=[2**64 - 1], token_ids=[], block_size=0, medium=theirs.MEDIUM_STORAGE),
            theirs.BlockRemoved(block_hashes=[A, 7], medium=None, group_idx=0, locality="LOCAL", ownership="x"),
            theirs.AllBlocksCleared(),
        ],
        data_parallel_rank=3,
    )
    five, seven = (BlockHash(number.to_bytes(8, "big")) for number in (5, 7))
    assert kv_events.decode(msgspec.msgpack.encode(batch)) == [
        BlocksStored(Tier.RAM, None, (A,), (1, 2)),
        BlocksStored(Tier.HOST, five, (A, B)),
        BlocksStored(Tier.DISK, None, (BlockHash(b"\xff" * 8),)),
        BlocksRemoved(Tier.RAM, (A, seven)),
        AllBlocksCleared(),
    ]


@contextmanager
def vllm_publisher(folder: Path, topic: str) -> Iterator[theirs.ZmqEventPublisher]:
    publisher = theirs.ZmqEventPublisher(0, f"ipc://{folder}/live", f"ipc://{folder}/replay", topic=topic)
    try:
        yield publisher
    finally:
        publisher.shutdown()


def publish(publisher: theirs.ZmqEventPublisher, number: int) -> None:
    publisher.publish(theirs.KVEventBatch(ts=0.0, events=[stored(block_hashes=[block(number)])]))


def subscriber(folder: Path, topic: str) -> EventSubscriber:
    return EventSubscriber(f"ipc://{folder}/live", f"ipc://{folder}/replay", topic)


def numbers(events: list[Event]) -> list[int]:
    stored = [event.event for event in events if isinstance(event.event, BlocksStored)]
    return [int.from_bytes(one, "big") for event in stored for one in event.hashes]


def tell_until_heard(
    publisher: theirs.ZmqEventPublisher, listening: EventSubscriber, first: int, *, at_least: int = 3
) -> list[Event]:
    """Tells of blocks from `first` on until all of them are heard, and returns what was: what is told before the other
    side listens shows as missed, and is asked for, when something else is told."""
    heard: list[Event] = []
    told = first

    def all_heard() -> bool:
        nonlocal told
        for _ in range(max(1, first + at_least - told)):
            publish(publisher, told)
            told += 1
        while (event := listening.next(0.1)) is not None:
            heard.append(event)
        return len(numbers(heard)) == told - first

    eventually(all_heard, BOUND_S)
    assert numbers(heard) == list(range(first, told))
    return heard


@pytest.mark.parametrize("topic", ["", "kv@10.0.0.1@llama"])
def test_our_subscriber_hears_vllms_publisher_from_its_beginning(tmp_path: Path, topic: str) -> None:
    with vllm_publisher(tmp_path, topic) as publisher, subscriber(tmp_path, topic) as listening:
        heard = tell_until_heard(publisher, listening, 0)
    assert {(event.topic, event.namespace, event.why) for event in heard} == {(topic, "", "")}


def test_a_vllm_that_restarts_resets_what_it_told(tmp_path: Path) -> None:
    topic = "kv@10.0.0.1@llama"
    with subscriber(tmp_path, topic) as listening:
        with vllm_publisher(tmp_path, topic) as publisher:
            tell_until_heard(publisher, listening, 0, at_least=FIRST_LIFE)
        with vllm_publisher(tmp_path, topic) as publisher:  # publishes fewer, otherwise no restart would show
            heard = tell_until_heard(publisher, listening, 1_000)
    assert (heard[0].event, heard[0].why) == (AllBlocksCleared(), RESTARTED)


def test_who_listens_to_vllm_can_listen_to_us() -> None:
    """With vLLM's decoder, and its way to ask for a replay."""
    with published(first_sequence=1) as publisher:
        for number in range(3):
            publisher.publish(effect(number))
        eventually(lambda: publisher.counters()["batches"] == 4)
        with connected(zmq.DEALER, publisher.replay_endpoint) as asking:
            asking.send_multipart((b"", (2).to_bytes(8, "big")))
            found = []
            while (frames := receive(asking))[2] != theirs.ZmqEventPublisher.END_SEQ:
                empty, topic, sequence, payload = frames
                assert (empty, topic) == (b"", b"kv@0000000000000000@llama")
                found.append((int.from_bytes(sequence, "big"), decoder.decode(payload).events))
        assert found == [
            (
                2 + number,
                [
                    stored(
                        block_hashes=[block(number)],
                        parent_block_hash=block(number - 1) if number else None,
                        token_ids=[number, number],
                        medium=theirs.MEDIUM_CPU,
                        ownership="kvcluster",
                    )
                ],
            )
            for number in range(3)
        ]
