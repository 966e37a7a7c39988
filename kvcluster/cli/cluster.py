"""`kvcluster up | join | down`: a cluster that keeps running, on this machine or on several."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from typing import Any

from kvcluster.cli.command_parser import OldOption
from kvcluster.cli.coordinator_args import DEFAULT_PORT
from kvcluster.cli.status import StatusExit
from kvcluster.config import ENCRYPTIONS, SHARD_RESOURCE, Config, load, size
from kvcluster.errors import CallerError
from kvcluster.extras import needs

_UP = """
Starts a cluster in the background and returns: Ray on loopback, a coordinator and the shards. `kvcluster down` stops
it. If it runs already, `up` starts the shards that are missing, such as one that was drained, and changes nothing else.

Each shard has up to three tiers, and takes the memory of the first two at once. Pages are stored in the RAM tier;
the coldest go down to the next tier instead of away. This release keeps no pages on a GPU, also where a machine has
one.

exit status:
  0  up, as configured
  1  nothing was started
  3  up, but degraded: a shard is without one of its tiers, or with a smaller
     one; what is missing is printed
"""

_JOIN = """
Makes this machine a node of a cluster that runs on another one (`kvcluster up --foreground` with server.secret_file
there). The node takes the shards that the cluster's configuration gives it. It stays in the foreground; Ctrl-C or
SIGTERM ends it, and its shards drain to other nodes first.
"""

_DOWN = """
Stops the cluster that `kvcluster up` started on this machine, or, with --address, a cluster on a Ray that goes on. All
pages in memory are lost; shards with a disk tier save their hottest pages there first (shard.stop_ms).
"""


def add(commands: Any) -> None:
    """Adds the three commands."""
    _add_up(commands)
    _add_join(commands)

    down = commands.add_parser(
        "down",
        help="stop the cluster that `up` started",
        description=_DOWN,
        examples=["kvcluster down", "kvcluster down --address 10.0.0.5:6379 --name team-a"],
    )
    down.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="PORT",
        help=f"port of the coordinator on this machine (default {DEFAULT_PORT})",
    )
    down.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="stop a cluster on the Ray whose head listens there instead, and leave that Ray running (default: use "
        "--port)",
    )
    down.add_argument(
        "--name", default="kvcluster", help="name of the cluster on the Ray at --address (default kvcluster)"
    )
    down.set_defaults(run=_down)


def _add_up(commands: Any) -> None:
    up = commands.add_parser(
        "up",
        help="start a cluster that keeps running",
        description=_UP,
        examples=[
            "kvcluster up --shards 2 --ram-bytes 1GiB",
            "kvcluster up --ram-bytes 1GiB --host-bytes 4GiB --disk-bytes 100GiB \\\n      --disk-dir /mnt/nvme/kv",
            "kvcluster up --foreground --config cluster.toml  # several hosts, systemd",
        ],
    )
    _add_tiers(up)
    _add_server_args(up)
    up.add_argument("--config", metavar="FILE", help="TOML file with these and all other settings (default: none)")
    up.add_argument(
        "--foreground",
        action="store_true",
        help="do not return: keep the cluster as configured, follow changes of --config, and stop it at the end; with "
        "server.secret_file other machines can join",
    )
    _add_ray_args(up)
    up.set_defaults(run=_up)


def _add_tiers(up: Any) -> None:
    up.add_argument("--shards", type=int, metavar="N", help="number of shards (default 1)")
    up.add_argument(
        "--ram-bytes",
        metavar="SIZE",
        help="RAM of each shard for pages as engines store them, such as 1GiB (default 1GiB)",
    )
    up.add_argument("--device-bytes", dest="ram_bytes", action=OldOption, now="--ram-bytes", help=argparse.SUPPRESS)
    up.add_argument(
        "--host-bytes",
        metavar="SIZE",
        help="RAM of each shard for encoded pages, the host tier, which hold about twice as many tokens; such as 4GiB "
        "(default: no such tier)",
    )
    up.add_argument(
        "--disk-bytes",
        metavar="SIZE",
        help="files of each shard for encoded pages, the disk tier, such as 100GiB; needs --host-bytes and --disk-dir. "
        "At least 5 %% of the drive stay free (default: no such tier)",
    )
    up.add_argument(
        "--disk-dir",
        metavar="FOLDER",
        help="folder on a local drive for the disk tier; a cluster that is started there later finds the pages again "
        "(default: none)",
    )


def _add_server_args(up: Any) -> None:
    up.add_argument("--port", type=int, metavar="PORT", help=f"port of the coordinator (default {DEFAULT_PORT})")
    up.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on, such as 0.0.0.0 for all (default 127.0.0.1)"
    )
    up.add_argument(
        "--token-file",
        metavar="FILE",
        help="file of the tokens that may connect, which `kvcluster token` makes (default: none, and then only this "
        "machine may)",
    )
    up.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="let everyone connect who reaches --host, without a token",
    )
    up.add_argument(
        "--encryption",
        choices=ENCRYPTIONS,
        metavar="HOW",
        help="what encrypts the traffic with other machines, if --host is no loopback: tls, whose files are named in "
        "--config; the network below (WireGuard, a mesh); or nothing (default: as the configuration says)",
    )


def _add_ray_args(up: Any) -> None:
    ray = up.add_argument_group("on several machines, or on a Ray that is there already")
    ray.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="use the Ray whose head listens there, and leave it running (default: start one)",
    )
    _add_node_args(ray, offers="nothing")
    ray.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=("unauthenticated-ray", "several-tenants"),
        metavar="WHAT",
        help="accept a Ray at --address that asks for no token (unauthenticated-ray), or that runs other jobs beside "
        "several tenants (several-tenants); may be repeated (default: refuse both)",
    )


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="make this machine a node of a cluster, until interrupted",
        description=_JOIN,
        examples=[
            "kvcluster join 10.0.0.5 --config cluster.toml",
            "kvcluster join head --config cluster.toml --memory 40GiB --label disk=nvme",
        ],
    )
    join.add_argument("head", metavar="HEAD", help="HOST or HOST:PORT of the head, as `kvcluster up` prints it")
    join.add_argument(
        "--config", required=True, metavar="FILE", help="TOML file of the cluster's settings, the same as on its head"
    )
    _add_node_args(join, offers=f"{SHARD_RESOURCE}=1")
    join.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of this node, by which groups of shards choose nodes; may be repeated (default: none)",
    )
    join.add_argument(
        "--memory",
        metavar="SIZE",
        help="RAM for the tiers of its shards, such as 40GiB (default: what this machine or container has, less a "
        "tenth)",
    )
    join.add_argument(
        "--leave-s",
        type=float,
        default=20.0,
        metavar="S",
        help="how many seconds its shards may take to drain at the end (default 20)",
    )
    join.add_argument(
        "--config-wait-s",
        type=float,
        default=0.0,
        metavar="S",
        help="how many seconds to wait for the head to run this configuration, where files reach machines at different "
        "times (default 0)",
    )
    join.set_defaults(run=_join)


def _add_node_args(command: Any, *, offers: str) -> None:
    command.add_argument(
        "--offer",
        action="append",
        metavar="NAME=AMOUNT",
        help=f"custom resource of Ray that this node offers and shards claim; may be repeated (default: {offers})",
    )
    command.add_argument(
        "--node-ip",
        default="",
        metavar="ADDRESS",
        help="address at which other machines reach this one (default: found out)",
    )


def _up(options: argparse.Namespace) -> int:
    config = _settings(options)
    if options.foreground or options.address:
        return _up_in_foreground(options, config)
    if config.server.secret_file:
        raise CallerError(
            "server.secret_file makes a cluster of several nodes, which needs `kvcluster up --foreground`"
        )
    with needs("ray"):
        from kvcluster.actors import background

    def starting() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # undo a partial start
        print(f"starting Ray, a coordinator and {config.shards} shard(s): usually ten seconds", file=sys.stderr)

    outcome = background.up(config, starting=starting)
    running = outcome.running
    where = "" if running.port == DEFAULT_PORT else f" --port {running.port}"
    again = f", started again: {', '.join(outcome.again)}" if outcome.again else ""
    print(f"{'up' if outcome.started else 'already up'} at {running.address}: {running.shards} shard(s){again}")
    shown = where + (f" --ca {config.security.ca_file}" if config.security.ca_file else "")
    print(f"`kvcluster status{shown}` shows it, `kvcluster down{where}` stops it")
    for shard, trouble in outcome.trouble.items():
        print(f"kvcluster: {shard} is degraded: {trouble}", file=sys.stderr)
    return StatusExit.DEGRADED if outcome.trouble else StatusExit.AS_CONFIGURED


def _up_in_foreground(options: argparse.Namespace, config: Config) -> int:
    with needs("ray"):
        from kvcluster.actors import foreground
        from kvcluster.actors.settings import outward_address
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # undo a partial start
    source = foreground.ConfigSource(lambda: _settings(options), options.config or "")
    if options.address:
        allowed = frozenset(options.allow)
        if not foreground.run_on(options.address, source, allowed, _say, once=not options.foreground):
            return StatusExit.DEGRADED
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
        "shard": {name: given[name] for name in ("ram_bytes", "host_bytes", "disk_bytes") if name in given},
    }
    if "encryption" in given:
        settings["security"] = {"encryption": given["encryption"]}
    if "shards" in given:
        settings["shards"] = given["shards"]
    if "disk_dir" in given:  # the shards run in other working directories
        settings["shard"]["disk_dir"] = os.path.abspath(given["disk_dir"])
    return _from_here(load(options.config, settings))


def _from_here(config: Config) -> Config:
    """Returns the configuration with absolute paths of what the actors read, which run in another directory."""
    tokens, state = (
        path and os.path.abspath(path) for path in (config.server.token_file, config.coordinator.state_dir)
    )
    server, coordinator = replace(config.server, token_file=tokens), replace(config.coordinator, state_dir=state)
    return replace(config, server=server, coordinator=coordinator)


def _join(options: argparse.Namespace) -> int:
    config = load(options.config)
    if not config.server.secret_file:
        raise CallerError(
            f"{options.config} has no server.secret_file: only nodes with the cluster's secret may join. Copy the file "
            "of the head to this machine, and name it there"
        )
    with needs("ray"):
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
    with needs("ray"):
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
