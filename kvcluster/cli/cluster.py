"""`kvcluster up | down | status`: a cluster that keeps running on this machine."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from kvcluster.cli.coordinator_args import DEFAULT_PORT, add_coordinator_args, address_of, coordinator, read_status
from kvcluster.cli.extras import needs
from kvcluster.cli.namespace_diff import kept_apart, read_namespaces
from kvcluster.cli.weights import alone, engines_dict, read_engines
from kvcluster.config import load
from kvcluster.errors import Unreachable
from kvcluster.transport.base import Unavailable


def add(commands: Any) -> None:
    """Adds the three commands."""
    up = commands.add_parser("up", help="start a cluster that keeps running", allow_abbrev=False)
    up.add_argument("--shards", type=int, help="number of shards (default 1)")
    up.add_argument("--device-bytes", help="device tier of each shard, e.g. 1GiB (default 1GiB)")
    up.add_argument("--host-bytes", help="host tier of each shard, for encoded pages, e.g. 4GiB (default none)")
    up.add_argument("--disk-bytes", help="disk tier of each shard, e.g. 100GiB (default none); needs --disk-dir")
    up.add_argument("--disk-dir", help="folder on a local drive for the disk tier; the next cluster reuses its files")
    up.add_argument("--port", type=int, help=f"port of the coordinator (default {DEFAULT_PORT})")
    up.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    up.add_argument("--token-file", help="file of the tokens that may connect; see `kvcluster token` (default none)")
    up.add_argument(
        "--insecure", action="store_true", default=None, help="allow a --host beyond loopback without --token-file"
    )
    up.add_argument("--config", help="TOML file with these and all other settings")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="stop the cluster that `up` started", allow_abbrev=False)
    down.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port of the coordinator (default {DEFAULT_PORT})"
    )
    down.set_defaults(run=_down)

    status = commands.add_parser("status", help="show shards, tiers, use, hit rate and leases", allow_abbrev=False)
    add_coordinator_args(status)
    status.add_argument("--json", action="store_true", help="print everything as one JSON object")
    status.set_defaults(run=_status)


def _up(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings: dict[str, Any] = {
        "server": {name: given[name] for name in ("port", "host", "token_file", "insecure") if name in given},
        "shard": {name: given[name] for name in ("device_bytes", "host_bytes", "disk_bytes") if name in given},
    }
    if "shards" in given:
        settings["shards"] = given["shards"]
    if "disk_dir" in given:  # the shards run in other working directories
        settings["shard"]["disk_dir"] = os.path.abspath(given["disk_dir"])
    config = load(options.config, settings)
    with needs("cluster", "ray"):
        from kvcluster.actors import background

    def starting() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # undo a partial start
        print(f"starting Ray, a coordinator and {config.shards} shard(s): usually ten seconds", file=sys.stderr)

    running, started = background.up(config, starting=starting)
    where = "" if running.port == DEFAULT_PORT else f" --port {running.port}"
    print(f"{'up' if started else 'already up'} at {running.address}: {running.shards} shard(s)")
    print(f"`kvcluster status{where}` shows it, `kvcluster down{where}` stops it")
    return 0


def _down(options: argparse.Namespace) -> int:
    with needs("cluster", "ray"):
        from kvcluster.actors import background
    if background.down(options.port):
        print("down")
        return 0
    print(f"nothing to stop: `kvcluster up` started nothing on port {options.port} that still runs", file=sys.stderr)
    return 1


def _status(options: argparse.Namespace) -> int:
    address = address_of(options)
    try:
        # Unlike `connect`, this does not wait for a cluster to start: it shows the state now.
        with coordinator(options) as port:
            engines = read_engines(port, 5_000)
            apart = [*kept_apart(read_namespaces(port, 5_000)), *alone(engines)]
            status = read_status(port, 5_000) | {"apart": apart, "engines": engines_dict(engines)}
    except Unavailable:
        raise Unreachable(f"no cluster answers at {address}; `kvcluster up` starts one") from None
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        with needs("cli", "rich", instead="or use --json"):
            from kvcluster.cli.status_view import print_status
        print_status(status, address)
    return 0
