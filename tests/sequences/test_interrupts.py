"""Ctrl-C anywhere in a call: what the sequences hold is right afterwards, or they refuse, and no other worker ever
loads a wrong byte."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import FrameType

import pytest
import torch

from kvcluster.client import Client
from kvcluster.errors import CallerError, ResidentSetFull
from kvcluster.sequences.step_lock import StepLock
from kvcluster.testing import MemoryCluster
from tests.client.conftest import Start
from tests.client.interrupts import interrupted_by, of_the_product
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK = 8, 4
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
STRIDE = 2
"""Every so many functions are tried."""


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=1, ram_bytes="4MiB", config={"client": {"resident_bytes": 8 * PAGE}})


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Makes a call, with KeyboardInterrupt as the `at`th function of the product is entered within it. Returns whether
    there was one. (Not at each line: at the end of a `with` statement Python takes no signal, but traces a line.)"""
    entered = count(1)

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and of_the_product(frame) and next(entered) == at:
            raise KeyboardInterrupt

    return interrupted_by(trace, call)


class Step:
    """A sequence of three blocks and a half, its fork, and the values of sixteen tokens."""

    def __init__(self, client: Client, first: int) -> None:
        self.ids = list(range(first, first + 16))
        draw = torch.Generator().manual_seed(first)
        self.kv = torch.randn(LAYERS, 2, 16, HEADS, DIM, generator=draw).to(
            getattr(torch, SPEC.groups[0].planes[0].dtype)
        )
        self.one = client.sequence()
        self.grow(0, 14)
        self.fork = self.one.fork()

    def append(self, layer: int, start: int, stop: int) -> None:
        self.one.append(layer, *self.kv[layer, :, start:stop])

    def grow(self, start: int, stop: int) -> None:
        for layer in range(LAYERS):
            self.append(layer, start, stop)
        self.one.advance(self.ids[start:stop])

    def forked(self) -> None:
        with self.one.fork():
            """It is closed at once."""

    def calls(self) -> dict[str, Callable[[], object]]:
        one = self.one
        return {
            "append": lambda: self.append(0, 14, 16),
            "grow": lambda: self.grow(14, 16),
            "write": lambda: one.write(0, 13, *self.kv[0, :, 13:14]),
            "truncate": lambda: one.truncate(13),
            "reserve": lambda: one.reserve(5),
            "fork": self.forked,
            "flush": one.flush,
            "read": lambda: one.read(0, 2, 9),
        }

    def again(self) -> None:
        """Goes on as the docs say: drops the step, and makes it again."""
        self.one.truncate(min(self.one.length, 12))
        self.grow(self.one.length, 16)
        for layer in range(LAYERS):
            assert torch.equal(torch.stack(self.one.read(layer, 0, 16)), self.kv[layer])
            assert torch.equal(torch.stack(self.fork.read(layer, 0, 14)), self.kv[layer, :, :14])
        self.one.flush()

    def check_published(self, other: Client) -> None:
        """What another worker finds under these token ids is what was computed."""
        out = torch.zeros(4, LAYERS, 2, BLOCK, HEADS, DIM, dtype=self.kv.dtype)
        loaded = other.load(self.ids, out)
        found = out.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        assert torch.equal(found[:, :, :loaded], self.kv[:, :, :loaded])


@pytest.mark.filterwarnings("ignore:a sequence of", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["append", "grow", "write", "truncate", "reserve", "fork", "read"])
def test_an_interrupted_call_leaves_what_was_there_or_a_refusal(cluster: MemoryCluster, name: str) -> None:
    first, broken = 1_000 * len(name), 0
    with cluster.client(SPEC) as other:
        client = cluster.client(SPEC)
        for at in count(1 + len(name) % STRIDE, STRIDE):
            step = Step(client, first + 100 * at)
            if not interrupted(step.calls()[name], at):
                break
            try:
                step.again()
            except CallerError as refused:
                assert "was interrupted while it changed" in str(refused)
                broken += 1
            step.check_published(other)
            step.one.close()
            step.fork.close()
            if client.resident().pages_available < 0 or broken:
                client.close()
                client, broken = cluster.client(SPEC), 0
        assert at > STRIDE
        client.close()


def test_what_checks_before_it_changes_breaks_nothing_and_neither_does_a_wait() -> None:
    lock = StepLock()
    lock.failed(ResidentSetFull("no page"))
    lock.check()

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as waited, lock:
        lock.wait_for(interrupt)
    lock.failed(waited.value)
    lock.check()
    lock.failed(KeyboardInterrupt())
    with pytest.raises(CallerError, match="close the client, connect again"):
        lock.check()


def test_a_sequence_that_was_broken_says_so_until_its_client_is_closed(cluster: MemoryCluster) -> None:
    client = cluster.client(SPEC)
    one, two = client.sequence(), client.sequence()
    one._runner.lock.failed(KeyboardInterrupt())
    for call in (
        lambda: two.read(0, 0, 0),
        one.fork,
        lambda: two.advance(0),
        lambda: two.append(0, torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM)),
    ):
        with pytest.raises(CallerError, match="was interrupted"):
            call()
    one.close()
    two.close()
    client.close()
    with cluster.client(SPEC) as again, again.sequence() as three:
        kv = torch.zeros(1, HEADS, DIM, dtype=three.resident_pages.dtype)
        for layer in range(LAYERS):
            three.append(layer, kv, kv)
        three.advance(1)
