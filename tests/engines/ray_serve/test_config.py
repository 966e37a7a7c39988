"""The configuration of an application is what vLLM and Serve expect, and mistakes are named at once."""

from __future__ import annotations

import json
import re

import pytest

from kvcluster.engines.ray_serve import kv_transfer_config, request_router_config
from kvcluster.engines.ray_serve.settings import RouterSettings, parse_settings
from kvcluster.errors import ConfigError
from tests.test_project import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray, about itself
AT = "127.0.0.1:7070"


def test_the_connectors_configuration_is_the_documented_one() -> None:
    documented = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    shown = [json.loads(text) for text in re.findall(r"--kv-transfer-config '([^']*)'", documented)]
    (with_a_cluster,) = [each for each in shown if each["kv_connector_extra_config"] == {"address": AT}]
    assert kv_transfer_config(AT) == with_a_cluster


def test_extra_keys_reach_the_connector_and_the_role_is_checked() -> None:
    told = kv_transfer_config(AT, role="kv_producer", weights="sha256:1")
    assert told["kv_role"] == "kv_producer"
    assert told["kv_connector_extra_config"] == {"address": AT, "weights": "sha256:1"}
    with pytest.raises(ConfigError, match=r"role must be one of .*, not 'both'"):
        kv_transfer_config(AT, role="both")
    with pytest.raises(ConfigError, match="is not host:port"):
        kv_transfer_config("7070")


def test_serve_is_given_the_routers_path_and_settings() -> None:
    told = request_router_config(AT, model="llama", min_blocks=8)
    assert told.get_request_router_class().__name__ == "KVClusterRouter"
    assert parse_settings(told.request_router_kwargs) == RouterSettings(address=AT, model="llama", min_blocks=8)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"patiense_ms": 3}, "no setting 'patiense_ms'"),
        ({"patience_ms": "3"}, "patience_ms must be of type int"),
        ({"patience_ms": True}, "patience_ms must be of type int"),
        ({"ahead": -1}, "ahead must not be negative"),
        ({"max_blocks": 0}, "max_blocks must be 1 to"),
        ({"model": ""}, "needs `model`"),
    ],
)
def test_a_mistake_is_named_where_the_application_is_built(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        request_router_config(AT, **{"model": "llama", **given})  # type: ignore[arg-type]


def test_a_credential_that_cannot_be_read_is_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="cannot read token_file"):
        _ = RouterSettings(token_file=f"{tmp_path}/none").token
