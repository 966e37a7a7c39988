"""Builds the configuration of an application on Ray Serve, as values that Ray and vLLM check themselves.

    LLMConfig(..., engine_kwargs={"kv_transfer_config": kv_transfer_config("coordinator:7070")},
              deployment_config={"request_router_config": request_router_config("coordinator:7070", model="llama")})

Both are plain data, so that an application can be built on a machine that has neither a GPU nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvcluster.engines.ray_serve.settings as settings
from kvcluster.errors import ConfigError
from kvcluster.transport.rpc import check_address

if TYPE_CHECKING:
    from ray.serve.config import RequestRouterConfig

ROUTER = "kvcluster.engines.ray_serve.router.KVClusterRouter"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")


def kv_transfer_config(address: str, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Returns vLLM's `kv_transfer_config` for engines that share KV through the cluster at `address` ("host:port").

    `extra` is passed to the connector (docs/vllm.md): token_file, weights, load_ms... The connector refuses unknown
    keys when the engine starts. Raises ConfigError for a bad address or role.
    """
    check_address(address)
    if role not in _ROLES:
        raise ConfigError(f"role must be one of {', '.join(_ROLES)}, not {role!r}")
    return {
        "kv_connector": "KVClusterConnector",
        "kv_connector_module_path": "kvcluster.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",  # vLLM's default fails a request whose load failed
        "kv_connector_extra_config": {"address": address, **extra},
    }


def request_router_config(address: str, *, model: str, tokenizer: str = "", **given: Any) -> RequestRouterConfig:
    """Returns Serve's `request_router_config` with a router that prefers replicas on the host of a prompt's prefix.

    `model` is the model's name in the cluster, which engines take from the last part of its path. `tokenizer` is the
    tokenizer's folder or name, for prompts that are text. The other settings are those of `settings.RouterSettings`.
    Raises ConfigError for an invalid setting.
    """
    values = {"address": address, "model": model, "tokenizer": tokenizer, **given}
    settings.parse_settings(values)  # so that a mistake raises here, and not later in a router's process
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs=values)
