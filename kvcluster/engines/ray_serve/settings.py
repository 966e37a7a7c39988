"""The router's settings: what stands in `request_router_kwargs`. Unknown keys are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcluster.client.credential import read_token
from kvcluster.core import limits
from kvcluster.engines.given import check
from kvcluster.errors import ConfigError
from kvcluster.transport.rpc import check_address


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`address`: of the coordinator, "host:port". `model`: its name in the namespace. `tokenizer`: the model's folder
    or name, without which only prompts given as token ids are looked for. `token_file`: a file that holds the
    credential. `weights`: which of several weights of the model, by the beginning of their name; without it those that
    most is cached of. `adapter`: content hash of a LoRA that all requests use; "" for none.

    `patience_ms`: a request waits so long at most for the coordinator, whether it is there or not. `text_ms`: and so
    long at most, while the coordinator answers, for text to become tokens. `min_blocks`: what is worth a preference.
    `max_blocks`: of a longer prompt only so many are looked for. `ahead`: a replica is not preferred while it works on
    more requests than that beyond the least busy one.
    """

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
        """The credential. Raises ConfigError where its file cannot be read."""
        return read_token(self.token_file)


def read(given: Mapping[str, Any]) -> RouterSettings:
    """Raises ConfigError, naming the key, for what is unknown, missing, of the wrong type or out of range."""
    check(given, RouterSettings, "the router has no setting")
    settings = RouterSettings(**given)
    check_address(settings.address)
    if not settings.model:
        raise ConfigError("the router needs `model`: the name under which the engines cache (`kvcluster status`)")
    if not 1 <= settings.max_blocks <= limits.BLOCKS_PER_CALL:
        raise ConfigError(f"max_blocks must be 1 to {limits.BLOCKS_PER_CALL}, not {settings.max_blocks}")
    return settings
