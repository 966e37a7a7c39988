"""The configuration tree: frozen, validated as a whole, and handed down as the smallest part that each object needs.

`load` is the only way in. Nothing else reads settings; no environment variable changes behaviour.
"""

from kvcluster.config.loading import as_values, client_config, differences, load, size, size_text
from kvcluster.config.sections import (
    CODECS,
    LOG_FORMATS,
    LOSSES,
    SHARD_RESOURCE,
    TRANSPORTS,
    TWIN,
    ClientConfig,
    Config,
    CoordinatorConfig,
    EventsConfig,
    GroupConfig,
    LogConfig,
    MetricsConfig,
    RayConfig,
    ServerConfig,
    ShardConfig,
)

__all__ = [
    "CODECS",
    "LOG_FORMATS",
    "LOSSES",
    "SHARD_RESOURCE",
    "TRANSPORTS",
    "TWIN",
    "ClientConfig",
    "Config",
    "CoordinatorConfig",
    "EventsConfig",
    "GroupConfig",
    "LogConfig",
    "MetricsConfig",
    "RayConfig",
    "ServerConfig",
    "ShardConfig",
    "as_values",
    "client_config",
    "differences",
    "load",
    "size",
    "size_text",
]
