"""`kvcluster doctor`: checks whether this machine can use a cluster, and by which transports; otherwise why not, and
what to do.

It takes the steps of a client in order and stops at the first that fails: the coordinator's address, its protocol, the
credential, its list of shards. Then it checks each shard and, for each shard, each transport with a real exchange. With
an operator's token it also shows what every process reports about itself, and has the shards try one another
(cluster_doctor.py).

The result is a tree of plain values (`examine`), shown as a page or as JSON.
"""

from __future__ import annotations

import argparse
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

from kvcluster.cli import engine_doctor, gpu_doctor, model_doctor
from kvcluster.cli.cluster_doctor import judged, probe_cluster
from kvcluster.cli.coordinator_args import (
    add_coordinator_args,
    address_of,
    check_listens,
    credentials_of,
    read_status,
)
from kvcluster.cli.doctor_view import add_diagnosis
from kvcluster.cli.text_page import TableColumn, TextPage, print_figures
from kvcluster.cli.weights import alone, kept_apart, read_engines, read_namespaces
from kvcluster.config import TRANSPORTS, Config, load
from kvcluster.config.ports import port_table, port_text
from kvcluster.core.ids import Attempt, Epoch
from kvcluster.core.messages import Offers
from kvcluster.errors import CallerError, ConfigError, CredentialError, KVClusterError, ProtocolError, VersionError
from kvcluster.memory import native
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transport.addresses import split_address
from kvcluster.transport.auto import OPENERS, own_attempts
from kvcluster.transport.base import DataPath, Deadline, RefusedByShard, Unavailable
from kvcluster.transport.certificates import COORDINATOR, DAY_S, SHARD, examine_server
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import GrpcPages
from kvcluster.transport.path_selector import Opener, not_offered, not_taken, opened, said, try_path
from kvcluster.transport.process_location import ProcessLocation, locate
from kvcluster.transport.rpc import Connection
from kvcluster.transports import BESIDE_GRPC, BY_NAME
from kvcluster.wire.methods import VersionQuestion

PATIENCE_MS = 3_000
"""Deadline of each check: a person waits for it, and anything slower is of no use to an engine."""

_TRIPS = 5
"""Number of round trips; the fastest one counts, since the others waited for other work."""


