"""What every release must keep, beside the schemas: each check takes a release and raises AssertionError.

`CHECKS` is the list; `make chart` prints how many of them each values file has passed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from kvcluster.actors.node_memory import bytes_for_pools
from kvcluster.cli.main import parser
from kvcluster.config import TLS, size
from kvcluster.config.ports import NODES, OPERATORS, PortUse, port_table
from kvcluster.core.shard_scheduler import pool_bytes
from kvcluster.runtime.metrics import METRICS
from kvcluster.transport.certificates import COORDINATOR, SCHEME, SHARD, CertificateNames
from kvcluster.transport.credentials import CA_FILE, CERT_FILE, ENCRYPTION, KEY_FILE, SERVER_NAME
from tests.chart.program import (
    ROOT,
    connector_settings,
    documented_transfer_config,
    metrics_in,
    ray_flags,
    ray_variables,
    served_paths,
)
from tests.chart.released import Object, PodTemplate, Release, ours
from tests.chart.security import restricted
from tests.deploy.alert_rules import RELEASE, rules, selectors

REDIS_PORT = 6379
_SIDECAR: dict[str, Any] = yaml.safe_load((ROOT / "helm/kvcluster/values.yaml").read_text(encoding="utf-8"))["sidecar"]
_MIB = 2**20
_CONNECTION = {ENCRYPTION, CA_FILE, CERT_FILE, KEY_FILE, SERVER_NAME}


def pods_are_restricted(release: Release) -> None:
    for pod in release.pods:
        engine = pod.owner.startswith("engine")
        assert not (faults := restricted(pod.spec, ours(pod), of_pod=not engine)), f"{pod.owner}: {faults}"


def roots_are_read_only_and_there_is_room_for_temporary_files(release: Release) -> None:
    for pod in release.pods:
        for each in ours(pod):
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
            (tmp,) = [mount["name"] for mount in each["volumeMounts"] if mount["mountPath"] == "/tmp"]
            (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == tmp]
            assert volume["emptyDir"]["sizeLimit"]


def no_pod_has_a_token_of_kubernetes_or_services_in_its_environment(release: Release) -> None:
    for account in release.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for pod in release.pods:
        if not pod.owner.startswith("engine"):
            assert pod.spec["automountServiceAccountToken"] is False
            assert pod.spec["enableServiceLinks"] is False


def commands_are_of_the_program(release: Release) -> None:
    seen = []
    for pod in release.pods:
        for each in ours(pod):
            given = [*each["command"], *each.get("args", [])]
            if each["command"] == ["kvcluster"]:
                options = parser().parse_args(given[1:])
                seen.append(options.command)
                assert _file_is_mounted(release, pod, each, options.config), options.config
            elif each["command"] == ["ray"]:
                flags = {each.partition("=")[0] for each in given if each.startswith("--")}
                assert given[1] == "start" and flags <= ray_flags(), flags - ray_flags()
                seen.append("ray")
            else:
                assert each["name"] == "redis", each["name"]
    assert "up" in seen and ("join" in seen or release.mode == "join")


def heads_and_nodes_fit_one_another(release: Release) -> None:
    config = release.config
    for pod, each, options in _programs(release):
        if options.command == "join":
            host, _, port = options.head.rpartition(":")
            assert host == config.server.advertise and int(port) == config.ray.port
            offers = dict(offer.split("=") for offer in options.offer)
            (group,) = [group for group in config.shard_groups.values() if offers.keys() == set(group.resources)]
            assert sum(map(float, offers.values())) == group.shards, pod.owner
        if options.command == "join" or not options.address:
            assert options.node_ip == "$(POD_IP)"
            assert any(env["name"] == "POD_IP" for env in each["env"])


def variables_are_known(release: Release) -> None:
    extra = {"TZ"}
    for pod in release.pods:
        for each in ours(pod):
            names = {env["name"] for env in each.get("env", [])} - extra
            rays = {name for name in names if name.startswith("RAY_")}
            assert names - rays <= {"POD_IP", "HOME", *_CONNECTION}, names
            assert rays <= ray_variables(), rays - ray_variables()
            for used in re.findall(r"\$\(([A-Z_]+)\)", " ".join(each.get("args", []))):
                assert used in names, used


def commands_in_containers_connect_as_the_cluster_does(release: Release) -> None:
    security = release.config.security
    for _, each, _ in _programs(release):
        env = {variable["name"]: variable.get("value") for variable in each["env"]}
        assert env[ENCRYPTION] == security.encryption
        assert env.get(CA_FILE, "") == security.ca_file
        assert bool(env.get(SERVER_NAME)) == (security.encryption == TLS)
        assert env.get(SERVER_NAME, release.config.server.advertise) == release.config.server.advertise
        shown = (security.cert_file, security.key_file) if security.client_certificates else ("", "")
        assert (env.get(CERT_FILE, ""), env.get(KEY_FILE, "")) == shown


def files_of_the_configuration_are_mounted(release: Release) -> None:
    server, ray, coordinator = release.config.server, release.config.ray, release.config.coordinator
    security = release.config.security
    for pod, each, options in _programs(release):
        for path in filter(None, (security.ca_file, security.cert_file, security.key_file)):
            assert _file_is_mounted(release, pod, each, path), path
            assert secret_at(pod, each, path) == tls_secret(
                release, "shard" if options.command == "join" else "coordinator"
            )
        for path in filter(None, (server.secret_file, server.token_file, server.quota_file)):
            assert _file_is_mounted(release, pod, each, path), path
        if options.command == "up" and not options.address:
            for folder in filter(None, (coordinator.state_dir,)):
                assert _claim_is_mounted(pod, each, folder), folder
            if ray.redis_password_file:
                assert _file_is_mounted(release, pod, each, ray.redis_password_file)
        if options.command == "join":
            (name,) = [n for n, g in release.config.shard_groups.items() if options.offer[0].startswith(*g.resources)]
            shard = release.config.shard_groups[name].shard
            assert not shard.disk_bytes or _claim_is_mounted(pod, each, shard.disk_dir)


def files_of_variables_are_mounted(release: Release) -> None:
    """Of every container of ours, which may run another program than kvcluster."""
    for pod in release.pods:
        for each in ours(pod):
            env = {variable["name"]: variable.get("value") for variable in each.get("env", [])}
            for path in filter(None, map(env.get, (CA_FILE, CERT_FILE, KEY_FILE))):
                assert _folder_is_mounted(each, path) and _file_is_mounted(release, pod, each, path), (
                    each["name"],
                    path,
                )


def memory_is_what_the_program_asks_for(release: Release) -> None:
    for _, each, options in _programs(release):
        if options.command != "join":
            continue
        (group,) = [g for g in release.config.shard_groups.values() if options.offer[0].startswith(*g.resources)]
        pools, limit = group.shards * pool_bytes(group), quantity(each["resources"]["limits"]["memory"])
        assert bytes_for_pools(limit, shards=group.shards) >= pools
        if not release.values.get("resources"):
            assert bytes_for_pools(limit - 4 * _MIB, shards=group.shards) < pools, "the limit is larger than needed"


def shards_claim_the_gpus_of_their_pods(release: Release) -> None:
    for _, each, options in _programs(release):
        if options.command == "join":
            (group,) = [g for g in release.config.shard_groups.values() if options.offer[0].startswith(*g.resources)]
            gpus = int(each["resources"]["limits"].get("nvidia.com/gpu", 0))
            assert group.shards * group.shard.num_gpus == gpus and bool(gpus) == bool(group.shard.gpu_bytes)


def pods_have_time_to_stop(release: Release) -> None:
    for pod, _, options in _programs(release):
        if options.command != "join":
            continue
        (group,) = [g for g in release.config.shard_groups.values() if options.offer[0].startswith(*g.resources)]
        saves = group.shard.stop_ms / 1_000 if group.shard.disk_bytes else 0
        engine_s = (
            {**_SIDECAR, **release.values.get("sidecar", {})}["engineGraceSeconds"] if release.mode == "sidecar" else 0
        )
        assert pod.spec["terminationGracePeriodSeconds"] >= engine_s + options.leave_s + saves + 10


def ports_are_of_the_program(release: Release) -> None:
    known = {port for use in port_table(release.config) for port in use.ports}
    for pod in release.pods:
        for each in ours(pod):
            named = [port["containerPort"] for port in each.get("ports", [])]
            names = [port["name"] for port in each.get("ports", [])]
            assert len({*names}) == len(names) and all(len(name) <= 15 for name in names)
            assert set(named) <= ({REDIS_PORT} if each["name"] == "redis" else known), named


def probes_ask_what_is_served(release: Release) -> None:
    metrics = {port for use in port_table(release.config) if use.setting == "metrics.port" for port in use.ports}
    for pod in release.pods:
        for each in ours(pod):
            ports = {port["name"]: port["containerPort"] for port in each.get("ports", [])}
            probes = [each[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in each]
            assert probes or each["name"] in ("join", "prepare-sockets"), each["name"]
            for probe in probes:
                if "httpGet" in probe:
                    encrypts = release.config.security.encryption == TLS
                    assert probe["httpGet"].get("scheme", "HTTP") == ("HTTPS" if encrypts else "HTTP")
                    assert ports[probe["httpGet"]["port"]] in metrics
                    assert probe["httpGet"]["path"] in served_paths()
    for pod in release.patched_engines():
        assert not {"startupProbe", "readinessProbe"} & ours(pod)[0].keys(), "an engine would wait for its cache"


def services_reach_ports_that_exist(release: Release) -> None:
    for service in release.of("Service"):
        spec = service["spec"]
        pods = [pod for pod in release.pods if pod.is_selected_by(spec["selector"])]
        if release.mode == "join" and service["metadata"]["name"].endswith("-head"):
            assert spec["selector"] == release.values["join"]["headSelector"]
            assert [port["targetPort"] for port in spec["ports"]] == [release.config.server.port]
            continue
        assert pods, service["metadata"]["name"]
        for port in spec["ports"]:
            served = [found for pod in pods for each in ours(pod) for found in each.get("ports", [])]
            assert port["targetPort"] in {found["name"] for found in served}
            if spec.get("clusterIP") != "None":
                assert port["port"] in {f["containerPort"] for f in served if f["name"] == port["targetPort"]}


def the_advertised_name_is_a_service(release: Release) -> None:
    service = release.one("Service", "-head")
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert release.config.server.advertise in (name, f"{name}.cluster.local")
    assert service["spec"]["publishNotReadyAddresses"] is True
    if release.config.ray.redis and not release.values.get("redis", {}).get("address"):
        host, _, port = release.config.ray.redis.rpartition(":")
        redis = release.one("Service", "-redis")["metadata"]["name"]
        assert host.startswith(f"{redis}.") and int(port) == REDIS_PORT


def selectors_match_pods(release: Release) -> None:
    for each in release.of("NetworkPolicy"):
        assert _selected(release, each["spec"]["podSelector"]["matchLabels"]), each["metadata"]["name"]
    for each in release.of("PodDisruptionBudget", "PodMonitor"):
        assert _selected(release, each["spec"]["selector"]["matchLabels"]), each["metadata"]["name"]
    for each in release.of("StatefulSet", "DaemonSet", "Deployment"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        selector = each["spec"]["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        assert [pod.owner for pod in _selected(release, selector)] == [each["metadata"]["name"]]
        for spread in each["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    services = release.of("Service")
    for each in release.of("ServiceMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"]
        assert any(wanted.items() <= service["metadata"]["labels"].items() for service in services)


def budgets_are_whole_numbers(release: Release) -> None:
    for each in release.of("PodDisruptionBudget"):
        given = [each["spec"].get(name) for name in ("minAvailable", "maxUnavailable")]
        assert sum(type(value) is int for value in given) == 1, given


def policies_let_in_whom_the_table_of_ports_names(release: Release) -> None:
    """The policies open each port to exactly the peers that docs/operations.md names for it."""
    policies = release.of("NetworkPolicy")
    if not policies or release.mode == "join":
        return
    name = release.one("Service", "-nodes")["spec"]["selector"]
    cluster = [{"podSelector": {"matchLabels": name}}]
    engines = policy_values(release)["engines"]
    monitoring = policy_values(release)["monitoring"]
    for use in port_table(release.config):
        allowed = cluster if use.callers == NODES else monitoring if use.callers == OPERATORS else [*cluster, *engines]
        for pod in _listeners(release, use):
            for port in (use.ports.start, use.ports.stop - 1):
                assert _admitted(policies, pod, port) == allowed, f"{pod.owner}: {use.setting} {port}"


def mounts_exist(release: Release) -> None:
    configs = {each["metadata"]["name"]: each for each in release.of("ConfigMap")}
    for pod in release.pods:
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for each in ours(pod):
            paths = [mount["mountPath"] for mount in each["volumeMounts"]]
            assert len({*paths}) == len(paths)
            for mount in each["volumeMounts"]:
                assert mount["name"] in volumes or mount["name"] in pod.claims, mount
                assert "subPath" not in mount, "a file mounted by subPath never changes"
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in configs
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets_of(release.values), volume
                assert volume["secret"]["defaultMode"] == 0o440, "the program refuses a secret that all may read"


def rules_and_dashboards_name_metrics_that_exist(release: Release) -> None:
    for rule in release.of("PrometheusRule"):
        (group,) = rule["spec"]["groups"]
        for each, source in zip(group["rules"], rules(), strict=True):
            assert any_release(each) == any_release(source)
            assert metrics_in(each["expr"]) <= METRICS.keys()
            named = [one.labels[RELEASE] for one in selectors(each["expr"])]
            asked = [one.labels[RELEASE] for one in selectors(source["expr"])]
            assert named == [("=", _name(rule)) if how == ("=~", ".*") else ("=~", f"|{_name(rule)}") for how in asked]
    for board in [each for each in release.of("ConfigMap") if each["metadata"]["name"].endswith("-dashboard")]:
        for name, text in board["data"].items():
            assert json.loads(text) == json.loads((ROOT / "deploy/grafana" / name).read_text(encoding="utf-8"))
            assert metrics_in(text) <= METRICS.keys(), metrics_in(text) - METRICS.keys()


def monitors_name_ports_and_the_job_of_the_rules(release: Release) -> None:
    served = {port["name"] for pod in release.pods for each in ours(pod) for port in each.get("ports", [])}
    for monitor in release.of("PodMonitor", "ServiceMonitor"):
        spec = monitor["spec"]
        for endpoint in spec.get("podMetricsEndpoints", spec.get("endpoints")):
            assert endpoint["port"] in served and endpoint["path"] in served_paths()
            encrypts = release.config.security.encryption == TLS
            assert (endpoint.get("scheme") == "https") is encrypts and ("tlsConfig" in endpoint) is encrypts
            if encrypts:
                verifies = endpoint["tlsConfig"]
                assert verifies["ca"] == {"secret": {"name": tls_secret(release, "shard"), "key": "ca.crt"}}
                assert "insecureSkipVerify" not in verifies
                for certificate in (each["spec"] for each in release.of("Certificate")):
                    assert (
                        verifies["serverName"] in certificate.get("dnsNames", [])
                        or "server auth" not in certificate["usages"]
                    )
            labels = {"job": "kvcluster", RELEASE: _name(monitor)}
            assert endpoint["relabelings"] == [
                {"action": "replace", "targetLabel": label, "replacement": value} for label, value in labels.items()
            ]


def any_release(rule: Object) -> Object:
    """Returns a rule of alerts without the values by which its selectors choose a release."""
    return {**rule, "expr": re.sub(rf'({RELEASE}=)~?"[^"]*"', r"\1", rule["expr"])}


def _name(each: Object) -> str:
    """What tells the release of an object from others in one Prometheus."""
    return f"{each['metadata']['namespace']}/{each['metadata']['labels']['app.kubernetes.io/instance']}"


def the_connection_is_what_the_connector_reads(release: Release) -> None:
    data = release.one("ConfigMap", "-connection")["data"]
    found = json.loads(data["kv-transfer-config"])
    assert data["KV_TRANSFER_CONFIG"] == data["kv-transfer-config"]
    extra = found.pop("kv_connector_extra_config")
    documented = documented_transfer_config()
    documented.pop("kv_connector_extra_config")
    assert found == documented
    assert extra.keys() <= connector_settings()
    assert not any(isinstance(value, float) for value in extra.values()), "no setting is a fraction"
    server = release.config.server
    assert extra["address"] == data["KVCLUSTER_ADDRESS"] == f"{server.advertise}:{server.port}"
    security = release.config.security
    assert data[ENCRYPTION] == security.encryption
    assert (CA_FILE in data) == (security.encryption == TLS)
    assert (CERT_FILE in data) == (KEY_FILE in data) == security.client_certificates


def certificates_have_the_names_and_roles_that_the_program_asks_for(release: Release) -> None:
    config = release.config
    found = {each["spec"]["secretName"]: each["spec"] for each in release.of("Certificate")}
    assert bool(found) == bool(release.values.get("security", {}).get("certManager"))
    for secret, spec in found.items():
        (uri,) = spec["uris"]
        cluster, _, role = uri.removeprefix(SCHEME).partition("/")
        names = CertificateNames(dns=tuple(spec.get("dnsNames", ())), uris=tuple(spec["uris"]))
        assert (
            uri.startswith(SCHEME) and cluster == config.name and secret == tls_secret(release, role.replace("/", "-"))
        )
        assert spec["privateKey"]["rotationPolicy"] == "Always"
        serves = role in (COORDINATOR, SHARD)
        assert set(spec["usages"]) == {"digital signature", "client auth", *(["server auth"] if serves else [])}
        assert bool(names.dns) == serves
        # Those who connect to the head verify the host of its address; of shards they are told a name.
        if role == COORDINATOR:
            assert names.name_for(config.server.advertise) == ""
        if role == SHARD:
            assert names.name_for("10.0.0.1") and config.server.advertise not in names.dns
    if found:
        assert {tls_secret(release, COORDINATOR), tls_secret(release, SHARD)} <= found.keys()


def objects_have_their_place(release: Release) -> None:
    keys = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
    assert len({*keys}) == len(keys)
    for each in release.objects:
        assert each["metadata"]["namespace"] == "llm"
        assert {"app.kubernetes.io/name", "app.kubernetes.io/instance"} <= each["metadata"]["labels"].keys()
        assert not any(name.startswith("helm.sh/hook") for name in each["metadata"].get("annotations", {}))


def notes_name_what_exists(release: Release) -> None:
    names = {each["metadata"]["name"] for each in release.objects} | secrets_of(release.values)
    named = re.findall(r"(?:configmap|service/|secret generic) ?([a-z0-9-]+)", release.notes)
    assert named and set(named) <= names
    assert len(re.findall(r"^[123]\. ", release.notes, re.MULTILINE)) == 3


CHECKS: tuple[Callable[[Release], None], ...] = (
    *(pods_are_restricted, roots_are_read_only_and_there_is_room_for_temporary_files),
    *(no_pod_has_a_token_of_kubernetes_or_services_in_its_environment, commands_are_of_the_program),
    *(heads_and_nodes_fit_one_another, variables_are_known, files_of_the_configuration_are_mounted),
    *(memory_is_what_the_program_asks_for, pods_have_time_to_stop, ports_are_of_the_program),
    shards_claim_the_gpus_of_their_pods,
    *(probes_ask_what_is_served, services_reach_ports_that_exist, the_advertised_name_is_a_service),
    *(selectors_match_pods, budgets_are_whole_numbers, policies_let_in_whom_the_table_of_ports_names, mounts_exist),
    *(rules_and_dashboards_name_metrics_that_exist, monitors_name_ports_and_the_job_of_the_rules),
    *(
        certificates_have_the_names_and_roles_that_the_program_asks_for,
        commands_in_containers_connect_as_the_cluster_does,
        files_of_variables_are_mounted,
    ),
    *(the_connection_is_what_the_connector_reads, objects_have_their_place, notes_name_what_exists),
)


# -------------------------------------------------------------------------------------------- the release


def quantity(text: str | int) -> int:
    """Returns the bytes of a quantity of memory."""
    return size(re.sub(r"([KMGT]i)$", r"\1B", str(text)).replace("M", "M"))


def policy_values(release: Release) -> dict[str, Any]:
    defaults = yaml.safe_load((ROOT / "helm/kvcluster/values.yaml").read_text(encoding="utf-8"))["networkPolicy"]
    merged: dict[str, Any] = {**defaults, **release.values.get("networkPolicy", {})}
    return merged


def secrets_of(values: Any) -> set[str]:
    """Returns the Secrets that these values declare, and the one that is looked for without."""
    names = {values.get(part, {}).get("secretName") for part in ("auth", "redis")}
    names |= {values.get("join", {}).get("tokenSecretName"), "cache-kvcluster-auth"}
    names |= {_tls_secret(values, role) for role in (COORDINATOR, SHARD)}
    return {name for name in names if name}


def tls_secret(release: Release, role: str) -> str:
    """Returns the Secret with the certificate for a role."""
    return _tls_secret(release.values, role)


def _tls_secret(values: Any, role: str) -> str:
    given: dict[str, str] = values.get("security", {}).get("existingSecrets", {})
    return given.get(role) or f"cache-kvcluster-{role}-tls"


def secret_at(pod: PodTemplate, container: Object, path: str) -> str:
    """Returns the Secret whose file is there."""
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == path.rpartition("/")[0]]
    assert mount["readOnly"] is True
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
    return str(volume["secret"]["secretName"])


def _programs(release: Release) -> list[tuple[PodTemplate, Object, Any]]:
    """Returns each container of `kvcluster`, with its pod and its options."""
    return [
        (pod, each, parser().parse_args(each["args"]))
        for pod in release.pods
        for each in ours(pod)
        if each["command"] == ["kvcluster"]
    ]


def _selected(release: Release, selector: Any) -> list[PodTemplate]:
    return [pod for pod in release.pods if pod.is_selected_by(selector)]


def _listeners(release: Release, use: PortUse) -> list[PodTemplate]:
    """Returns the pods in which a process listens on these ports."""
    heads = [pod for pod, _, options in _programs(release) if options.command == "up"]
    nodes = [pod for pod, _, options in _programs(release) if options.command == "join"]
    if use.listener in ("coordinator", "Ray's head"):
        return heads
    return [*heads, *nodes] if use.ray else nodes


def _admitted(policies: list[Object], pod: PodTemplate, port: int) -> list[Object]:
    """Returns the peers that may reach this port; {} stands for all."""
    own = [each for each in policies if pod.is_selected_by(each["spec"]["podSelector"]["matchLabels"])]
    assert own, f"no policy is of {pod.owner}"
    peers: list[Object] = []
    for rule in (rule for each in own for rule in each["spec"].get("ingress", [])):
        for each in rule.get("ports", [{"protocol": "TCP", "port": 1, "endPort": 65_535}]):
            if each.get("protocol", "TCP") == "TCP" and each["port"] <= port <= each.get("endPort", each["port"]):
                peers += rule.get("from", [{}])
    return peers


def _folder_is_mounted(container: Object, path: str) -> bool:
    return path.rpartition("/")[0] in [mount["mountPath"] for mount in container["volumeMounts"]]


def _file_is_mounted(release: Release, pod: PodTemplate, container: Object, path: str) -> bool:
    """Whether this file is a key of a ConfigMap or Secret that the container mounts."""
    folder, _, name = path.rpartition("/")
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
    if "secret" in volume:
        return name in [item["path"] for item in volume["secret"]["items"]]
    found = [each for each in release.of("ConfigMap") if each["metadata"]["name"] == volume["configMap"]["name"]]
    return name in found[0]["data"]


def _claim_is_mounted(pod: PodTemplate, container: Object, folder: str) -> bool:
    return any(mount["mountPath"] == folder and mount["name"] in pod.claims for mount in container["volumeMounts"])
