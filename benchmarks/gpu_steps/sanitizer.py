"""Every thirtieth comparison of the codecs, and some drawn moves, verifications and programs of the conformance suite,
under NVIDIA's compute-sanitizer: accesses outside of memory, and memory that is read before it was written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_steps.rows import row, skip

CODECS, MOVES = ["tests.memory.coders", "triton", "cuda"], ["tests.device.moved", "0", "60", "cuda"]
RUNS = (
    ("memcheck", "codecs", [*CODECS, "7/30"]),
    ("initcheck", "codecs", [*CODECS, "11/60"]),
    ("memcheck", "moves", MOVES),
    ("memcheck", "verdicts", ["tests.device.summed", "0", "20", "cuda"]),
    ("memcheck", "programs", ["benchmarks.gpu_steps.device", "cuda", "10"]),
)


def main() -> None:
    found = shutil.which("compute-sanitizer")
    program = next((str(p) for p in [Path("/usr/local/cuda/bin/compute-sanitizer")] if p.exists()), found)
    if program is None:
        skip("compute-sanitizer is not installed")
    for tool, of, module in RUNS:
        done = subprocess.run(
            [program, "--tool", tool, sys.executable, "-m", *module],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        errors = re.search(r"ERROR SUMMARY: (\d+) error", done.stdout)
        compared = re.search(r"^(\d+) of (\d+) differ", done.stdout, re.MULTILINE)
        if errors is None or compared is None:
            row(tool, of=of, said=done.stdout[-800:], right=False)
            continue
        if errors[1] != "0":
            print(done.stdout[:3_000])
        row(
            tool,
            of=of,
            compared=int(compared[2]),
            differ=int(compared[1]),
            errors=int(errors[1]),
            right=errors[1] == compared[1] == "0",
        )


if __name__ == "__main__":
    main()
