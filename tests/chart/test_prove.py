"""deploy/kubernetes/prove.sh, run as it is against a kubectl and a helm that answer from the rendered chart: what it
says when all is well, and what it says of each thing that can go wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcluster.config.ports import port_table
from kvcluster.runtime.auth import digest
from tests.chart.fake_cluster import WITH_VALUE, WITHOUT_VALUE, FakeCluster, Object
from tests.chart.released import Release
from tests.chart.rendering import ROOT, render
from tests.chart.schemas import check_schema
from tests.chart.scripted_pods import ScriptedPods

SCRIPT = ROOT / "deploy" / "kubernetes" / "prove.sh"
IMAGE = "registry.example/kvcluster:1"
TITLES = re.findall(r'claim "([^"]+)" \w+', SCRIPT.read_text(encoding="utf-8"))
POLICIES = [title for title in TITLES if " reach" in title]
CLUSTER, STRANGER, ENGINE, MONITORING = POLICIES

FAULTS: dict[str, tuple[list[str], str]] = {
    "admits-all": (["the namespace refuses what is not restricted"], "does not enforce Pod Security"),
    "refuses-shards": (["restricted admits every pod"], "pods of cache-kvcluster-shard are missing"),
    "unbound": (["pods are scheduled and volumes bound"], "disk-cache-kvcluster-shard-1"),
    "unready": (["startup and readiness probes succeed"], "timed out waiting"),
    "wrong-bytes": (["what one pod stores another loads"], "other bytes than were stored"),
    "stores-less": (["what one pod stores another loads"], "not all was stored"),
    "all-closed": ([CLUSTER, ENGINE, MONITORING], "engine-a reaches nothing, and should reach"),
    "no-policies": ([STRANGER, ENGINE, MONITORING, CLUSTER], "stranger reaches .*6379.* and should reach nothing"),
    "token-unseen": (["changed tokens are followed"], "TimeoutError"),
    "token-stays": (["changed tokens are followed"], "TimeoutError"),
    "token-restarts": (["changed tokens are followed"], "a pod or a container was restarted"),
    "no-budget": (["a second eviction at once is refused"], "both pods of the group were evicted at once"),
    "volume-lost": (["a deleted pod comes back with its volume"], "came back with another volume"),
    "pages-lost": (["a deleted pod comes back with its volume"], r"\d+ of \d+ hits kept"),
    "head-takes-shards": (["shards go on when the head is replaced"], "a shard or Redis was restarted"),
    "upgrade-loses": (["a rolling upgrade keeps the hits"], r"\d+ of 384 hits kept"),
    "upgrade-skips": (["a rolling upgrade keeps the hits"], "cache-kvcluster-shard-0 was not replaced"),
    "upgrade-takes-head": (["a rolling upgrade keeps the hits"], "the head was replaced, too"),
    "leftovers": (["uninstalling leaves the volumes alone"], "these are left: service/"),
    "volumes-gone": (["uninstalling leaves the volumes alone"], "0 claims of volumes are left"),
}
"""What goes wrong: the claims that fail by it, and what the script says."""


@cache
def _rendered(values: str, release: str, namespace: str) -> list[Object]:
    return render(json.loads(values), release=release, namespace=namespace)


def rendered(values: Mapping[str, Any], release: str, namespace: str) -> list[Object]:
    """Renders the same values once for all runs."""
    return _rendered(json.dumps(values, sort_keys=True), release, namespace)


class Run:
    """One run of the script."""

    def __init__(self, folder: Path, *options: str, fault: str = "") -> None:
        faults = frozenset({fault} - {""})
        with FakeCluster(folder, rendered, check_schema, ScriptedPods(faults), faults) as self.cluster:
            done = subprocess.run(
                ["bash", str(SCRIPT), *options],
                env=self.cluster.environment | {"TMPDIR": str(folder)},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        self.status, self.said, self.complaints = done.returncode, done.stdout, done.stderr
        self.left = [path for path in folder.iterdir() if path.name != "bin"]

    def verdicts(self) -> dict[str, str]:
        """The rows of the table, by their titles."""
        found = re.findall(r"^(holds|FAILED) +(.*)$", self.said, re.MULTILINE)
        return {title: verdict for verdict, row in found for title in TITLES if row.startswith(title)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("good"), "--image", IMAGE, "--storage-class", "fast")


def test_all_claims_hold_and_everything_is_taken_away(good: Run) -> None:
    assert good.status == 0, good.said + good.complaints
    assert good.verdicts() == dict.fromkeys(TITLES, "holds") and len(TITLES) == 15
    assert not good.cluster.namespaces and not good.left
    assert "384 of 384 hits kept (100 %)" in good.said and "a new token after 42 s" in good.said
    assert "No script can try: vLLM itself" in good.said


def test_no_secret_is_printed_or_given_on_a_command_line(good: Run) -> None:
    words = [word for command in good.cluster.commands for word in command]
    for secret in good.cluster.secrets.values():
        for value in filter(None, (line.strip() for each in secret.values() for line in each.decode().splitlines())):
            assert value not in good.said + good.complaints and not any(value in word for word in words)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_said(fault: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "--image", IMAGE, "--timeout", "1", fault=fault)
    fails, says = FAULTS[fault]
    assert run.status == 1, run.said + run.complaints
    found = run.verdicts()
    assert {title for title, verdict in found.items() if verdict == "FAILED"} == set(fails), run.said + run.complaints
    assert re.search(says, run.said + run.complaints), run.said + run.complaints
    assert not run.cluster.namespaces and not run.left


def test_each_claim_is_made_to_fail() -> None:
    assert {title for titles, _ in FAULTS.values() for title in titles} == {*TITLES}


def test_what_is_kept_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "--image", IMAGE, "--namespace", "mine", "--keep")
    assert run.status == 0, run.said + run.complaints
    assert [*run.verdicts()] == TITLES[:-1] and run.said.endswith("to remove it: kubectl delete namespace mine\n")
    assert run.cluster.namespaces == {"mine": {"pod-security.kubernetes.io/enforce": "restricted"}}
    assert run.cluster.claims and len(run.cluster.pods) == 8 and not run.left


def test_options_reach_the_release(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("redis: {image: 'registry.example/redis:7'}\n", encoding="ascii")
    pinned = f"registry.example:5000/kvcluster@sha256:{'0' * 64}"
    options = ["--storage-class", "fast", "--values", str(tmp_path / "more.yaml"), "--keep"]
    cluster = Run(tmp_path, "--image", pinned, *options).cluster
    images = {each["image"] for pod in cluster.pods.values() for each in pod["spec"]["containers"]}
    assert images == {pinned, "registry.example/redis:7"}
    assert {each["spec"]["storageClassName"] for each in cluster.claims.values()} == {"fast"}


@pytest.mark.parametrize("encryption", ["none", "tls"])
def test_its_clients_connect_as_the_release_says(encryption: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"encryption": encryption}
    if encryption == "tls":
        given["certManager"] = {"issuerRef": {"name": "ours", "kind": "ClusterIssuer"}}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"security": given}), encoding="ascii")
    run = Run(tmp_path, "--image", IMAGE, "--values", str(tmp_path / "more.yaml"), "--keep")
    assert run.status == 0, run.said + run.complaints
    release = Release({}, rendered({"security": given}, "cache", "kvcluster-prove"))
    connection = release.one("ConfigMap", "-connection")
    spec = run.cluster.pods["engine-a"]["spec"]
    (client,) = spec["containers"]
    assert client["envFrom"] == [{"configMapRef": {"name": connection["metadata"]["name"]}}]
    (volume,) = [each["secret"] for each in spec["volumes"] if each["name"] == "tls"]
    assert volume["optional"] is True and volume["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    (mount,) = [each["mountPath"] for each in client["volumeMounts"] if each["name"] == "tls"]
    if encryption == "tls":
        assert connection["data"]["KVCLUSTER_CA_FILE"] == f"{mount}/ca.crt"
        assert volume["secretName"] in [each["spec"]["secretName"] for each in release.of("Certificate")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--image is missing"),
        (["--image", "registry.example:5000/kvcluster"], "needs a tag or a digest"),
        (["--image", IMAGE, "--timeout", "5m"], "whole seconds, not 5m"),
        (["--image", IMAGE, "--timeout"], "--timeout needs a value"),
        (["--image", IMAGE, "--forever"], "unknown option: --forever"),
    ],
)
def test_what_it_cannot_begin_with_is_refused(options: list[str], says: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *options)
    assert run.status == 2 and says in run.complaints and not run.cluster.commands


def test_a_namespace_that_is_there_is_not_touched(tmp_path: Path) -> None:
    with FakeCluster(tmp_path, rendered, check_schema, ScriptedPods()) as cluster:
        cluster.namespaces["llm"] = {}
        command = ["bash", str(SCRIPT), "--image", IMAGE, "--namespace", "llm"]
        done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "the namespace llm exists" in done.stderr
    assert cluster.namespaces == {"llm": {}} and len(cluster.commands) == 2


def test_help_is_printed_without_a_cluster(tmp_path: Path) -> None:
    run = Run(tmp_path, "--help")
    said = set(re.findall(r"--[a-z-]+", run.said))
    assert run.status == 0 and not run.cluster.commands
    assert said == {"--image", "--namespace", "--storage-class", "--values", "--timeout", "--keep"}


def test_the_page_lists_the_claims() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    table = page.partition("## Prove it on your cluster")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[1:] == TITLES


# ------------------------------------------------------------------------- the script and the chart's objects


def test_the_secrets_have_what_the_pods_mount(good: Run) -> None:
    mounted = [
        (volume["secret"]["secretName"], item["key"])
        for each in release().pods
        for volume in each.spec["volumes"]
        if "secret" in volume
        for item in volume["secret"]["items"]
    ]
    assert {key for _, key in mounted} == {"secret", "tokens"}
    for name, key in mounted:
        assert len(good.cluster.secrets[name][key].strip()) >= 32
    token = good.cluster.secrets["prove-tokens"]["token"].decode()
    assert good.cluster.secrets["cache-kvcluster-auth"]["tokens"].decode() == f"sha256:{digest(token)}  prove\n"


def test_the_ports_are_those_of_the_program() -> None:
    (asked,) = re.findall(r'reach \$\(at "([\d ]+)" "([\d ]+)" "([\d ]+)"\)', SCRIPT.read_text(encoding="utf-8"))
    of_head, of_shard, of_service = [{int(port) for port in ports.split()} for ports in asked]
    uses = port_table(release().config)
    firsts = {use.ports.start for use in uses}
    on_head = {use.ports.start for use in uses if use.listener in ("coordinator", "Ray's head")}
    assert on_head <= of_head <= firsts and of_shard < firsts | {release().config.metrics.port + 1}
    service = release().one("Service", "-head")["spec"]["ports"]
    assert of_service == {each["port"] for each in service}


def release() -> Release:
    values: dict[str, Any] = yaml.safe_load((SCRIPT.parent / "prove-values.yaml").read_text(encoding="utf-8"))
    return Release(values, rendered(values, "cache", "llm"))


# ------------------------------------------------------------------------------------------------ its means


@pytest.mark.parametrize("checker", [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])])
def test_the_script_is_sound(checker: list[str]) -> None:
    done = subprocess.run([*checker, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kubectl", [each for each in [shutil.which("kubectl")] if each])
@pytest.mark.parametrize(
    "verb", [["create", "secret", "generic"] if verb == "create" else [verb] for verb in WITH_VALUE]
)
def test_the_options_are_those_of_a_real_kubectl(verb: list[str], kubectl: str) -> None:
    verb = ["rollout", "status"] if verb == ["rollout"] else verb
    said = "".join(
        subprocess.run([kubectl, *each], capture_output=True, text=True, check=True, timeout=60).stdout
        for each in ([*verb, "--help"], [verb[0], "--help"], ["options"])
    )
    for option in ("-n", *WITH_VALUE[verb[0]], *WITHOUT_VALUE.get(verb[0], ())):
        assert re.search(rf"^ +(-\w, )?{option}[,=]", said, re.MULTILINE), option


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["get", "pods", "--no-heading"], "unknown flag: --no-heading"),
        (["get", "pods", "-o"], "flag needs an argument: -o"),
        (["fetch", "pods"], 'unknown command "fetch"'),
        (["-n", "nowhere", "get", "pods", "-o", "name"], "NotFound"),
        (["-n", "llm", "get", "pod", "none", "-o", "name"], "NotFound"),
        (["-n", "llm", "run", "x", "--image=y", "--restart=Never", "--dry-run=server"], "violates PodSecurity"),
    ],
)
def test_the_stand_in_refuses_what_a_cluster_refuses(command: list[str], says: str, tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, rendered, check_schema, ScriptedPods())
    cluster.namespaces["llm"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    status, _, complaint = cluster.run(["kubectl", *command], b"")
    assert status == 1 and says in complaint.decode()
