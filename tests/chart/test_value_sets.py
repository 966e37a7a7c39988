"""Values as platforms and other charts give them: null where a field is to be left out, security contexts of OpenShift,
GKE and EKS, a chart above this one, extra objects in pods. All are rendered by Helm and held to Kubernetes' schemas."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcluster.runtime.private_files import derived_password
from tests.chart.api_server import ApiServer
from tests.chart.checks import (
    certificates_have_the_names_and_roles_that_the_program_asks_for,
    commands_in_containers_connect_as_the_cluster_does,
    files_of_the_configuration_are_mounted,
    files_of_variables_are_mounted,
    memory_is_what_the_program_asks_for,
    mounts_exist,
    pods_have_time_to_stop,
    probes_ask_what_is_served,
    selectors_match_pods,
    the_connection_is_what_the_connector_reads,
)
from tests.chart.helm import CHART, Helm
from tests.chart.released import Object, Release, ours
from tests.chart.rendering import RenderError, installed, render, values_of
from tests.chart.schemas import check_schema
from tests.chart.test_upgrades import merged

Values = dict[str, Any]

DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
REFUSED = "missing propert"
"""What Helm says of a value that is null and may not be."""

OPENSHIFT: Values = {"runAsUser": None, "runAsGroup": None, "redis": {"runAsUser": None}}
CONTAINER = {"name": "agent", "image": "agent:1", "volumeMounts": [{"name": "more", "mountPath": "/more"}]}
EXTRA = {
    "podLabels": {"team": "search"},
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "extraContainers": [CONTAINER],
    "extraInitContainers": [{**CONTAINER, "name": "first"}],
}

CERT_MANAGER: Values = {"security": {"encryption": "tls", "certManager": {"issuerRef": {"name": "ca"}}}}
SECRETS: Values = {
    "security": {"encryption": "tls", "existingSecrets": {"coordinator": "kv-head", "shard": "kv-shards"}}
}

SETS: dict[str, Values] = {
    "an autoscaler sets the replicas": {"shards": {"replicas": None}},
    "of one group an autoscaler sets the replicas": {"groups": {"a": {"replicas": None}, "b": {}}},
    "OpenShift": OPENSHIFT,
    "OpenShift, engines with a sidecar": {**OPENSHIFT, "mode": "sidecar"},
    "OpenShift, in a RayCluster": {**values_of("join"), "runAsUser": None, "runAsGroup": None},
    "GKE Autopilot": {
        "shards": {
            "resources": {"requests": {"ephemeral-storage": "5Gi"}, "limits": {"ephemeral-storage": "5Gi"}},
            "nodeSelector": {"cloud.google.com/compute-class": "Balanced"},
            "tolerations": [{"key": "kubernetes.io/arch", "operator": "Equal", "value": "amd64"}],
        },
        "head": {"resources": {"limits": {"ephemeral-storage": "5Gi"}}},
    },
    "GKE, one node pool for GPUs": {
        "shards": {
            "shard": {"gpu_bytes": "8GiB", "host_bytes": "4GiB"},
            "gpu": {"count": 1, "resource": "nvidia.com/gpu"},
            "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
            "runtimeClassName": "nvidia",
        }
    },
    "EKS": {
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/kv"}},
        "head": {
            "service": {
                "type": "LoadBalancer",
                "annotations": {"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"},
            }
        },
        "runAsUser": 1_000,
        "runAsGroup": 2_000,
    },
    "EKS with EFA": {"shards": {"resources": {"limits": {"vpc.amazonaws.com/efa": 1, "hugepages-2Mi": "512Mi"}}}},
    "RDMA": {"shards": {"resources": {"limits": {"rdma/hca_shared_devices_a": 1}}}},
    "a sidecar beside an engine with a group of its own": {
        "mode": "sidecar",
        "sidecar": {"engineGraceSeconds": 300, "fsGroup": False},
    },
    "a NodePort": {"head": {"service": {"type": "NodePort"}}},
    "another scheduler": {"shards": {"schedulerName": "volcano"}, "head": {"schedulerName": "volcano"}},
    "no resources of the head": {"head": {"resources": None}},
    "no limits of the head": {"head": {"resources": {"limits": None}}},
    "no limit of the head's memory": {"head": {"resources": {"limits": {"memory": None}}}},
    "no requests of shards": {"shards": {"resources": {"requests": None}}},
    "no resources of shards": {"shards": {"resources": None}},
    "the autoscaler may evict": {
        "head": {"podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}},
        "shards": {"podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}},
    },
    "annotations of ours, given again": {"head": {"podAnnotations": {"kvcluster/secret-revision": "7"}}},
    "everything extra": {"shards": EXTRA, "head": EXTRA, "commonLabels": {"cost": "llm"}},
    "everything extra, in a RayCluster": {**values_of("join"), "head": EXTRA},
    "everything extra, of one group": {"groups": {"a": EXTRA}},
    "another registry": {"global": {"imageRegistry": "registry.example:5000/mirror", "imagePullSecrets": ["pull"]}},
    "another registry and a digest": {
        "global": {"imageRegistry": "registry.example", "imagePullSecrets": [{"name": "pull"}]},
        "image": {"repository": "ghcr.io/kv/kvcluster", "digest": "sha256:" + "0" * 64},
    },
    "a condition of the chart above": {"enabled": True},
    "a shard on each node": {"mode": "node-local"},
    "a shard on each node, of OpenShift with a CSI volume": {
        **OPENSHIFT,
        "mode": "node-local",
        "nodeLocal": {"csi": {"driver": "csi.example.com", "nodePublishSecretRef": {"name": "node"}}},
    },
    "a shard on each node, in two groups with everything extra": {
        "mode": "node-local",
        "groups": {"a": {**EXTRA, "nodeSelector": {"pool": "a"}}, "b": {"nodeSelector": {"pool": "b"}, "perPod": 2}},
        "nodeLocal": {"maxUnavailable": "10%", "hostPath": {"path": "/run/ours", "prepare": False}},
    },
    "budgets that hold nodes": {
        "head": {"podDisruptionBudget": {"maxUnavailable": 0, "unhealthyPodEvictionPolicy": "IfHealthyBudget"}},
        "shards": {
            "podDisruptionBudget": {"maxUnavailable": None, "minAvailable": 2, "unhealthyPodEvictionPolicy": ""}
        },
        "redis": {"podDisruptionBudget": {"maxUnavailable": 0}},
    },
    "no budgets": {
        "head": {"podDisruptionBudget": {"enabled": False}},
        "shards": {"podDisruptionBudget": {"enabled": False}},
        "redis": {"podDisruptionBudget": {"enabled": False}},
    },
    "no text anywhere": {
        "auth": {"secretName": None, "revision": None},
        "clusterDomain": None,
        "redis": {"address": None, "secretName": None, "storage": {"storageClassName": None}},
        "image": {"tag": None, "digest": None},
        "head": {"priorityClassName": None, "state": {"storageClassName": None}, "nodeSelector": None},
    },
    "no Redis": {"redis": {"enabled": False}},
    "a Redis that is there": {"redis": {"address": "redis.example:6379"}},
    "a Redis that is there, with a Secret of its own": {"redis": {"address": "redis.example:6379", "secretName": "r"}},
    "a password of our own": {"redis": {"secretName": "cache-redis", "secretKey": "password"}},
    "quotas": {"auth": {"quotasKey": "quotas.toml"}},
    "quotas, with a sidecar": {"mode": "sidecar", "auth": {"quotasKey": "quotas"}},
    "quotas, in a RayCluster": {**values_of("join"), "auth": {"quotasKey": "quotas"}},
    "two groups, several shards in a pod": {"groups": {"a": {"perPod": 2}, "b": {"replicas": 1}}},
    "encrypted by cert-manager": CERT_MANAGER,
    "encrypted by cert-manager, by an issuer of all namespaces": {
        "security": {
            "encryption": "tls",
            "certManager": {
                "issuerRef": {"name": "ca", "kind": "ClusterIssuer"},
                "duration": "24h",
                "renewBefore": "8h",
                "dnsNames": ["kv.example"],
            },
        }
    },
    "encrypted by another issuer": {
        "security": {
            "encryption": "tls",
            "certManager": {
                "issuerRef": {"name": "pca", "kind": "AWSPCAClusterIssuer", "group": "awspca.cert-manager.io"}
            },
        }
    },
    "encrypted, and engines show certificates": merged(
        CERT_MANAGER,
        {"security": {"clientCertificates": True, "certManager": {"clients": ["tenant-a", "operator", "events"]}}},
    ),
    "encrypted by Secrets": SECRETS,
    "encrypted by one Secret": {
        "security": {"encryption": "tls", "existingSecrets": {"coordinator": "a", "shard": "a"}}
    },
    "encrypted, with a sidecar": {"mode": "sidecar", **CERT_MANAGER},
    "encrypted, a shard on each node": {"mode": "node-local", **CERT_MANAGER},
    "encrypted, in a RayCluster": {**values_of("join"), **CERT_MANAGER},
    "encrypted, on OpenShift": {**OPENSHIFT, **CERT_MANAGER},
    "encrypted by the network": {"security": {"encryption": "network"}},
    "not encrypted": {"security": {"encryption": "none"}},
    "metrics elsewhere": {"config": {"metrics": {"port": 19_400}}, "monitoring": {"enabled": True}},
}


def paths(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every value, tables among them."""
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def null_at(path: tuple[str, ...]) -> Values:
    value: Any = None
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def nulls_in(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(value is None or nulls_in(value) for value in tree.values())
    return isinstance(tree, list) and any(nulls_in(each) for each in tree)


def rendered(values: Values) -> Release:
    """Returns the release; each object keeps the schemas, and none has a field of null, or the text
    that Go writes for one."""
    objects = [each for each in render(values) if each]
    for each in objects:
        check_schema(each)
        assert not nulls_in(each), each["metadata"]["name"]
        assert not any(text in yaml.safe_dump(each) for text in ("<nil>", "<no value>"))
    return Release(values, objects)


@pytest.mark.parametrize("name", SETS)
def test_these_values_render_what_kubernetes_takes(name: str) -> None:
    release = rendered(SETS[name])
    for check in (mounts_exist, probes_ask_what_is_served, selectors_match_pods, pods_have_time_to_stop):
        check(release)
    for check in (files_of_the_configuration_are_mounted, the_connection_is_what_the_connector_reads):
        check(release)
    certificates_have_the_names_and_roles_that_the_program_asks_for(release)
    commands_in_containers_connect_as_the_cluster_does(release)
    files_of_variables_are_mounted(release)
    if release.mode != "join":
        memory_is_what_the_program_asks_for(release)


@pytest.mark.parametrize("path", sorted(paths(DEFAULTS)), ids=".".join)
def test_a_value_of_null_is_left_out_or_refused_by_name(path: tuple[str, ...]) -> None:
    try:
        rendered(null_at(path))
    except RenderError as refused:
        assert (REFUSED in str(refused) or "set the other to null" in str(refused)) and path[-1] in str(refused)


# ------------------------------------------------------------------------------------------- what they mean


def of(release: Release, kind: str, name: str) -> Object:
    found: Object = release.one(kind, name)
    return found


def test_replicas_that_an_autoscaler_sets_are_not_written() -> None:
    release = rendered(SETS["of one group an autoscaler sets the replicas"])
    assert "replicas" not in of(release, "StatefulSet", "-a")["spec"]
    assert of(release, "StatefulSet", "-b")["spec"]["replicas"] == DEFAULTS["shards"]["replicas"]


@pytest.mark.parametrize("name", ["OpenShift", "OpenShift, engines with a sidecar", "OpenShift, in a RayCluster"])
def test_openshift_chooses_the_user_and_the_group(name: str) -> None:
    release = rendered(SETS[name])
    for pod in release.pods:
        contexts = [each["securityContext"] for each in ours(pod)]
        contexts += [pod.spec["securityContext"]] if not pod.owner.startswith("engine") else []
        for context in contexts:
            assert not context.keys() & {"runAsUser", "runAsGroup", "fsGroup"}
            assert context["runAsNonRoot"] is True


def test_a_quota_file_is_a_key_of_the_secret_wherever_a_process_reads_it() -> None:
    for name in ("quotas", "quotas, with a sidecar", "quotas, in a RayCluster"):
        release = rendered(SETS[name])
        assert release.config.server.quota_file == "/etc/kvcluster/auth/quotas"
    joined = of(release, "ConfigMap", "-raycluster")["data"]["pod-template.yaml"]
    (volume,) = yaml.safe_load(joined)["spec"]["volumes"]
    assert {"key": "quotas", "path": "quotas"} in volume["secret"]["items"]
    assert not rendered({}).config.server.quota_file


def test_a_sidecars_patch_leaves_the_engine_its_time_and_its_group() -> None:
    plain, own = ({"mode": "sidecar"}, SETS["a sidecar beside an engine with a group of its own"])
    (before,), (after,) = (rendered(values).pods[-1:] for values in (plain, own))
    seconds = [pod.spec["terminationGracePeriodSeconds"] for pod in (before, after)]
    assert seconds[1] - seconds[0] == 300 - DEFAULTS["sidecar"]["engineGraceSeconds"]
    assert before.spec["securityContext"]["fsGroup"] == DEFAULTS["runAsGroup"]
    assert "fsGroup" not in after.spec.get("securityContext", {})


def test_annotations_that_are_given_replace_those_of_the_chart() -> None:
    release = rendered(SETS["the autoscaler may evict"])
    for name in ("-head", "-shard"):
        annotations = of(release, "StatefulSet", name)["spec"]["template"]["metadata"]["annotations"]
        assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"
        assert annotations["kvcluster/secret-revision"] == ""


def test_containers_of_others_come_after_ours() -> None:
    release = rendered(SETS["everything extra"])
    for name, own in (("-head", "head"), ("-shard", "shard")):
        spec = of(release, "StatefulSet", name)["spec"]["template"]["spec"]
        assert [each["name"] for each in spec["containers"]] == [own, "agent"]
        assert [each["name"] for each in spec["initContainers"]] == ["first"]


def test_resources_that_the_chart_does_not_know_are_passed_on() -> None:
    for name, resource in (("RDMA", "rdma/hca_shared_devices_a"), ("EKS with EFA", "vpc.amazonaws.com/efa")):
        (container,) = of(rendered(SETS[name]), "StatefulSet", "-shard")["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"][resource] == 1 and container["resources"]["limits"]["memory"]


def test_the_registry_of_the_chart_above_replaces_that_of_every_image() -> None:
    plain, digest = rendered(SETS["another registry"]), rendered(SETS["another registry and a digest"])
    images = {each["image"] for pod in plain.pods for each in pod.containers}
    assert all(image.startswith("registry.example:5000/mirror/") for image in images)
    images = {each["image"] for pod in digest.pods for each in pod.containers}
    redis = DEFAULTS["redis"]["image"].removeprefix("docker.io/")
    assert images == {"registry.example/kv/kvcluster@sha256:" + "0" * 64, f"registry.example/{redis}"}
    for pod in (*plain.pods, *digest.pods):
        assert pod.spec["imagePullSecrets"] == [{"name": "pull"}]


def test_a_head_and_a_redis_have_budgets_by_which_nodes_drain() -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for each in rendered({}).of("PodDisruptionBudget")}
    assert budgets.keys() == {f"cache-kvcluster-{name}" for name in ("head", "redis", "shard")}
    for spec in budgets.values():
        assert spec["maxUnavailable"] == 1 and spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize("secret", ["0123456789abcdef" * 4, "  spaces and\ttabs, of a file written by hand\r\n"])
