"""`kvcluster pin | unpin | pins`: protects a common prefix, such as a system prompt, from eviction."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.cli.command_parser import positive, seconds
from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, connection_config, coordinator
from kvcluster.cli.prompt_args import ID_CHARS, add_prompt_args, layout_id, read_prompt, spec_of
from kvcluster.cli.text_page import TableCell, TableColumn, TextPage, counted, duration_text, print_figures
from kvcluster.cli.weights import read_namespaces
from kvcluster.client.connect import connect
from kvcluster.client.pinning import list_pins, unpin_prefix
from kvcluster.config import size_text
from kvcluster.errors import CallerError, Unreachable
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.transfer import PinListing
from kvcluster.transport.base import Deadline

_TTL_S = 86_400.0
_LAYOUT_CHARS = 8

_PIN = """
Protects the cached blocks of a prompt from eviction for a time, such as those of a system prompt. It computes nothing:
an engine must have stored the blocks. All pins of a tenant together take a share of the cache at most
(coordinator.pinned_share, by default a quarter).
"""

_UNPIN = """
Ends the pin of a prompt: its blocks stay until they are evicted as all others. Given the id of a pin, blocks that
another pin has too stay pinned.
"""

_PINS = """
Lists the pinned prefixes of prompts: their tokens, what they take in all tiers of all shards, and when their pins end.
A pin is named by the hash of its last block. Prefixes that begin alike share blocks ("shared"), which each of them
counts. An operator's token lists the pins of all tenants. It changes nothing.
"""

_EXAMPLE = "--model llama-3-8b --prompt-file system.json"


def add(commands: Any) -> None:
    """Adds the commands."""
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
        usage="kvcluster unpin (--prompt-file FILE | --pin ID) [options]",
        help="let a pinned prompt be evicted again",
        description=_UNPIN,
        examples=[f"kvcluster unpin {_EXAMPLE}", "kvcluster unpin --pin 3fa9c17e20b4"],
    )
    for command, verb in ((pin, "pin"), (unpin, "unpin")):
        add_prompt_args(command, or_pin=command is unpin)
        add_coordinator_args(command)
        command.set_defaults(run=_run, verb=verb, pin=None)
    pins = commands.add_parser(
        "pins",
        help="list what is pinned, its size, and until when",
        description=_PINS,
        examples=["kvcluster pins", "kvcluster pins --model llama-3-8b --json"],
    )
    pins.add_argument(
        "--model", metavar="NAME", help="model as the engines registered it (default: the pins of all models)"
    )
    pins.add_argument("--json", action="store_true", help="print the pins as a JSON object")
    add_coordinator_args(pins)
    pins.set_defaults(run=_pins)


def pins_dict(listing: PinListing) -> dict[str, Any]:
    """Returns the pins as plain values for JSON."""
    pins = [
        {
            "pin": pin.block,
            "tenant": pin.tenant,
            "model": pin.spec.model,
            "weights": pin.spec.weights,
            "adapter": pin.spec.adapter,
            "layout": layout_id(pin.spec),
            "first_token": pin.first * pin.spec.block_tokens,
            "tokens": pin.tokens,
            "blocks": pin.blocks,
            "shared_blocks": pin.shared_blocks,
            "nbytes": pin.nbytes,
            "left_s": pin.left_s,
        }
        for pin in listing.pins
    ]
    return {"pins": pins, "more_blocks": listing.more_blocks}


def add_pins(page: TextPage, listing: dict[str, Any]) -> None:
    """Adds a row for each pin, as `pins_dict` returns them."""
    pins = listing["pins"]
    if not pins:
        page.say("nothing is pinned")
    else:
        columns = [
            *(TableColumn("pin"), TableColumn("tenant", drop=3), TableColumn("model")),
            *(TableColumn("layout", drop=1), TableColumn("adapter", drop=2), TableColumn("tokens", right=True)),
            *(TableColumn("shared", right=True), TableColumn("size", right=True), TableColumn("ends in", right=True)),
        ]
        page.table(columns, map(_pin_row, pins))
    if listing["more_blocks"]:
        more = counted(listing["more_blocks"], "more pinned block")
        page.say(f"and {more}, not shown: --model shows those of one model")


def _pin_row(pin: dict[str, Any]) -> list[str | TableCell]:
    tokens, first = pin["tokens"], pin["first_token"]
    shared = pin["shared_blocks"] * tokens // pin["blocks"]
    return [
        *(pin["pin"][:ID_CHARS], pin["tenant"], pin["model"], pin["layout"][:_LAYOUT_CHARS], pin["adapter"][:ID_CHARS]),
        f"{tokens:,}" if not first else f"{first:,} to {first + tokens:,}",
        *(f"{shared:,}" if shared else "", size_text(pin["nbytes"]), duration_text(int(pin["left_s"] * 1e9))),
    ]


def _pins(options: argparse.Namespace) -> int:
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        listing = pins_dict(list_pins(CoordinatorClient(port), options.model, Deadline.after_ms(ANSWER_MS)))
    print_figures(listing, add_pins, as_json=options.json)
    return 0


def _unpin(options: argparse.Namespace) -> int:
    """Ends the pin that --pin names."""
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        control, deadline = CoordinatorClient(port), Deadline.after_ms(ANSWER_MS)
        listing = list_pins(control, None, deadline)
        found = [pin for pin in listing.pins if options.pin and pin.block.startswith(options.pin)]
        if len(found) != 1:
            what = f"{len(found)} pins have" if found else "no pin has"
            raise CallerError(f"{what} an id that begins with {options.pin!r}: `kvcluster pins` lists them")
        unpinned = unpin_prefix(control, found[0], deadline)
    if unpinned.miss is not None:
        raise Unreachable(f"the coordinator does not answer: {unpinned.miss}; some of it may still be pinned")
    rest = (
        f"; {counted(found[0].shared_blocks, 'block')} of it stay pinned with others" if found[0].shared_blocks else ""
    )
    print(f"{unpinned.tokens:,} tokens may be evicted again{rest}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.pin is not None:
        return _unpin(options)
    prompt = read_prompt(options)
    tokens = len(prompt.token_ids)
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        spec = spec_of(options, read_namespaces(port, ANSWER_MS))
    with connect(address_of(options), spec, token=options.token, config=connection_config(options)) as client:
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
