"""What glibc keeps of long messages that have been freed, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvcluster.runtime.malloc_env import ENVIRONMENT

_CHILD = """
import sys
from kvcluster.runtime.malloc_env import return_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "returns":
    return_large_blocks()
before, kept = resident(), []
for _ in range(3):
    messages = [b"x" * 2**20 for _ in range(64)]
    kept.append([bytes(2_000) for _ in range(3_000)])  # lies behind the messages, so the heap cannot shrink
    del messages
print(resident() - before)
"""


@pytest.mark.parametrize(("how", "least", "most"), [("keeps", 64, 256), ("returns", 0, 32)])
def test_what_a_process_keeps_of_long_messages_that_it_has_freed(how: str, least: int, most: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _CHILD, how], env={**os.environ, **ENVIRONMENT}, capture_output=True, check=True
    )
    assert least * 2**20 <= int(ran.stdout) < most * 2**20
