"""The router in a real Ray Serve: a deployment of two replicas on two nodes, whose engine is a stub.

Ray's nodes are one host here, so each is given a name of its own where the router asks for it. The router runs where
the deployment's handle is, which is this process.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest

from kvcluster.actors.own_ray import own_ray
from tests.client.build import SPEC, prompt
from tests.engines.ray_serve.nodes import ray_node
from tests.engines.ray_serve.test_prefix_locator import CACHED, HOST, PATIENT, apart
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),  # of Ray, which says much about itself
]

AT_ONCE = 2
"""Requests that a replica takes."""


class Stub:
    """Says on which node it is. A request that is held waits for a file to go."""

    async def __call__(self, request: dict[str, Any]) -> str:
        import ray

        if "held" in request:
            await asyncio.to_thread(eventually, lambda: not Path(request["held"]).exists())
        return str(ray.get_runtime_context().get_node_id())

    async def other(self, prompt: list[int]) -> str:
        return await self({})


class Recorded:
    """What the router counts, in place of Serve's metrics."""

    outcomes: ClassVar[Counter[str]] = Counter()
    went: ClassVar[Counter[str]] = Counter()


class Application:
    """The deployment over a coordinator, which is in a process of its own. `near` is the node of the cached prefix."""

    def __init__(self, handle: Any, near: str, far: str, send: Any) -> None:
        self.handle, self.near, self.far, self.send = handle, near, far, send

    def ask(self, request: dict[str, Any]) -> str:
        return str(self.handle.remote(request).result(timeout_s=60))

    def knows(self) -> bool:
        """Is the prefix found? Forgets what was counted of that."""
        self.ask({"prompt": CACHED})
        known = Recorded.went["preferred"] > 0
        Recorded.outcomes.clear()
        Recorded.went.clear()
        return known


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with ExitStack() as stack:
        address, send = stack.enter_context(apart())
        stack.enter_context(own_ray())
        patch = stack.enter_context(pytest.MonkeyPatch.context())

        import ray
        from ray import serve

        from kvcluster.engines.ray_serve import compat, request_router_config

        folder = stack.enter_context(TemporaryDirectory(prefix="kvserve-", ignore_cleanup_errors=True))
        head = stack.enter_context(ray_node(folder, num_cpus=4))
        stack.enter_context(ray_node(folder, head.gcs_address, num_cpus=4))
        ray.init(address=head.gcs_address, log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1")
        stack.callback(ray.shutdown)
        near, far = [str(node["NodeID"]) for node in ray.nodes()]
        # Serve hands the router's module on by value, so what it imports is patched where that is at home.
        names = [{"NodeID": near, "NodeManagerHostname": HOST}, {"NodeID": far, "NodeManagerHostname": "elsewhere"}]
        patch.setattr(ray, "nodes", lambda: [{"Alive": True, **one} for one in names])
        patch.setattr(compat.Counters, "asked", lambda _, outcome, waited_ns: Recorded.outcomes.update([outcome]))
        patch.setattr(compat.Counters, "sent", lambda _, to: Recorded.went.update([to]))
        serve.start(proxy_location="Disabled")
        stack.callback(serve.shutdown)
        deployment = serve.deployment(
            Stub,
            num_replicas=2,
            max_replicas_per_node=1,
            max_ongoing_requests=AT_ONCE,
            ray_actor_options={"num_cpus": 1},
            request_router_config=request_router_config(address, model=SPEC.model, min_blocks=2, **PATIENT),
        )
        handle = serve.run(deployment.bind(), name="stub", route_prefix=None)
        built = Application(handle, near, far, send)
        eventually(built.knows)
        yield built


@pytest.fixture(autouse=True)
def counted(application: Application) -> None:
    Recorded.outcomes.clear()
    Recorded.went.clear()


def test_requests_go_where_their_prefix_lies(application: Application) -> None:
    assert [application.ask({"prompt": CACHED + prompt(1, seed=n)}) for n in range(10)] == [application.near] * 10
    assert (Recorded.outcomes, Recorded.went) == ({"found": 10}, {"preferred": 10})


def test_a_prompt_that_is_not_cached_goes_anywhere(application: Application) -> None:
    went = {application.ask({"prompt": prompt(4, seed=100 + n)}) for n in range(40)}
    assert went == {application.near, application.far}
    assert Recorded.outcomes == {"nothing": 40}


def test_keyword_arguments_of_other_methods_are_routed_alike(application: Application) -> None:
    told = [application.handle.other.remote(prompt=CACHED).result(timeout_s=60) for _ in range(5)]
    assert told == [application.near] * 5


def test_what_is_no_prompt_and_what_is_of_an_adapter_is_not_looked_up(application: Application) -> None:
    went = {application.ask({"say": "hello"}) for _ in range(20)}
    adapter = application.handle.options(multiplexed_model_id="tuned")
    went |= {adapter.remote({"prompt": CACHED}).result(timeout_s=60) for _ in range(20)}
    assert went == {application.near, application.far}
    assert Recorded.outcomes == {"no_prompt": 20, "adapter": 20}


def test_a_replica_that_is_full_is_passed_over(application: Application, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    waiting = [application.handle.remote({"prompt": CACHED, "held": str(held)}) for _ in range(AT_ONCE)]
    eventually(lambda: Recorded.went["preferred"] == AT_ONCE)
    assert application.ask({"prompt": CACHED}) == application.far
    assert Recorded.went["another"] == 1
    held.unlink()
    assert [one.result(timeout_s=60) for one in waiting] == [application.near] * AT_ONCE


def test_a_mistake_in_the_router_costs_a_preference_and_no_answer(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcluster.engines.ray_serve import prompts

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(prompts, "find", broken)
    went = {application.ask({"prompt": CACHED}) for _ in range(40)}
    assert went == {application.near, application.far}
    assert Recorded.outcomes == {"mistake": 40}


def test_with_the_coordinator_gone_requests_go_anywhere_and_are_answered(application: Application) -> None:
    application.send(signal.SIGKILL)  # the last of these tests: it does not come back
    went = {application.ask({"prompt": CACHED}) for _ in range(40)}
    assert went == {application.near, application.far}
    assert Recorded.outcomes["away"] > 0
    assert not Recorded.went
