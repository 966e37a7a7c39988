"""The Triton kernels make the same bytes as the definition, as far as can be tested without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcluster.pages import codec

ROOT = Path(__file__).parents[2]
# All implementations here must give the same pages, so there is one to test where Triton is not installed.
HERE = str(codec.implementation())
IMPLEMENTATIONS = [HERE, "triton"] if find_spec("triton") else [HERE]
KERNELS = 15 if find_spec("triton") else 0


def said(module: str, *arguments: str, interpreted: bool, cache: Path) -> list[str]:
    """What a program printed. Triton reads its environment when it is imported, so in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache)} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_of_all_kinds_are_encoded_and_decoded_as_the_definition_does(implementation: str, tmp_path: Path) -> None:
    assert said("tests.pages.coders", implementation, interpreted=True, cache=tmp_path) == ["0 of 270 differ"]


@pytest.mark.slow
def test_for_a_gpu_nothing_is_fused_nothing_approximated_and_only_division_may_flush(tmp_path: Path) -> None:
    # Where Triton is not installed, there are no kernels.
    lines = said("tests.pages.kernels", interpreted=False, cache=tmp_path) if KERNELS else []
    assert len(lines) == KERNELS
    exact = r"(abs|min|max|neg|(add|sub|mul)\.rn|div\.rn(\.ftz)?)\.f32|cvt\.(f32\.f16|rn\.(f32\.[su]\d+|f16(x2)?\.f32))"
    for line in lines:
        kernel, stored, *operations = line.split()
        assert operations
        for operation in operations:
            assert re.fullmatch(exact, operation.partition("=")[0]), f"{kernel} of {stored}: {operation}"
