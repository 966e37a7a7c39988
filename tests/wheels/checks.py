"""What `make wheels` has built, as those who install it find it: what is in it, and that it works.

`make wheels-check` runs this. The wheels for x86-64 are installed with each Python into fresh environments; that for
aarch64 runs under qemu, with Debian's Python for aarch64. docs/testing.md says what that does not show.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from kvcluster.release import __version__
from tests.ports import free_port
from tests.wheels import arm64
from tests.wheels.environments import Fresh, fresh
from tools import wheels

pytestmark = [pytest.mark.timeout(1_800)]

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
SDIST = DIST / f"kvcluster-{__version__}.tar.gz"
BUILT = [(python, architecture) for python in wheels.PYTHONS for architecture in wheels.ARCHITECTURES]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
INFO = f"kvcluster-{__version__}.dist-info"

SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
"""Libraries that the native core may ask for: they are part of every glibc."""

MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
BASE = {"kvcluster", "grpcio", "protobuf", "xxhash", "typing_extensions", "tomli"}
"""What the base install may bring (docs/adr/0005); gRPC asks for typing_extensions, and Python 3.10 for tomli."""

ARM64_TESTS = ("conftest.py", "pages/test_native.py", "pages/test_checksum.py", "pages/test_copy_batch.py")
"""Tests of the native core that need no torch."""


def path_of(python: str, architecture: str) -> Path:
    abi = f"cp{python.replace('.', '')}"
    return DIST / f"kvcluster-{__version__}-{abi}-{abi}-{wheels.tag(architecture)}.whl"


def core_of(python: str, architecture: str) -> str:
    return f"kvcluster/memory/_native.cpython-{python.replace('.', '')}-{architecture}-linux-gnu.so"


def tracked(folder: str) -> set[str]:
    """The files of this tree below a folder that belong to a release."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(listed.splitlines())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())


# ---------------------------------------------------------------------------------------------------- what is in it


def test_there_is_an_sdist_and_a_wheel_for_every_python_on_both_architectures() -> None:
    assert {path.name for path in DIST.iterdir()} == {SDIST.name, *(path_of(*one).name for one in BUILT)}


@pytest.mark.parametrize(("python", "architecture"), BUILT)
def test_a_wheel_holds_the_package_with_its_native_core_and_nothing_else(python: str, architecture: str) -> None:
    with zipfile.ZipFile(path_of(python, architecture)) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == tracked("kvcluster") | {core_of(python, architecture)} | about
    stubs = {f"kvcluster/wire/v1/{name}_pb2.pyi" for name in ("common", "coordinator", "shard")}
    assert stubs | {"kvcluster/py.typed", "kvcluster/memory/_native.pyi"} <= names


@pytest.mark.parametrize(("python", "architecture"), BUILT)
def test_a_native_core_has_one_entry_and_asks_only_for_an_old_glibc(
    python: str, architecture: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(path_of(python, architecture)) as archive:
        core = archive.extract(core_of(python, architecture), tmp_path)
    read = ["readelf", "--wide", "--file-header", "--dynamic", "--dyn-syms", core]
    said = subprocess.run(read, check=True, capture_output=True, text=True).stdout
    assert f"Machine:                           {MACHINES[architecture]}" in said
    rows = [line.split() for line in said.splitlines() if re.match(r"\s+\d+: [0-9a-f]{16} ", line)]
    assert [row[7] for row in rows if row[6] != "UND" and row[4] != "LOCAL"] == ["PyInit__native"]
    assert set(re.findall(r"Shared library: \[(.*)\]", said)) <= SYSTEM
    asked = {(int(major), int(minor)) for major, minor in re.findall(r"@GLIBC_(\d+)\.(\d+)", said)}
    assert asked and max(asked) <= wheels.GLIBC


@pytest.mark.parametrize(("python", "architecture"), BUILT)
def test_the_page_of_a_package_index_leads_somewhere(python: str, architecture: str) -> None:
    about = metadata(path_of(python, architecture))
    urls = dict(url.split(", ", 1) for url in about.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    text = about.get_payload()
    assert isinstance(text, str) and f"{urls['Source']}/blob/" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    assert targets and all(re.match(r"https://|#", target) for target in targets)


def test_the_sdist_holds_what_a_build_needs_and_no_tests() -> None:
    with tarfile.open(SDIST) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {name for name in tracked("native") if not name.startswith("native/tests/")}
    beside = {"pyproject.toml", "PKG-INFO", "README.md", "CHANGELOG.md", "LICENSE", "tools/long_description.py"}
    assert names == tracked("kvcluster") | native | tracked("proto") | beside


# ------------------------------------------------------------------------------------------------------ that it works


def instruction_sets() -> list[str]:
    """Those that the native core has on this machine, by what the kernel says of it."""
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)[1].split())  # type: ignore[index]
    found = ["plain"]
    if {"avx2", "fma", "f16c"} <= flags:
        found += ["avx2", *(["avx512"] if "avx512f" in flags else [])]
    return found


