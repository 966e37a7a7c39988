"""Mode node-local: the pods of shards on nodes, and the pods of engines that a library chart or Kustomize connects to
them. Both must have the same directory, under the path that the settings name, and the group that may connect."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcluster.config import TLS
from kvcluster.transport.credentials import CA_FILE, CERT_FILE, ENCRYPTION, KEY_FILE
from kvcluster.transport.process_location import SOCKET_DIR
from tests.chart.api_server import ApiServer
from tests.chart.helm import CHART, Helm, HelmError
from tests.chart.released import Object, PodTemplate, Release, ours
from tests.chart.rendering import installed, values_of
from tests.chart.schemas import check_schema
from tests.chart.security import restricted

ROOT = CHART.parents[1]
COMPONENT = ROOT / "deploy" / "kustomize" / "engine"
LIBRARY = ROOT / "helm" / "kvcluster-engine"
WITH_HOST_PATH: dict[str, Any] = {"mode": "node-local"}
WITH_CSI = values_of("node-local")

ENGINE_CHART = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: engine
spec:
  selector: {matchLabels: {app: engine}}
  template:
    metadata:
      labels:
        app: engine
        {{- include "kvcluster-engine.podLabels" .Values.kvcluster | nindent 8 }}
    spec:
      securityContext:
        runAsNonRoot: true
        runAsUser: 2000
        seccompProfile: {type: RuntimeDefault}
        {{- include "kvcluster-engine.podSecurityContext" .Values.kvcluster | nindent 8 }}
      containers:
        - name: vllm
          image: engine
          env:
            {{- include "kvcluster-engine.env" .Values.kvcluster | nindent 12 }}
          securityContext:
            runAsNonRoot: true
            runAsUser: 2000
            allowPrivilegeEscalation: false
            capabilities: {drop: [ALL]}
            seccompProfile: {type: RuntimeDefault}
          volumeMounts:
            {{- include "kvcluster-engine.volumeMounts" .Values.kvcluster | nindent 12 }}
      volumes:
        {{- include "kvcluster-engine.volumes" .Values.kvcluster | nindent 8 }}
"""


def release_of(values: Mapping[str, Any]) -> Release:
    record = installed(values)
    return Release(values, list(yaml.safe_load_all(record["manifest"])), record["info"]["notes"])


def shards_of(release: Release) -> PodTemplate:
    (pod,) = [pod for pod in release.pods if pod.owner.endswith("-shard")]
    return pod


def volume_at(pod: Object, container: Object, path: str) -> tuple[Object, Object]:
    """The mount at that path, and its volume."""
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == path]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    return mount, {kind: what for kind, what in volume.items() if kind != "name"}


# -------------------------------------------------------------------------------------------- the shards' pods


