"""deploy/kubernetes/vllm.yaml and the Dockerfiles: what they name is what the chart renders and the connector takes,
and the vLLM is one that is served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcluster.release import __version__
from tests.chart.program import ROOT, connector_settings, documented_transfer_config
from tests.chart.released import Object, Release
from tests.chart.rendering import render, values_of
from tests.chart.schemas import Invalid, check_schema
from tests.chart.security import restricted
from tests.pods.objects import selects

FOLDER = ROOT / "deploy" / "kubernetes"
DOCUMENT = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
Check = Callable[[list[Object], Release], None]


@cache
def _release(name: str) -> Release:
    return Release(values_of(name), render(values_of(name)))


def manifests() -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / "vllm.yaml").read_text(encoding="utf-8")))


def deployment(objects: list[Object]) -> Object:
    (found,) = [each for each in objects if each["kind"] == "Deployment"]
    return found


def pod(objects: list[Object]) -> Object:
    found: Object = deployment(objects)["spec"]["template"]["spec"]
    return found


def engine(objects: list[Object]) -> Object:
    (found,) = pod(objects)["containers"]
    return dict(found)


def labels(objects: list[Object]) -> dict[str, str]:
    found: dict[str, str] = deployment(objects)["spec"]["template"]["metadata"]["labels"]
    return found


# ------------------------------------------------------------------------------------------------- the checks


def keeps_the_schemas(objects: list[Object], release: Release) -> None:
    for each in objects:
        check_schema(each)
    assert {each["metadata"]["namespace"] for each in objects} == {"llm"}


def keeps_restricted(objects: list[Object], release: Release) -> None:
    assert restricted(pod(objects), [engine(objects)]) == []


def has_two_replicas_that_are_served(objects: list[Object], release: Release) -> None:
    assert deployment(objects)["spec"]["replicas"] == 2
    assert deployment(objects)["spec"]["selector"]["matchLabels"].items() <= labels(objects).items()
    (service,) = [each["spec"] for each in objects if each["kind"] == "Service"]
    assert selects({"matchLabels": service["selector"]}, labels(objects))
    ports = {each["name"]: each["containerPort"] for each in engine(objects)["ports"]}
    assert [ports[each["targetPort"]] for each in service["ports"]] == [each["port"] for each in service["ports"]]
    assert f"--port={ports['http']}" in engine(objects)["args"]
    (policy,) = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    assert selects(policy["podSelector"], labels(objects))
    assert [each["port"] for rule in policy["ingress"] for each in rule["ports"]] == [ports["http"]]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine(objects)[name]["httpGet"] == {"path": "/health", "port": "http"}


def is_let_in_by_the_policies(objects: list[Object], release: Release) -> None:
    peers = [
        peer["podSelector"]
        for policy in release.of("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        if any(port["port"] in (release.config.server.port, 7_100) for port in rule["ports"])
        for peer in rule["from"]
    ]
    assert len(peers) == 4 and sum(selects(peer, labels(objects)) for peer in peers) == 2  # of the head and the shards


def connects_as_the_release_says(objects: list[Object], release: Release) -> None:
    (source,) = engine(objects)["envFrom"]
    (connection,) = [
        each for each in release.of("ConfigMap") if each["metadata"]["name"] == source["configMapRef"]["name"]
    ]
    used = re.findall(r"\$\(([A-Z_]+)\)", " ".join(engine(objects)["args"]))
    assert used == ["KV_TRANSFER_CONFIG"] and "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in engine(objects)["args"]
    given = json.loads(connection["data"][used[0]])
    extra = given.pop("kv_connector_extra_config")
    assert given == {k: v for k, v in documented_transfer_config().items() if k != "kv_connector_extra_config"}
    assert (ROOT / given["kv_connector_module_path"].replace(".", "/") / "__init__.py").exists()
    assert extra.keys() <= connector_settings()
    folder, _, name = extra["token_file"].rpartition("/")
    (mount,) = [each for each in engine(objects)["volumeMounts"] if each["mountPath"] == folder]
    (volume,) = [each for each in pod(objects)["volumes"] if each["name"] == mount["name"]]
    assert mount["readOnly"] and volume["secret"]["defaultMode"] == 0o440 and pod(objects)["securityContext"]["fsGroup"]
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"create secret generic {volume['secret']['secretName']} --from-literal={name}=TOKEN" in page


def runs_as_the_user_of_the_chart(objects: list[Object], release: Release) -> None:
    defaults = yaml.safe_load((ROOT / "helm/kvcluster/values.yaml").read_text(encoding="utf-8"))
    for context in (pod(objects)["securityContext"], engine(objects)["securityContext"]):
        assert (context["runAsUser"], context["runAsGroup"]) == (defaults["runAsUser"], defaults["runAsGroup"])


def has_room_where_vllm_writes(objects: list[Object], release: Release) -> None:
    mounts = {each["name"]: each["mountPath"] for each in engine(objects)["volumeMounts"]}
    writable = {mounts[each["name"]] for each in pod(objects)["volumes"] if "emptyDir" in each}
    env = {each["name"]: each.get("value") for each in engine(objects)["env"]}
    assert writable == {env["HOME"], "/tmp", "/dev/shm"} and env["USER"]
    assert sorted(mounts) == sorted(each["name"] for each in pod(objects)["volumes"])


def finds_the_authority_of_a_release_with_tls_and_needs_none_of_others(objects: list[Object], release: Release) -> None:
    encrypted = _release("tls")
    folder, _, name = encrypted.one("ConfigMap", "-connection")["data"]["KVCLUSTER_CA_FILE"].rpartition("/")
    (mount,) = [each for each in engine(objects)["volumeMounts"] if each["mountPath"] == folder]
    (volume,) = [each["secret"] for each in pod(objects)["volumes"] if each["name"] == mount["name"]]
    assert mount["readOnly"] and volume["optional"] is True
    assert volume["secretName"] in {each["spec"]["secretName"] for each in encrypted.of("Certificate")}
    assert volume["items"] == [{"key": name, "path": name}], "the key of the shards stays out of the engine's pod"


def has_a_core_and_memory_to_spare(objects: list[Object], release: Release) -> None:
    env = {each["name"]: each.get("value") for each in engine(objects)["env"]}
    resources = engine(objects)["resources"]
    assert int(env["OMP_NUM_THREADS"]) < int(resources["requests"]["cpu"])
    assert 2 * int(env["VLLM_CPU_KVCACHE_SPACE"]) <= int(resources["limits"]["memory"].removesuffix("Gi"))
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def no_service_of_the_namespace_sets_a_variable_of_vllm(objects: list[Object], release: Release) -> None:
    """With links, the Service vllm would set VLLM_PORT=tcp://..."""
    assert pod(objects)["enableServiceLinks"] is False and pod(objects)["automountServiceAccountToken"] is False