def names_of(environment: Fresh) -> list[str]:
    code = "from kvcluster.memory import _native; print(*_native.names())"
    return environment.says("python", "-c", code).split()


@pytest.mark.parametrize("python", wheels.PYTHONS)
def test_the_base_install_of_a_wheel_is_light_and_has_every_instruction_set(python: str, tmp_path: Path) -> None:
    interpreter = wheels.interpreter(python)
    assert interpreter is not None, f"there is no Python {python}"
    environment = fresh(tmp_path / "env", interpreter)
    environment.install(str(path_of(python, "x86_64")))
    frozen = environment.says("python", "-m", "pip", "--disable-pip-version-check", "freeze")
    assert {re.split(r"==| @ ", line)[0].replace("-", "_") for line in frozen.splitlines()} <= BASE
    assert environment.says("kvcluster", "--version").split() == ["kvcluster", __version__]
    assert "usage: kvcluster COMMAND" in environment.says("kvcluster")
    where = environment.says("python", "-c", "import kvcluster; kvcluster.connect; print(kvcluster.__file__)")
    assert where.startswith(str(environment.folder))
    assert names_of(environment) == instruction_sets()
    refused = environment.run("kvcluster", "up")
    assert refused.returncode != 0 and "pip install 'kvcluster[cluster]'" in refused.stderr


def test_an_installation_of_the_sdist_compiles_the_native_core(tmp_path: Path) -> None:
    environment = fresh(tmp_path / "env")
    environment.install(str(SDIST))
    assert names_of(environment) == instruction_sets()


def test_a_cluster_of_the_wheel_serves_the_example_of_the_readme(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    example = next(one for one in examples if 'kvcluster.connect("127.0.0.1:7070"' in one)
    environment = fresh(tmp_path / "env")
    environment.install(f"{path_of(HERE, 'x86_64')}[cluster]")
    port = str(free_port())
    environment.says("kvcluster", "up", "--shards", "2", "--ram-bytes", "64MiB", "--port", port)
    try:
        answer = environment.says("python", "-", stdin=example.replace("127.0.0.1:7070", f"127.0.0.1:{port}"))
        assert "64" in answer and "below_block" in answer
        status = environment.says("kvcluster", "status", "--port", port)
        assert "4 blocks" in status and "shard-1  up" in status
        environment.says("kvcluster", "doctor", "--port", port)
    finally:
        environment.says("kvcluster", "down", "--port", port)


# ------------------------------------------------------------------------------------------------------------ aarch64


def test_the_wheel_for_aarch64_passes_the_tests_of_the_native_core(tmp_path: Path) -> None:
    python = arm64.prepare(ROOT / "build" / "arm64", DIST)
    names = python.run("-c", "from kvcluster.memory import _native; print(*_native.names())", cwd=tmp_path)
    assert names.stdout.split() == ["neon"], names.stderr
    assert __version__ in python.run("-m", "kvcluster", "--version", cwd=tmp_path).stdout
    arm64.copy_tests(tmp_path, ARM64_TESTS)
    done = python.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_what_zig_compiles_for_aarch64_gives_the_bytes_of_the_definitions(tmp_path: Path) -> None:
    python = arm64.prepare(ROOT / "build" / "arm64", DIST)
    build = tmp_path / "build"
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "native"), "-B", str(build), "-DKVC_VECTORS=ON"]
    configure += [f"-DCMAKE_TOOLCHAIN_FILE={wheels.toolchain('aarch64')}"]
    for command in (configure, ["cmake", "--build", str(build)]):
        subprocess.run(command, env=wheels.environment(), check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "tests.memory.vectors", str(tmp_path / "cases")], cwd=ROOT, check=True)
    run = ["qemu-aarch64", "-L", str(python.root), str(build / "vectors"), str(tmp_path / "cases")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
