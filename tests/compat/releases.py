"""Releases of several versions of the protocol, as wheels that are built from their own commits.

A release is a folder with an installed wheel. A process of it runs without the virtual environment's site, which would
import this tree's code, and has the folder and the installed dependencies as its path.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kvcluster.release import PROTOCOL_VERSION

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "compat"
_VERSIONS = tomllib.loads((Path(__file__).parent / "releases.toml").read_text("utf-8"))["versions"]
RECORDED: dict[int, str] = {int(version): commit for version, commit in _VERSIONS.items()}
"""The last commit of each version before this tree's."""


def installed(version: int) -> Path:
    """Returns the folder with the release of that version of the protocol, built if it is not there. This tree's own is
    built each time. Raises CalledProcessError if it cannot be built."""
    if version == PROTOCOL_VERSION:
        return _install(ROOT, BUILD / "this")
    folder = BUILD / RECORDED[version]
    if folder.is_dir():
        return folder
    with TemporaryDirectory() as scratch:
        _extract(RECORDED[version], Path(scratch))
        return _install(Path(scratch), folder)


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process of the release in that folder, for `python -S`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), sysconfig.get_paths()["purelib"]])}


def _extract(commit: str, into: Path) -> None:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(into, **options)


def _install(source: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    with TemporaryDirectory() as wheels:
        build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, str(source)]
        subprocess.run(build, check=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(wheels).glob("*.whl")
        beside = folder.with_name(f"{folder.name}.new")
        install = [*pip, "install", "--no-deps", "--upgrade", "--target", str(beside), str(wheel)]
        subprocess.run(install, check=True, stdin=subprocess.DEVNULL)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
    return folder
