"""The arguments of deploy/kubernetes/vllm.yaml are those of this vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm import envs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "vllm.yaml"
TRANSFER = {"kv_connector": "KVClusterConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"address": "a:1"}}


def container() -> dict[str, Any]:
    deployment = next(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def parsed(arguments: list[str]) -> Any:
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    given = [each.replace("$(KV_TRANSFER_CONFIG)", json.dumps(TRANSFER)) for each in arguments]
    return parser.parse_args(["serve", *given])


def test_vllm_takes_the_arguments_of_the_manifest() -> None:
    found = parsed(container()["args"])
    ServeSubcommand().validate(found)
    assert container()["command"] == ["vllm", "serve"]
    assert found.model_tag == container()["args"][0] and found.port == 8_000
    assert (found.dtype, found.block_size, found.max_model_len) == ("bfloat16", 32, 8_192)
    assert found.kv_transfer_config.kv_connector == "KVClusterConnector"
    with pytest.raises(SystemExit):
        parsed([*container()["args"], "--kv-transfer=x"])


def test_vllm_knows_the_variables_of_the_manifest() -> None:
    names = [each["name"] for each in container()["env"] if each["name"].startswith("VLLM_")]
    assert names and set(names) <= envs.environment_variables.keys()
