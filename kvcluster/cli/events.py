"""`kvcluster events`: prints KV events as they come, of this cluster or of an engine with vLLM's words.

Standard output has a line for each event; `--json` makes each a JSON object with whole hashes and all token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import TYPE_CHECKING, Any

from kvcluster.cli.extras import needs
from kvcluster.core.messages.events import AllBlocksCleared, BlocksStored

if TYPE_CHECKING:
    from kvcluster.client.events import Event

_ENDPOINT = "tcp://127.0.0.1:5557"
_WAIT_S = 1.0
"""One wait, so that an interrupt never waits for longer."""

_DIGITS = 12


def add(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser("events", help="print KV events as they come", allow_abbrev=False)
    command.add_argument(
        "--endpoint", default=_ENDPOINT, metavar="URL", help=f"where they are published (default {_ENDPOINT})"
    )
    command.add_argument("--replay", default="", metavar="URL", help="where earlier and missed ones are asked for")
    command.add_argument(
        "--topic", default="kv@", metavar="PREFIX", help="those that begin so (default kv@; '' for all)"
    )
    command.add_argument("--json", action="store_true", help="a JSON object a line")
    command.add_argument("--count", type=int, metavar="N", help="end after so many events")
    command.add_argument("--for", type=float, dest="for_s", metavar="S", help="end after so many seconds")
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
            pass  # the usual end
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
