"""The checks and the API server see what they are for: each is shown an object that is wrong in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.chart import checks
from tests.chart.api_server import ApiServer, Kind, Refused
from tests.chart.released import Object, Release
from tests.chart.rendering import installed, render, values_of

Change = Callable[[Object], object]


@pytest.fixture(scope="module")
def releases() -> dict[str, Release]:
    return {
        name: Release(values_of(name), render(values_of(name)), installed(values_of(name))["info"]["notes"])
        for name in ("disk", "gpu", "monitoring", "tls")
    }


def shard(objects: Object) -> Object:
    found: Object = objects["StatefulSet/cache-kvcluster-shard"]["spec"]["template"]["spec"]
    return found


def container(objects: Object) -> Object:
    found: Object = shard(objects)["containers"][0]
    return found


def argument(name: str, value: str) -> Change:
    def change(objects: Object) -> None:
        given = container(objects)["args"]
        given[given.index(name) + 1] = value

    return change


def setting(before: str, after: str) -> Change:
    def change(objects: Object) -> None:
        data = objects["ConfigMap/cache-kvcluster-config"]["data"]
        assert before in data["cluster.toml"]
        data["cluster.toml"] = data["cluster.toml"].replace(before, after)

    return change


def tls_volume(objects: Object) -> Object:
    (found,) = [each for each in shard(objects)["volumes"] if each["name"] == "tls"]
    return found  # type: ignore[no-any-return]


def tls_mount(objects: Object) -> Object:
    (found,) = [each for each in container(objects)["volumeMounts"] if each["name"] == "tls"]
    return found  # type: ignore[no-any-return]


def certificate(role: str, **fields: Any) -> Change:
    def change(objects: Object) -> None:
        objects[f"Certificate/cache-kvcluster-{role}"]["spec"].update(fields)

    return change


def policy(objects: Object) -> list[Object]:
    found: list[Object] = objects["NetworkPolicy/cache-kvcluster-shards"]["spec"]["ingress"]
    return found


WRONG: list[tuple[str, Callable[[Release], None], Change]] = [
    ("disk", checks.pods_are_restricted, lambda o: container(o)["securityContext"].pop("capabilities")),
    ("disk", checks.commands_are_of_the_program, argument("--config", "/etc/kvcluster/config/other.toml")),
    ("disk", checks.heads_and_nodes_fit_one_another, argument("--offer", "kvcluster_shard_shard=2")),
    ("disk", checks.heads_and_nodes_fit_one_another, setting('advertise = "', 'advertise = "x')),
    ("disk", checks.variables_are_known, lambda o: container(o)["env"].append({"name": "RAY_TOKN", "value": "1"})),
    ("disk", checks.files_of_the_configuration_are_mounted, setting("/disk", "/disc")),
    ("disk", checks.memory_is_what_the_program_asks_for, setting('host_bytes = "8GiB"', 'host_bytes = "9GiB"')),
    ("gpu", checks.shards_claim_the_gpus_of_their_pods, setting("num_gpus = 0.5", "num_gpus = 0.25")),
    ("disk", checks.pods_have_time_to_stop, setting("stop_ms = 50000", "stop_ms = 100000")),
    ("disk", checks.ports_are_of_the_program, setting("port = 9400", "port = 9500")),
    ("disk", checks.probes_ask_what_is_served, lambda o: container(o)["ports"][0].update(containerPort=9_400 + 99)),
    ("disk", checks.probes_ask_what_is_served, lambda o: container(o)["livenessProbe"]["httpGet"].update(path="/")),
    (
        "disk",
        checks.selectors_match_pods,
        lambda o: o["NetworkPolicy/cache-kvcluster-head"]["spec"].update(podSelector={"matchLabels": {"app": "other"}}),
    ),
    ("disk", checks.policies_let_in_whom_the_table_of_ports_names, lambda o: policy(o)[1].pop("from")),
    (
        "disk",
        checks.policies_let_in_whom_the_table_of_ports_names,
        lambda o: policy(o)[0]["ports"][0].update(endPort=7_150),
    ),
    ("disk", checks.mounts_exist, lambda o: shard(o)["volumes"][0].update(name="confg")),
    ("disk", checks.mounts_exist, lambda o: shard(o)["volumes"][1]["secret"].update(defaultMode=0o444)),
    (
        "monitoring",
        checks.rules_and_dashboards_name_metrics_that_exist,
        lambda o: o["PrometheusRule/cache-kvcluster"]["spec"]["groups"][0]["rules"][1].update(
            expr="kvcluster_shard_s > 0"
        ),
    ),
    (
        "monitoring",
        checks.rules_and_dashboards_name_metrics_that_exist,
        lambda o: o["PrometheusRule/cache-kvcluster"]["spec"]["groups"][0]["rules"][0].update(
            expr='up{job="kvcluster", kvcluster_release="llm/other"} == 0'
        ),
    ),
    (
        "monitoring",
        checks.monitors_name_ports_and_the_job_of_the_rules,
        lambda o: o["PodMonitor/cache-kvcluster"]["spec"]["podMetricsEndpoints"][1]["relabelings"].pop(),
    ),
    (
        "monitoring",
        checks.monitors_name_ports_and_the_job_of_the_rules,
        lambda o: o["PodMonitor/cache-kvcluster"]["spec"]["podMetricsEndpoints"][0].update(port="metrics"),
    ),
    ("tls", checks.probes_ask_what_is_served, lambda o: container(o)["livenessProbe"]["httpGet"].pop("scheme")),
    (
        "disk",
        checks.probes_ask_what_is_served,
        lambda o: container(o)["livenessProbe"]["httpGet"].update(scheme="HTTPS"),
    ),
    ("tls", checks.mounts_exist, lambda o: tls_volume(o)["secret"].update(defaultMode=0o444)),
    ("tls", checks.mounts_exist, lambda o: tls_mount(o).update(subPath="tls.crt")),
    ("tls", checks.files_of_the_configuration_are_mounted, lambda o: tls_volume(o)["secret"]["items"].pop()),
    ("tls", checks.files_of_variables_are_mounted, lambda o: container(o)["volumeMounts"].remove(tls_mount(o))),
    (
        "tls",
        checks.files_of_the_configuration_are_mounted,
        lambda o: tls_volume(o)["secret"].update(secretName="cache-kvcluster-coordinator-tls"),
    ),
    ("tls", checks.files_of_the_configuration_are_mounted, setting("/etc/kvcluster/tls/tls.key", "/etc/tls/tls.key")),
    ("tls", checks.files_of_the_configuration_are_mounted, lambda o: tls_mount(o).update(readOnly=False)),
    ("tls", checks.commands_in_containers_connect_as_the_cluster_does, lambda o: container(o)["env"].pop()),
    ("tls", checks.certificates_have_the_names_and_roles_that_the_program_asks_for, certificate("shard", uris=[])),
    (
        "tls",
        checks.certificates_have_the_names_and_roles_that_the_program_asks_for,
        certificate("shard", uris=["kvcluster://cache/shard"]),
    ),
    (
        "tls",
        checks.certificates_have_the_names_and_roles_that_the_program_asks_for,
        certificate("shard", usages=["digital signature", "server auth"]),
    ),
    (
        "tls",
        checks.certificates_have_the_names_and_roles_that_the_program_asks_for,
        certificate("coordinator", dnsNames=["cache-kvcluster-head"]),
    ),
    (
        "tls",
        checks.certificates_have_the_names_and_roles_that_the_program_asks_for,
        certificate("shard", dnsNames=["*.llm.svc"]),
    ),
    (
        "tls",
        checks.certificates_have_the_names_and_roles_that_the_program_asks_for,
        certificate("tenant-default", secretName="cache-kvcluster-shard-tls"),
    ),
    (
        "tls",
        checks.monitors_name_ports_and_the_job_of_the_rules,
        lambda o: o["PodMonitor/cache-kvcluster"]["spec"]["podMetricsEndpoints"][0].update(scheme="http"),
    ),
    (
        "tls",
        checks.monitors_name_ports_and_the_job_of_the_rules,
        lambda o: o["PodMonitor/cache-kvcluster"]["spec"]["podMetricsEndpoints"][0]["tlsConfig"].update(serverName="x"),
    ),
    (
        "tls",
        checks.the_connection_is_what_the_connector_reads,
        lambda o: o["ConfigMap/cache-kvcluster-connection"]["data"].pop("KVCLUSTER_CA_FILE"),
    ),
    (
        "disk",
        checks.the_connection_is_what_the_connector_reads,
        lambda o: o["ConfigMap/cache-kvcluster-connection"]["data"].pop("KVCLUSTER_ENCRYPTION"),
    ),
    (
        "disk",
        checks.the_connection_is_what_the_connector_reads,
        lambda o: o["ConfigMap/cache-kvcluster-connection"]["data"].update(KVCLUSTER_ADDRESS="elsewhere:1"),
    ),
]


@pytest.mark.parametrize(("name", "check", "change"), WRONG)
def test_a_check_sees(
    name: str, check: Callable[[Release], None], change: Change, releases: dict[str, Release]
) -> None:
    whole = releases[name]
    objects = {f"{each['kind']}/{each['metadata']['name']}": copy.deepcopy(each) for each in whole.objects}
    check(Release(whole.values, list(objects.values()), whole.notes))
    change(objects)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        check(Release(whole.values, list(objects.values()), whole.notes))


@pytest.mark.parametrize(
    ("group_version", "kind", "spec", "says"),
    [
        ("v1", "ConfigMap", {}, "'spec' was unexpected"),
        ("v1", "Service", {"ports": [{"port": "http"}]}, "ports"),
        ("cert-manager.io/v1", "Certificate", {"secretName": "s", "issuerRef": {"name": "i"}, "uri": []}, "uri"),
        (
            "cert-manager.io/v1",
            "Certificate",
            {"secretName": "s", "issuerRef": {"name": "i"}, "usages": ["server"]},
            "server",
        ),
        ("monitoring.coreos.com/v1", "PodMonitor", {"selector": {}, "podMetricEndpoints": []}, "podMetricEndpoints"),
    ],
)
def test_the_api_server_refuses_what_the_schema_does(group_version: str, kind: str, spec: Any, says: str) -> None:
    written = {"apiVersion": group_version, "kind": kind, "metadata": {"name": "it"}, "spec": spec}
    server = ApiServer()
    try:
        with pytest.raises(Refused, match=says):
            server.create(Kind(group_version, f"{kind.lower()}s", kind), "llm", written)
    finally:
        server._server.server_close()


@pytest.mark.parametrize("port", [7100, 7165, 65_500])
def test_a_release_on_another_port_lets_in_where_its_program_listens(port: int) -> None:
    values = values_of("disk") | {"config": {**values_of("disk").get("config", {}), "server": {"port": port}}}
    moved = Release(values, render(values), "")
    assert moved.config.server.port == port
    checks.policies_let_in_whom_the_table_of_ports_names(moved)
    checks.ports_are_of_the_program(moved)
