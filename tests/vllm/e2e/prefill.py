"""Prefill on one server, decode on another, through the proxy of examples/; and the prefill server killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.ports import free_port
from tests.vllm.e2e.run import BLOCK, ROOT, House, eventually, prompts
from tests.vllm.e2e.servers import Ask, Server, drive, expected, servers, wrong


def check(house: House, model: str = "llama") -> None:
    """Every answer is right, and of its prompt the decode server computes a block or less."""
    asks = [Ask(prompt, {"max_tokens": 24}) for prompt in prompts(24, seed=31) if len(prompt) > BLOCK]
    right = expected(house, model, asks)
    with (
        servers(house, model, 1, "kv_producer", MANY_BLOCKS) as (first,),
        servers(house, model, 1, "kv_consumer", MANY_BLOCKS, layerwise_ms=BESIDE) as (second,),
        _proxy(house, first, second) as proxy,
    ):
        traffic = drive([proxy], model, asks)
        computed = [report["computed_tokens"] for report in traffic.reports.values()]
        bad = wrong(traffic, asks, right)
        house.table.add(
            "prefill and decode apart",
            f"{bad} of {len(asks)} wrong; the decode server computes at most {max(computed)} tokens of a prompt, "
            f"a block is {BLOCK}"
            + "".join(f"; {one}" for one in traffic.reports.values() if one["computed_tokens"] > BLOCK),
            not bad and len(computed) == len(asks) and max(computed) <= BLOCK,
        )
        # Answered by the first server, which is then gone; the second goes on from what it stored.
        later = [Ask(prompt, {"max_tokens": 24}) for prompt in prompts(12, seed=32) if len(prompt) > BLOCK]
        right = expected(house, model, later)
        drive([first], model, [Ask(ask.prompt, {"max_tokens": 1, "kv_transfer_params": HANDOVER}) for ask in later])
        first.process.send_signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(first.process.pid, signal.SIGKILL)
        traffic = drive([proxy], model, later)
        computed = [report["computed_tokens"] for report in traffic.reports.values()]
        bad = wrong(traffic, later, right)
        house.table.add(
            "the prefill server killed after its answers",
            f"{bad} of {len(later)} wrong, {len(traffic.errors)} errors; at most {max(computed)} tokens computed",
            not bad and not traffic.errors and max(computed) <= BLOCK,
        )


HANDOVER = {"do_remote_decode": True}
BESIDE = 0
"""A load within a pass, for which all requests wait, is given up where the machine stands still for a moment."""

MANY_BLOCKS = 1_000
"""A request that is preempted counts what it computes a second time."""


@contextmanager
def _proxy(house: House, first: Server, second: Server) -> Iterator[Server]:
    port = free_port()
    said = house.folder / "proxy.txt"
    command = [sys.executable, str(ROOT / "examples" / "prefill_decode_proxy.py")]
    command += ["--prefill", first.url, "--decode", second.url, "--port", str(port)]
    with open(said, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: _listens(port), 30, "the proxy is up")
        yield Server(f"http://127.0.0.1:{port}", process, said)
    finally:
        process.terminate()
        process.wait(20)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
