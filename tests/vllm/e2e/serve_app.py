"""The example's application on engines that run on a CPU, with a router that logs its decisions.

`python -m tests.vllm.e2e.serve_app SETTINGS`, in the engines' environment and beside a Ray node, serves until stdin
ends. Settings are JSON: `ray`, its address; `port`; `model`, its folder; `connector`, its extra config; `said`, a file.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

from examples.ray_serve_app import llm_config
from kvcluster.engines.ray_serve.compat import PendingRequest, Replica
from kvcluster.engines.ray_serve.router import KVClusterRouter
from tests.vllm.e2e.engine import LLM_ARGUMENTS, ON_SERVE

AT_ONCE = 2
"""Requests that a replica takes, so that one is soon full."""

PLAIN, NUMBER = "x-plain", "x-number"
"""Headers of a request: it is to be routed as Serve would; its number in what the router says."""

ENGINE = LLM_ARGUMENTS | ON_SERVE | {"enable_prompt_tokens_details": True}


class Watched(KVClusterRouter):
    """Says of each request where it went, what was known of its prefix, and how long it was kept to find out. A request
    that asks for it goes where power of two choices sends it: so both take turns over the same replicas."""

    def initialize_state(self, *, said: str, **given: Any) -> None:
        super().initialize_state(**given)
        self._said = said
        self._kept: dict[str, tuple[str, int]] = {}

    async def _preferred(self, replicas: list[Replica], request: PendingRequest) -> list[Replica]:
        if PLAIN in _headers(request):
            return []
        began = time.perf_counter_ns()
        chosen = await super()._preferred(replicas, request)
        key = request.metadata.internal_request_id
        waited_ns = self._kept.get(key, ("", 0))[1] + time.perf_counter_ns() - began
        self._kept[key] = (self._asked[key].answer.outcome.value, waited_ns)
        return chosen

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: object) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        outcome, waited_ns = self._kept.pop(pending_request.metadata.internal_request_id, ("plain", 0))
        host = self._hosts.of(self.curr_replicas[replica_id].node_id)
        told = {"number": _headers(pending_request).get(NUMBER), "host": host, "outcome": outcome, "waited": waited_ns}
        with open(self._said, "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def _headers(request: PendingRequest) -> dict[str, str]:
    return next((dict(one.headers) for one in request.args if hasattr(one, "headers")), {})


def config(settings: dict[str, Any]) -> LLMConfig:
    """The example's, as it is but for what a CPU and this test need."""
    one = llm_config(settings["connector"]["address"], settings["model"], 2).model_copy(deep=True)
    one.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"] |= settings["connector"]
    router = one.deployment_config["request_router_config"]
    router = type(router)(
        request_router_class=Watched, request_router_kwargs=router.request_router_kwargs | {"said": settings["said"]}
    )
    return LLMConfig(
        model_loading_config=one.model_loading_config,
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1, "engine": 1}]},  # of which each node has one
        engine_kwargs=one.engine_kwargs | ENGINE,
        deployment_config=one.deployment_config | {"max_ongoing_requests": AT_ONCE, "request_router_config": router},
        log_engine_metrics=False,
    )


def main(settings: dict[str, Any]) -> None:
    """Says "up" when both engines are."""
    ray.init(address=settings["ray"], log_to_driver=False, logging_level="error", _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": settings["port"]})
    one_router = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 1}}
    app = build_openai_app({"llm_configs": [config(settings)], "ingress_deployment_config": one_router})
    serve.run(app, name="llm")
    print("up", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
