"""The bytes of the Triton codecs against their definition: all 270 comparisons of tests/memory/coders.py on a card, and
every thirtieth in the interpreter, in which CI runs all. Several processes compile the kernels at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from benchmarks.gpu_steps.rows import row


def main(device: str) -> None:
    count = min(8, os.cpu_count() or 1) if device == "cuda" else 1
    shares = [f"{first}/{count}" for first in range(count)] if device == "cuda" else ["7/30"]
    where = "cuda" if device == "cuda" else "cpu"
    began = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.memory.coders", "triton", where, share],
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    differ = total = 0
    for child in children:
        said = child.communicate()[0]
        found = re.search(r"^(\d+) of (\d+) differ$", said, re.MULTILINE)
        if found is None or child.returncode:
            row("a process ended", status=child.returncode, said=said[-1_500:], right=False)
            continue
        differ, total = differ + int(found[1]), total + int(found[2])
        for line in said.splitlines()[:-1]:
            row("differs", case=line, right=False)
    seconds = time.monotonic() - began
    row("pages of all kinds", compared=total, differ=differ, seconds=round(seconds, 1), right=total > 0 and not differ)


if __name__ == "__main__":
    main(sys.argv[1])
