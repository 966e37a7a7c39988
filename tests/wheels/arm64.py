"""A Python for aarch64 that runs on this machine under qemu: Debian's, unpacked into a folder, with a wheel beside it.

Nothing is installed on the machine: apt gets a folder of its own, with no packages in it and aarch64 as its
architecture. What is there already is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import wheels

ROOT = Path(__file__).parents[2]
NEEDED = ("qemu-aarch64", "apt-get", "apt-cache", "dpkg-deb")
BESIDE = (
    *("grpcio", "protobuf", "typing-extensions", "xxhash"),  # what a wheel needs
    *("attrs", "hypothesis", "iniconfig", "packaging", "pluggy", "pygments", "pytest", "pytest-timeout"),
    "sortedcontainers",
)
"""Of requirements.lock: the client's dependencies, and what runs tests."""

_CONFIG = """
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "{folder}";
Dir::State::status "{folder}/status";
Dir::State::Lists "{folder}/lists";
Dir::Cache "{folder}/cache";
"""


@dataclass(frozen=True)
class Arm64:
    """The interpreter, its version such as "3.11", and the folder with what it imports."""

    root: Path
    version: str
    site: Path

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        qemu = ["qemu-aarch64", "-L", str(self.root), str(self.root / f"usr/bin/python{self.version}")]
        return subprocess.run(
            [*qemu, *arguments],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def prepare(folder: Path, dist: Path) -> Arm64:
    """Returns Debian's Python with the wheel for it from `dist`. Raises AssertionError if a program is missing, and
    CalledProcessError if Debian's packages or those of requirements.lock cannot be had."""
    lacking = [program for program in NEEDED if shutil.which(program) is None]
    assert not lacking, f"there is no {', '.join(lacking)} here; on Debian: apt-get install qemu-user"
    root = folder / "root"
    marker = folder / "version"
    if not marker.exists():
        version = _unpack(folder, root)
        marker.write_text(version, "utf-8")
    version = marker.read_text("utf-8")
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    (wheel,) = dist.glob(f"kvcluster-*-cp{version.replace('.', '')}-*-{wheels.tag('aarch64')}.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(site)]
    pip += ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    for platform in (wheels.tag("aarch64"), "manylinux_2_17_aarch64", "manylinux2014_aarch64", "any"):
        pip += ["--platform", platform]
    wanted = folder / "requirements.txt"
    wanted.write_text(wheels.locked(BESIDE, (ROOT / "requirements.lock").read_text("utf-8")), "utf-8")
    subprocess.run([*pip, "--require-hashes", "-r", str(wanted)], check=True)
    subprocess.run([*pip, "--upgrade", str(wheel)], check=True)
    return Arm64(root, version, site)


def _unpack(folder: Path, root: Path) -> str:
    """Fetches Debian's Python and all that it needs, and returns its version."""
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "apt.conf").write_text(_CONFIG.format(folder=folder), "utf-8")
    _apt(folder, "apt-get", "update", "-qq")
    there = [v for v in wheels.PYTHONS if "Package:" in _apt(folder, "apt-cache", "show", f"libpython{v}-stdlib")]
    assert there, f"Debian has none of Python {', '.join(wheels.PYTHONS)} for aarch64"
    version = there[0]
    wanted = (f"python{version}-minimal", f"libpython{version}-stdlib", "libstdc++6")
    _apt(folder, "apt-get", "install", "-y", "-qq", "--download-only", "--no-install-recommends", *wanted)
    for package in (folder / "cache/archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return version


def _apt(folder: Path, *command: str) -> str:
    environment = os.environ | {"APT_CONFIG": str(folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}
    asks = command[0] == "apt-cache"  # which fails for a package that is not there
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if asks else None,
        text=True,
        check=not asks,
    ).stdout


def copy_tests(into: Path, names: Sequence[str]) -> None:
    """Copies tests of this repository where the package beside them is not this tree's."""
    for name in names:
        target = into / "tests" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, target)
    (into / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n", "utf-8")
