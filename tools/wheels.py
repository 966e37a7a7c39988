"""`make wheels`: builds the source distribution and, from it, the wheels of a release into dist/.

A wheel is for one Python and one architecture. All are compiled on this machine, by Zig's C++ compiler, against the
symbols of one old glibc, and auditwheel holds each to its tag. Of a Python only the headers are used, which are the
same for both architectures; so each needs an interpreter here, from PATH or pyenv. One that is missing is named, the
others are built, and the exit status is 1. docs/adr/0066 says why there is one wheel for each Python.

It runs in .venv-wheels, which the Makefile makes, and needs nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENV = ROOT / ".venv-wheels"
WORK = ROOT / "build" / "wheels"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (2, 28)

BACKEND = ("scikit-build-core", "nanobind", "packaging", "pathspec", "tomli", "exceptiongroup", "typing-extensions")
"""What of requirements.lock builds a wheel; cmake and ninja are in .venv-wheels."""

_PROBE = (
    "import os, sys, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h'); "
    "print(*sys.version_info[:2], sep='.')"
)


def tag(architecture: str) -> str:
    """Returns the platform tag, such as manylinux_2_28_x86_64."""
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{architecture}"


# ---------------------------------------------------------------------------------------------------- interpreters


def interpreter(version: str) -> Path | None:
    """Returns an interpreter of that version that has its headers, or None."""
    for candidate in _candidates(version):
        done = subprocess.run([candidate, "-c", _PROBE], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders += sorted(pyenv.glob(f"versions/{version}.*/bin"), reverse=True)
    yield from (path for folder in folders if (path := folder / f"python{version}").is_file())


def backend(version: str) -> Path | None:
    """Returns an interpreter of that version in an environment with what builds a wheel, made where it is missing, or
    None where no such Python is."""
    environment = ENV / version
    python = environment / "bin" / "python"
    if not (environment / ".installed").exists():
        base = interpreter(version)
        if base is None:
            return None
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([base, "-m", "venv", environment], check=True)
        wanted = environment / "requirements.txt"
        wanted.write_text(locked(BACKEND, (ROOT / "requirements.lock").read_text("utf-8")), "utf-8")
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "-qq",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
        ]
        subprocess.run([*pip, "-r", str(wanted)], check=True)
        (environment / ".installed").touch()
    return python


def locked(names: Sequence[str], lock: str) -> str:
    """Returns the entries of requirements.lock for these packages, with their hashes and markers."""
    entries = re.split(r"\n(?=\w)", lock)
    chosen = [entry for entry in entries if re.split(r"[ =\[;]", entry, maxsplit=1)[0] in names]
    missing = set(names) - {re.split(r"[ =\[;]", entry, maxsplit=1)[0] for entry in chosen}
    assert not missing, f"requirements.lock has no {', '.join(sorted(missing))}"
    return "\n".join(entry.strip() for entry in chosen) + "\n"


# -------------------------------------------------------------------------------------------------------- compiling


def zig() -> Path:
    """Returns the compiler of .venv-wheels."""
    return _in_env("ziglang/zig")


def _in_env(path: str) -> Path:
    (found,) = ENV.glob(f"lib/python3*/site-packages/{path}")
    return found


def toolchain(architecture: str) -> Path:
    """Writes and returns the file by which CMake compiles for an architecture."""
    WORK.mkdir(parents=True, exist_ok=True)
    for tool in ("ar", "ranlib"):
        wrapper = WORK / f"zig-{tool}"
        wrapper.write_text(f'#!/bin/sh\nexec "{zig()}" {tool} "$@"\n', "utf-8")
        wrapper.chmod(0o755)
    file = WORK / f"{architecture}.cmake"
    lines = [
        "set(CMAKE_SYSTEM_NAME Linux)",
        f"set(CMAKE_SYSTEM_PROCESSOR {architecture})",
        f'set(CMAKE_CXX_COMPILER "{zig()}" c++)',
        f"set(CMAKE_CXX_COMPILER_TARGET {architecture}-linux-gnu.{GLIBC[0]}.{GLIBC[1]})",
        f'set(CMAKE_AR "{WORK}/zig-ar")',
        f'set(CMAKE_RANLIB "{WORK}/zig-ranlib")',
        "set(CMAKE_DEPENDS_USE_COMPILER FALSE)",  # Zig keeps nothing that was compiled with a list of its headers
    ]
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def environment() -> dict[str, str]:
    """Returns the environment of every build: the programs of .venv-wheels first, and nothing that differs between
    machines or days."""
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        **{name: value for name, value in os.environ.items() if name not in ("CMAKE_ARGS", "CXXFLAGS", "LDFLAGS")},
        "PATH": f"{ENV}/bin{os.pathsep}{os.environ.get('PATH', '')}",
        "CMAKE_EXECUTABLE": str(
            _in_env("cmake/data/bin/cmake")
        ),  # its script in bin starts too slowly on a busy machine
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(WORK / "zig"),
        **({"SOURCE_DATE_EPOCH": epoch} if epoch else {}),
    }


def _call(python: Path, source: Path, log: Path, env: dict[str, str], hook: str, *arguments: object) -> str:
    """Calls a hook of the build backend (PEP 517) in `source`, with its output in `log`, and returns the name of the
    file that it made."""
    code = (
        "import json, sys; from scikit_build_core import build; "
        "print(getattr(build, sys.argv[1])(*json.loads(sys.argv[2])))"
    )
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [python, "-c", code, hook, json.dumps(arguments)],
            cwd=source,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            check=False,
        )
        file.write(done.stdout)
    if done.returncode:
        sys.exit(f"{hook} failed; {log.relative_to(ROOT)} ends with:\n{log.read_text('utf-8')[-4000:]}")
    return done.stdout.strip().splitlines()[-1]


# --------------------------------------------------------------------------------------------------------- building


def sdist(python: Path, into: Path) -> Path:
    """Builds the source distribution of this tree."""
    return into / _call(python, ROOT, WORK / "sdist.log", environment(), "build_sdist", str(into))


def unpacked(archive: Path) -> Path:
    """Unpacks a source distribution where all wheels are built, and returns its folder. The place is the same each
    time, so that Zig's cache has what has not changed, and for a second Python all that knows nothing of Python."""
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(source, filter="data")
        else:
            tar.extractall(source)
    (folder,) = source.iterdir()
    return folder


