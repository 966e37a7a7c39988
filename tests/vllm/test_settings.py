"""`kv_connector_extra_config`: every mistake in it is named before an engine runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from kvcluster.config import TRANSPORTS
from kvcluster.engines.vllm import KVClusterConnector, settings
from kvcluster.errors import ConfigError
from tests.vllm.build import engine_config, kv_config

ADDRESS = {"address": "host:7070"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, 'kv_connector_extra_config needs "address": the coordinator\'s host:port'),
        ({"address": ""}, 'kv_connector_extra_config needs "address"'),
        (
            {"adress": "host:7070"},
            "kv_connector_extra_config has no 'adress'; known: mode, address, token_file, weights",
        ),
        ({"address": 7070}, "address must be of type str, not 7070"),
        (ADDRESS | {"weights": None}, "weights must be of type str, not None"),
        (ADDRESS | {"prefill_tokens_per_s": "fast"}, "prefill_tokens_per_s must be of type int, not 'fast'"),
        (ADDRESS | {"prefill_tokens_per_s": 1e3}, "prefill_tokens_per_s must be of type int, not 1000.0"),
        (ADDRESS | {"load_ms": True}, "load_ms must be of type int, not True"),
        (ADDRESS | {"hold_ms": -1}, "hold_ms must not be negative, but is -1"),
        (ADDRESS | {"report": 1}, "report must be of type bool, not 1"),
        (ADDRESS | {"transports": "grpc"}, f"transports must be a list of {', '.join(TRANSPORTS)}, not 'grpc'"),
        (ADDRESS | {"transports": []}, "transports must be a list of"),
        (ADDRESS | {"transports": ["grpc", "pigeon"]}, "transports must be a list of"),
        (ADDRESS | {"mode": "of"}, "mode must be one of on, observe, off, not 'of'"),
        ({"mode": "observe", "trace_bytes": 1}, "trace_bytes must be at least 8,388,608, not 1"),
        (ADDRESS | {"accept": "q2"}, "accept must be one of exact, q8, q4, not 'q2'"),
    ],
)
def test_what_is_wrong_is_told_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings.parse_settings(given)


def test_what_is_given_stands_and_the_rest_has_its_default() -> None:
    read = settings.parse_settings(ADDRESS | {"load_ms": 7, "transports": ["grpc"], "report": True, "accept": "exact"})
    assert (read.address, read.load_ms, read.transports, read.report) == ("host:7070", 7, ("grpc",), True)
    assert settings.parse_settings(ADDRESS) == settings.ConnectorSettings(address="host:7070")
    assert settings.parse_settings(ADDRESS).transports == TRANSPORTS


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_without_loads_and_stores_no_address_is_needed_and_none_is_in_the_way(mode: str) -> None:
    assert settings.parse_settings({"mode": mode}).mode == mode
    assert settings.parse_settings(ADDRESS | {"mode": mode}).mode == mode


def test_a_token_is_what_its_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n", encoding="utf-8")
    assert settings.parse_settings(ADDRESS | {"token_file": str(file)}).token == "secret"
    assert settings.parse_settings(ADDRESS).token is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_token_that_cannot_be_read_names_its_file(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"cannot read token_file {re.escape(str(file))}"):
        assert settings.parse_settings(ADDRESS | {"token_file": str(file)}).token


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_engine_with_wrong_settings_does_not_start(llama: Path, role: KVConnectorRole) -> None:
    config = engine_config(llama, {"load_mss": 1})
    with pytest.raises(ConfigError, match="has no 'load_mss'"):
        KVConnectorFactory.create_connector(config, role, kv_config(config))


def test_an_engine_that_would_fail_requests_for_a_failed_load_does_not_start(llama: Path) -> None:
    config = engine_config(llama)
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(ConfigError, match='needs "kv_load_failure_policy": "recompute"'):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_config(config))


@pytest.mark.parametrize("layerwise_ms", [20, 0])
def test_full_graphs_are_kept(layerwise_ms: int) -> None:
    """On a GPU no load runs within a pass, so none waits between layers."""
    extra = ADDRESS | {"layerwise_ms": layerwise_ms}
    assert KVClusterConnector.requires_piecewise_for_cudagraph(extra) is False


def test_staging_that_is_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="staging_bytes must be at least 33,554,432, not 1,000"):
        settings.parse_settings(ADDRESS | {"staging_bytes": 1_000})
