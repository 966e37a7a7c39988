"""What prove.sh runs inside pods: `python3 - JOB ARGUMENT... < prove_client.py` prints NAME=VALUE words.

It needs an image with kvcluster and nothing else. What is stored is made from a seed, alike in every pod, so that every
loaded byte is compared. A job that ends badly prints why and exits with 1.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvcluster
from kvcluster.config import ClientConfig
from kvcluster.errors import CredentialError

SPEC = kvcluster.KVSpec.uniform(
    model="prove", weights="sha256:1", num_layers=4, num_kv_heads=8, head_dim=64, dtype="float16", block_tokens=16
)
BLOCKS = 16
"""Of each prompt."""

PATIENT = ClientConfig(deadline_ms=30_000, connect_ms=30_000, store_wait_ms=10_000)
KNOCK_S = 2.0
PAUSE_S = 0.5


def tokens(seed: int) -> list[int]:
    """A prompt of full blocks that no other seed shares."""
    return list(range(seed * 1_000, seed * 1_000 + BLOCKS * SPEC.block_tokens))


def pages(seed: int) -> list[bytes]:
    """The pages of its blocks."""
    draw = random.Random(seed)
    return [draw.randbytes(SPEC.block_bytes) for _ in range(BLOCKS)]


def connect(address: str, token_file: str) -> kvcluster.Client:
    """Returns a client with the token of that file."""
    token = Path(token_file).read_text(encoding="utf-8").strip()
    return kvcluster.connect(address, SPEC, token=token, config=PATIENT)


def store(address: str, token_file: str, prompts: str) -> str:
    """Stores so many prompts, and waits until all can see them."""
    with connect(address, token_file) as client:
        done = [client.store(tokens(seed), kvcluster.Buffers(pages(seed))) for seed in range(int(prompts))]
        client.flush()
    missed = next((each.miss for each in done if each.miss), "none")
    stored = sum(each.blocks + each.deduplicated for each in done)
    return f"blocks={stored} of={int(prompts) * BLOCKS} miss={missed}"


def load(address: str, token_file: str, prompts: str, patience_s: str) -> str:
    """Loads them and compares every byte. What is missing is looked for again until the time is up, since a cluster
    that has just changed may still be learning what it holds."""
    of, until = int(prompts) * BLOCKS, time.monotonic() + float(patience_s)
    with connect(address, token_file) as client:
        while True:
            found = [load_one(client, seed) for seed in range(int(prompts))]
            blocks, wrong = (sum(each) for each in zip(*found, strict=True))
            if blocks == of or wrong or time.monotonic() > until:
                return f"blocks={blocks} of={of} wrong={wrong}"
            time.sleep(PAUSE_S)


def load_one(client: kvcluster.Client, seed: int) -> tuple[int, int]:
    """Returns how many blocks of a prompt were loaded, and how many of those have another content than was stored."""
    wanted = pages(seed)
    into = [bytearray(SPEC.block_bytes) for _ in wanted]
    loaded = client.load(tokens(seed), kvcluster.Buffers(into)) // SPEC.block_tokens
    return loaded, sum(got != want for got, want in zip(into[:loaded], wanted[:loaded], strict=True))


def admitted(address: str, token_file: str, patience_s: str) -> str:
    """Waits until the cluster knows the token."""
    return f"seconds={waited(lambda: knows(address, token_file), float(patience_s)):.0f}"


def refused(address: str, token_file: str, patience_s: str) -> str:
    """Waits until the cluster knows the token no more."""
    return f"seconds={waited(lambda: not knows(address, token_file), float(patience_s)):.0f}"


def knows(address: str, token_file: str) -> bool:
    """Whether the cluster knows the token."""
    try:
        connect(address, token_file).close()
    except CredentialError:
        return False
    return True


def waited(look: Callable[[], bool], patience_s: float) -> float:
    """Returns the seconds until `look` was true. Raises TimeoutError."""
    began = time.monotonic()
    while not look():
        if time.monotonic() > began + patience_s:
            raise TimeoutError(f"not within {patience_s:.0f} s")
        time.sleep(PAUSE_S)
    return time.monotonic() - began


def reach(*targets: str) -> str:
    """Tries to connect to each HOST:PORT, and names those that let it in."""
    with ThreadPoolExecutor(32) as threads:
        found = [target for target, is_open in zip(targets, threads.map(opens, targets), strict=True) if is_open]
    return f"open={','.join(sorted(found))}"


def opens(target: str) -> bool:
    """Whether something accepts connections there."""
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
    except OSError:
        return False
    return True


def scrape(*targets: str) -> str:
    """Reads the metrics and the health of each HOST:PORT."""
    return " ".join(scraped(targets))


def scraped(targets: tuple[str, ...]) -> Iterator[str]:
    """Yields how many series of kvcluster each target has. Raises OSError if one does not answer with 200. With TLS its
    certificate must be of the cluster's authority; it has no address."""
    authority = os.environ.get("KVCLUSTER_CA_FILE")
    verifies = ssl.create_default_context(cafile=authority) if authority else None
    if verifies is not None:
        verifies.check_hostname = False
    scheme = "https" if authority else "http"
    for target in targets:
        for path in ("healthz", "readyz", "metrics"):
            with urllib.request.urlopen(f"{scheme}://{target}/{path}", timeout=10, context=verifies) as answer:
                lines = answer.read().decode().splitlines()
        yield f"series={sum(line.startswith('kvcluster_') for line in lines)}"


JOBS: dict[str, Callable[..., str]] = {job.__name__: job for job in (store, load, admitted, refused, reach, scrape)}


def main(job: str, *arguments: str) -> int:
    """Does one job and says what came of it."""
    try:
        print(JOBS[job](*arguments))
    except (kvcluster.KVClusterError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
