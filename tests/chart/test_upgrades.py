"""Which pods an upgrade replaces: the templates that change, and no other."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.api_server import ApiServer
from tests.chart.helm import CHART, Helm, HelmError
from tests.chart.rendering import values_of

_GROUPS = {"groups": {"big": {"shard": {"ram_bytes": "2GiB"}}, "small": {}}}
_DISK = {"shards": {"shard": {"host_bytes": "1GiB", "disk_bytes": "10GiB"}}}
_NO_REDIS = {"redis": {"enabled": False}}
_TLS = {"security": {"encryption": "tls", "certManager": {"issuerRef": {"name": "ca"}}}}
ALL = {"head", "big", "small"}
ROOT = CHART.parents[1]
Values = dict[str, Any]


def merged(*parts: Values) -> Values:
    out: Values = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(out.get(name), dict)
            out[name] = merged(out[name], value) if both else value
    return out


def replaced(before: Values, after: Values) -> set[str]:
    """Upgrades from one to the other, and returns the controllers whose pods change."""
    with ApiServer() as server:
        helm = Helm(server)
        helm.install(before)
        first = templates(server)
        helm.upgrade(after)
        second = templates(server)
    return {name for name in first.keys() & second.keys() if first[name] != second[name]}


def templates(server: ApiServer) -> dict[str, str]:
    return {
        each["metadata"]["name"].removeprefix("cache-kvcluster-"): json.dumps(each["spec"]["template"], sort_keys=True)
        for each in server.owned()
        if each["kind"] in ("StatefulSet", "Deployment")
    }


@pytest.mark.parametrize(
    ("change", "pods"),
    [
        ({"image": {"tag": "next"}}, ALL),
        ({"auth": {"revision": "2"}}, {*ALL, "redis"}),
        ({"groups": {"big": {"shard": {"ram_bytes": "3GiB"}}}}, {"big"}),
        ({"config": {"shard": {"ram_bytes": "512MiB"}}}, {"small"}),
        ({"config": {"shard": {"lease_ttl_ms": 9000}}}, {"big", "small"}),
        ({"groups": {"big": {"replicas": 5}}}, set()),
        ({"groups": {"new": {}}}, set()),
        ({"config": {"coordinator": {"hot_loads": 64}}}, {"head"}),
        ({"config": {"client": {"deadline_ms": 500}}}, set()),
        ({"config": {"log": {"format": "text"}}}, {"head", "big", "small"}),
        ({"networkPolicy": {"enabled": False}}, set()),
        ({"monitoring": {"enabled": True}}, set()),
        ({"commonLabels": {"team": "inference"}}, set()),
        ({"groups": {"big": {"updateStrategy": {"partition": 1}}}}, set()),
        ({"groups": {"big": {"podDisruptionBudget": {"enabled": False}}}}, set()),
        ({"connection": {"extraConfig": {"report": True}}}, set()),
        ({"head": {"podAnnotations": {"a": "b"}}}, {"head"}),
        ({"security": {"encryption": "network"}}, {"head", "big", "small"}),
        (_TLS, {"head", "big", "small"}),
    ],
    ids=lambda each: json.dumps(each) if isinstance(each, dict) else "",
)
def test_an_upgrade_replaces_only_what_must_start_again(change: Values, pods: set[str]) -> None:
    assert replaced(_GROUPS, merged(_GROUPS, change)) == pods


@pytest.mark.parametrize(
    "change",
    [
        {"certManager": {"issuerRef": {"kind": "ClusterIssuer"}, "duration": "1000h", "renewBefore": "500h"}},
        {"certManager": {"clients": ["operator"], "dnsNames": ["kv.example"]}},
    ],
)
def test_what_cert_manager_does_restarts_nothing(change: Values) -> None:
    """Certificates are read again when they change."""
    before = merged(_GROUPS, _TLS)
    assert replaced(before, merged(before, {"security": change})) == set()


@pytest.mark.parametrize(
    ("extra", "restarts"),
    [
        ({}, True),
        ({**_NO_REDIS, "head": {"restartOnConfigChange": True}}, True),
        (_NO_REDIS, False),
        ({"head": {"restartOnConfigChange": False}}, False),
    ],
)
def test_the_coordinators_settings_replace_the_head_where_nothing_is_lost_by_it(extra: Values, restarts: bool) -> None:
    before = merged(_GROUPS, extra)
    changed = merged(before, {"config": {"coordinator": {"hot_loads": 64}}})
    assert replaced(before, changed) == ({"head"} if restarts else set())


def test_a_chart_of_the_next_version_replaces_no_pod(tmp_path: Any) -> None:
    newer = tmp_path / "kvcluster"
    newer.mkdir()
    for path in (path for path in CHART.rglob("*") if path.is_file()):
        target = newer / path.relative_to(CHART)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (newer / "files" / "dashboards").mkdir(exist_ok=True)
    about = yaml.safe_load((newer / "Chart.yaml").read_text(encoding="utf-8"))
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "9.9.9"}), encoding="utf-8")
    with ApiServer() as server:
        helm = Helm(server)
        values = {**values_of("disk"), "image": {"tag": "pinned"}}
        helm.install(values)
        before = templates(server)
        helm.upgrade(values, newer)
        assert templates(server) == before
        labels = [each["metadata"]["labels"]["helm.sh/chart"] for each in server.owned()]
        assert set(labels) == {"kvcluster-9.9.9"}


def test_what_kubernetes_lets_nobody_change_is_refused_here_too() -> None:
    with ApiServer() as server:
        helm = Helm(server)
        helm.install(_DISK)
        with pytest.raises(HelmError, match="volumeClaimTemplates cannot be changed"):
            helm.upgrade(merged(_DISK, {"shards": {"disk": {"size": "100Gi"}}}))


@pytest.mark.parametrize(
    ("values", "pages", "leave_s", "stop_ms", "grace_s"),
    [
        ({"config": {"shard": {"ram_bytes": "100GiB"}}}, "drain", 205, 20_000, 250),
        (
            {"config": {"shard": {"ram_bytes": "100GiB"}}, "shards": {"stop": {"maxSeconds": 60}}},
            "drain",
            60,
            20_000,
            105,
        ),
        (
            {"config": {"shard": {"ram_bytes": "100GiB"}}, "shards": {"stop": {"noticeSeconds": 30}}},
            "drain",
            20,
            20_000,
            30,
        ),
        (merged(_DISK, {"shards": {"shard": {"host_bytes": "49GiB"}}}), "save", 0, 205_000, 250),
        (merged(_DISK, {"shards": {"stop": {"pages": "drain"}}}), "drain", 10, 0, 55),
        (merged(_DISK, {"config": {"shard": {"stop_ms": 5_000}}}), "save", 0, 5_000, 50),
    ],
)
def test_the_time_to_stop_is_computed_from_bytes_and_a_rate(
    values: Values, pages: str, leave_s: int, stop_ms: int, grace_s: int
) -> None:
    with ApiServer() as server:
        record = Helm(server).install(values)
    objects = list(yaml.safe_load_all(record["manifest"]))
    (shards,) = [
        each
        for each in objects
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "cache-kvcluster-shard"
    ]
    pod = shards["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--leave-s") + 1] == str(leave_s)
    assert pod["terminationGracePeriodSeconds"] == grace_s
    (config,) = [each for each in objects if each["metadata"]["name"] == "cache-kvcluster-config"]
    if "disk" in config["data"]["cluster.toml"]:
        text = config["data"]["cluster.toml"]
        assert f"stop_ms = {stop_ms}" in text or "disk_dir" not in text
    assert ("copies" if pages == "drain" else "saves") in record["info"]["notes"]


def test_values_that_an_older_chart_did_not_have_are_missed_by_name_where_its_values_are_reused(tmp_path: Path) -> None:
    """As `helm upgrade --reuse-values` does, which the documentation does not recommend."""
    older = tmp_path / "kvcluster"
    shutil.copytree(CHART, older, symlinks=False)
    values = yaml.safe_load((older / "values.yaml").read_text(encoding="utf-8"))
    del values["nodeLocal"]
    (older / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (older / "values.schema.json").unlink()
    (older / "templates" / "_checks.tpl").write_text('{{- define "kvcluster.checks" }}{{ end }}', encoding="utf-8")
    for template in (older / "templates").glob("*.yaml"):
        if template.name != "serviceaccount.yaml":
            template.unlink()
    (older / "templates" / "NOTES.txt").unlink()
    with ApiServer() as server:
        helm = Helm(server)
        helm.install({"runAsUser": 1_234}, older)
        with pytest.raises(HelmError, match="nodeLocal"):
            helm.upgrade({}, reuse_values=True)
        helm.upgrade({"runAsUser": 1_234})
    for page in ("docs/kubernetes.md", "helm/kvcluster/README.md", "helm/kvcluster/templates/NOTES.txt"):
        commands = re.findall(r"^ *helm upgrade .*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert not any(" --reuse-values" in command for command in commands), page
