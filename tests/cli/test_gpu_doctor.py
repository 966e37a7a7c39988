"""`kvcluster doctor --gpu`: what is there and what is missing, by a driver without a card and by none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvcluster.cli.main import main
from kvcluster.device import examine
from kvcluster.device.cuda_driver import CudaDriver
from tests.device.fake_cuda import library

Versions = dict[str, str]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Has a driver and packages of these versions."""

    def has(driver: str, **versions: str) -> None:
        monkeypatch.setattr(examine, "CudaDriver", partial(CudaDriver, driver))
        monkeypatch.setattr(examine, "_version", versions.get)
        monkeypatch.setattr(examine.shutil, "which", {"gcc": "/usr/bin/gcc"}.get)
        monkeypatch.setenv("HOME", str(tmp_path))

    return has


def found(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, object]:
    assert main(["doctor", "--gpu", "--json"]) == status
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_a_machine_that_has_all_of_it(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine(library(), torch="2.11.0+cu130", triton="3.6.0")
    findings = found(capsys, 0)
    assert findings["missing"] == [] and findings["driver"] == "13.0"
    assert findings["cache"] == str(tmp_path / ".cache/kvcluster/triton") and not list(tmp_path.iterdir())
    assert findings["devices"] == [
        {
            "uuid": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
            "name": "Paper H100",
            "memory_bytes": 80 * 2**30,
            "multiprocessors": 16,
            "registers_read_only": True,
        }
    ]
    assert main(["doctor", "--gpu"]) == 0
    page = capsys.readouterr().out
    assert "Paper H100" in page and "80 GiB" in page and "device_staging_bytes" in page
    assert "No release of kvcluster has run with KV on a GPU" in page


@pytest.mark.parametrize(
    ("versions", "missing"),
    [
        ({"triton": "3.6.0"}, "torch is not installed"),
        ({"torch": "2.13.0+cpu", "triton": "3.6.0"}, "torch 2.13.0+cpu is not built for CUDA"),
        ({"torch": "2.11.0+rocm6.4", "triton": "3.6.0"}, "torch 2.11.0+rocm6.4 is not built for CUDA"),
        ({"torch": "2.11.0+cu130"}, "Triton is not installed"),
    ],
)
def test_what_is_missing_is_named(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str], versions: Versions, missing: str
) -> None:
    machine(library(), **versions)
    assert missing in str(found(capsys, 1)["missing"])


def test_without_a_driver_or_a_compiler(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("libcuda-none.so", torch="2.11.0+cu130", triton="3.6.0")
    monkeypatch.setattr(examine.shutil, "which", lambda name: None)
    findings = found(capsys, 1)
    assert findings["driver"] is None and findings["devices"] == []
    assert "no driver of NVIDIA's" in str(findings["missing"]) and "no C compiler" in str(findings["missing"])


def test_it_imports_neither_torch_nor_triton(capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys; from kvcluster.cli.main import main; main(['doctor', '--gpu', '--json']); "
    script += "print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
