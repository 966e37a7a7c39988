"""Calls of threads that wait for one another end by their deadlines, also when the other never ends: an interrupt may
keep it from giving back what it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kvcluster.client import Client
from kvcluster.errors import CallerError, ResidentSetFull
from kvcluster.sequences.remote_attention import ShardFailure, Shipment
from kvcluster.sequences.resources import SequenceResources
from kvcluster.sequences.sequence import Sequence
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Deadline
from tests.client.conftest import Start
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK = 8, 4
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
SOON_MS = 20
LONG_S = 30
"""For what must end soon, and would not."""


@pytest.fixture
def client(start: Start) -> Iterator[Client]:
    cluster: MemoryCluster = start(shards=1, ram_bytes="4MiB", config={"client": {"resident_bytes": 8 * PAGE}})
    with cluster.client(SPEC) as made:
        yield made


@pytest.fixture
def one(client: Client) -> Iterator[Sequence]:
    with client.sequence(publish=False) as made:
        kv = torch.zeros(BLOCK, HEADS, DIM, dtype=made.resident_pages.dtype)
        for layer in range(LAYERS):
            made.append(layer, kv, kv)
        made.advance(BLOCK)
        yield made


def in_a_thread(call: Callable[[], Any]) -> Future[Any]:
    """Makes a call, in a thread that may never end."""
    result: Future[Any] = Future()

    def make() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return result


Has = Callable[[SequenceResources, Sequence], Any]


def holds_blocks(resources: SequenceResources, one: Sequence) -> Any:
    return resources.runner.holding(one._state.blocks, Deadline.after_ms(0))


def reads(resources: SequenceResources, one: Sequence) -> Any:
    return resources.runner.reading(Deadline.after_ms(0))


def streams(resources: SequenceResources, one: Sequence) -> Any:
    return resources.loads.layers.turn.taken(Deadline.after_ms(0))


def takes_a_page(resources: SequenceResources, one: Sequence) -> Any:
    """As `with_room` for another page than there is."""

    @contextmanager
    def taking() -> Iterator[None]:
        with resources.runner.lock:
            resources.runner._evicting += 1
        yield
        with resources.runner.lock:
            resources.runner._evicting -= 1

    return taking()


def needs_a_page(resources: SequenceResources, one: Sequence) -> None:
    def none() -> None:
        raise ResidentSetFull("there is none")

    with resources.runner.lock:
        resources.runner.with_room(none, Deadline.after_ms(SOON_MS))


def enters(has: Has) -> Callable[[SequenceResources, Sequence], None]:
    """As those above, at a deadline that is soon."""

    def enter(resources: SequenceResources, one: Sequence) -> None:
        soon = Deadline.after_ms(SOON_MS)
        given = {
            holds_blocks: lambda: resources.runner.holding(one._state.blocks, soon),
            reads: lambda: resources.runner.reading(soon),
            streams: lambda: resources.loads.layers.turn.taken(soon),
        }
        with given[has]():
            """It is left at once."""

    enter.__name__ = has.__name__
    return enter


PAIRS = [
    (holds_blocks, needs_a_page),
    (holds_blocks, enters(holds_blocks)),
    (reads, needs_a_page),
    (takes_a_page, enters(reads)),
    (streams, enters(streams)),
]
names = pytest.mark.parametrize(("has", "waits"), PAIRS, ids=[f"{w.__name__} while one {h.__name__}" for h, w in PAIRS])


@names
def test_a_wait_for_another_thread_ends_at_its_deadline(one: Sequence, has: Has, waits: Callable[..., None]) -> None:
    with ExitStack() as held:
        held.enter_context(has(one.resources, one))
        with pytest.raises(ResidentSetFull):
            in_a_thread(lambda: waits(one.resources, one)).result(LONG_S)
    if waits is not needs_a_page:
        waits(one.resources, one)


@names
def test_a_wait_for_a_thread_whose_call_was_interrupted_ends_at_once(
    one: Sequence, has: Has, waits: Callable[..., None]
) -> None:
    left = has(one.resources, one)
    left.__enter__()  # and an interrupt comes before it is left
    one._runner.failed(KeyboardInterrupt())
    with pytest.raises(CallerError, match="was interrupted"):
        in_a_thread(lambda: waits(one.resources, one)).result(LONG_S)


def test_a_client_is_closed_though_attention_was_interrupted_before_it_could_say_that_it_ended(
    client: Client, one: Sequence
) -> None:
    left = one.resources.runner.reading(Deadline.after_ms(0))
    left.__enter__()
    one._runner.failed(KeyboardInterrupt())
    in_a_thread(client.close).result(LONG_S)


def test_a_shipment_whose_shard_never_answers_has_failed_at_its_deadline() -> None:
    shipment = Shipment(2)
    shipment.take(ShardFailure(busy=True))
    assert not in_a_thread(lambda: shipment.wait(Deadline.after_ms(SOON_MS))).result(LONG_S)