def test_a_shard_runs_on_each_node_with_its_socket_in_the_directory() -> None:
    release = release_of(WITH_HOST_PATH)
    (daemons,) = release.of("DaemonSet")
    pod = daemons["spec"]["template"]["spec"]
    (shard,) = pod["containers"]
    mount, volume = volume_at(pod, shard, release.config.server.socket_dir)
    assert not mount.get("readOnly")
    assert volume == {"hostPath": {"path": "/run/kvcluster/llm-cache-kvcluster", "type": "DirectoryOrCreate"}}
    assert daemons["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    assert [group.per_node for group in release.config.shard_groups.values()] == [True]
    budgets = [each["metadata"]["name"] for each in release.of("PodDisruptionBudget")]
    assert budgets == ["cache-kvcluster-head", "cache-kvcluster-redis"], "a budget of a DaemonSet's pods holds nothing"


def test_two_releases_have_two_directories() -> None:
    paths = set()
    for values in (WITH_HOST_PATH, {**WITH_HOST_PATH, "fullnameOverride": "other"}):
        pod = shards_of(release_of(values)).spec
        paths |= {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert len(paths) == 2


def test_the_directory_is_prepared_for_the_shards_user_and_the_engines_group_alone() -> None:
    values = {**WITH_HOST_PATH, "runAsUser": 1_234, "nodeLocal": {"group": 5_678}}
    pod = shards_of(release_of(values)).spec
    (prepare,) = pod["initContainers"]
    (script,) = prepare["args"]
    assert script.splitlines() == ["chown 1234:5678 /var/run/kvcluster", "chmod 2750 /var/run/kvcluster"]
    assert prepare["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER", "FSETID"]}
    assert [each["mountPath"] for each in prepare["volumeMounts"]] == ["/var/run/kvcluster"], "it sees no secret"


def test_with_a_csi_volume_restricted_holds_and_nothing_runs_as_root() -> None:
    pod = shards_of(release_of(WITH_CSI))
    assert restricted(pod.spec, ours(pod)) == []
    assert "initContainers" not in pod.spec


@pytest.mark.parametrize("prepare", [True, False])
def test_what_of_a_host_path_restricted_refuses_is_said_by_name(prepare: bool) -> None:
    release = release_of({**WITH_HOST_PATH, "nodeLocal": {"hostPath": {"prepare": prepare}}})
    pod = shards_of(release)
    refused = restricted(pod.spec, ours(pod))
    of_root = ["runAsNonRoot is not true", "runAsUser is 0 or missing", "capabilities.add"]
    assert refused == ["volume sockets is a hostPath", *(f"prepare-sockets: {each}" for each in of_root if prepare)]
    assert "neither in `restricted` nor in `baseline`" in release.notes


def test_an_upgrade_between_the_modes_is_taken() -> None:
    with ApiServer() as server:
        helm = Helm(server)
        helm.install({})
        helm.upgrade(WITH_HOST_PATH)
        kinds = {kind for kind, _, name in server.objects if name == "cache-kvcluster-shard"}
    assert "daemonsets" in kinds and "statefulsets" not in kinds


# ------------------------------------------------------------------------------------------- the engines' pods


def check_connected(deployment: Object, release: Release) -> None:
    """The engine's pod has what the release's shards have."""
    check_schema(deployment)
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (engine,) = [each for each in pod["containers"] if each["name"] == "vllm"]
    connection = release.one("ConfigMap", "-connection")
    sources = {each["name"]: each.get("valueFrom", {}) for each in engine["env"]}
    env = {name: source["configMapKeyRef"] for name, source in sources.items() if "configMapKeyRef" in source}
    for name in ("KV_TRANSFER_CONFIG", "KVCLUSTER_ADDRESS", SOCKET_DIR):
        assert env[name]["name"] == connection["metadata"]["name"] and env[name]["key"] in connection["data"]
    path = connection["data"][SOCKET_DIR]
    assert path == release.config.server.socket_dir

    mount, volume = volume_at(pod, engine, path)
    assert mount["readOnly"] is True, "who can write there can take a shard's place"
    shards = shards_of(release)
    _, theirs = volume_at(shards.spec, shards.spec["containers"][0], path)
    if "csi" in theirs:
        assert volume == {"csi": {**theirs["csi"], "readOnly": True}}
    else:
        assert volume == {"hostPath": {**theirs["hostPath"], "type": "Directory"}}, "an engine makes no directory"
    group = {"group": 10_002, **release.values.get("nodeLocal", {})}["group"]
    assert group in pod["securityContext"]["supplementalGroups"]

    for name in (ENCRYPTION, CA_FILE):
        assert env[name] == {"name": connection["metadata"]["name"], "key": name, "optional": True}
    if release.config.security.encryption == TLS:
        check_encrypted(pod, engine, release)

    token, secret = volume_at(pod, engine, "/etc/kvcluster-token")
    assert token["readOnly"] and secret["secret"]["defaultMode"] == 0o440
    assert template["metadata"]["labels"]["kvcluster-client"] == "true"


def check_encrypted(pod: Object, engine: Object, release: Release) -> None:
    """The engine's pod has the authority's certificate where the release says, and its own if it is asked for one."""
    data, files = release.one("ConfigMap", "-connection")["data"], ["ca.crt"]
    if release.config.security.client_certificates:
        files += ["tls.crt", "tls.key"]
        keys = {each["name"]: each["valueFrom"]["configMapKeyRef"] for each in engine["env"] if "valueFrom" in each}
        assert keys[CERT_FILE]["key"] == CERT_FILE and keys[KEY_FILE]["key"] == KEY_FILE
    paths = [data[name] for name in (CA_FILE, CERT_FILE, KEY_FILE) if name in data]
    folder = paths[0].rpartition("/")[0]
    assert paths == [f"{folder}/{file}" for file in files]
    mount, volume = volume_at(pod, engine, folder)
    (source,) = volume.values()
    assert mount["readOnly"] and source["items"] == [{"key": file, "path": file} for file in files]
    if "secret" in volume:
        assert source["secretName"] in {each["spec"]["secretName"] for each in release.of("Certificate")}
        assert source["defaultMode"] == (0o444 if files == ["ca.crt"] else 0o440)


def engine_chart(folder: Path) -> Path:
    """A chart of an engine that uses the library."""
    chart = folder / "engine"
    shutil.copytree(LIBRARY, chart / "charts" / LIBRARY.name)
    (chart / "templates").mkdir()
    (chart / "templates" / "engine.yaml").write_text(ENGINE_CHART, encoding="utf-8")
    about = {"apiVersion": "v2", "name": "engine", "version": "1.0.0"}
    about["dependencies"] = [{"name": LIBRARY.name, "version": "0.3.0-dev0"}]  # type: ignore[assignment]
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about), encoding="utf-8")
    return chart


def engine_of(given: Mapping[str, Any], folder: Path) -> Object:
    with ApiServer() as server:
        record = Helm(server, release="engine").install({"kvcluster": given}, engine_chart(folder))
    (deployment,) = yaml.safe_load_all(record["manifest"])
    return deployment  # type: ignore[no-any-return]