CHECKS: tuple[Check, ...] = (
    *(keeps_the_schemas, keeps_restricted, has_two_replicas_that_are_served, is_let_in_by_the_policies),
    *(connects_as_the_release_says, runs_as_the_user_of_the_chart, has_room_where_vllm_writes),
    finds_the_authority_of_a_release_with_tls_and_needs_none_of_others,
    *(has_a_core_and_memory_to_spare, no_service_of_the_namespace_sets_a_variable_of_vllm),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_replicas_of_vllm(check: Check) -> None:
    check(manifests(), _release("default"))


WRONG: list[tuple[Check, Callable[[list[Object]], object]]] = [
    (keeps_the_schemas, lambda o: deployment(o)["spec"].update(replica=2)),
    (keeps_restricted, lambda o: pod(o)["containers"][0]["securityContext"].pop("capabilities")),
    (keeps_restricted, lambda o: pod(o)["volumes"].append({"name": "cache", "hostPath": {"path": "/models"}})),
    (has_two_replicas_that_are_served, lambda o: deployment(o)["spec"].update(replicas=1)),
    (has_two_replicas_that_are_served, lambda o: labels(o).update(app="engine")),
    (has_two_replicas_that_are_served, lambda o: engine(o)["args"].remove("--port=8000")),
    (is_let_in_by_the_policies, lambda o: labels(o).pop("kvcluster-client")),
    (
        connects_as_the_release_says,
        lambda o: engine(o)["envFrom"][0]["configMapRef"].update(name="kvcluster-connection"),
    ),
    (connects_as_the_release_says, lambda o: engine(o)["volumeMounts"][0].update(mountPath="/etc/token")),
    (connects_as_the_release_says, lambda o: pod(o)["volumes"][0]["secret"].update(secretName="token")),
    (runs_as_the_user_of_the_chart, lambda o: pod(o)["securityContext"].update(runAsUser=2_000)),
    (has_room_where_vllm_writes, lambda o: engine(o)["env"][0].update(value="/root")),
    (
        finds_the_authority_of_a_release_with_tls_and_needs_none_of_others,
        lambda o: pod(o)["volumes"][1]["secret"].pop("items"),
    ),
    (
        finds_the_authority_of_a_release_with_tls_and_needs_none_of_others,
        lambda o: pod(o)["volumes"][1]["secret"].update(optional=False),
    ),
    (has_a_core_and_memory_to_spare, lambda o: engine(o)["resources"]["requests"].update(cpu="3")),
    (no_service_of_the_namespace_sets_a_variable_of_vllm, lambda o: pod(o).pop("enableServiceLinks")),
]


@pytest.mark.parametrize(("check", "change"), WRONG)
def test_a_check_sees_what_is_wrong(check: Check, change: Callable[[list[Object]], object]) -> None:
    objects = deepcopy(manifests())
    change(objects)
    with pytest.raises((AssertionError, Invalid, KeyError, ValueError)):
        check(objects, _release("default"))


def test_the_sidecars_patch_fits_the_deployment() -> None:
    """As `kubectl patch --patch-file` merges it: lists by name."""
    release = _release("sidecar")
    (patch,) = [yaml.safe_load(text) for text in release.one("ConfigMap", "-sidecar")["data"].values()]
    added, objects = patch["spec"]["template"]["spec"], manifests()
    names = {each["name"] for each in pod(objects)["volumes"]} & {each["name"] for each in added["volumes"]}
    assert not names and [each["name"] for each in added["initContainers"]] == ["kvcluster-shard"]
    context = {**pod(objects)["securityContext"], **added["securityContext"]}
    volumes = [*pod(objects)["volumes"], *added["volumes"]]
    merged = {**pod(objects), **added, "securityContext": context, "volumes": volumes}
    deployment(objects)["spec"]["template"]["spec"] = merged
    check_schema(deployment(objects))
    assert restricted(merged, [*merged["initContainers"], *merged["containers"]]) == []
    assert patch["spec"]["template"]["metadata"]["labels"]["kvcluster-client"] == "true"


@pytest.mark.parametrize("kubectl", [each for each in [shutil.which("kubectl")] if each])
def test_a_real_kubectl_merges_the_sidecars_patch(kubectl: str, tmp_path: Path) -> None:
    (text,) = _release("sidecar").one("ConfigMap", "-sidecar")["data"].values()
    (tmp_path / "sidecar.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "vllm.yaml").write_text(yaml.safe_dump(deployment(manifests())), encoding="utf-8")
    command = [kubectl, "patch", "--local", "-f", "vllm.yaml", "--patch-file", "sidecar.yaml", "-o", "json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    merged: Any = json.loads(done.stdout)["spec"]["template"]
    assert [each["name"] for each in merged["spec"]["initContainers"]] == ["kvcluster-shard"]
    assert [each["name"] for each in merged["spec"]["containers"]] == ["vllm"]
    assert len(merged["spec"]["volumes"]) == len({each["name"] for each in merged["spec"]["volumes"]}) == 9
    assert merged["metadata"]["labels"].keys() >= {"app", "kvcluster-client", "kvcluster-sidecar", "kvcluster-node"}


def test_the_authority_signs_for_the_release_of_the_document_and_keeps_its_key() -> None:
    objects = list(yaml.safe_load_all((FOLDER / "cache-ca.yaml").read_text(encoding="utf-8")))
    for each in objects:
        check_schema(each)
    names = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}
    (certificate,) = [spec for (kind, _), spec in names.items() if kind == "Certificate"]
    (name,) = [
        name for (kind, name), spec in names.items() if spec == {"ca": {"secretName": certificate["secretName"]}}
    ]
    assert names["Issuer", certificate["issuerRef"]["name"]] == {"selfSigned": {}}
    assert certificate["isCA"] is True and certificate["privateKey"]["rotationPolicy"] == "Never"
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"--set security.certManager.issuerRef.name={name} " in page
    assert {spec["spec"]["issuerRef"]["name"] for spec in _release("tls").of("Certificate")} == {name}
    assert {each["metadata"]["namespace"] for each in objects} == {"llm"}


def test_the_page_says_what_the_certificates_have() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `<fullname>-(\w+)-tls`.*?\| (.*?) \| `(kvcluster://[^`]+)` \|$", page, re.MULTILINE)
    found = {role: (names, uri.replace("<fullname>", "cache-kvcluster")) for role, names, uri in rows}
    for each in _release("tls").of("Certificate"):
        role = each["metadata"]["name"].removeprefix("cache-kvcluster-")
        if role in ("coordinator", "shard"):
            names, uri = found[role]
            assert each["spec"]["uris"] == [uri]
            assert "`<fullname>-nodes.<namespace>.svc`" in names
            assert "cache-kvcluster-nodes.llm.svc" in each["spec"]["dnsNames"]
    assert found.keys() == {"coordinator", "shard"}


# ------------------------------------------------------------------------------------------------ the images


def test_the_page_builds_the_engines_image_as_its_file_says() -> None:
    (command,) = re.findall(r"^#   (git archive .*)$", (FOLDER / "vllm.Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert command in (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def test_the_image_has_a_vllm_that_engines_were_run_with() -> None:
    text = (FOLDER / "vllm.Dockerfile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^FROM vllm/vllm-openai-cpu:v([\d.]+)$", text, re.MULTILINE)
    rows = [row for row in DOCUMENT.splitlines() if row.startswith(f"| {version} | fits | run by ")]
    assert len(rows) == 1 and "the CPU build" in rows[0]
    assert engine(manifests())["image"] == f"kvcluster-vllm:{version}"
    assert f"-t kvcluster-vllm:{version} " in text


def test_what_a_pod_with_a_gpu_needs_is_said_and_that_none_has_run() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^- \*\*GPUs\*\*: .*?(?=^- )", page, re.MULTILINE | re.DOTALL)
    (version,) = re.findall(
        r"^FROM vllm/vllm-openai-cpu:(v[\d.]+)$", (FOLDER / "vllm.Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    (staging_bytes,) = re.findall(
        r"^\| `staging_bytes` \| (\d+) \|.* three quarters as much pinned", DOCUMENT, re.MULTILINE
    )
    pinned_mib = int(staging_bytes) * 3 // 4 >> 20
    assert f"vllm/vllm-openai:{version}" in row and f"{pinned_mib} MiB more memory" in row
    assert not [name for name in engine(manifests())["resources"]["limits"] if "gpu" in name]
    assert "**No such pod has run.**" in row


def test_the_chart_asks_for_the_image_of_this_release() -> None:
    images = {each["image"] for pod in _release("default").pods for each in pod.containers if each["name"] != "redis"}
    assert images == {f"kvcluster:{__version__}"}
