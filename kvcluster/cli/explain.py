"""`kvcluster lookup | explain`: how much of a prompt is cached, and for every block where it is or why it is a miss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, connection_config, coordinator
from kvcluster.cli.prompt_args import add_prompt_args, read_prompt, spec_of
from kvcluster.cli.text_page import TableCell, TableColumn, TextPage, Tone, counted
from kvcluster.cli.weights import read_namespaces
from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.config.sections import LOSSES
from kvcluster.core.miss import Loss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.transfer import BlockExplanation, Lookup

R = TypeVar("R")

_LOOKUP = """
Shows how many tokens of a prompt an engine could load instead of computing them, and why the next block is a miss. It
moves no page and pins none; it counts as a lookup in the hit rate.
"""

_EXPLAIN = """
Shows for every block of a prompt in which tier of which shards it is, or why it is a miss: never stored, evicted,
stored under other weights or settings, and so on. Consecutive blocks that are alike are one row. It moves no page, pins
none and changes nothing.
"""

_EXAMPLES = (
    "--prompt-file prompt.json",
    "--model llama-3-8b --prompt-file prompt.txt \\\n      --tokenizer ./llama",
    "--prompt-file - <<< '[128000, 2675, 527, 264]' --json",
)

MEANINGS = {
    MissReason.NEVER_SEEN: "no engine has stored it, or so long ago that the cluster does not remember",
    MissReason.EVICTED: "it was stored, and evicted to make room",
    MissReason.PENDING: "an engine is storing it at this moment",
    MissReason.BELOW_BLOCK: "tokens at the end that fill no block are never stored",
    MissReason.NAMESPACE: "it is stored by engines that differ in this",
    MissReason.PART: "only some of its layers or heads are stored",
    MissReason.LOSSY: "it is stored only with more loss than --accept allows",
    MissReason.CORRUPT: "its bytes did not match their checksum",
    MissReason.SHARD_LOST: "the shard that holds it does not answer",
    MissReason.COORDINATOR_LOST: "the coordinator does not answer, so the cluster could not be asked",
    MissReason.DEVICE_LOST: "the device with the caller's memory has failed in that process",
    MissReason.REBUILDING: "the coordinator has just started and does not know all blocks yet",
    MissReason.FULL: "there was no room for it",
    MissReason.DEADLINE: "the coordinator did not answer in time",
    MissReason.SLOWER_THAN_RECOMPUTE: "loading it would take longer than computing it",
    MissReason.OFF: "the cache is turned off (`kvcluster on`)",
}
"""What each reason means to the person who asks."""


def add(commands: Any) -> None:
    """Adds both commands."""
    looks_up = partial(_ask, Client.lookup, lookup_dict, add_lookup)
    explains = partial(_ask, Client.explain, explain_dict, add_explanation)
    for name, does, description, run in (
        ("lookup", "show how much of a prompt is cached", _LOOKUP, looks_up),
        ("explain", "show for every block of a prompt where it is, or why not", _EXPLAIN, explains),
    ):
        examples = [f"kvcluster {name} {example}" for example in _EXAMPLES]
        command = commands.add_parser(name, help=does, description=description, examples=examples)
        command.add_argument(
            "--accept",
            choices=LOSSES,
            default="q4",
            help="the most loss that counts as cached: exact, q8 or q4 (default q4, as for engines)",
        )
        command.add_argument("--json", action="store_true", help="print the answer as JSON")
        add_prompt_args(command)
        add_coordinator_args(command)
        command.set_defaults(run=run)


def _ask(
    ask: Callable[..., R],
    as_dict: Callable[[R, KVSpec, int], dict[str, Any]],
    add_to: Callable[[TextPage, R, KVSpec, int], None],
    options: argparse.Namespace,
) -> int:
    """Asks the cluster about the prompt by a call of the client, and prints the answer."""
    prompt, spec = read_prompt(options), _spec(options)
    with connect(address_of(options), spec, token=options.token, config=connection_config(options)) as client:
        found = ask(client, prompt, accept=Loss[options.accept.upper()])
    if options.json:
        print(json.dumps(as_dict(found, spec, len(prompt.token_ids)), indent=2))
    else:
        page = TextPage.of_terminal()
        add_to(page, found, spec, len(prompt.token_ids))
        page.print()
    return 0


def _spec(options: argparse.Namespace) -> KVSpec:
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        known = read_namespaces(port, ANSWER_MS)
    return spec_of(options, known)


# ------------------------------------------------------------------------------------------------ lookup


def lookup_dict(found: Lookup, spec: KVSpec, tokens: int) -> dict[str, Any]:
    """Returns a lookup as plain values for JSON."""
    miss = found.reason
    return _about(spec, tokens) | {
        "cached_tokens": found.tokens,
        "cached_blocks": found.blocks,
        "loss": found.loss.name.lower(),
        "miss": None if miss is None else {"reason": miss.reason.value, "detail": miss.detail},
    }


def add_lookup(page: TextPage, found: Lookup, spec: KVSpec, tokens: int) -> None:
    """Adds how much is cached and why the next block is a miss."""
    _add_head(page, spec, tokens)
    loss = "" if found.loss is Loss.EXACT else f", with the loss of {found.loss.name.lower()}"
    share = f"{found.tokens:,} of {counted(tokens, 'token')} are cached{loss}"
    page.say("", label=share, tone=Tone.GOOD if found.tokens else Tone.WARNING)
    if found.reason is not None:
        page.say(_why(found.reason.reason, found.reason.detail), label=f"block {found.blocks} is a miss: ")


# ------------------------------------------------------------------------------------------------ explain


def explain_dict(blocks: Sequence[BlockExplanation], spec: KVSpec, tokens: int) -> dict[str, Any]:
    """Returns the explanations as plain values for JSON."""
    return _about(spec, tokens) | {
        "blocks": [
            {"block": each.block, "hit": each.hit}
            | (
                {"tier": each.tier, "shard": each.shard}
                if each.reason is None
                else {"reason": each.reason.value, "detail": each.detail}
            )
            for each in blocks
        ]
    }


def add_explanation(page: TextPage, blocks: Sequence[BlockExplanation], spec: KVSpec, tokens: int) -> None:
    """Adds a row for each run of blocks that are alike."""
    _add_head(page, spec, tokens)
    page.table(
        [TableColumn("blocks", right=True), TableColumn("tokens", right=True), TableColumn(""), TableColumn("")],
        list(_rows(blocks, spec.block_tokens, tokens)),
    )
    hits = sum(each.hit for each in blocks)
    page.say(f"{counted(hits, 'block')} of {len(blocks):,} can be loaded")


def _rows(blocks: Sequence[BlockExplanation], block_tokens: int, tokens: int) -> Iterator[list[str | TableCell]]:
    for _, run in groupby(blocks, lambda each: (each.hit, each.tier, each.shard, each.reason, each.detail)):
        first, *rest = run
        last = rest[-1] if rest else first
        end = min((last.block + 1) * block_tokens, tokens) - 1
        numbers = [_range(first.block, last.block), _range(first.block * block_tokens, end)]
        if first.reason is None:
            yield [*numbers, TableCell("hit", Tone.GOOD), f"{first.tier} tier of {first.shard}"]
        else:
            yield [*numbers, TableCell("miss", Tone.WARNING), _why(first.reason, first.detail)]


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _why(reason: MissReason, detail: str) -> str:
    return f"{reason.value}{f' ({detail})' if detail else ''}: {MEANINGS[reason]}"


def _add_head(page: TextPage, spec: KVSpec, tokens: int) -> None:
    about = [f"weights {spec.weights}", *([f"adapter {spec.adapter}"] if spec.adapter else [])]
    blocks = f"{counted(tokens, 'token')} in blocks of {spec.block_tokens}"
    page.say(f"{', '.join(about)}; {blocks}", label=f"{spec.model}  ", tone=Tone.HEAD)


def _about(spec: KVSpec, tokens: int) -> dict[str, Any]:
    about = {"model": spec.model, "weights": spec.weights, "adapter": spec.adapter}
    return about | {"tokens": tokens, "block_tokens": spec.block_tokens}
