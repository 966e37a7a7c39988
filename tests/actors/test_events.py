"""KV events of a real cluster: what a store publishes, a subscriber that comes late, and a coordinator that dies."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

import kvcluster
from kvcluster import EventSubscriber
from kvcluster.actors.local import LocalCluster
from kvcluster.client.events import Event
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored
from kvcluster.errors import ConfigError
from tests.client.build import SPEC, kv
from tests.ports import event_endpoints

pytestmark = pytest.mark.cluster

TOKENS = list(range(7, 7 + 8 * SPEC.block_tokens))
HEARD_S = 30.0


@pytest.fixture
def endpoints() -> tuple[str, str]:
    return event_endpoints()


@pytest.fixture
def cluster(shared_ray: None, endpoints: tuple[str, str]) -> Iterator[LocalCluster]:
    """With a buffer of two batches, so that who comes late has missed some."""
    events = {"endpoint": endpoints[0], "replay": endpoints[1], "buffer_batches": 2}
    config = {"shard": {"report_interval_ms": 100}, "events": events}
    with kvcluster.local(ram_bytes="16MiB", config=config) as running:
        yield running


class Listener:
    """Keeps a picture, as a router does."""

    def __init__(self, subscriber: EventSubscriber) -> None:
        self._subscriber = subscriber
        self.blocks: dict[BlockHash, BlockHash | None] = {}
        self.tokens: list[int] = []
        self.cleared: list[Event] = []

    def hear_until(self, blocks: int) -> None:
        while len(self.blocks) != blocks:
            event = self._subscriber.next(HEARD_S)
            assert event is not None, f"{len(self.blocks)} of {blocks} blocks were heard of"
            assert event.model == SPEC.model
            told = event.event
            if isinstance(told, AllBlocksCleared):
                self.cleared.append(event)
                self.blocks.clear()
            elif isinstance(told, BlocksRemoved):
                for block in told.hashes:
                    self.blocks.pop(block)
            elif isinstance(told, BlocksStored):
                self.blocks.update(zip(told.hashes, (told.parent, *told.hashes), strict=False))
                self.tokens += told.tokens


def test_an_endpoint_in_use_is_said_before_anything_is_started(endpoints: tuple[str, str]) -> None:
    port = int(endpoints[0].rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match="another process listens there"),
        kvcluster.local(ram_bytes="16MiB", config={"events": {"endpoint": endpoints[0]}}),
    ):
        raise AssertionError("it started")


def test_a_listener_knows_what_is_cached_also_after_the_coordinator_died(
    cluster: LocalCluster, endpoints: tuple[str, str]
) -> None:
    client = cluster.client(SPEC)
    with EventSubscriber(*endpoints) as first:
        heard = Listener(first)
        assert client.store(TOKENS, kv(8)).blocks == 8
        heard.hear_until(8)
        chain = client.hashes(TOKENS)
        assert heard.blocks == dict(zip(chain, [None, *chain], strict=False))
        assert heard.tokens == TOKENS

        for first_token in (1_000, 2_000, 3_000):  # each by itself, so that the buffer has not room for all
            assert client.store([first_token, *TOKENS[1:]], kv(8)).blocks == 8
            assert client.flush()
        heard.hear_until(32)
        with EventSubscriber(*endpoints) as second:
            late = Listener(second)
            late.hear_until(32)
            assert late.blocks == heard.blocks

        coordinator, *_ = cluster.pids()
        os.kill(coordinator, signal.SIGKILL)
        cleared = len(heard.cleared)
        while len(heard.cleared) == cleared:
            event = first.next(HEARD_S)
            assert event is not None, "nothing is heard of the next coordinator"
            if isinstance(event.event, AllBlocksCleared):
                heard.cleared.append(event)
                heard.blocks.clear()
        heard.hear_until(32)
        assert heard.blocks == late.blocks

        assert client.clear() == 32
        heard.hear_until(0)
