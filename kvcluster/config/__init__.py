"""The configuration tree: frozen, validated as a whole, and handed down as the smallest part that each object needs.

`load` is the only way in. Nothing else reads settings; no environment variable changes behaviour.
"""

from kvcluster.config.loading import as_values, client_config, differences, load, size, size_text
from kvcluster.config.sections import (
    CODECS,
    ENCRYPTIONS,
    LOG_FORMATS,
    LOSSES,
    NETWORK,
    NO_ENCRYPTION,
    SHARD_RESOURCE,
    TLS,
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
    SecurityConfig,
    ServerConfig,
    ShardConfig,
)

__all__ = [
    "CODECS",
    "ENCRYPTIONS",
    "LOG_FORMATS",
    "LOSSES",
    "NETWORK",
    "NO_ENCRYPTION",
    "SHARD_RESOURCE",
    "TLS",
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
    "SecurityConfig",
    "ServerConfig",
    "ShardConfig",
    "as_values",
    "client_config",
    "differences",
    "load",
    "size",
    "size_text",
]
