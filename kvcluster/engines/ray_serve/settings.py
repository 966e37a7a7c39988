"""The router's settings, which are the keys of `request_router_kwargs`. Unknown keys are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcluster.client.credential import read_token
from kvcluster.core import limits
from kvcluster.engines.settings_check import check_settings
from kvcluster.errors import ConfigError
from kvcluster.observe.trace_file import MODES
from kvcluster.transport.rpc import check_address


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`mode`: "on" prefers replicas; "observe" locates prefixes and counts where requests would have gone, and prefers
    none; "off" asks nothing. `address`: the coordinator's "host:port". `model`: the model's name in the namespace.
    `tokenizer`: the folder or name of the model's tokenizer; without it only prompts given as token ids are located.
    `token_file`: a file that holds the credential. `weights`: the beginning of the weights id, if the cluster has
    several for the model; "" takes those with the most cached blocks. `adapter`: content hash of a LoRA that all
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
