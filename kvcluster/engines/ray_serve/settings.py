"""The settings of an application on Ray Serve: the router's, and functions that configure engines and deployment.

    LLMConfig(..., engine_kwargs={"kv_transfer_config": kv_transfer_config("coordinator:7070")},
              deployment_config={"request_router_config": request_router_config("coordinator:7070", model="llama")})

The router's settings are the keys of `request_router_kwargs`; unknown keys are refused by name. Both functions return
plain data, which Ray and vLLM check themselves, so that an application can be built on a machine that has neither a GPU
nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcluster.client.credential import read_token
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.engines.settings_check import check_settings
from kvcluster.errors import ConfigError
from kvcluster.observe.trace_file import MODES
from kvcluster.transport.addresses import check_address
from kvcluster.transport.credentials import CONNECTION, Credentials, client_credentials

if TYPE_CHECKING:
    from ray.serve.config import RequestRouterConfig


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`mode`: "on" prefers replicas; "observe" locates prefixes and counts where requests would have been routed, and
    prefers none; "off" asks nothing. `address`: the coordinator's "host:port". `model`: the model's name in the
    namespace. `tokenizer`: the folder or name of the model's tokenizer; without it only prompts given as token ids are
    located. `token_file`: a file that holds the credential. `encryption`, `ca_file`, `cert_file`, `key_file`,
    `server_name`: as in ClientConfig. `weights`: the beginning of the weights id, if the cluster
    has several for the model; "" takes those with the most cached blocks. `adapter`: content hash of a LoRA that all
    requests use; "" for none.

    `patience_ms`: the longest that a request waits for the coordinator, whether or not it runs. `text_ms`: the longest
    that a request also waits for its text to be tokenised, while the coordinator answers. `min_blocks`: the fewest
    cached blocks for which a replica is preferred. `max_blocks`: the number of leading blocks of a prompt that are
    located. `ahead`: a replica is not preferred while it has over `ahead` more requests than the least busy replica.
    """

    mode: str = "on"
    address: str = ""
    model: str = ""
    tokenizer: str = ""
    token_file: str = ""
    encryption: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    weights: str = ""
    adapter: str = ""
    patience_ms: int = 4
    text_ms: int = 20
    min_blocks: int = 4
    max_blocks: int = 512
    ahead: int = 16

    @property
    def token(self) -> str | None:
        """The credential. Raises ConfigError if its file cannot be read."""
        return read_token(self.token_file)

    @property
    def credentials(self) -> Credentials:
        """What the router shows to the coordinator. Raises ConfigError if a file cannot be used, or if it is open
        whether to encrypt."""
        client = ClientConfig(**{name: getattr(self, name) for name in CONNECTION})
        return client_credentials(self.address, self.token, client)


def parse_settings(given: Mapping[str, Any]) -> RouterSettings:
    """Returns the settings. Raises ConfigError, naming the key, for one that is unknown, missing, of the wrong type or
    out of range."""
    check_settings(given, RouterSettings, "the router has no setting")
    settings = RouterSettings(**given)
    if settings.mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}, not {settings.mode!r}")
    check_address(settings.address)
    if not settings.model:
        raise ConfigError("the router needs `model`: the name under which the engines cache (`kvcluster status`)")
    if not 1 <= settings.max_blocks <= limits.BLOCKS_PER_CALL:
        raise ConfigError(f"max_blocks must be 1 to {limits.BLOCKS_PER_CALL}, not {settings.max_blocks}")
    return settings


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
    tokenizer's folder or name, for prompts that are text. The other settings are those of RouterSettings.
    Raises ConfigError for an invalid setting.
    """
    values = {"address": address, "model": model, "tokenizer": tokenizer, **given}
    parse_settings(values)  # so that a mistake raises here, and not later in a router's process
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs=values)
