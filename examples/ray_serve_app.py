"""vLLM replicas on Ray Serve that share what they have prefilled, behind an OpenAI API. See docs/ray-serve.md.

    serve run --app-dir examples ray_serve_app:build address=127.0.0.1:7070 model=/models/Llama-3.1-8B-Instruct

What one replica has computed, every other loads; and a request is sent to the host where its prefix lies already.
"""

from __future__ import annotations

from pathlib import PurePath

from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_openai_app

from kvcluster.engines.ray_serve import kv_transfer_config, request_router_config

_MEANINGS = {
    "address": "the cluster's coordinator, host:port",
    "model": "a folder, or a name on the hub",
    "replicas": "how many engines; 2 where it is not given",
}


def build(args: dict[str, str]) -> Application:
    """The application that `serve run` is asked for; `args` are its NAME=VALUE. Raises ValueError for others."""
    unknown, missing = args.keys() - _MEANINGS, {"address", "model"} - args.keys()
    if unknown or missing:
        given = "; ".join(f"{name}: {meaning}" for name, meaning in _MEANINGS.items())
        raise ValueError(f"unknown: {sorted(unknown)}, missing: {sorted(missing)}. Give as NAME=VALUE: {given}")
    engines = llm_config(args["address"], args["model"], int(args.get("replicas", "2")))
    return build_openai_app({"llm_configs": [engines]})


def llm_config(address: str, model: str, replicas: int) -> LLMConfig:
    """Engines of one model that share through the cluster at that address."""
    name = PurePath(model).name  # as the connector names it in the cluster, and the router must look for it
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": model},
        engine_kwargs={"kv_transfer_config": kv_transfer_config(address)},
        deployment_config={
            "num_replicas": replicas,
            "request_router_config": request_router_config(address, model=name, tokenizer=model),
        },
    )
