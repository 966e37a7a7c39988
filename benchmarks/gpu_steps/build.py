"""Builds the native core beside its sources, for the Python that runs this, unless it is there and newer than they."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import SKIP_STATUS

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4_000:])
        sys.exit(f"{command[0]} failed with status {done.returncode}")


def main() -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = ROOT / "kvcluster" / "pages" / f"_native{suffix}"
    sources = list((ROOT / "native").glob("*.*"))
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        print("it is there")
        return
    for module in ("cmake", "nanobind"):
        if find_spec(module) is None:
            print(f"{module} is not installed: bytes are moved by Python, more slowly")
            sys.exit(SKIP_STATUS)
    from nanobind import cmake_dir

    built = ROOT / "build" / f"gpu{suffix.removesuffix('.so')}"
    cmake = [sys.executable, "-c", "import cmake; cmake.cmake()"]
    soabi = suffix.removeprefix(".").removesuffix(".so")
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "SKBUILD_STATE": "editable",
        "SKBUILD_SOABI": soabi,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": cmake_dir(),
    }
    flags = [f"-D{name}={value}" for name, value in settings.items()]
    run(*cmake, "-S", "native", "-B", str(built), *flags)
    run(*cmake, "--build", str(built), "--parallel", str(os.cpu_count()))
    run(*cmake, "--install", str(built))
    run(sys.executable, "-c", "import kvcluster.memory._native")
    print("built")


if __name__ == "__main__":
    main()
