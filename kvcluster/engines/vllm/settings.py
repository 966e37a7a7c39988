"""The connector's settings, which are the keys of `kv_connector_extra_config`. Unknown keys are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcluster.client.credential import read_token
from kvcluster.config import LOSSES, TRANSPORTS
from kvcluster.core import limits
from kvcluster.core.ids import TENANT_NAME
from kvcluster.core.spec import RUN_WEIGHTS
from kvcluster.engines.settings_check import check_settings
from kvcluster.errors import ConfigError
from kvcluster.observe.trace_file import DEFAULT_FOLDER, MODES

_LEAST_STAGING_BYTES = 1 << 25

_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_run(weights: str) -> bool:
    """Whether this setting names a training run."""
    return weights.startswith(RUN_WEIGHTS)


def run_fault(weights: str) -> str:
    """Returns what is wrong with the name of a run, "" for none, and for weights that are no run."""
    if not is_run(weights) or _RUN_NAME.fullmatch(weights[len(RUN_WEIGHTS) :]):
        return ""
    return f"weights must name a run by up to 128 letters, digits, '.', '_' and '-', as run:NAME, not {weights[:200]!r}"


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`mode`: "on" loads and stores; "observe" moves nothing and writes a trace of what could have been loaded, for
    `kvcluster report`; "off" does nothing. `trace_dir`, `trace_bytes`: the folder of traces, and the limit of one.

    `address`: the coordinator's "host:port". `token_file`: a file that holds the credential. `weights`: a digest or
    commit that pins the weights; "" reads the checkpoint; "run:NAME" names a training run, whose weights have the
    versions that vLLM is told (weight_versions.py). `model`: the model's name in the namespace; "" takes the last part
    of its path.

    `prefill_tokens_per_s`: the rate at which this engine computes, 0 to learn it; tokens that would take longer to load
    are computed. `layerwise_ms`: loads that are expected to take at most this long run within the forward pass, layer
    by layer; others run beside it. `lookup_ms`: the longest that a request waits for its lookup. `load_ms`: the
    deadline of a load. `store_ms`: the deadline of a store. `hold_ms`: the longest that the blocks of a finished
    request are kept for their stores; from a GPU, while the engine has blocks to spare, the longest time in which none
    of them is read. `handover_ms`: in prefill/decode disaggregation, the longest that the prefill server's answer waits
    until its blocks are committed, and that the decode server waits until it finds them. `staging_bytes`: for KV on a
    GPU, the GPU's memory through which each rank loads and stores, half of it for either; each rank also takes three
    quarters as much pinned memory. `share_across_devices`: KV is shared with engines on other GPUs, and by other
    attention backends, whose bits may differ. `also_reads`: a tenant whose KV is loaded where the engine's own tenant
    has less, if the operator has granted that. `report`: every answer contains in `kv_transfer_params` what was loaded
    for it, and why no more. `transports`, `accept`, `socket_dir`, `encryption`, `ca_file`,
    `cert_file`, `key_file`, `server_name`: as in the client's own configuration.
    """

    mode: str = "on"
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
    staging_bytes: int = 2**28
    share_across_devices: bool = False
    also_reads: str = ""
    report: bool = False
    transports: tuple[str, ...] = TRANSPORTS
    accept: str = "q4"
    socket_dir: str = ""
    encryption: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    trace_dir: str = str(DEFAULT_FOLDER)
    trace_bytes: int = limits.TRACE_BYTES

    @property
    def run(self) -> str:
        """The training run that the settings name, "" for none."""
        return self.weights if is_run(self.weights) else ""

    @property
    def pinned_weights(self) -> str:
        """The weights that an engine starts with, "" if its checkpoint says what they are."""
        return "" if self.run else self.weights

    @property
    def token(self) -> str | None:
        """The credential. Raises ConfigError if its file cannot be read."""
        return read_token(self.token_file)


def parse_settings(given: Mapping[str, Any]) -> ConnectorSettings:
    """Returns the settings. Raises ConfigError, naming the key, for one that is unknown, of the wrong type or out of
    range."""
    check_settings(given, ConnectorSettings, "kv_connector_extra_config has no")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = ConnectorSettings(**values)
    if settings.mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}, not {settings.mode!r}")
    if not settings.address and settings.mode == "on":
        raise ConfigError('kv_connector_extra_config needs "address": the coordinator\'s host:port')
    if settings.trace_bytes < limits.LEAST_TRACE_BYTES:
        raise ConfigError(f"trace_bytes must be at least {limits.LEAST_TRACE_BYTES:,}, not {settings.trace_bytes:,}")
    if settings.staging_bytes < _LEAST_STAGING_BYTES:
        raise ConfigError(f"staging_bytes must be at least {_LEAST_STAGING_BYTES:,}, not {settings.staging_bytes:,}")
    if settings.also_reads and not TENANT_NAME.fullmatch(settings.also_reads):
        raise ConfigError(f"also_reads must be the name of a tenant, not {settings.also_reads!r}")
    if fault := run_fault(settings.weights):
        raise ConfigError(fault)
    if settings.accept not in LOSSES:
        raise ConfigError(f"accept must be one of {', '.join(LOSSES)}, not {settings.accept!r}")
    return settings
