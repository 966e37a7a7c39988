"""`kvcluster up | join | down | status`: a cluster that keeps running, on this machine or on several."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from kvcluster.cli.coordinator_args import DEFAULT_PORT, add_coordinator_args, address_of, coordinator, read_status
from kvcluster.cli.namespace_diff import kept_apart, read_namespaces
from kvcluster.cli.weights import alone, engines_dict, read_engines
from kvcluster.config import SHARD_RESOURCE, Config, load, size
from kvcluster.errors import CallerError, Unreachable
from kvcluster.extras import needs
from kvcluster.transport.base import Unavailable


def add(commands: Any) -> None:
    """Adds the four commands."""
    _add_up(commands)
    _add_join(commands)

    down = commands.add_parser("down", help="stop the cluster that `up` started", allow_abbrev=False)
    down.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port of the coordinator (default {DEFAULT_PORT})"
    )
    down.add_argument("--address", metavar="HOST:PORT", help="end the cluster on the Ray of this head instead")
    down.add_argument("--name", default="kvcluster", help="name of the cluster on that Ray (default kvcluster)")
    down.set_defaults(run=_down)

    status = commands.add_parser("status", help="show shards, tiers, use, hit rate and leases", allow_abbrev=False)
    add_coordinator_args(status)
    status.add_argument("--json", action="store_true", help="print everything as one JSON object")
    status.set_defaults(run=_status)


def _add_up(commands: Any) -> None:
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
    up.add_argument(
        "--foreground",
        action="store_true",
        help="keep the cluster as configured until this command is told to end; with server.secret_file other nodes "
        "join",
    )
    up.add_argument(
        "--address", metavar="HOST:PORT", help="use the Ray that is there, of this head, and leave it running"
    )
    _add_node_args(up, offers="none")
    up.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=("unauthenticated-ray", "several-tenants"),
        help="accept this of the Ray at --address (see docs/operations.md)",
    )
    up.set_defaults(run=_up)


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join", help="make this machine a node of a cluster, until told to end", allow_abbrev=False
    )
    join.add_argument("head", metavar="HEAD", help="HOST or HOST:PORT of the head, as `kvcluster up` shows it")
    join.add_argument("--config", required=True, help="TOML file of the cluster's settings, as on its head")
    _add_node_args(join, offers=f"{SHARD_RESOURCE}=1")
    join.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="a label of this node, for groups of shards"
    )
    join.add_argument("--memory", help="memory for the pools of its shards, e.g. 40GiB (default what the machine has)")
    join.add_argument(
        "--leave-s", type=float, default=20.0, metavar="S", help="how long its shards may take to drain at the end (20)"
    )
    join.add_argument(
        "--config-wait-s",
        type=float,
        default=0.0,
        metavar="S",
        help="how long to wait for the head to run this configuration, where files reach hosts at different times (0)",
    )
    join.set_defaults(run=_join)


def _add_node_args(command: Any, *, offers: str) -> None:
    command.add_argument(
        "--offer",
        action="append",
        metavar="NAME=AMOUNT",
        help=f"a custom resource of this node, which shards claim (default {offers})",
    )
    command.add_argument("--node-ip", default="", help="this machine's address among the nodes (default: found out)")


def _up(options: argparse.Namespace) -> int:
    config = _settings(options)
    if options.foreground or options.address:
        return _up_in_foreground(options, config)
    if config.server.secret_file:
        raise CallerError(
            "server.secret_file makes a cluster of several nodes, which needs `kvcluster up --foreground`"
        )
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


def _up_in_foreground(options: argparse.Namespace, config: Config) -> int:
    with needs("cluster", "ray"):
        from kvcluster.actors import foreground
        from kvcluster.actors.addresses import outward_address
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # undo a partial start
    source = foreground.ConfigSource(lambda: _settings(options), options.config or "")
    if options.address:
        allowed = frozenset(options.allow)
        foreground.run_on(options.address, source, allowed, _say, once=not options.foreground)
    elif config.server.secret_file:
        foreground.run_head(source, options.node_ip or outward_address(config.server.host), _offers(options), _say)
    else:
        foreground.run_local(source, _say)
    return 0


def _settings(options: argparse.Namespace) -> Config:
    """Returns the configuration of a file and of the options given beside it. Raises ConfigError."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings: dict[str, Any] = {
        "server": {name: given[name] for name in ("port", "host", "token_file", "insecure") if name in given},
        "shard": {name: given[name] for name in ("device_bytes", "host_bytes", "disk_bytes") if name in given},
    }
    if "shards" in given:
        settings["shards"] = given["shards"]
    if "disk_dir" in given:  # the shards run in other working directories
        settings["shard"]["disk_dir"] = os.path.abspath(given["disk_dir"])
    return load(options.config, settings)


def _join(options: argparse.Namespace) -> int:
    config = load(options.config)
    if not config.server.secret_file:
        raise CallerError(f"{options.config} has no server.secret_file: only nodes with the cluster's secret may join")
    with needs("cluster", "ray"):
        from kvcluster.actors.joining import Joining, join
    head = options.head if ":" in options.head else f"{options.head}:{config.ray.port}"
    offers = _offers(options) or {SHARD_RESOURCE: 1.0}
    labels = dict(_pair(text, "--label") for text in options.label)
    memory = size(options.memory, "--memory") if options.memory else 0
    waits = options.leave_s, options.config_wait_s
    join(config, Joining(head, options.node_ip, offers, labels, memory, *waits), _say)
    return 0


def _offers(options: argparse.Namespace) -> dict[str, float]:
    offers: dict[str, float] = {}
    for text in options.offer or ():
        name, amount = _pair(text, "--offer")
        try:
            offers[name] = float(amount)
        except ValueError:
            raise CallerError(f"--offer takes NAME=AMOUNT, such as {SHARD_RESOURCE}=1, not {text!r}") from None
    return offers


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise CallerError(f"{option} takes NAME=VALUE, not {text!r}")
    return name, value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _down(options: argparse.Namespace) -> int:
    with needs("cluster", "ray"):
        from kvcluster.actors import background, foreground
    if options.address:
        ended = foreground.end_on(options.address, options.name)
        where = f"at {options.address} under the name {options.name!r}"
    else:
        ended = background.down(options.port)
        where = f"on port {options.port}"
    if ended:
        print("down")
        return 0
    print(f"nothing to stop: `kvcluster up` started nothing {where} that still runs", file=sys.stderr)
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
