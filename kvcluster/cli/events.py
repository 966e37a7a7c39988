"""`kvcluster events`: prints KV events as they arrive, of this cluster or of an engine that publishes vLLM's format.

Each event is one line on standard output; with `--json` it is a JSON object with full hashes and all token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import TYPE_CHECKING, Any

from kvcluster.core.messages.events import AllBlocksCleared, BlocksStored
from kvcluster.extras import needs

if TYPE_CHECKING:
    from kvcluster.client.events import Event

_ENDPOINT = "tcp://127.0.0.1:5557"
_WAIT_S = 1.0
"""Longest single wait, so that an interrupt is handled within this time."""

_DIGITS = 12


def add(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser("events", help="print KV events as they arrive", allow_abbrev=False)
    command.add_argument(
        "--endpoint", default=_ENDPOINT, metavar="URL", help=f"endpoint that publishes the events (default {_ENDPOINT})"
    )
    command.add_argument(
        "--replay", default="", metavar="URL", help="endpoint that replays missed events (default none)"
    )
    command.add_argument(
        "--topic",
        default="kv@",
        metavar="PREFIX",
        help="print topics that start with this prefix (default kv@; '' for all)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object per line")
    command.add_argument("--count", type=int, metavar="N", help="end after N events (default: no limit)")
    command.add_argument("--for", type=float, dest="for_s", metavar="S", help="end after S seconds (default: no limit)")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    with needs("events", "zmq", "msgspec"):
        from kvcluster.client.events import EventSubscriber
    show = _object if options.json else _line
    left = math.inf if options.count is None else options.count
    until_s = math.inf if options.for_s is None else time.monotonic() + options.for_s
    with EventSubscriber(options.endpoint, options.replay, options.topic) as subscriber:
        try:
            while left > 0 and (wait_s := until_s - time.monotonic()) > 0:
                event = subscriber.next(min(wait_s, _WAIT_S))
                if event is not None:
                    print(show(event), flush=True)
                    left -= 1
        except KeyboardInterrupt:
            pass  # the normal way to end this command
    return 0


def _line(heard: Event) -> str:
    event = heard.event
    of = f"{heard.model!r} [{heard.namespace}]" if heard.namespace else repr(heard.topic)
    if isinstance(event, AllBlocksCleared):
        return f"cleared  {of}" + (f": {heard.why}" if heard.why else "")
    what, behind = "removed", ""
    if isinstance(event, BlocksStored):
        what, behind = "stored", f" behind {event.parent.hex()[:_DIGITS]}" if event.parent else ""
    blocks = f"{len(event.hashes):,} block{'s' * (len(event.hashes) != 1)} from {event.hashes[0].hex()[:_DIGITS]}"
    return f"{what:<7}  {of}  {event.tier.name.lower()}: {blocks}{behind}"


def _object(heard: Event) -> str:
    event = heard.event
    found: dict[str, object] = {"topic": heard.topic, "namespace": heard.namespace, "model": heard.model}
    if isinstance(event, AllBlocksCleared):
        return json.dumps(found | {"event": "cleared", "why": heard.why})
    told: dict[str, object] = {"tier": event.tier.name.lower(), "hashes": [one.hex() for one in event.hashes]}
    if isinstance(event, BlocksStored):
        parent = None if event.parent is None else event.parent.hex()
        return json.dumps(found | {"event": "stored", **told, "parent": parent, "tokens": event.tokens})
    return json.dumps(found | {"event": "removed", **told})