_DESCRIPTION = """
Checks step by step whether this machine can use a cluster: is the coordinator reached, does it speak this release's
protocol, is the token accepted, is each shard reached, and by which transports, each tried with a real exchange. What
fails is shown with what to do. With an operator's token it also shows every process of the cluster (release,
configuration, clock, memory, ports) and has the shards try one another. It changes nothing.

exit status: 0 if all is well, 1 if this machine cannot use the cluster fully, if one process does not reach another, or
if a shard is degraded.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    doctor = commands.add_parser(
        "doctor",
        help="check whether this machine can use a cluster, and how",
        usage="kvcluster doctor [options] [-- ARGUMENT ...]",
        description=_DESCRIPTION,
        examples=[
            "kvcluster doctor",
            "kvcluster doctor --address 10.0.0.5:7070 --token-from ops.token",
            "kvcluster doctor --ports cluster.toml  # the ports to open in firewalls",
            "kvcluster doctor --engine vllm --model Qwen/Qwen3-0.6B",
            "kvcluster doctor --model /models/llama  # is it served? from its config.json",
        ],
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    doctor.add_argument(
        "--ports",
        metavar="FILE",
        help="check nothing; print the ports that a cluster with this TOML configuration uses, who listens and who "
        "connects (default: check the cluster)",
    )
    doctor.add_argument(
        "--gpu",
        action="store_true",
        help="check no cluster; print what this machine has for KV in the memory of a GPU, and what is missing",
    )
    engine_doctor.add_arguments(doctor)
    add_coordinator_args(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.ports:
        _print_ports(load(options.ports), as_json=options.json)
        return 0
    if options.gpu:
        return gpu_doctor.run(as_json=options.json)
    if engine_doctor.is_asked(options):
        return engine_doctor.run(options, examine)
    if options.model:
        return model_doctor.run(options.model, as_json=options.json)
    found = examine(address_of(options), credentials_of(options))
    print_figures(found, add_diagnosis, as_json=options.json)
    return 0 if found["healthy"] and not any(problem["severe"] for problem in found["cluster"]["problems"]) else 1


def _print_ports(config: Config, *, as_json: bool) -> None:
    """Prints the ports of a configuration: a row for each port or range, the setting, who listens and who connects."""
    columns = ("port", "setting", "who listens", "who connects")
    rows = [(port_text(use.ports), use.setting, use.listener, use.callers) for use in port_table(config)]
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
        return
    page = TextPage.of_terminal()
    page.table(list(map(TableColumn, columns)), rows)
    page.print()


def examine(
    address: str,
    credentials: Credentials,
    *,
    openers: Mapping[str, Opener] = OPENERS,
    location: ProcessLocation | None = None,
) -> dict[str, Any]:
    """Returns all findings as plain values for JSON. `healthy` is True if every shard can be reached from here;
    `cluster` has what its processes report about themselves and one another (cluster_doctor.judged)."""
    location = location or locate()
    coordinator, status = _examine_coordinator(address, credentials)
    tried = () if coordinator["credential"] == _OF_NO_TENANT else status.get("shards", ())
    shards = [_examine_shard(shard, credentials, openers, location) for shard in tried]
    found = {
        "address": address,
        "here": location.host,
        "socket_dir": location.socket_dir,
        "kernels": native.name(),
        "openssl": {"release": ssl.OPENSSL_VERSION, "fast": ssl.OPENSSL_VERSION_INFO >= _FAST_OPENSSL},
        "coordinator": coordinator,
        "tls": _examine_tls(address, credentials, COORDINATOR),
        "shards": shards,
        "cluster": _examine_cluster(address, credentials, status, shards),
    }
    healthy, verdict = _verdict(coordinator, shards)
    return found | {"healthy": healthy, "verdict": verdict}


_FAST_OPENSSL = (3, 2)
"""Since this release AES is by the wider instructions of processors that have them (docs/adr/0104)."""

_OF_NO_TENANT = "of an operator without a tenant"


def _examine_tls(address: str, credentials: Credentials, role: str) -> dict[str, Any] | None:
    """Returns what a server shows within TLS, or why it shows nothing that is accepted; None in the clear."""
    if credentials.certificates is None:
        return None
    name = credentials.name_at(address)
    found: dict[str, Any] = {"name": name, "version": None, "cipher": None, "days_left": None, "names": [], "why": None}
    try:
        connected = socket.create_connection(split_address(address), timeout=PATIENCE_MS / 1e3)
        deadline = Deadline.after_ms(PATIENCE_MS)
        shown = examine_server(connected, name, credentials.certificates, deadline, role=role)
    except (OSError, KVClusterError) as error:
        return found | {"why": said(error) if isinstance(error, KVClusterError) else str(error)}
    names = [*shown.names.dns, *shown.names.addresses]
    return found | {
        "version": shown.version,
        "cipher": shown.cipher,
        "days_left": int((shown.names.expires_s - time.time()) / DAY_S),
        "names": names,
    }


# ------------------------------------------------------------------------------------------ the coordinator


def _examine_coordinator(address: str, credentials: Credentials) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the findings about the coordinator, and its status ({} if a step failed)."""
    found: dict[str, Any] = {
        "reachable": False,
        "protocol_version": None,
        "credential": None,
        "state": None,
        "apart": [],
        "why": None,
        "advice": None,
    }
    try:
        check_listens(address, PATIENCE_MS)
        with closing(Connection(address, credentials)) as connection:
            connection.wait_ready(Deadline.after_ms(PATIENCE_MS))
            found["reachable"] = True
            found["credential"] = "accepted"
            try:
                with suppress(CallerError):  # the coordinator accepted the version and refused the empty request
                    connection.ask(VersionQuestion(), None, Deadline.after_ms(PATIENCE_MS))
            except CredentialError:  # a credential that is refused may not ask for the status either
                found["credential"] = _OF_NO_TENANT
            status = read_status(GrpcPort(connection), PATIENCE_MS)
            found["protocol_version"] = connection.version
            port = GrpcPort(connection)
            found["apart"] = [
                *kept_apart(read_namespaces(port, PATIENCE_MS)),
                *alone(read_engines(port, PATIENCE_MS)),
            ]
            found["state"] = status["state"]
            return found, status
    except KVClusterError as error:
        if isinstance(error, CredentialError):
            found["credential"] = "refused"
        return found | {"why": said(error), "advice": _advice(error, address)}, {}


def _advice(error: Exception, address: str) -> str:
    """Returns what the user can do about an error."""
    if isinstance(error, ConfigError):
        return "give --address host:port, as `kvcluster up` printed it"
    if isinstance(error, CredentialError):
        return "give --token-from, or KVCLUSTER_TOKEN; the operator of the cluster makes tokens with `kvcluster token`"
    if isinstance(error, VersionError):
        return "upgrade the older side: releases understand each other if they are the same or next to each other"
    if isinstance(error, ProtocolError):
        return "check that nothing else listens at that port, and that the release there is not much older or newer"
    loopback = address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    if isinstance(error, Unavailable):
        return "the coordinator hangs or has just died: see `kvcluster logs` there, and try again in a few seconds"
    if loopback:
        return "`kvcluster up` starts a cluster here; --address names one elsewhere"
    return (
        "check that the coordinator runs there (`kvcluster status` on its machine), that it was started with a --host "
        "that other machines can reach, and that no firewall blocks the port"
    )


# ---------------------------------------------------------------------------------------------- the cluster


