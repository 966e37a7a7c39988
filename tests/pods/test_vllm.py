"""The two engines of deploy/kubernetes/vllm.yaml as processes: with the manifest's arguments, variables and user,
without privileges, and with no other folder to write than its own. The second loads what the first has computed.

vLLM's CPU build (`make .venv-vllm`) stands in for the image, and a tiny model for the one that is named. Needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcluster
from kvcluster.runtime.auth import new_token, token_line
from tests.hosts.hosts import ROOT
from tests.hosts.netns import missing
from tests.pods.container import Container
from tests.pods.objects import Mount, Pod
from tests.pods.privileges import check_unprivileged
from tests.pods.volumes import empty_folder, write_files
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]
PROGRAMS = (ROOT / ".venv-vllm").resolve()
MACHINE = [] if missing() or not (PROGRAMS / "bin" / "python").exists() else ["this machine"]
"""None where the machine gives us no namespaces, or there is no vLLM: then nothing here runs."""

MODEL = "/models/llama"
HEALTHY_S = 300.0
EXTRA = {"token_file": "/etc/kvcluster-token/token", "report": True, "prefill_tokens_per_s": 1}
"""Such a small model computes faster than anything is loaded, if it is not said otherwise."""

BLOCK_TOKENS, BLOCKS = 32, 20
SPEC = kvcluster.KVSpec.uniform(
    model="another",
    weights="sha256:0",
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    block_tokens=BLOCK_TOKENS,
)
"""Of the client that only asks how many blocks the cluster holds."""

Object = dict[str, Any]


def template() -> Object:
    deployment = next(yaml.safe_load_all((ROOT / "deploy/kubernetes/vllm.yaml").read_text(encoding="utf-8")))
    found: Object = deployment["spec"]["template"]["spec"]
    return found


def pod(name: str, port: int, address: str) -> Pod:
    """The manifest's pod, of that tiny model and at a port of its own."""
    spec, (container,) = template(), template()["containers"]
    transfer = {"kv_connector": "KVClusterConnector", "kv_connector_module_path": "kvcluster.engines.vllm"}
    transfer |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    variable = {
        "KV_TRANSFER_CONFIG": json.dumps({**transfer, "kv_connector_extra_config": {"address": address, **EXTRA}})
    }
    model, *arguments = [
        each.replace("$(KV_TRANSFER_CONFIG)", variable["KV_TRANSFER_CONFIG"]) for each in container["args"]
    ]
    assert model == "Qwen/Qwen3-0.6B" and "--port=8000" in arguments and "--max-model-len=8192" in arguments
    changed = [
        f"--model={MODEL}",
        "--served-model-name=it",
        "--max-model-len=1024",
        f"--port={port}",
        "--enforce-eager",
    ]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    kinds = {each["name"]: "secret" if "secret" in each else "emptyDir" for each in spec["volumes"]}
    mounts = [
        Mount(m["mountPath"], m["name"], kinds[m["name"]], "", m.get("readOnly", False))
        for m in container["volumeMounts"]
    ]
    context = container["securityContext"]
    return Pod(
        name=name,
        owner="vllm",
        labels={},
        argv=("python", "-m", "vllm.entrypoints.openai.api_server", *arguments, *changed),
        env=env,
        uid=context["runAsUser"],
        gid=context["runAsGroup"],
        fs_group=spec["securityContext"]["fsGroup"],
        memory=6 * 2**30,
        grace_s=spec["terminationGracePeriodSeconds"],
        mounts=(*mounts, Mount("/models", "models", "emptyDir", "", read_only=True)),
        probes={},
        template="",
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    command = [str(PROGRAMS / "bin" / "python"), "-m", "tests.vllm.e2e.models", str(tmp_path / "models")]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path / "models")], check=True)
    return tmp_path / "models"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """Its address, and a token."""
    token = new_token()
    (tmp_path / "tokens").write_text(token_line(token, "default") + "\n", encoding="ascii")
    config = {"server": {"token_file": str(tmp_path / "tokens"), "transports": ["tcp", "grpc"]}}
    with kvcluster.local(shards=2, ram_bytes="128MiB", config=config) as running:
        yield running.address, token.encode()


def start(made: Pod, folder: Path, token: bytes, models: Path) -> Container:
    folders = []
    for mount in made.mounts:
        folders.append(models if mount.volume == "models" else folder / mount.volume)
        if mount.kind == "secret":
            write_files(folders[-1], {"token": token}, mode=0o440, group=made.fs_group)
        elif mount.volume != "models":
            empty_folder(folders[-1], mode=0o2777, group=made.fs_group)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n", encoding="ascii")
    return Container(made, [], folder / "container", folders, hosts, PROGRAMS)


def is_healthy(container: Container, port: int) -> bool:
    assert container.runs(), container.log.read_text(encoding="utf-8", errors="replace")[-4_000:]
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
    except OSError:
        return False


def loaded_tokens(port: int) -> int:
    """How many tokens of a prompt of 640 the engine loads from the cluster."""
    asked = {"model": "it", "prompt": "It was a dark and stormy night. " * 20, "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["kv_transfer_params"]["kvcluster"]["loaded_tokens"])


@pytest.mark.parametrize("machine", MACHINE)
def test_the_second_engine_loads_what_the_first_computed(
    machine: str, tmp_path: Path, models: Path, cluster: tuple[str, bytes]
) -> None:
    address, token = cluster
    ports = {"first": free_port(), "second": free_port()}
    with ExitStack() as ends:
        containers = []
        for name, port in ports.items():
            (tmp_path / name).mkdir()
            containers.append(start(pod(name, port, address), tmp_path / name, token, models))
            ends.callback(containers[-1].kill)
        started = [*zip(containers, ports.values(), strict=True)]
        eventually(lambda: all(is_healthy(container, port) for container, port in started), HEALTHY_S)
        assert containers[0].pod.uid == 10_001
        check_unprivileged(containers[0])
        assert loaded_tokens(ports["first"]) == 0
        with kvcluster.connect(address, SPEC, token=token.decode()) as client:
            # The second is asked once: afterwards it finds the prompt in its own memory.
            eventually(lambda: client.status()["blocks"] >= BLOCKS)
        assert loaded_tokens(ports["second"]) == (BLOCKS - 1) * BLOCK_TOKENS
        assert [each.stop() for each in containers] == [0, 0]
