"""Ray Serve: engine replicas that share KV through a cluster, and a router that prefers hosts with a prompt's prefix.

    from kvcluster.engines.ray_serve import kv_transfer_config, request_router_config

The first configures the engines (`kvcluster.engines.vllm`), the second their deployment (docs/ray-serve.md).
"""

from kvcluster.engines.ray_serve.settings import kv_transfer_config, request_router_config

__all__ = ["kv_transfer_config", "request_router_config"]
