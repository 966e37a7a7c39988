"""The Triton kernels make the same bytes as the definition, and compile to what is meant, as far as can be shown
without a GPU: they run in Triton's interpreter, and the assembler that Triton brings compiles them for users' cards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton.compiled import LAUNCHES

ROOT = Path(__file__).parents[2]
SHARES = 4
EXACT = r"(abs|min|max|neg|(add|sub|mul)\.rn|div\.rn(\.ftz)?)\.f32|cvt\.(f32\.f16|rn\.(f32\.[su]\d+|f16(x2)?\.f32))"


def said(module: str, *arguments: str, interpreted: bool, cache: Path) -> list[str]:
    """What a program printed. Triton reads its environment when it is imported, so in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)} | (
        {"TRITON_INTERPRET": "1"} if interpreted else {}
    )
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("share", range(SHARES))
def test_pages_of_all_kinds_are_encoded_and_decoded_as_the_definition_does(share: int, tmp_path: Path) -> None:
    (line,) = said("tests.pages.coders", "triton", "cpu", f"{share}/{SHARES}", interpreted=True, cache=tmp_path)
    differ, total = re.fullmatch(r"(\d+) of (\d+) differ", line).groups()  # type: ignore[union-attr]
    assert (int(differ), int(total)) == (0, len(range(share, 270, SHARES)))


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile_for_every_card_without_spills_and_with_exact_arithmetic_alone(
    capability: int, tmp_path: Path
) -> None:
    lines = said("tests.triton.compiled", str(capability), interpreted=False, cache=tmp_path)
    assert len(lines) == LAUNCHES
    for line in lines:
        kernel, stored, spilled, registers, *operations = line.split()
        assert spilled == "spilled=0", line
        assert 0 < int(registers.removeprefix("registers=")) <= 255
        assert operations
        for operation in operations:
            assert re.fullmatch(EXACT, operation.partition("=")[0]), f"{kernel} of {stored}: {operation}"
