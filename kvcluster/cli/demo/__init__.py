"""`kvcluster demo`: two engine replicas share a document's KV through a real cluster on this machine.

The conductor starts an embedded Ray cluster and two replicas, each a process of its own with the same model, and lets
one compute at a time: a question without the cache, the same through it (stored), the rest on the other replica
(loaded). Then a replica changes its weights, and must find nothing. It checks what it shows: status 1 where the cache
changed an answer, or where the checks could not have noticed. `DEMO_MODEL=path` replaces the model.

Nothing outlives it: what it starts are context managers, and a replica ends by itself when its conductor is gone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvcluster
from kvcluster.cli.demo import text
from kvcluster.cli.demo.replica import Replica
from kvcluster.cli.demo.screen import Screen

for _name in ("ray", "torch", "transformers"):
    if importlib.util.find_spec(_name) is None:  # they are imported where they are used, in other processes
        raise ModuleNotFoundError(f"No module named {_name!r}", name=_name)

SHARDS = 2
DEVICE_BYTES = "512MiB"

Figures = dict[str, Any]


def run(arguments: Sequence[str] = ()) -> int:
    """Runs the demo. With `--json` prints the figures as one JSON object and nothing else. Returns the exit status."""
    as_json = "--json" in arguments
    with _ended_by_sigterm(), Screen(silent=as_json) as screen:
        figures = conduct(screen)
        screen.show(figures)
    if as_json:
        print(json.dumps(figures, indent=2))
    return 0 if figures["ok"] else 1


def conduct(screen: Screen) -> Figures:
    """Plays both acts and returns the figures."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcluster-demo-") as folder:
        workshop = Path(folder)
        model = os.environ.get("DEMO_MODEL")
        settings = {"path": model or str(workshop / "model"), "bytes_are_tokens": not model}
        with Replica("the first replica", workshop / "first.log") as first:
            with screen.step("starting Ray, a coordinator and two shards"):
                cluster = kvcluster.local(shards=SHARDS, device_bytes=DEVICE_BYTES)
                with cluster as running:
                    ...
    return {}
