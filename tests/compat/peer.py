"""One process of some release: a coordinator, a shard or a worker, without Ray. It imports that release's own code and
nothing of these tests, and uses only what all of the releases have.

    python -S peer.py coordinator SHARDS
    python -S peer.py shard NAME REPORTS_TO
    python -S peer.py worker COORDINATOR TRANSPORT store|load SEED

It prints its addresses, or what a worker did, as one line of JSON. A server answers each further line on stdin with one
line of JSON about itself, and ends when stdin does.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import socket
import sys
import time
from typing import Any

import kvcluster
from kvcluster.config import ClientConfig, ShardConfig, load
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.spec import KVSpec

try:
    from kvcluster.runtime.shard_credentials import CredentialIssuer, ShardCredentials
    from kvcluster.transport.credentials import Credentials
except ImportError:  # a release in which shards show the secret itself
    CredentialIssuer = ShardCredentials = None

SECRET = os.environ.get("KVCLUSTER_PEER_SECRET", "between the processes of these tests")
HOST = os.environ.get("KVCLUSTER_PEER_HOST", "127.0.0.1")
TTL_MS = int(os.environ.get("KVCLUSTER_PEER_TTL_MS", "30000"))
POOL = os.environ.get("KVCLUSTER_PEER_POOL", "32MiB")
GPU = os.environ.get("KVCLUSTER_PEER_GPU", "")
"""Where the shard has a pool as large on a device, such as `twin`."""

CODEC = os.environ.get("KVCLUSTER_PEER_CODEC", "")
"""With which pages are encoded in a host tier as large, from which none comes up again."""

TOKENS = os.environ.get("KVCLUSTER_PEER_TOKENS", "")
"""By default they are for a cluster of such processes on one host. With these a shard joins a cluster that is there."""
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=2, num_kv_heads=1, head_dim=32, dtype="float16", block_tokens=16
)
BLOCKS = 256
BLOCK_BYTES = SPEC.page_bytes(0, SPEC.whole(0))


def serve(name: str, told: dict[str, Any], look: Any) -> None:
    """Prints the addresses, and answers until stdin ends."""
    print(
        json.dumps({"process": name, "release": kvcluster.__version__, "code": kvcluster.__file__, **told}), flush=True
    )
    for _ in sys.stdin:
        print(json.dumps(look()), flush=True)


def known(function: Any, **arguments: Any) -> dict[str, Any]:
    """Returns those of the arguments that this release's function has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def about_process(host: Any, **about: str) -> dict[str, Any]:
    """Returns the arguments by which this release's host takes what its process is."""
    if "process" not in inspect.signature(host).parameters:  # an older release
        return known(host, **about)
    from kvcluster.core.messages import ProcessInfo

    return {"process": ProcessInfo(**about)}


def refusals(calls: Any, host: Any = None) -> dict[str, int]:
    """Returns the refused calls by reason, and with them the refused connections of a host that counts them."""
    samples = [*calls.samples(), *(host.samples() if hasattr(host, "samples") else ())]
    refused: dict[str, int] = {}
    for one in samples:
        if one.name in ("kvcluster_refused_calls_total", "kvcluster_refused_connections_total"):
            refused[one.labels[-1]] = refused.get(one.labels[-1], 0) + int(one.value)
    return refused


def settings(shards: int) -> Any:
    room = known(ShardConfig, ram_bytes=POOL, device_bytes=POOL)  # the latter up to 0.2
    quick = {**room, "report_interval_ms": 20, "report_retry_ms": 20, "scrub_bytes": 0}
    server = {"token_file": TOKENS} if TOKENS else {}
    overrides = {"shards": shards, "membership_ttl_ms": TTL_MS, "shard": quick, "server": server}
    if GPU:
        quick |= {"gpu_bytes": POOL, "gpu_device": GPU, "host_bytes": "16MiB"}
        overrides |= {"coordinator": {"promote_loads": 1, "hold_ms": 0}}
    if CODEC:
        quick |= {"host_bytes": POOL}
        overrides |= {"coordinator": {"host_codec": CODEC, "host_raw_blocks": 0, "promote_loads": 1_000_000}}
    return load(overrides=overrides)


def coordinator(shards: str) -> None:
    from kvcluster.runtime.auth import Authenticator
    from kvcluster.runtime.coordinator_host import CoordinatorHost
    from kvcluster.runtime.server import CallMetrics, GrpcServer, unary_handlers
    from kvcluster.wire.methods import COORDINATOR

    config = settings(int(shards))
    about = about_process(CoordinatorHost, node="node-c", release=kvcluster.__version__, config_hash="c0ffee")
    host = CoordinatorHost(Epoch(time.time_ns()), config, on_end=lambda leave: None, **about)
    calls = CallMetrics(COORDINATOR)
    reports, issuing = frozenset({"Report", "Inventory"}), frozenset({"IssueCredential"})
    asked = {name: method for name, method in COORDINATOR.items() if name not in issuing}
    handlers = unary_handlers(asked, host.ask, reports, metrics=calls)
    more: dict[str, Any] = {}
    if CredentialIssuer is not None:
        issuer = CredentialIssuer()
        more["epoch_of"] = issuer.epoch_of
        methods = {name: COORDINATOR[name] for name in issuing}
        handlers |= unary_handlers(methods, lambda build, *_: issuer.issue(build(0).question), issuing, metrics=calls)
    server = GrpcServer(handlers, Authenticator(None, SECRET, **more), "127.0.0.1", 0, 8, metrics=calls)
    host.start()
    server.start()

    def look() -> dict[str, Any]:
        status = host.inspect(lambda: host.core.status(time.monotonic_ns()))
        shards = {
            shard.info.shard: {
                "state": shard.state,
                "pages": shard.info.pages,
                "pulled": dict(shard.info.counters)["pulled"],
                "release": getattr(shard.info, "release", None),
                "node": getattr(shard.info, "node", None),
                "config_hash": getattr(shard.info, "config_hash", None),
            }
            for shard in status.shards
        }
        return {"shards": shards, "refused": refusals(calls)}

    serve("coordinator", {"address": server.address}, look)
    server.close(grace_s=0)
    host.close()


