"""What a message or a page says to install brings what is missing, by the project's own list of extras."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvcluster.errors import KVClusterError
from kvcluster.extras import EXTRAS, install, needs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Those that are not named as they are imported."""


def brought(requirement: Requirement, depth: int = 1) -> Iterator[str]:
    """Yields a distribution, and those that it brings by its own metadata if it is installed."""
    yield canonicalize_name(requirement.name)
    try:
        further = metadata.requires(requirement.name) or () if depth else ()
    except metadata.PackageNotFoundError:
        return
    for each in map(Requirement, further):
        wanted = [{"extra": extra} for extra in (*requirement.extras, "")]
        if each.marker is None or any(each.marker.evaluate(extra) for extra in wanted):
            yield from brought(each, depth - 1)


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_that_is_named_for_a_package_brings_it(package: str) -> None:
    listed = map(Requirement, PROJECT["optional-dependencies"][EXTRAS[package]])
    assert canonicalize_name(DISTRIBUTIONS.get(package, package)) in {name for each in listed for name in brought(each)}


def uses() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the packages that each use of `needs` and `install` names."""
    for path in (ROOT / "kvcluster").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "kvcluster.extras" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("needs", "install"):
                    yield str(path), tuple(ast.literal_eval(argument) for argument in node.args)


def test_every_use_names_packages_that_an_extra_brings() -> None:
    found = list(uses())
    assert len(found) > 10
    assert {package for _, packages in found for package in packages} == EXTRAS.keys()


def test_no_message_names_an_extra_by_itself() -> None:
    named = re.compile(r"pip install\b[^\n]*kvcluster")
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "kvcluster").rglob("*.py")}
    assert [path.name for path, text in texts.items() if named.search(text)] == ["extras.py"]


def test_one_command_installs_all_that_a_command_needs() -> None:
    assert install("ray", "rich", "torch") == "pip install 'kvcluster[cluster,transformers]'"
    with pytest.raises(KVClusterError) as refused, needs("ray", "torch"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    assert str(refused.value) == (
        "this needs torch, which is not installed: pip install 'kvcluster[cluster,transformers]'"
    )


PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
NO_INDEX = "No package index has a release yet"
"""To be removed, with what it says, by the first release."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_installs_kvcluster_says_what_stands_for_the_name(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    if re.search(r"^(?!\|).*pip install (kvcluster|'kvcluster)", text, re.MULTILINE):
        assert NO_INDEX in text or "[a wheel stands for the name](../README.md#quickstart)" in text


@pytest.mark.parametrize("page", PAGES)
def test_every_extra_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {extra for found in re.findall(r"kvcluster\[([\w,-]+)\]", text) for extra in found.split(",")}
    assert named <= PROJECT["optional-dependencies"].keys()
