"""The Dockerfile and what goes into it, held to the program, the chart and the documents without building anything.

`make image-check` builds it (tests/deploy/image_checks.py).
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from kvcluster.release import __version__
from tools.extras import requirements

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
DOCUMENT = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8").partition("\n## Image\n")[2].partition("\n## ")[0]
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "helm/kvcluster/values.yaml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str, str]]:
    """Each instruction with its stage ("" before the first), its name and the rest, in one line."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", TEXT, flags=re.MULTILINE))
    found, stage = [], ""
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            stage = rest.split(" AS ")[1]
        found.append((stage, name, " ".join(rest.split())))
    return found


LINES = instructions()


def of(name: str) -> list[str]:
    """The rest of every instruction of that name."""
    return [rest for _, each, rest in LINES if each == name]


def test_a_container_runs_as_the_user_of_the_chart() -> None:
    user, group = VALUES["runAsUser"], VALUES["runAsGroup"]
    assert of("USER") == [f"{user}:{group}"]
    assert f"groupadd --gid {group} " in TEXT
    assert f"useradd --uid {user} --gid {group} " in TEXT


def test_a_container_runs_the_command_of_the_chart_and_is_told_to_end_by_sigterm() -> None:
    (entrypoint,), (stop,) = of("ENTRYPOINT"), of("STOPSIGNAL")
    assert yaml.safe_load(entrypoint) == VALUES["image"]["command"]
    assert stop == "SIGTERM"
    # Kubernetes has probes, which know what a process is for; another check would only be a second opinion.
    assert not of("HEALTHCHECK") and not of("VOLUME") and not of("EXPOSE")


def test_the_tag_the_label_and_the_chart_name_this_release() -> None:
    assert f"VERSION={__version__}" in of("ARG")
    assert f"-t kvcluster:{__version__} ." in TEXT and f"/kvcluster:{__version__} " in DOCUMENT
    assert 'org.opencontainers.image.version="${VERSION}"' in TEXT
    assert (VALUES["image"]["repository"], VALUES["image"]["tag"]) == ("kvcluster", "")  # "": the chart's appVersion


def test_the_shipped_stages_start_from_the_base_and_build_nothing() -> None:
    parents = {rest.split(" AS ")[1]: rest.split(" AS ")[0] for rest in of("FROM")}
    for target in ("cpu", "cuda"):
        assert (parents[target], parents["runtime"], parents["python"]) == ("runtime", "python", "${BASE}")
    assert list(parents)[-1] == "cpu"  # what is built where no target is named
    for stage, name, rest in LINES:
        if stage in ("python", "runtime", "cpu", "cuda") and name == "RUN":
            assert not re.search(r"\bpip\b|g\+\+|-dev\b", rest), rest
        if stage in ("runtime", "cpu", "cuda") and name == "COPY":
            assert rest.startswith("--from="), rest


def test_packages_are_installed_by_the_hashes_of_the_lock() -> None:
    installs = [rest for stage, name, rest in LINES if name == "RUN" and " install " in rest and "pip" in rest]
    (download,) = [rest for rest in of("RUN") if " download " in rest]
    assert "--require-hashes --only-binary=:all:" in download and "-r requirements.lock" in download
    without_index = [rest for rest in installs if "--no-index" in rest or "--no-deps --no-warn" in rest]
    (torch,) = [rest for rest in installs if "${TORCH}" in rest]
    assert len(without_index) == len(installs) - 1
    assert "-c pins.txt" in torch
    assert "TORCH=torch==2.13.0" in of("ARG")
    assert "torch==2.13.0" in (ROOT / "tools/lock.in").read_text(encoding="utf-8")


def test_what_the_image_installs_is_the_extras_that_it_serves() -> None:
    (extras,) = re.findall(r"extras\.py (.*?) > wanted\.txt \\\n && tools/bin/pip .* --no-index", TEXT)
    names = {Requirement(line).name for line in requirements(ROOT / "pyproject.toml", extras.split())}
    assert names == {"grpcio", "protobuf", "xxhash", "tomli", "ray", "rich", "pyzmq", "msgspec"}
    (more,) = re.findall(r"extras\.py (\w+) > wanted\.txt \\\n && .* \"\$\{TORCH\}\"", TEXT)
    assert {"torch", "transformers"} <= {
        Requirement(line).name for line in requirements(ROOT / "pyproject.toml", [more])
    }


def test_the_oldest_python_that_it_admits_is_one_that_kvcluster_supports() -> None:
    (oldest, newest) = re.search(r"its own Python of (3\.\d+) to (3\.\d+)", TEXT).groups()  # type: ignore[union-attr]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert {oldest, newest} <= set(supported) and newest == supported[-1]


def test_every_path_that_is_copied_exists_and_is_sent_and_nothing_else_is() -> None:
    copied = [path for rest in of("COPY") if not rest.startswith("--from=") for path in rest.split()[:-1]]
    sent = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert sent[0] == "*"
    assert sorted(f"!{path}" for path in copied) == sorted(line for line in sent if line[0] == "!")
    for path in copied:
        assert (ROOT / path).exists(), path
    hidden = [line for line in sent[1:] if line[0] != "!"]
    for path in ("kvcluster/memory/__pycache__", "kvcluster/memory/_native.cpython-311-x86_64-linux-gnu.so"):
        assert any(fnmatch(path, pattern) for pattern in hidden), path


def test_every_argument_and_target_is_documented() -> None:
    arguments = {rest.split("=")[0] for rest in of("ARG")}
    assert {name for name in arguments if f"`{name}`" not in DOCUMENT} == set()
    assert "`cpu`" in DOCUMENT and "`cuda`" in DOCUMENT


def test_make_builds_and_checks_it_with_the_engines_that_the_document_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\nimage:")[2].partition("\n\n")[0]
    assert "-f deploy/docker/Dockerfile --target $(TARGET)" in recipe
    for engine in ("docker", "podman", "buildah"):
        assert engine in DOCUMENT
    assert "make image" in DOCUMENT and "make image-check" in DOCUMENT