@pytest.mark.parametrize("values", [WITH_HOST_PATH, WITH_CSI], ids=["hostPath", "csi"])
def test_the_library_connects_an_engine_of_another_chart(values: dict[str, Any], tmp_path: Path) -> None:
    csi = values.get("nodeLocal", {}).get("csi", {})
    node = {"enabled": True, "group": 10_002, "hostPath": "/run/kvcluster/llm-cache-kvcluster", "csi": csi}
    deployment = engine_of(
        {"fullname": "cache-kvcluster", "tokenSecret": "cache-token", "tokenKey": "token", "nodeLocal": node}, tmp_path
    )
    check_connected(deployment, release_of(values))
    pod = deployment["spec"]["template"]["spec"]
    refused = restricted(pod, pod["containers"])
    assert refused == ([] if csi else ["volume kvcluster-sockets is a hostPath"])


def test_the_library_connects_to_a_release_without_shared_memory(tmp_path: Path) -> None:
    deployment = engine_of({"fullname": "cache-kvcluster", "tokenSecret": "cache-token"}, tmp_path)
    check_schema(deployment)
    pod = deployment["spec"]["template"]["spec"]
    assert "supplementalGroups" not in pod["securityContext"]
    assert [volume["name"] for volume in pod["volumes"]] == ["kvcluster-token"]
    assert SOCKET_DIR not in str(deployment)


@pytest.mark.parametrize(
    ("tls", "shown"),
    [
        ({"secret": "cache-kvcluster-shard-tls"}, False),
        ({"configMap": "kvcluster-ca"}, False),
        ({"clientSecret": "cache-kvcluster-tenant-default-tls"}, True),
    ],
)
def test_the_library_gives_an_engine_what_it_needs_for_tls(tls: dict[str, str], shown: bool, tmp_path: Path) -> None:
    release = release_of(encrypted(shown=shown))
    node = {"enabled": True, "group": 10_002, "hostPath": "/run/kvcluster/llm-cache-kvcluster"}
    given = {"fullname": "cache-kvcluster", "tokenSecret": "cache-token", "tls": tls, "nodeLocal": node}
    check_connected(engine_of(given, tmp_path), release)


@pytest.mark.parametrize("tls", [{"secret": "a", "configMap": "b"}, {"secret": ""}])
def test_the_library_refuses_two_authorities_and_none(tls: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(HelmError, match=r"kvcluster\.tls: give one of secret, configMap and clientSecret"):
        engine_of({"fullname": "cache-kvcluster", "tokenSecret": "cache-token", "tls": tls}, tmp_path)


def encrypted(*, shown: bool = False) -> dict[str, Any]:
    """Values of a release in mode node-local that speaks TLS. `shown`: engines show certificates."""
    made = {"issuerRef": {"name": "ca"}, "clients": ["tenant-default"]}
    return {**WITH_HOST_PATH, "security": {"encryption": "tls", "clientCertificates": shown, "certManager": made}}


def patch() -> Object:
    return yaml.safe_load((COMPONENT / "engine.yaml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("encrypts", [False, True])
def test_the_component_s_patch_says_what_the_release_has(encrypts: bool) -> None:
    deployment = deepcopy(patch())
    deployment["spec"]["selector"] = {"matchLabels": {"app": "engine"}}
    deployment["spec"]["template"]["metadata"]["labels"]["app"] = "engine"
    check_connected(deployment, release_of(encrypted() if encrypts else WITH_HOST_PATH))


@pytest.mark.parametrize("kubectl", [each for each in [shutil.which("kubectl")] if each])
def test_a_real_kustomize_puts_the_component_over_an_engine(kubectl: str, tmp_path: Path) -> None:
    shutil.copytree(COMPONENT, tmp_path / "engine")
    text = (ROOT / "deploy" / "kubernetes" / "vllm.yaml").read_text(encoding="utf-8")
    objects = list(yaml.safe_load_all(text))
    (before,) = [each for each in objects if each["kind"] == "Deployment"]
    before["metadata"]["labels"]["kvcluster-engine"] = "true"
    other = deepcopy(before)
    other["metadata"] = {"name": "other", "namespace": "llm"}
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "engines.yaml").write_text(yaml.safe_dump_all([*objects, other]), encoding="utf-8")
    (overlay / "kustomization.yaml").write_text("resources: [engines.yaml]\ncomponents: [../engine]\n")
    done = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=True, timeout=60)
    found = {each["metadata"]["name"]: each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Deployment"}
    assert "kvcluster-sockets" not in str(found["other"]), "it lacks the label"
    merged = deepcopy(found["vllm"])
    (engine,) = merged["spec"]["template"]["spec"]["containers"]
    assert {each["name"] for each in engine["env"]} >= {"HOME", "USER", SOCKET_DIR}, "what was there stays"
    check_connected(merged, release_of(WITH_HOST_PATH))
