"""The honest tenant: a worker that loads prompts that it has stored, and stores a new one now and then.

`python -m tests.attacks.honest ADDRESS METRICS...`, with the token in KVCLUSTER_TOKEN. It makes REQUESTS_PER_S requests
a second, whatever becomes of them, and writes a line of JSON for each: when it began by the monotonic clock, its
milliseconds, and of how many blocks how many were loaded or stored. A prompt that is lost is stored again, as an engine
does. Now and then it probes the liveness of a process at one of the addresses of METRICS in turn, as Kubernetes does,
and writes whether it is alive in place of blocks.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import count

import torch

import kvcluster
from kvcluster.config import ClientConfig
from kvcluster.transport.addresses import split_address
from tests.attacks.reach import speaks_tls
from tests.attacks.setting import BLOCKS, SPEC, kv, prompt

REQUESTS_PER_S = 20
PROMPTS = 16
_STORE_EVERY = _PROBE_EVERY = 20
_PROBE_S = 1.0  # Kubernetes' own default
_CONFIG = ClientConfig(connect_ms=60_000, deadline_ms=10_000)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(1)
    address, *metrics = sys.argv[1:]
    with kvcluster.connect(address, SPEC, token=os.environ["KVCLUSTER_TOKEN"], config=_CONFIG) as client:
        values = [kv(number) for number in range(PROMPTS)]
        for number in range(PROMPTS):
            client.store(prompt(number), values[number])
        client.flush(deadline_ms=60_000)
        out, due = torch.empty_like(values[0]), time.monotonic()
        for number in count():
            which, storing = number % PROMPTS, number % _STORE_EVERY == 0
            began = time.monotonic()
            if storing:
                stored = client.store(prompt(10_000 + number), values[which])
                client.flush()
                blocks = stored.blocks + stored.deduplicated
            else:
                blocks = client.load(prompt(which), out) // SPEC.block_tokens
            took_ms = (time.monotonic() - began) * 1e3
            kind = "store" if storing else "load"
            _say(began, kind, took_ms, blocks, BLOCKS)
            if not storing:
                assert torch.equal(out[:blocks], values[which][:blocks]), "a wrong byte"
                if blocks < BLOCKS:
                    client.store(prompt(which), values[which])
            if number % _PROBE_EVERY == 1:
                _probe(metrics[number // _PROBE_EVERY % len(metrics)])
            due = max(due + 1 / REQUESTS_PER_S, time.monotonic())
            if stop.wait(due - time.monotonic()):
                return


def _probe(address: str) -> None:
    connection, alive = _connection(address), False
    began = time.monotonic()
    with suppress(OSError, HTTPException):
        connection.request("GET", "/healthz")
        alive = connection.getresponse().status == HTTPStatus.OK
    connection.close()
    _say(began, "probe", (time.monotonic() - began) * 1e3, int(alive), 1)


def _connection(address: str) -> HTTPConnection:
    """A kubelet's connection, which verifies no certificate."""
    host, port = split_address(address)
    if not speaks_tls():
        return HTTPConnection(host, port, timeout=_PROBE_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return HTTPSConnection(host, port, timeout=_PROBE_S, context=context)


def _say(at: float, kind: str, ms: float, blocks: int, of: int) -> None:
    print(json.dumps({"at": at, "kind": kind, "ms": ms, "blocks": blocks, "of": of}), flush=True)


if __name__ == "__main__":
    main()
