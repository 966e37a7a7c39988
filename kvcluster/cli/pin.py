"""`kvcluster pin | unpin`: protects a common prefix, such as a system prompt, from eviction."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.cli.argument_types import positive, seconds
from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, coordinator
from kvcluster.cli.namespace_diff import read_namespaces
from kvcluster.cli.prompt_args import add_prompt_args, read_prompt, spec_of
from kvcluster.client.connect import connect
from kvcluster.errors import CallerError

_TTL_S = 86_400.0

_PIN = """
Protects the cached blocks of a prompt from eviction for a time, such as those of a system prompt. It computes nothing:
an engine must have stored the blocks. All pins of a tenant together take a share of the cache at most
(coordinator.pinned_share, by default a quarter).
"""

_UNPIN = """
Ends the pin of a prompt: its blocks stay until they are evicted as all others.
"""

_EXAMPLE = "--model llama-3-8b --prompt-file system.json"


def add(commands: Any) -> None:
    """Adds both commands."""
    pin = commands.add_parser(
        "pin",
        help="protect a prompt from eviction",
        description=_PIN,
        examples=[
            f"kvcluster pin {_EXAMPLE}",
            "kvcluster pin --model llama-3-8b --prompt-file system.txt \\\n      --tokenizer ./llama --ttl 3600",
        ],
    )
    pin.add_argument(
        "--ttl", type=seconds, default=_TTL_S, metavar="S", help="seconds until the pin ends (default 86400)"
    )
    pin.add_argument(
        "--replicas", type=positive, default=1, metavar="N", help="number of shards that are to hold it (default 1)"
    )
    unpin = commands.add_parser(
        "unpin",
        help="let a pinned prompt be evicted again",
        description=_UNPIN,
        examples=[f"kvcluster unpin {_EXAMPLE}"],
    )
    for command, verb in ((pin, "pin"), (unpin, "unpin")):
        add_prompt_args(command)
        add_coordinator_args(command)
        command.set_defaults(run=_run, verb=verb)


def _run(options: argparse.Namespace) -> int:
    prompt = read_prompt(options)
    tokens = len(prompt.token_ids)
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        spec = spec_of(options, read_namespaces(port, ANSWER_MS))
    with connect(address_of(options), spec, token=options.token) as client:
        if options.verb == "unpin":
            client.unpin(prompt)
            print("the prompt may be evicted again")
            return 0
        pinned = client.pin(prompt, options.ttl, replicas=options.replicas)
    whole = tokens // spec.block_tokens
    if not pinned.blocks:
        raise CallerError(
            f"none of these {tokens:,} tokens is cached ({pinned.miss or 'never seen, or no room for pins'}): "
            "let an engine compute them first"
        )
    print(f"{pinned.tokens:,} of {tokens:,} tokens are pinned for {options.ttl:,.0f} s")
    if pinned.blocks < whole:
        print(f"the other {whole - pinned.blocks:,} block(s) are not cached, or the limit of pinned bytes is reached")
    return 0
