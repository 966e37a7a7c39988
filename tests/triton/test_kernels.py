"""The Triton kernels make the same bytes as their definitions, and compile to what is meant, as far as can be shown
without a GPU: they run in Triton's interpreter, and the assembler that Triton brings compiles them for users' cards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton.compiled import LAUNCHES, MOVES, SUMS

ROOT = Path(__file__).parents[2]
SHARES = 4
WORDS = {16: "v2.b64", 8: "b64", 4: "b32", 2: "b16", 1: "b8"}
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
    (line,) = said("tests.memory.coders", "triton", "cpu", f"{share}/{SHARES}", interpreted=True, cache=tmp_path)
    differ, total = re.fullmatch(r"(\d+) of (\d+) differ", line).groups()  # type: ignore[union-attr]
    assert (int(differ), int(total)) == (0, len(range(share, 270, SHARES)))


@pytest.mark.parametrize("share", range(SHARES))
def test_records_of_all_layouts_are_moved_as_a_loop_over_their_values_moves_them(share: int, tmp_path: Path) -> None:
    *_, line = said("tests.device.moved", str(300 * share), "100", interpreted=True, cache=tmp_path)
    differ, total, variants = re.fullmatch(r"(\d+) of (\d+) differ, (\d+) variants", line).groups()  # type: ignore[union-attr]
    assert int(differ) == 0 and int(total) > 90 and int(variants) > 8


@pytest.mark.parametrize("share", range(SHARES))
def test_records_of_all_lengths_have_the_verdict_that_xxhash_gives_them(share: int, tmp_path: Path) -> None:
    *_, line = said("tests.device.summed", str(300 * share), "20", interpreted=True, cache=tmp_path)
    differ, bad = re.fullmatch(r"(\d+) of 20 differ, (\d+) bad records", line).groups()  # type: ignore[union-attr]
    assert int(differ) == 0 and int(bad) > 5


def test_all_that_moves_and_verifies_records_is_built_when_a_device_is_opened_and_nothing_when_it_is_used(
    tmp_path: Path,
) -> None:
    *_, line = said("tests.triton.launched", interpreted=False, cache=tmp_path)
    built, launches, besides = re.fullmatch(r"(\d+) built, (\d+) launches, (\d+) built besides", line).groups()  # type: ignore[union-attr]
    assert int(built) == MOVES + SUMS and int(launches) > 200 and int(besides) == 0


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile_for_every_card_without_spills_with_exact_arithmetic_and_wide_accesses(
    capability: int, tmp_path: Path
) -> None:
    lines = said("tests.triton.compiled", str(capability), interpreted=False, cache=tmp_path)
    assert len(lines) == LAUNCHES + MOVES + SUMS
    for line in lines:
        kernel, kind, spilled, registers, *counts = line.split()
        assert spilled == "spilled=0", line
        assert 0 < int(registers.removeprefix("registers=")) <= 255
        found = dict(count.split("=") for count in counts)
        assert found
        if kernel == "move":
            word = WORDS[int(kind.partition("-")[0])]
            assert {name for name in found if name.startswith("st")} == {f"st.global.{word}"}, line
            assert set(found) == {f"st.global.{word}", f"ld.global.{word}", "ld.global.b64"}, "of the table"
        elif kernel in ("add", "judge"):
            wide = {"ld.global.v2.b64", "st.global.v2.b64"} if kind == "16" else set()
            assert set(found) == {"ld.global.b64", "st.global.b64"} | wide, line
        else:
            assert all(re.fullmatch(EXACT, operation) for operation in found), line
