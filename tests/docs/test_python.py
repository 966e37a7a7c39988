"""The Python of the pages whose examples need no module of their own runs, twice. MODULES says where that of the others
runs; each of these modules runs the snippets of its page by `run_twice`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.client.client import Client
from kvcluster.client.events import Event
from kvcluster.core.breakeven import Breakeven
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import BlocksRemoved, Publish
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.bandwidth import BandwidthEstimator
from tests.client.build import SPEC, kv, prompt, room
from tests.docs.snippets import PAGES, ROOT, run_twice, snippets_of
from tests.runtime.events import block, effect, published, stream

MODULES = {
    "docs/attention.md": "tests/attention/test_examples.py",
    "docs/client.md": "tests/client/test_guide.py",
    "docs/sequences.md": "tests/sequences/test_examples.py",
    "docs/tuning.md": "tests/client/test_tuning.py",
}
Names = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve, about itself


class Given:
    """What the names of examples stand for: a client of a cluster within this process, which the test ends."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack, self.monkeypatch = stack, monkeypatch

    def cluster(self) -> MemoryCluster:
        return self.stack.enter_context(MemoryCluster(shards=2, ram_bytes="32MiB"))

    def client(self) -> Client:
        client = self.stack.enter_context(self.cluster().client(SPEC))
        assert client.store(prompt(3), kv(3)).blocks == 3 and client.flush()
        return client


def breakeven(given: Given) -> Names:
    link = BandwidthEstimator()
    for nbytes in (1_000_000, 2_000_000, 4_000_000):
        link.record(nbytes, nbytes * 1_000, 0)  # a link so slow that computing is faster
    names = {"spec": SPEC, "client": given.client(), "bandwidth": link, "now": 1, "tokens": 64}
    return names | {"Breakeven": Breakeven}


def events(given: Given) -> Names:
    """The subscriber of the page, over a real publisher; it ends after the first three events."""
    publisher = given.stack.enter_context(published())
    for told in (effect(0), Publish(stream(), (BlocksRemoved(Tier.HOST, (block(0),)),))):
        publisher.publish(told)

    class Subscriber(kvcluster.EventSubscriber):
        def __init__(self, endpoint: str, replay: str) -> None:
            assert endpoint.startswith("tcp://") and replay.startswith("tcp://")
            super().__init__(publisher.endpoint, publisher.replay_endpoint)

        def __iter__(self) -> Iterator[Event]:
            return islice(super().__iter__(), 3)

    given.monkeypatch.setattr(kvcluster, "EventSubscriber", Subscriber)
    return {}


def ray_serve(given: Given) -> Names:
    return {"LLMConfig": dict}  # that of ray.serve.llm imports vLLM, and takes the same arguments


def tiers(given: Given) -> Names:
    client = given.client()
    names = {"client": client, "prompt": prompt(3), "kv": kv(3), "out": room(3)}
    with client.prepare_load(client.hashes(prompt(3))) as ticket:
        return names | {"outcome": client.begin_load(ticket, room(3)).result()}


def transformers(given: Given) -> Names:
    from tests.engines.test_transformers import llama  # its imports take seconds

    given.stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)  # to wake a second one takes longer than this model computes
    cluster = given.cluster()
    given.monkeypatch.setattr(kvcluster, "connect", lambda at, spec: given.stack.enter_context(cluster.client(spec)))
    ids = torch.arange(1, 41)[None]
    return {"model": llama(num_hidden_layers=1), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


NAMES: Mapping[str, Callable[[Given], Names]] = {
    "docs/breakeven.md": breakeven,
    "docs/events.md": events,
    "docs/ray-serve.md": ray_serve,
    "docs/tiers.md": tiers,
    "docs/transformers.md": transformers,
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    with ExitStack() as stack:
        yield Given(stack, monkeypatch)


@pytest.mark.parametrize("page", NAMES)
def test_the_examples_of_a_page_run_and_can_be_run_again(given: Given, page: str) -> None:
    names = NAMES[page](given)
    for snippet in snippets_of(page, "python"):
        run_twice(snippet.code, str(snippet), names)


def test_the_python_of_every_page_runs_somewhere() -> None:
    in_quickstart = {"README.md"}
    assert {page for page in PAGES if snippets_of(page, "python")} == MODULES.keys() | NAMES.keys() | in_quickstart
    for page, module in MODULES.items():
        assert "run_twice(" in (ROOT / module).read_text(encoding="utf-8"), f"{module} runs the examples of {page} once"
