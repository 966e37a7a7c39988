"""Flipping bits in another process, and finding it by its port."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys

import pytest

from kvcluster.core.ids import BlockHash
from kvcluster.memory import arena
from kvcluster.memory.arena import Arena
from tests.actors.processes import ROOT
from tests.chaos.content import PAGE_BYTES, lonely, prompt, right_bytes, wrong
from tests.chaos.victims import flip_bits, holds, listener

ARENA_BYTES = 2**20
HERE, GONE = BlockHash(bytes(32)), BlockHash(b"\1" * 32)


@pytest.mark.parametrize("kind", ["memory file", "own"])
def test_one_bit_of_the_page_is_flipped_in_the_other_process_and_none_of_an_absent_one(kind: str) -> None:
    command = [sys.executable, "-m", "tests.chaos.test_victims", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"began\n"
        assert holds(child.pid, [HERE], ARENA_BYTES) and not holds(child.pid, [HERE, GONE], ARENA_BYTES)
        assert flip_bits(child.pid, [HERE, GONE], random.Random(1), ARENA_BYTES) == 1
        child.stdin.write(b"\n")
        child.stdin.close()
        page = child.stdout.read()
    differing = [a ^ b for a, b in zip(page, right_bytes(HERE), strict=True) if a != b]
    assert len(differing) == 1
    assert differing[0].bit_count() == 1


def test_who_listens_on_a_port_is_found_among_others() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert listener([other.pid, os.getpid()], port) == os.getpid()
        assert listener([other.pid, os.getpid()], port) is None
        other.communicate(b"\n")


def test_a_prompt_begins_as_a_shorter_one_of_its_number_and_prompts_share_only_system_prompts() -> None:
    assert prompt(7, 10)[: 6 * 16] == prompt(7, 6)
    assert prompt(7, 10)[: 4 * 16] == prompt(12, 10)[: 4 * 16]
    assert prompt(7, 10)[: 5 * 16] != prompt(12, 10)[: 5 * 16]
    assert len(prompt(7, 2)) == 2 * 16
    assert lonely(1, 2)[:16] != lonely(2, 2)[:16]
    assert len(lonely(1, 2)) == 2 * 16


def test_a_page_of_another_block_is_told_from_the_right_one() -> None:
    pages = [bytearray(right_bytes(HERE)), bytearray(right_bytes(HERE))]
    assert wrong([HERE, GONE], pages) == [1]
    assert len(pages[0]) == PAGE_BYTES


def _child(kind: str) -> None:
    """Has an arena with a page in it, and says what is in that page when asked."""
    if kind == "own":
        arena._memory_file = lambda: None
    with Arena(2 * ARENA_BYTES) as memory:
        page = memory.view(PAGE_BYTES, PAGE_BYTES)
        page[:] = right_bytes(HERE)
        sys.stdout.write("began\n")
        sys.stdout.flush()
        sys.stdin.readline()
        sys.stdout.buffer.write(page)


if __name__ == "__main__":
    _child(sys.argv[1])
