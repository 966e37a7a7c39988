"""Values that cannot work are refused, and the error names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.chart.rendering import RenderError, render, values_of

_JOIN = values_of("join")
_NODE_LOCAL = {"mode": "node-local"}
_ISSUER = {"issuerRef": {"name": "ca"}}


def tls(**more: Any) -> dict[str, Any]:
    return {"security": {"encryption": "tls", **more}}


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    tree: dict[str, Any] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value"),
    [
        # Misspelt keys.
        ("imag", {}),
        ("image.tagg", "1"),
        ("config.shardz", {}),
        ("config.shard.deviceBytes", "1GiB"),
        ("config.coordinator.low_fre", 0.1),
        ("shards.shard.ram_byte", "1GiB"),
        ("groups.gpu.replica", 2),
        ("groups.gpu.shard.hostBytes", "1GiB"),
        ("redis.enable", True),
        ("networkPolicy.enabeld", True),
        ("monitoring.podmonitor", True),
        ("security.encription", "tls"),
        ("security.certManager.issuer", "ca"),
        # Wrong types, and values that are not among the choices.
        ("mode", "operator"),
        ("shards.replicas", "2"),
        ("shards.replicas", -1),
        ("config.server.threads", "16"),
        ("config.coordinator.low_free", "5%"),
        ("config.coordinator.host_codec", "q5"),
        ("config.server.transports", ["rdma"]),
        ("config.metrics.tenants", "yes"),
        ("shards.podDisruptionBudget.maxUnavailable", "50%"),
        ("shards.resources.limits.memory", "40 GB"),
        ("monitoring.dashboard", "on"),
        ("image.digest", "latest"),
        ("security.encryption", "ssl"),
        ("security.encryption", ""),
        ("security.rayEncryption", "tls"),
        ("security.certManager.duration", "90d"),
        ("security.certManager.clients", ["shard"]),
        ("security.certManager.clients", ["tenant/a"]),
        ("config.client.encryption", "ssl"),
        ("connection.tlsDir", "kvcluster-tls"),
        ("runAsUser", 0),
        ("join.address", "no-port"),
        ("nodeLocal.hostPath.path", "run/kvcluster"),
        ("nodeLocal.maxUnavailable", 0),
        ("nodeLocal.group", 0),
        ("groups", {"Big_One": {}}),
    ],
)
def test_the_schema_refuses_by_name(path: str, value: Any) -> None:
    with pytest.raises(RenderError) as refused:
        render(nested(path, value))
    assert "values don't meet the specifications of the schema" in str(refused.value)
    last = next(iter(value)) if path == "groups" else path.rpartition(".")[2]
    assert last in str(refused.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"shards": {"gpu": {"count": 1}}}, "shards?.gpu.count is 1 without .*gpu.resource"),
        ({"groups": {"a": {"gpu": {"count": 2}}}}, "groups.a.gpu.count is 2 without groups.a.gpu.resource"),
        ({"groups": {"a": {"gpu": {"resource": "nvidia.com/gpu"}}}}, "groups.a.gpu.resource is nvidia.com/gpu without"),
        (
            {"shards": {"gpu": {"count": 1, "resource": "nvidia.com/gpu"}}},
            "gpu.count is 1, and shards without a pool there do not use GPUs: set .*.shard.gpu_bytes",
        ),
        ({"shards": {"shard": {"disk_bytes": "9GiB"}}}, "disk_bytes needs .*host_bytes"),
        ({"shards": {"shard": {"gpu_bytes": "9GiB"}}}, "gpu_bytes needs .*host_bytes"),
        (
            {"shards": {"replicas": 100}, "config": {"shard": {"host_bytes": "8GiB", "disk_bytes": "2TiB"}}},
            "limits.memory is 2Gi, and the index of all blocks .* needs [0-9]+Mi: raise it, or set head.block",
        ),
        ({"head": {"blockBytes": 100}}, "head.blockBytes must be at least 1024"),
        ({"shards": {"stop": {"pages": "save"}}}, "stop.pages is save without .*disk_bytes"),
        (
            {"config": {"shard": {"host_bytes": "1GiB", "disk_bytes": "9GiB"}}, "shards": {"disk": {"size": "9Gi"}}},
            "disk.size is 9Gi, and the disk tier of a pod needs",
        ),
        ({"shards": {"resources": {"limits": {"memory": "1Gi"}}}}, "resources.limits.memory is 1Gi"),
        ({"shards": {"podDisruptionBudget": {"minAvailable": 1}}}, "podDisruptionBudget takes one of"),
        ({"groups": {"head": {}}}, "groups.head: this name is taken"),
        ({"fullnameOverride": "a" * 30, "groups": {"b" * 20: {}}, "nameOverride": ""}, None),
        ({"config": {"server": {"host": "10.0.0.1"}}}, "config.server.host is derived by the chart"),
        ({"config": {"server": {"token_file": "/t"}}}, "config.server.token_file .*set auth.secretName"),
        ({"config": {"server": {"quota_file": "/q"}}}, "config.server.quota_file .*set auth.quotasKey"),
        ({"config": {"name": "x"}}, "config.name is derived by the chart: set fullnameOverride"),
        ({"config": {"groups": {}}}, "config.groups is derived by the chart: set groups"),
        ({"config": {"shard": {"disk_dir": "/d"}}}, "config.shard.disk_dir is derived"),
        ({"config": {"ray": {"redis_password_from_secret": True}}}, "leave redis.secretName empty"),
        ({"config": {"ray": {"redis": "r:1"}}}, "config.ray.redis .*set redis.enabled or redis.address"),
        ({"config": {"metrics": {"port": 0}}}, "the port of metrics must be a fixed one"),
        ({"config": {"server": {"shard_ports": "0"}}}, "no range of ports"),
        (
            {"auth": {"severalTenants": True}, "config": {"server": {"transports": ["shm", "grpc"]}}},
            "transports names shm, and auth.severalTenants",
        ),
        (
            tls(),
            "encryption tls needs certificates: security.certManager.issuerRef.name.* or both of security.existing",
        ),
        (tls(existingSecrets={"coordinator": "a"}), "encryption tls needs certificates"),
        (tls(existingSecrets={"shard": "a"}), "encryption tls needs certificates"),
        (
            tls(existingSecrets={"coordinator": "a", "shard": "b"}, certManager=_ISSUER),
            "issuerRef.name and security.existingSecrets exclude one another",
        ),
        (
            tls(existingSecrets={"coordinator": "a", "shard": "b"}, certManager={"clients": ["operator"]}),
            "certManager.clients needs security.certManager.issuerRef.name",
        ),
        (
            tls(certManager={**_ISSUER, "duration": "24h"}),
            "renewBefore is 720h, and a certificate is valid for 24h",
        ),
        ({"security": {"certManager": _ISSUER}}, "no meaning with security.encryption none: set it to tls"),
        ({"security": {"existingSecrets": {"shard": "b"}}}, "no meaning with security.encryption none: set it to tls"),
        ({"security": {"encryption": "network", "clientCertificates": True}}, "no meaning with .* network: set it"),
        ({"config": {"security": {"encryption": "tls"}}}, "config.security.encryption .*: set security.encryption"),
        ({"config": {"security": {"cert_file": "/c"}}}, "config.security.cert_file is derived by the chart"),
        ({"config": {"security": {"client_certificates": True}}}, "set security.clientCertificates"),
        ({"config": {"ray": {"encryption": "tls"}}}, "config.ray.encryption .*set security.rayEncryption"),
        ({"mode": "join"}, "mode join needs join.address"),
        ({**_JOIN, "join": {**_JOIN["join"], "headSelector": {}}}, "mode join needs join.headSelector"),
        ({**_JOIN, "join": {**_JOIN["join"], "tokenSecretName": ""}}, "join.tokenSecretName.*allowUnauthenticatedRay"),
        ({**_JOIN, "auth": {"severalTenants": True}}, "auth.severalTenants in mode join.*join.allowSeveralTenants"),
        ({**_JOIN, "redis": {"address": "redis:6379"}}, "redis.address is of the cluster's own Ray"),
        ({**_JOIN, "mode": "cluster"}, "join.address and join.tokenSecretName need mode join, not cluster"),
        ({"monitoring": {"podMonitor": True, "serviceMonitor": True}}, "podMonitor and .*serviceMonitor exclude"),
        (
            {"mode": "sidecar", "config": {"shard": {"host_bytes": "1GiB", "disk_bytes": "1GiB"}}},
            "disk_bytes in mode sidecar",
        ),
        (
            {**_NODE_LOCAL, "config": {"shard": {"host_bytes": "1GiB", "disk_bytes": "1GiB"}}},
            "disk_bytes in mode node-local",
        ),
        ({**_NODE_LOCAL, "auth": {"severalTenants": True}}, "severalTenants in mode node-local.*a release for each"),
        ({**_NODE_LOCAL, "runAsUser": None}, "nodeLocal.hostPath.prepare needs runAsUser"),
        ({**_NODE_LOCAL, "nodeLocal": {"csi": {"readOnly": True}}}, "nodeLocal.csi needs driver"),
        ({**_NODE_LOCAL, "shards": {"updateStrategy": {"partition": 1}}}, "partition in mode node-local"),
        ({**_NODE_LOCAL, "config": {"server": {"socket_dir": "/run"}}}, "config.server.socket_dir is derived"),
        (
            {**_NODE_LOCAL, "nodeLocal": {"expectedNodes": 900}, "config": {"shard": {"ram_bytes": "40GiB"}}},
            "limits.memory is 2Gi, and the index of all blocks",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused_by_name(values: Mapping[str, Any], says: str | None) -> None:
    if says is None:
        render(values)  # as long as a name may be
        return
    with pytest.raises(RenderError, match=says):
        render(values)


def test_what_is_said_expressly_is_accepted() -> None:
    allowed = {**_JOIN["join"], "allowSeveralTenants": True, "allowUnauthenticatedRay": True, "tokenSecretName": ""}
    (reconciler,) = [
        each
        for each in render({**_JOIN, "auth": {"severalTenants": True}, "join": allowed})
        if each["kind"] == "Deployment"
    ]
    arguments = reconciler["spec"]["template"]["spec"]["containers"][1]["args"]
    assert arguments[-4:] == ["--allow", "unauthenticated-ray", "--allow", "several-tenants"]