def test_the_redis_and_the_head_derive_the_same_password(secret: str, tmp_path: Path) -> None:
    release = rendered({})
    assert release.config.ray.redis_password_from_secret and not release.config.ray.redis_password_file
    folders = {
        "/etc/redis": tmp_path / "conf",
        "/etc/redis-auth": tmp_path / "auth",
        "/data": tmp_path,
        "/tmp": tmp_path,
    }
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    (tmp_path / "conf" / "redis.conf").touch()
    (tmp_path / "auth" / "secret").write_bytes(secret.encode())
    (tmp_path / "auth" / "secret").chmod(0o600)
    (container,) = of(release, "StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    script = re.sub(r"(/etc/redis-auth|/etc/redis|/data|/tmp)\b", lambda at: str(folders[at[1]]), container["args"][0])
    script = script.replace("exec valkey-server", "cat")
    done = subprocess.run([*container["command"], script], check=True, capture_output=True, text=True)
    assert done.stdout == f'requirepass "{derived_password(str(tmp_path / "auth" / "secret"))}"\n'


def test_no_redis_of_ours_runs_where_there_is_another() -> None:
    for values in ({"redis": {"enabled": False}}, {"redis": {"address": "r:6379"}}, values_of("join")):
        assert not [each for each in rendered(values).objects if each["metadata"]["name"].endswith("-redis")]
    config = rendered({"redis": {"address": "r:6379"}}).config
    assert (config.ray.redis, config.ray.redis_password_file) == ("r:6379", "/etc/kvcluster/redis/password")


def test_notes_say_what_an_upgrade_loses_without_redis() -> None:
    def says(redis: Values) -> bool:
        notes: str = installed({"redis": redis})["info"]["notes"]
        return "every upgrade of the image, every loss of the head's pod" in notes

    assert says({"enabled": False}) and not says({}) and not says({"address": "r:6379"})


# ------------------------------------------------------------------------------------------- encryption


def notes_of(values: Values) -> str:
    notes: str = installed(values)["info"]["notes"]
    return notes


@pytest.mark.parametrize("name", [name for name in SETS if name.startswith("encrypted") or name == "not encrypted"])
def test_the_program_reads_what_the_chart_says_of_encryption(name: str) -> None:
    values, config = SETS[name], rendered(SETS[name]).config
    assert config.security.encryption == values["security"]["encryption"]
    assert config.ray.encryption == ("none" if config.security.encryption == "tls" else "")
    assert config.security.client_certificates is values["security"].get("clientCertificates", False)


def test_by_default_nothing_is_encrypted_and_notes_say_so() -> None:
    assert rendered({}).config.security.encryption == "none"
    notes = notes_of({})
    assert "security.encryption is none: nothing between pods is encrypted" in notes
    assert "The policies of this release let no others in" in notes
    assert "keeps nobody from them" in notes_of({"networkPolicy": {"enabled": False}})
    assert "does not check that the network between pods does" in notes_of(SETS["encrypted by the network"])


def test_notes_say_what_stays_open_with_tls() -> None:
    notes = notes_of(CERT_MANAGER)
    assert "rayEncryption is none" in notes and "6379, 6380-6387, 10002-10129" in notes
    assert "runs code as the cluster" in notes and "connection to its Redis is not encrypted" in notes
    assert "security.encryption is none" not in notes
    assert "its Redis" not in notes_of(merged(CERT_MANAGER, {"redis": {"enabled": False}}))
    trusting = notes_of(merged(CERT_MANAGER, {"security": {"rayEncryption": "network"}}))
    assert "rayEncryption is network" in trusting and "runs code as the cluster" not in trusting
    assert rendered(merged(CERT_MANAGER, {"security": {"rayEncryption": "network"}})).config.ray.encryption == "network"


def test_notes_name_the_secrets_that_pods_wait_for_and_a_command_that_connects() -> None:
    for values, secrets in ((CERT_MANAGER, "cache-kvcluster-coordinator-tls and cache-kvcluster-shard-tls"),
                            (SECRETS, "kv-head and kv-shards")):  # fmt: skip
        notes = notes_of(values)
        assert f"They wait for the Secrets {secrets}, too" in notes
        assert ("get certificate" in notes) is (values is CERT_MANAGER)
        assert "KVCLUSTER_SERVER_NAME=cache-kvcluster-head.llm.svc.cluster.local KVCLUSTER_TOKEN=TOKEN" in notes
    assert "KVCLUSTER_SERVER_NAME" not in notes_of({})


def test_a_head_has_no_certificate_of_a_shard_and_an_engine_no_key() -> None:
    """Nor has a shard the head's: whoever takes a shard over acts as a shard alone."""
    for name, mode in (("encrypted by cert-manager", "cluster"), ("encrypted, a shard on each node", "node-local")):
        release = rendered(SETS[name])
        for pod in release.pods:
            secrets = {each["secret"]["secretName"] for each in pod.spec["volumes"] if "secret" in each}
            own = {"head": "coordinator", "shard": "shard"}.get(pod.owner.rpartition("-")[2])
            certificates = {each for each in secrets if each.endswith("-tls")}
            assert certificates == ({f"cache-kvcluster-{own}-tls"} if own else set()), (mode, pod.owner)
    data = rendered(CERT_MANAGER).one("ConfigMap", "-connection")["data"]
    assert "KVCLUSTER_KEY_FILE" not in data and data["KVCLUSTER_CA_FILE"] == "/etc/kvcluster-tls/ca.crt"


def test_a_sidecar_has_the_certificate_of_shards_under_a_name_of_its_own() -> None:
    (engine,) = rendered(SETS["encrypted, with a sidecar"]).patched_engines()
    (volume,) = [each for each in engine.spec["volumes"] if each["name"] == "kvcluster-tls"]
    assert volume["secret"]["secretName"] == "cache-kvcluster-shard-tls"


def test_the_nodes_of_a_raycluster_get_the_certificate_of_their_role() -> None:
    data = rendered(SETS["encrypted, in a RayCluster"]).one("ConfigMap", "-raycluster")["data"]
    for key, role in (("head-pod-template.yaml", "coordinator"), ("pod-template.yaml", "shard")):
        spec = yaml.safe_load(data[key])["spec"]
        (volume,) = [each["secret"] for each in spec["volumes"] if each["name"] == "kvcluster-tls"]
        assert volume["secretName"] == f"cache-kvcluster-{role}-tls" and volume["defaultMode"] == 0o440
        mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        assert mounts == {"kvcluster-auth": "/etc/kvcluster/auth", "kvcluster-tls": "/etc/kvcluster/tls"}
    plain = rendered(values_of("join")).one("ConfigMap", "-raycluster")["data"]
    assert plain.keys() == {"pod-template.yaml", "ray-start-params.yaml"}
    assert "kvcluster-tls" not in plain["pod-template.yaml"]


def test_how_monitors_verify_can_be_replaced() -> None:
    given = {"ca": {"configMap": {"name": "ours", "key": "ca"}}, "serverName": "kv.example"}
    values = merged(SECRETS, {"monitoring": {"podMonitor": True, "tlsConfig": given}})
    (endpoint,) = of(rendered(values), "PodMonitor", "")["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"] == given


def test_two_releases_share_no_name_and_no_selector() -> None:
    values = merged(CERT_MANAGER, {"monitoring": {"enabled": True}})
    first, second = (render(values, release=name) for name in ("one", "two"))
    for kind in ("secretName", "dnsNames", "uris"):
        used = [
            [each["spec"][kind] for each in objects if each["kind"] == "Certificate"] for objects in (first, second)
        ]
        assert len(used[0]) == 2 and not [each for each in used[0] if each in used[1]], kind
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (first, second)]
    assert not names[0] & names[1]
    pods = [Release({}, objects).pods for objects in (first, second)]
    for objects, others in ((first, pods[1]), (second, pods[0])):
        for each in objects:
            if each["kind"] == "Service":
                assert not any(pod.is_selected_by(each["spec"]["selector"]) for pod in others)


def test_a_chart_above_may_switch_this_one_off(tmp_path: Path) -> None:
    above = tmp_path / "above"
    (above / "charts").mkdir(parents=True)
    dependency = {"name": "kvcluster", "version": _version(), "condition": "kvcluster.enabled"}
    chart = {"apiVersion": "v2", "name": "above", "version": "1.0.0", "dependencies": [dependency]}
    (above / "Chart.yaml").write_text(yaml.safe_dump(chart), encoding="utf-8")
    with ApiServer() as server:
        Helm(server).package(above / "charts")
    for enabled, registry in ((True, "registry.example"), (False, "")):
        values = {"global": {"imageRegistry": registry}, "kvcluster": {"enabled": enabled}}
        with ApiServer() as server:
            manifest = Helm(server).install(values, above).get("manifest", "")
        assert ("registry.example/kvcluster:" in manifest) is enabled
        assert bool(manifest.strip()) is enabled


def _version() -> str:
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"])
