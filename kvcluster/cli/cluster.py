"""`kvcluster up | down | status`: a cluster that keeps running on this machine."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from kvcluster.cli.screen import needs
from kvcluster.client.control import NO_CALL, GrpcPort, expect
from kvcluster.client.status import status_dict
from kvcluster.config import load
from kvcluster.core.messages import GetStatus, Status
from kvcluster.transport.rpc import Connection
from kvcluster.transport.seam import Deadline

DEFAULT_PORT = 7070


def add(commands: Any) -> None:
    """Adds the three commands."""
    up = commands.add_parser("up", help="start a cluster that keeps running", allow_abbrev=False)
    up.add_argument("--shards", type=int, help="number of shards (default 1)")
    up.add_argument("--device-bytes", help="pool of each shard, such as 1GiB (the default)")
    up.add_argument("--port", type=int, help=f"port of the coordinator (default {DEFAULT_PORT})")
    up.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    up.add_argument("--token-file", help="who may connect; see `kvcluster token`")
    up.add_argument("--insecure", action="store_true", help="listen beyond loopback without a token file")
    up.add_argument("--config", help="TOML file with these and all other settings")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="stop the cluster that `up` started", allow_abbrev=False)
    down.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"its port (default {DEFAULT_PORT})")
    down.set_defaults(run=_down)

    status = commands.add_parser("status", help="shards, tiers, use, hit rate and leases", allow_abbrev=False)
    status.add_argument("--address", default=f"127.0.0.1:{DEFAULT_PORT}", help="host:port of the coordinator")
    status.add_argument("--token", default=os.environ.get("KVCLUSTER_TOKEN"), help="or KVCLUSTER_TOKEN")
    status.add_argument("--json", action="store_true", help="everything, as one JSON object")
    status.set_defaults(run=_status)


def _up(options: argparse.Namespace) -> int:
    settings: dict[str, Any] = {}
    server = {name: getattr(options, name) for name in ("port", "host", "token_file") if getattr(options, name)}
    if options.insecure:
        server["insecure"] = True
    if server:
        settings["server"] = server
    if options.shards is not None:
        settings["shards"] = options.shards
    if options.device_bytes is not None:
        settings["shard"] = {"device_bytes": options.device_bytes}
    config = load(options.config, settings)
    with needs("cluster", "ray"):
        from kvcluster.actors import background
    running, started = background.up(config)
    if started:
        print(f"up at {running.address} with {running.shards} shard(s)")
        print("`kvcluster status` shows it, `kvcluster down` ends it")
    else:
        print(f"already up at {running.address} with {running.shards} shard(s); `kvcluster down` ends it")
    return 0


def _down(options: argparse.Namespace) -> int:
    with needs("cluster", "ray"):
        from kvcluster.actors import background
    if background.down(options.port):
        print("down")
        return 0
    print(f"nothing to stop: `kvcluster up` started nothing on port {options.port} that still runs")
    return 1


def _status(options: argparse.Namespace) -> int:
    connection = Connection(options.address, options.token)
    try:
        deadline = Deadline.after_ms(5_000)
        connection.wait_ready(deadline)
        status = status_dict(expect(Status, GrpcPort(connection).ask(GetStatus(NO_CALL), deadline)))
    finally:
        connection.close()
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        with needs("cli", "rich", instead="or use --json"):
            from kvcluster.cli.tables import print_status
        print_status(status, options.address)
    return 0
