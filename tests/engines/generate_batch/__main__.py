"""Two engines share prefixes through a cluster, and what they generate is compared with an engine that shares nothing.

    python -m tests.engines.generate_batch --device cuda --prompts 48 --seed 1

runs an engine without kvcluster, then two with it, one after the other, over one cluster in this process. It prints one
line about the second: prompts, tokens shared, tokens loaded, blocks audited, differing tokens. It ends with status 1 if
a token differs, a loaded block is not what was stored, or nothing was loaded.

With `--connect ADDRESS --filed FILE` it runs only one engine with kvcluster, over a cluster that serves other
processes. FILE has what earlier such runs have stored, for the audit; this run adds its own. Call it twice to have two
processes.

It has been run on CPUs only. `--device cuda` puts the model and the paged cache on a CUDA device, and gives the client
staging memory there. That has not been tried on a card. The engine is synchronous there as well: when a pass is over,
its tokens have been copied to the host, so all its KV has been written before a store begins; and a load has its result
before the next pass is enqueued.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvcluster
from kvcluster.config import ClientConfig
from kvcluster.testing import MemoryCluster
from tests.engines.generate_batch.audit import Audit
from tests.engines.generate_batch.engine import Output, generate, shared_prompts, smallest_margin, spec_of, tiny_llama
from tests.engines.generate_batch.shared_prefixes import Counts, SharedPrefixes

DEADLINE_MS = 20_000
STAGING_BYTES = 2**28


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parsed(arguments)
    model, prompts = tiny_llama(given.device), shared_prompts(given.prompts, given.seed)
    staging = STAGING_BYTES if given.device != "cpu" else 0
    alone, audit = generate(model, prompts), Audit()
    if given.connect:
        if given.filed.exists():
            audit.restore(given.filed)
        config = ClientConfig(deadline_ms=DEADLINE_MS, connect_ms=DEADLINE_MS, device_staging_bytes=staging)
        with kvcluster.connect(given.connect, spec_of(model), config=config) as client:
            output, counts = run(model, prompts, SharedPrefixes(client, audit, beside=given.beside))
        audit.save(given.filed)
    else:
        with MemoryCluster(config={"client": {"device_staging_bytes": staging}}) as cluster:
            client = cluster.client(spec_of(model))
            run(model, prompts, SharedPrefixes(client, audit))
            output, counts = run(model, prompts, SharedPrefixes(client, audit, beside=given.beside))
    print(_line(prompts, counts, audit, alone, output), f"smallest margin {smallest_margin(model, prompts, alone):.1e}")
    useful = counts.loaded > 0 or bool(given.connect)
    return 0 if useful and not audit.wrong and not output.differing(alone) else 1


def run(model: Any, prompts: list[list[int]], hooks: SharedPrefixes, **settings: int) -> tuple[Output, Counts]:
    """Runs one engine over a cluster. When it returns, every client finds what the engine has stored."""
    output = generate(model, prompts, hooks, **settings)
    hooks.settle()
    return output, hooks.counts


def _line(prompts: list[list[int]], counts: Counts, audit: Audit, alone: Output, output: Output) -> str:
    return (
        f"{len(prompts)} prompts, {counts.shared} tokens shared, {counts.loaded} loaded, {audit.blocks} blocks "
        f"audited, {len(audit.wrong)} wrong, {output.differing(alone)} tokens differ; {output.computed} tokens "
        f"computed, {alone.computed} without kvcluster; log probabilities differ by {output.drift(alone):.1e},"
    )


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.generate_batch", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="device of the model and its cache, cpu or cuda (default: cpu)")
    parser.add_argument("--prompts", type=int, default=48, help="number of prompts (default: 48)")
    parser.add_argument("--seed", type=int, default=1, help="seed that the prompts are drawn from (default: 1)")
    parser.add_argument("--beside", action="store_true", help="have requests wait for their loads while others run")
    parser.add_argument("--connect", default="", help="address of a coordinator; by default a cluster in this process")
    parser.add_argument("--filed", type=Path, help="file of what was stored, with --connect")
    given = parser.parse_args(arguments)
    if bool(given.connect) != (given.filed is not None):
        parser.error("--connect and --filed go together")
    return given


if __name__ == "__main__":
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # a failure is an error of its request
    sys.exit(main())