def _examine_cluster(
    address: str, credentials: Credentials, status: Mapping[str, Any], shards: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns what the processes report about themselves and one another; with `why`, if they cannot be asked."""
    nothing: dict[str, Any] = {"why": None, "processes": [], "pairs": [], "problems": []}
    if not status:
        return nothing
    if status["tenant"]:
        return nothing | {"why": "whether the shards reach one another is told to operators: give an operator's token"}
    try:
        with closing(Connection(address, credentials)) as connection:
            port = GrpcPort(connection)
            probed = probe_cluster(port, PATIENCE_MS)
            status = read_status(port, PATIENCE_MS)  # as it is now: a shard may have been lost meanwhile
    except ProtocolError:
        release = status["release"] or "an older one"
        return nothing | {
            "why": f"the coordinator does not know how to have the shards try one another: its release is {release}"
        }
    except KVClusterError as error:
        return nothing | {"why": f"the coordinator did not have the shards try one another: {said(error)}"}
    return judged(status, probed, shards, address)


# ------------------------------------------------------------------------------------------------ one shard


def _examine_shard(
    shard: Mapping[str, Any], credentials: Credentials, openers: Mapping[str, Opener], location: ProcessLocation
) -> dict[str, Any]:
    found = {name: shard[name] for name in ("shard", "epoch", "address", "host", "state")}
    credentials = credentials.named(shard["server_name"])
    tried: list[dict[str, Any]] = []
    why = "the coordinator no longer gets reports from it" if shard["state"] == "lost" else None
    if why is None:
        try:
            with closing(GrpcPages(shard["address"], credentials)) as control:
                tried = _examine_paths(shard, control, credentials, openers, location)
        except ConfigError as error:
            why = said(error)
    tls = None if why is not None else _examine_tls(shard["address"], credentials, SHARD)
    works = [path["transport"] for path in tried if path["works"]]
    return found | {
        "reachable": "grpc" in works,
        "chosen": next(iter(works), None),
        "transports": tried,
        "why": why,
        "tls": tls,
    }


def _examine_paths(
    shard: Mapping[str, Any],
    control: GrpcPages,
    credentials: Credentials,
    openers: Mapping[str, Opener],
    location: ProcessLocation,
) -> list[dict[str, Any]]:
    """Returns for every transport, in order of preference, whether it works from here."""
    epoch, next_attempt = Epoch(shard["epoch"]), own_attempts()
    grpc = _tried("grpc", lambda: GrpcPages(shard["address"], credentials), epoch, next_attempt)
    offers: Offers | None = None
    silence = "control messages use gRPC, which does not work"
    if grpc["works"]:
        try:
            offers = control.offers(Deadline.after_ms(PATIENCE_MS))
        except (KVClusterError, RefusedByShard) as error:
            silence = f"the shard does not tell its transports: {said(error)}"
    found = []
    for name in (spec.name for spec in BESIDE_GRPC):
        why = not_taken(name, TRANSPORTS, openers)
        if why is None:
            why = silence if offers is None else not_offered(name, offers, shard["host"], location)
        if why is None and offers is not None:
            found.append(
                _tried(name, partial(opened, name, offers, location, credentials, openers), epoch, next_attempt)
            )
        else:
            found.append(_untried(name, why, BY_NAME[name].offered_where))
    return [*found, grpc]


def _tried(
    name: str, open_path: Callable[[], DataPath], epoch: Epoch, next_attempt: Callable[[], Attempt]
) -> dict[str, Any]:
    """Opens a connection and times a few round trips through the whole path."""
    took_ms: list[float] = []
    try:
        with closing(open_path()) as path:
            for _ in range(1 + _TRIPS):
                began = time.monotonic_ns()
                try_path(path, epoch, next_attempt(), Deadline.after_ms(PATIENCE_MS))
                took_ms.append(round((time.monotonic_ns() - began) / 1e6, 3))
    except KVClusterError as error:
        return _untried(name, said(error), BY_NAME[name].remedy)
    connect_ms, *trips_ms = took_ms
    return _untried(name, None, None) | {"works": True, "connect_ms": connect_ms, "trip_ms": min(trips_ms)}


def _untried(name: str, why: str | None, advice: str | None) -> dict[str, Any]:
    return {"transport": name, "works": False, "connect_ms": None, "trip_ms": None, "why": why, "advice": advice}


def _verdict(coordinator: Mapping[str, Any], shards: list[dict[str, Any]]) -> tuple[bool, str]:
    """Returns whether the cluster can be used fully from here, and the verdict as one line."""
    if coordinator["why"] is not None:
        return False, f"this machine cannot use the cluster: {coordinator['why']}"
    if coordinator["credential"] == _OF_NO_TENANT:
        return (
            True,
            "whether this machine reaches the shards is found with a tenant's token: this one stands for none",
        )
    if not shards:
        return False, "the coordinator knows no shard: nothing can be stored"
    lost = [shard["shard"] for shard in shards if not shard["reachable"]]
    if lost:
        return False, f"of {len(shards)} shard(s), {', '.join(lost)} cannot be reached: blocks there are misses"
    counts: dict[str, int] = {}
    for shard in shards:
        counts[shard["chosen"]] = counts.get(shard["chosen"], 0) + 1
    return True, f"all {len(shards)} shard(s) can be reached: " + ", ".join(
        f"{counts[name]} by {name}" for name in TRANSPORTS if name in counts
    )
