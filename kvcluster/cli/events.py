"""`kvcluster events`: prints KV events as they arrive, of this cluster or of an engine that publishes vLLM's format.

Each event is one line on standard output; with `--json` it is a JSON object with full hashes and all token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from kvcluster.cli.command_parser import positive, seconds
from kvcluster.cli.coordinator_args import add_tls_args, connection_config
from kvcluster.client.event_tunnel import EventTunnel
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksStored
from kvcluster.errors import ConfigError
from kvcluster.extras import needs
from kvcluster.release import docs_page
from kvcluster.transport.credentials import tls_credentials

if TYPE_CHECKING:
    from kvcluster.client.events import Event

_ENDPOINT = "tcp://127.0.0.1:5557"
_WAIT_S = 1.0
"""Longest single wait, so that an interrupt is handled within this time."""

_DIGITS = 12


_DESCRIPTION = """
Prints KV events as they arrive, a line each: which blocks were stored, removed or cleared, in which tier. They are of a
cluster whose configuration has events.endpoint, or of an engine that publishes events in vLLM's format. While
nothing listens at the endpoint, it says so and waits. It changes nothing; Ctrl-C ends it.

A cluster that speaks TLS lets in who shows the certificate of an operator, or of a reader of events. Subscribers that
speak no TLS, as those of engines and routers, connect to what --forward opens on this machine.

exit status: 0; 1 if nothing has listened at the endpoint until the end.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "events",
        help="print KV events as they arrive",
        description=_DESCRIPTION,
        examples=[
            "kvcluster events",
            "kvcluster events --replay tcp://127.0.0.1:5558 --json",
            "kvcluster events --endpoint tcp://10.0.0.7:5557 --topic '' --for 60",
            "kvcluster events --endpoint tcp://kv:5557 --forward tcp://127.0.0.1:5557",
        ],
    )
    command.add_argument(
        "--endpoint",
        default=_ENDPOINT,
        metavar="URL",
        help=f"endpoint that publishes the events, events.endpoint (default {_ENDPOINT})",
    )
    command.add_argument(
        "--replay",
        default="",
        metavar="URL",
        help="endpoint that replays missed events, events.replay (default: none, and then what is missed is said)",
    )
    command.add_argument(
        "--topic",
        default="kv@",
        metavar="PREFIX",
        help="print topics that start with this prefix (default kv@; '' for all)",
    )
    command.add_argument(
        "--json", action="store_true", help="print a JSON object on each line, with all hashes and token ids"
    )
    command.add_argument("--count", type=positive, metavar="N", help="end after N events (default: no limit)")
    command.add_argument(
        "--for", type=seconds, dest="for_s", metavar="S", help="end after S seconds (default: no limit)"
    )
    command.add_argument(
        "--forward",
        default="",
        metavar="URL",
        help="print nothing, and pass connections to this address of this machine on to the endpoint, within TLS "
        "(default: print events)",
    )
    add_tls_args(command)
    command.set_defaults(run=_run)


def _forward(options: argparse.Namespace) -> int:
    tls = tls_credentials(connection_config(options))
    if tls.certificates is None:
        raise ConfigError("--forward is for a cluster that speaks TLS: give --ca, and --cert and --key")
    until_s = math.inf if options.for_s is None else time.monotonic() + options.for_s
    tunnel = EventTunnel(options.endpoint, tls.certificates, tls.server_name, local=options.forward)
    with closing(tunnel), suppress(KeyboardInterrupt):  # the normal way to end this command
        print(f"{options.forward} leads to {options.endpoint}", flush=True)
        while (wait_s := until_s - time.monotonic()) > 0:
            time.sleep(min(wait_s, _WAIT_S))
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.forward:
        return _forward(options)
    with needs("zmq", "msgspec"):
        from kvcluster.client.events import EventSubscriber
    show = _object if options.json else _line
    left = math.inf if options.count is None else options.count
    until_s = math.inf if options.for_s is None else time.monotonic() + options.for_s
    publisher = _Publisher(options.endpoint)
    config = connection_config(options)
    with EventSubscriber(options.endpoint, options.replay, options.topic, config=config) as subscriber:
        try:
            while left > 0 and (wait_s := until_s - time.monotonic()) > 0:
                publisher.look()
                event = subscriber.next(min(wait_s, _WAIT_S))
                if event is not None:
                    publisher.found()
                    print(show(event), flush=True)
                    left -= 1
        except KeyboardInterrupt:
            pass  # the normal way to end this command
    return 0 if publisher.listens else 1


class _Publisher:
    """Whether something has listened at the endpoint: a ZMQ socket waits for a publisher without reporting that.
    Endpoints other than tcp://HOST:PORT are taken to listen."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._address = (host.strip("[]"), int(port)) if port.isdecimal() and endpoint.startswith("tcp://") else None
        self._said = False
        self.listens = self._address is None

    def look(self) -> None:
        """Checks whether something listens, unless it was found before; prints when nothing does, and when that
        changes."""
        if self.listens or self._address is None:
            return
        try:
            socket.create_connection(self._address, timeout=_WAIT_S).close()
        except OSError as error:
            if not self._said:
                why = error.strerror or str(error)
                print(
                    f"kvcluster: nothing publishes events at {self._endpoint} yet ({why}); waiting for it. A cluster "
                    f"publishes where its configuration says so: events.endpoint ({docs_page('events.md')})",
                    file=sys.stderr,
                )
                self._said = True
            return
        self.found()

    def found(self) -> None:
        """Notes that something listens, and prints so if nothing did before."""
        if self._said and not self.listens:
            print(f"kvcluster: {self._endpoint} listens now", file=sys.stderr)
        self.listens = True


def _line(received: Event) -> str:
    event = received.event
    of = f"{received.model!r} [{received.namespace}]" if received.namespace else repr(received.topic)
    if isinstance(event, AllBlocksCleared):
        return f"cleared  {of}" + (f": {received.why}" if received.why else "")
    what, behind = "removed", ""
    if isinstance(event, BlocksStored):
        what, behind = "stored", f" behind {event.parent.hex()[:_DIGITS]}" if event.parent else ""
    blocks = f"{len(event.hashes):,} block{'s' * (len(event.hashes) != 1)} from {event.hashes[0].hex()[:_DIGITS]}"
    return f"{what:<7}  {of}  {event.tier.name.lower()}: {blocks}{behind}"


def _object(received: Event) -> str:
    event = received.event
    found: dict[str, object] = {"topic": received.topic, "namespace": received.namespace, "model": received.model}
    if isinstance(event, AllBlocksCleared):
        return json.dumps(found | {"event": "cleared", "why": received.why})
    fields: dict[str, object] = {"tier": event.tier.name.lower(), "hashes": [one.hex() for one in event.hashes]}
    if isinstance(event, BlocksStored):
        parent = None if event.parent is None else event.parent.hex()
        return json.dumps(found | {"event": "stored", **fields, "parent": parent, "tokens": event.tokens})
    return json.dumps(found | {"event": "removed", **fields})
