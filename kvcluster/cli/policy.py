"""`kvcluster policy`: shows and changes the tier settings that may change while a cluster runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, coordinator, read_status
from kvcluster.core.messages import Done, SetPolicy
from kvcluster.errors import CallerError
from kvcluster.transfers.coordinator_client import expect
from kvcluster.transport.base import Deadline

_DESCRIPTION = """
Shows how pages move between the tiers of a running cluster, or changes it, for operators. A change holds for pages that
are demoted from then on, also after the coordinator has restarted.

settings, with their defaults:
  host.codec=q8       encoding of pages that go down to the host tier: raw, q8
                      or q4
  host.raw_blocks=1   so many first blocks of a prompt stay raw
  promote.loads=4     a run of blocks that is loaded so often within
                      coordinator.hot_window_ms comes up again
"""


def add(commands: Any) -> None:
    """Adds the command."""
    policy = commands.add_parser(
        "policy",
        help="show or change how pages move between tiers",
        description=_DESCRIPTION,
        examples=["kvcluster policy", "kvcluster policy set host.codec=q4 promote.loads=8"],
    )
    policy.add_argument(
        "action", nargs="?", choices=["set"], metavar="set", help="change settings (default: show them)"
    )
    policy.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings to change, such as host.codec=q4")
    policy.add_argument("--json", action="store_true", help="print the settings as one JSON object")
    add_coordinator_args(policy)
    policy.set_defaults(run=_policy)


def _policy(options: argparse.Namespace) -> int:
    settings = tuple(_setting(text) for text in options.settings)
    if (options.action == "set") != bool(settings):
        raise CallerError("give the settings after `set`, such as `kvcluster policy set host.codec=q4`")
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        if settings:
            expect(Done, port.ask(SetPolicy(settings), Deadline.after_ms(ANSWER_MS)))
        policy: dict[str, str] = read_status(port, ANSWER_MS)["policy"]
    if options.json:
        print(json.dumps(policy, indent=2))
        return 0
    for name, value in policy.items():
        print(f"{name}={value}")
    if settings:
        print("Applies to future demotions.")
    return 0


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise CallerError(f"{text!r} is not a setting; write NAME=VALUE, such as host.codec=q4")
    return name, value