def shard(name: str, reports_to: str) -> None:
    from kvcluster.runtime.auth import authenticator
    from kvcluster.runtime.server import CallMetrics, GrpcServer, unary_handlers
    from kvcluster.runtime.shard_host import ShardHost
    from kvcluster.runtime.transport_servers import serve_paths
    from kvcluster.transport.auto import choose, own_attempts
    from kvcluster.transport.grpc_pages import page_handlers
    from kvcluster.transport.rpc import Connection
    from kvcluster.wire.methods import COORDINATOR, SHARD

    config, calls = settings(1), CallMetrics(SHARD)
    epoch, attempts = Epoch(time.time_ns()), own_attempts()
    failures: list[str] = []
    if ShardCredentials is None:
        auth = authenticator(config.server, SECRET)
        connections = [Connection(reports_to, SECRET)]

        def connection(deadline: Any) -> Any:
            return connections[0]

        def shows(source: Any) -> Any:
            return SECRET

    else:
        own = ShardCredentials(epoch, Credentials(SECRET))
        auth = authenticator(config, SECRET, epoch_of=own.epoch_of, secret_suffices=lambda: own.secret_suffices)
        shows, connections = own.to_shard, list[Any]()

        def connection(deadline: Any) -> Any:
            if not connections:
                connections.append(Connection(reports_to, own.to_report(reports_to, "", deadline)))
            return connections[0]

    def tell(message: Any, deadline: Any) -> Any:
        try:
            return connection(deadline).ask(COORDINATOR[type(message).__name__], message, deadline)
        except Exception as error:
            if ShardCredentials is not None:
                connections.clear()
            failures[:] = [f"{type(error).__name__}: {error}"]
            raise

    handlers: dict[str, Any] = {}
    server = GrpcServer(handlers, auth, HOST, 0, 8, metrics=calls)
    from kvcluster.core.messages import ShardAddress

    me = ShardAddress(ShardId(name), epoch, server.address, socket.gethostname())
    about = about_process(ShardHost, node="node-s", release=kvcluster.__version__, config_hash="5bad")
    rest: dict[str, Any] = about | {
        "tell": tell,
        "open_source": lambda source: choose(source, shows(source), attempts),
    }
    rest["on_end"] = lambda leave: None
    if "me" in inspect.signature(ShardHost).parameters:
        host = ShardHost(me, config, **rest)
    else:  # an older release
        host = ShardHost(me.shard, me.epoch, config, address=me.address, host=me.host, **rest)
    handlers.update(unary_handlers(SHARD, host.ask, shared=frozenset({"GetOffers", "Suspect"}), metrics=calls))
    handlers.update(page_handlers(host))
    paths = serve_paths(host, auth, config.server, HOST)
    server.start()
    host.start(paths.offers)
    offers = {offer.transport: offer.address for offer in paths.offers.offers}
    serve(name, {"address": server.address, **offers}, lambda: {"refused": refusals(calls, host), "failures": failures})
    server.close(grace_s=0)
    paths.close()
    host.close()
    for one in connections:
        one.close()


def worker(address: str, transport: str, action: str, seed: str) -> None:

    tokens = [int(seed), *range(BLOCKS * SPEC.block_tokens - 1)]
    content = [bytearray(random.Random(f"{seed} {block}").randbytes(BLOCK_BYTES)) for block in range(BLOCKS)]
    config = ClientConfig(transports=(transport,), deadline_ms=20_000, connect_ms=20_000)
    did: dict[str, Any] = {"code": kvcluster.__file__}
    try:
        with kvcluster.connect(address, SPEC, config=config) as client:
            if action == "store":
                stored = client.store(tokens, kvcluster.Buffers([memoryview(block) for block in content]))
                did["blocks"], did["flushed"] = stored.blocks, client.flush()
                client.pin(tokens, 600, replicas=2)
            else:
                into = [bytearray(BLOCK_BYTES) for _ in content]
                did["blocks"] = (
                    client.load(tokens, kvcluster.Buffers([memoryview(block) for block in into])) // SPEC.block_tokens
                )
                did["same"] = into == content
            did["transports"] = {name: one["name"] for name, one in client.status()["transports"].items()}
    except kvcluster.KVClusterError as error:
        did["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(did), flush=True)


if __name__ == "__main__":
    {"coordinator": coordinator, "shard": shard, "worker": worker}[sys.argv[1]](*sys.argv[2:])
