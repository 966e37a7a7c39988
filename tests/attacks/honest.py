"""The honest tenant: a worker that loads prompts that it has stored, and stores a new one now and then.

`python -m tests.attacks.honest ADDRESS`, with the token in KVCLUSTER_TOKEN. It makes REQUESTS_PER_S requests a second,
whatever becomes of them, and writes a line of JSON for each: when it began by the monotonic clock, its milliseconds,
and of how many blocks how many were loaded or stored. A prompt that is lost is stored again, as an engine does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from itertools import count

import torch

import kvcluster
from kvcluster.config import ClientConfig
from tests.attacks.setting import BLOCKS, SPEC, kv, prompt

REQUESTS_PER_S = 20
PROMPTS = 16
_STORE_EVERY = 20
_CONFIG = ClientConfig(connect_ms=60_000, deadline_ms=10_000)


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(1)
    with kvcluster.connect(sys.argv[1], SPEC, token=os.environ["KVCLUSTER_TOKEN"], config=_CONFIG) as client:
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
            print(json.dumps({"at": began, "kind": kind, "ms": took_ms, "blocks": blocks, "of": BLOCKS}), flush=True)
            if not storing:
                assert torch.equal(out[:blocks], values[which][:blocks]), "a wrong byte"
                if blocks < BLOCKS:
                    client.store(prompt(which), values[which])
            due = max(due + 1 / REQUESTS_PER_S, time.monotonic())
            if stop.wait(due - time.monotonic()):
                return


if __name__ == "__main__":
    main()
