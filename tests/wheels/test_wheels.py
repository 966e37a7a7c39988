"""How `make wheels` chooses what it builds with, and what a package index shows. What it builds: checks.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import wheels
from tools.long_description import dynamic_metadata, with_absolute_links

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = "https://example.org/kv"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](docs/x.md)", f"[a]({SOURCE}/blob/v1.2.0/docs/x.md)"),
        ("[a](./docs/x.md#part)", f"[a]({SOURCE}/blob/v1.2.0/docs/x.md#part)"),
        ("![a](docs/x.svg)", f"![a]({SOURCE}/raw/v1.2.0/docs/x.svg)"),
        ("[![a](docs/x.svg)](docs/x.md)", f"[![a]({SOURCE}/raw/v1.2.0/docs/x.svg)]({SOURCE}/blob/v1.2.0/docs/x.md)"),
        ('<img src="docs/x.svg">', f'<img src="{SOURCE}/raw/v1.2.0/docs/x.svg">'),
        ('<a href="docs/x.md">', f'<a href="{SOURCE}/blob/v1.2.0/docs/x.md">'),
        ("[a](#part)", "[a](#part)"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[a](mailto:a@example.org)", "[a](mailto:a@example.org)"),
        ("```\n[a](docs/x.md)\n```\n", "```\n[a](docs/x.md)\n```\n"),
    ],
)
def test_links_of_a_description_lead_to_the_files_of_its_release(written: str, shown: str) -> None:
    assert with_absolute_links(written, SOURCE, "1.2.0") == shown


def test_links_of_a_development_version_lead_to_the_main_branch() -> None:
    assert with_absolute_links("[a](b.md)", SOURCE, "1.2.0.dev0") == f"[a]({SOURCE}/blob/main/b.md)"


def test_the_readme_has_no_relative_link_on_a_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = dynamic_metadata({"input": "README.md"}, {"urls": PROJECT["urls"], "version": "1.2.0"})
    assert made["readme"]["content-type"] == "text/markdown"
    text = re.sub(r"^```.*?^```", "", made["readme"]["text"], flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert any(f"{PROJECT['urls']['Source']}/blob/v1.2.0/docs/" in target for target in targets)
    assert [target for target in targets if not re.match(r"https://|#", target)] == []


def test_every_python_that_is_supported_gets_wheels() -> None:
    said = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    assert list(wheels.PYTHONS) == said


def test_what_builds_wheels_is_locked_with_its_hashes() -> None:
    chosen = wheels.locked(wheels.BACKEND, (ROOT / "requirements.lock").read_text(encoding="utf-8"))
    entries = re.split(r"\n(?=\w)", chosen)
    assert [entry.partition("==")[0] for entry in entries] == sorted(wheels.BACKEND)
    assert all("--hash=sha256:" in entry for entry in entries)


def test_what_the_lock_does_not_have_is_named() -> None:
    with pytest.raises(AssertionError, match=r"requirements\.lock has no gone"):
        wheels.locked(["one", "gone"], "# of one\none==1 \\\n    --hash=sha256:1\n")


def program(folder: Path, version: str, prints: str) -> Path:
    """A program that answers as an interpreter would."""
    folder.mkdir(parents=True)
    made = folder / f"python{version}"
    made.write_text(f"#!/bin/sh\necho {prints}\n", encoding="utf-8")
    made.chmod(0o755)
    return made


def test_an_interpreter_must_be_what_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "shims", "3.12", "3.11")  # of another version, as a launcher may be
    right = program(tmp_path / "pyenv/versions/3.12.1/bin", "3.12", "3.12")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    assert wheels.interpreter("3.12") == right
    assert wheels.interpreter("3.99") is None


def test_a_python_that_is_missing_is_named_and_keeps_no_other_from_being_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[str, str]] = []

    def wheel(python: Path, version: str, architecture: str, source: Path, into: Path) -> Path:
        built.append((version, architecture))
        made = into / f"kvcluster-{version}-{architecture}.whl"
        made.touch()
        return made

    monkeypatch.setattr(wheels, "WORK", tmp_path / "work")
    monkeypatch.setattr(wheels, "ENV", tmp_path / "env")
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/twine").symlink_to("/bin/true")
    monkeypatch.setattr(wheels, "backend", lambda version: None if version == "3.13" else Path(sys.executable))
    monkeypatch.setattr(wheels, "sdist", lambda python, into: into / "kvcluster-1.tar.gz")
    monkeypatch.setattr(wheels, "unpacked", lambda archive: tmp_path)
    monkeypatch.setattr(wheels, "wheel", wheel)
    assert wheels.main(["--into", str(tmp_path / "dist")]) == 1
    assert built == [(version, each) for version in ("3.10", "3.11", "3.12") for each in wheels.ARCHITECTURES]
    assert "no wheels for Python 3.13" in capsys.readouterr().err
    assert wheels.main(["--into", str(tmp_path / "dist"), "--python", "3.12"]) == 0
    with pytest.raises(SystemExit, match=r"no wheels for Python 3\.13"):
        wheels.main(["--python", "3.13"])
