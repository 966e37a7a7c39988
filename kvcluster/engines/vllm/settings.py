"""The connector's settings: what stands in `kv_connector_extra_config`. Unknown keys are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcluster.client.credential import read_token
from kvcluster.config import LOSSES, TRANSPORTS
from kvcluster.engines.given import check
from kvcluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`address`: of the coordinator, "host:port". `token_file`: a file that holds the credential. `weights`: a digest
    or commit that pins the weights, in place of what is found out. `model`: the name of the model in the namespace, in
    place of the last part of its path.

    `prefill_tokens_per_s`: how fast this engine computes, in place of what is learnt; what would take longer to load is
    computed. `layerwise_ms`: a load that is expected to take no longer goes on within the forward pass, layer by layer;
    others go on beside it. `lookup_ms`: a request waits so long at most to hear what there is for it. `load_ms`: so
    long at most for a load. `store_ms`: a store ends after so long. `hold_ms`: so long at most the blocks of a finished
    request are kept back for their stores. `handover_ms`: so long at most an answer that another server goes on from
    waits until its blocks are committed, and that server until it finds them. `report`: every answer says in
    `kv_transfer_params` what was loaded for it, and why no more. `transports`, `accept`: as in the client's own
    configuration.
    """

    address: str = ""
    token_file: str = ""
    weights: str = ""
    model: str = ""
    prefill_tokens_per_s: int = 0
    layerwise_ms: int = 20
    lookup_ms: int = 500
    load_ms: int = 5_000
    store_ms: int = 5_000
    hold_ms: int = 1_000
    handover_ms: int = 1_000
    report: bool = False
    transports: tuple[str, ...] = TRANSPORTS
    accept: str = "q4"

    @property
    def token(self) -> str | None:
        """The credential. Raises ConfigError where its file cannot be read."""
        return read_token(self.token_file)


def read(given: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ConfigError, naming the key, for what is unknown, of the wrong type or out of range."""
    check(given, ConnectorSettings, "kv_connector_extra_config has no")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = ConnectorSettings(**values)
    if not settings.address:
        raise ConfigError('kv_connector_extra_config needs "address": the coordinator\'s host:port')
    if settings.accept not in LOSSES:
        raise ConfigError(f"accept: there is no loss {settings.accept!r}; there is {', '.join(LOSSES)}")
    return settings