def wheel(python: Path, version: str, architecture: str, source: Path, into: Path) -> Path:
    """Builds one wheel of the unpacked source distribution and has auditwheel hold it to its tag."""
    name = f"{version}-{architecture}"
    folder, build = WORK / "unrepaired" / name, WORK / "cmake" / name
    for old in (folder, build):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    cross = {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain(architecture)),
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.replace('.', '')}-{architecture}-linux-gnu.so",
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
    }
    hook = ("build_wheel", str(folder), {"build-dir": str(build)})
    made = folder / _call(python, source, WORK / f"{name}.log", environment() | cross, *hook)
    return _audited(made, architecture, into)


def _audited(made: Path, architecture: str, into: Path) -> Path:
    """Has auditwheel hold a wheel to its tag and give it that name. Its command line knows the tags of this machine's
    architecture only, and the rest of it those of all: so it is told another machine."""
    code = (
        "import sys; from auditwheel.architecture import Architecture; told = Architecture(sys.argv.pop(1)); "
        "Architecture.detect = staticmethod(lambda **_: told); from auditwheel.main import main; sys.exit(main())"
    )
    python = ENV / "bin" / "python"
    repair = ("repair", "--plat", tag(architecture), "--only-plat", "-w", str(into), str(made))
    done = subprocess.run(
        [python, "-c", code, architecture, *repair], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"auditwheel refuses {made.name}:\n{done.stdout}{done.stderr}")
    return into / made.name.replace(f"linux_{architecture}", tag(architecture))


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds what is asked for; returns 1 where an interpreter is missing."""
    parser = argparse.ArgumentParser(prog="make wheels", description=__doc__)
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="for these (default all)")
    parser.add_argument(
        "--arch", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES, help="for these (default both)"
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default dist")
    options = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    pythons = {version: backend(version) for version in options.python}
    there = {version: python for version, python in pythons.items() if python is not None}
    missing = [version for version in pythons if version not in there]
    lacking = (
        f"no wheels for Python {', '.join(missing)}: there is no such interpreter with headers on PATH or in pyenv"
    )
    if not there:
        sys.exit(lacking)
    into: Path = options.into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    for old in (*into.glob("kvcluster-*.tar.gz"), *into.glob("kvcluster-*.whl")):
        old.unlink()
    _say_changes()
    made = [sdist(next(iter(there.values())), into)]
    print(made[0].name, flush=True)
    source = unpacked(made[0])
    for version, python in there.items():
        for architecture in options.arch:
            began = time.monotonic()
            made.append(wheel(python, version, architecture, source, into))
            print(
                f"{made[-1].name}  {made[-1].stat().st_size / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    subprocess.run([ENV / "bin" / "twine", "check", "--strict", *made], check=True)
    if missing:
        print(lacking, file=sys.stderr)
    return 1 if missing else 0


def _say_changes() -> None:
    """Says where the tree is not what its commit is: a release is built from a clean one."""
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if status.stdout.strip():
        print("this tree has changes that its commit has not: for a release, build from a clean one", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
