"""Every values file is linted, packaged, installed, upgraded and uninstalled by the real Helm library, and what is
written keeps every check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import table
from tests.chart.api_server import ApiServer
from tests.chart.checks import CHECKS
from tests.chart.helm import CHART, Helm
from tests.chart.released import Release
from tests.chart.rendering import VALUES, values_of
from tests.chart.security import restricted

NAMES = sorted(path.name.removesuffix("-values.yaml") for path in VALUES.glob("*-values.yaml"))


@pytest.fixture(scope="module")
def releases() -> dict[str, Release]:
    """The release of each values file, as rendered and written."""
    found = {}
    for name in NAMES:
        with ApiServer() as server:
            record = Helm(server).install(values_of(name))
            objects = list(yaml.safe_load_all(record["manifest"]))
            assert not server.refused and len(server.owned()) == len(objects)
            found[name] = Release(values_of(name), objects, record["info"]["notes"])
    return found


def test_the_values_files_are_those_that_were_asked_for() -> None:
    wanted = {"default", "gpu", "disk", "monitoring", "ha", "join", "sidecar", "multi-tenant", "node-local"}
    wanted |= {"tls", "tls-secrets"}
    assert set(NAMES) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_helm_lints_packages_installs_upgrades_and_uninstalls(name: str, tmp_path: Path) -> None:
    with ApiServer() as server:
        helm = Helm(server)
        helm.lint()
        archive = helm.package(tmp_path)
        first = helm.install(values_of(name), archive)
        assert first["info"]["status"] == "deployed" and first["manifest"]
        written = {key: each["metadata"]["resourceVersion"] for key, each in server.objects.items()}
        second = helm.upgrade({**values_of(name), "image": {"tag": "next"}}, archive)
        assert second["version"] == 2 and second["info"]["status"] == "deployed"
        kept = [key for key in server.objects if key in written and key[0] != "secrets"]
        assert len(kept) == len(server.owned()), "an upgrade of the image neither adds nor removes an object"
        helm.uninstall()
        assert not server.objects, "something is left"
        assert not server.refused


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_release_keeps(name: str, check: Callable[[Release], None], releases: dict[str, Release]) -> None:
    check(releases[name])
    table.note(name, len(releases[name].objects), check.__name__)


def test_the_same_values_render_the_same(releases: dict[str, Release]) -> None:
    with ApiServer() as server:
        again = list(yaml.safe_load_all(Helm(server).install(values_of("ha"))["manifest"]))
    assert again == releases["ha"].objects


@pytest.mark.parametrize("word", ["lookup", "rand", "helm.sh/hook", ".Capabilities", "genCA", "genSelf", "uuid", "now"])
def test_no_template_asks_the_cluster_or_draws_anything(word: str) -> None:
    for path in (CHART / "templates").iterdir():
        code = "".join(part.split("}}")[0] for part in path.read_text(encoding="utf-8").split("{{")[1:])
        words = code.replace("(", " ").replace(")", " ").split()
        assert word not in words and not (word.startswith((".", "helm")) and word in code), path.name


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("runAsNonRoot", False, "runAsNonRoot"),
        ("runAsUser", 0, "runAsUser"),
        ("privileged", True, "privileged"),
        ("allowPrivilegeEscalation", True, "allowPrivilegeEscalation"),
        ("capabilities", {"drop": []}, "capabilities.drop"),
        ("capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "capabilities.add"),
        ("seccompProfile", {"type": "Unconfined"}, "seccompProfile"),
        ("procMount", "Unmasked", "procMount"),
    ],
)
def test_the_check_of_restricted_sees(field: str, value: Any, says: str, releases: dict[str, Release]) -> None:
    pod = next(pod for pod in releases["default"].pods if pod.owner.endswith("-shard"))
    (container,) = pod.containers
    changed = {**container, "securityContext": {**container["securityContext"], field: value}}
    assert restricted(pod.spec, [container]) == []
    (fault,) = restricted(pod.spec, [changed])
    assert says in fault
