"""A real cluster that speaks TLS: what it moves, who gets in, and what changed certificates and tokens do to load."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen
from uuid import uuid4

import grpc
import pytest
import torch

import kvcluster
from kvcluster import EventSubscriber
from kvcluster.actors.local import LocalCluster
from kvcluster.cli.main import main
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.messages.reports import BlocksStored
from kvcluster.errors import ConfigError, CredentialError, KVClusterError, ProtocolError, Unreachable
from kvcluster.runtime.auth import token_line
from kvcluster.wire import zmtp
from tests.actors.worker import SPEC, kv, tokens
from tests.authority import Authority, Issued
from tests.ports import event_endpoints, free_port, metrics_port
from tests.waiting import eventually

pytestmark = pytest.mark.cluster

CLUSTER = "tls-tested"
REVOKED_S = 5.0


class World:
    """A cluster of two shards, whose certificates are for names that no address has."""

    def __init__(self, house: ExitStack, folder: Path, *, client_certificates: bool = False) -> None:
        self.name = f"tls-{uuid4().hex[:8]}"  # one Ray has all of them
        self.authority = Authority(folder / "authority")
        self.node = self.issue("node", "coordinator", "shard", names=("kv.example", "shards.example"))
        self.token_file = folder / "tokens"
        self.admit("mine", "yours", "ops")
        self.events, self.replay = event_endpoints()
        self.metrics_port = metrics_port(self.events, self.replay)
        files = self.node.files
        self.cluster: LocalCluster = house.enter_context(
            kvcluster.local(
                shards=2,
                ram_bytes="64MiB",
                config={
                    "name": self.name,
                    "shard": {"report_interval_ms": 100},
                    "server": {"token_file": str(self.token_file)},
                    "security": {
                        "encryption": "tls",
                        "ca_file": files.ca,
                        "cert_file": files.cert,
                        "key_file": files.key,
                        "client_certificates": client_certificates,
                    },
                    "events": {"endpoint": self.events, "replay": self.replay},
                    "metrics": {"port": self.metrics_port},
                },
            )
        )

    def issue(self, to: str, *roles: str, names: tuple[str, ...] = (), **how: Any) -> Issued:
        return self.authority.issue(to, *roles, names=names or ("client.example",), cluster=self.name, **how)

    def admit(self, *tokens: str) -> None:
        """Has the token file admit these, and no other."""
        lines = [token_line(token, token, operator=token == "ops") for token in tokens]
        new = self.token_file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.chmod(0o600)
        new.rename(self.token_file)

    def config(self, issued: Issued | None = None, **settings: Any) -> ClientConfig:
        own = issued.files if issued is not None else ("", "", "")
        settings = {"deadline_ms": 10_000, "server_name": "kv.example", **settings}
        return ClientConfig(ca_file=str(self.authority.ca), cert_file=own[1], key_file=own[2], **settings)

    def ports(self) -> list[int]:
        """The ports of coordinator and shards at which it speaks TLS, but those for shards and events."""
        with self.connect() as client:
            shards = [int(shard["address"].rpartition(":")[2]) for shard in client.status()["shards"]]
        worker = int(self.cluster.address.rpartition(":")[2])
        return [worker, *(port + beside for port in shards for beside in (0, 1)), self.metrics_port]

    def presented(self) -> set[str]:
        """The fingerprints of the certificates that they show now."""
        found = set()
        for port in self.ports():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection(("127.0.0.1", port), timeout=30) as connected,
                context.wrap_socket(connected) as wrapped,
            ):
                found.add(hashlib.sha256(wrapped.getpeercert(binary_form=True) or b"").hexdigest())
        return found

    def show(self, issued: Issued) -> None:
        """Waits until all of them show this certificate."""
        eventually(lambda: self.presented() == {issued.fingerprint})

    def connect(self, token: str | None = "mine", issued: Issued | None = None, **settings: Any) -> Client:
        return kvcluster.connect(self.cluster.address, SPEC, token=token, config=self.config(issued, **settings))


@contextmanager
def running(folder: Path, **how: Any) -> Iterator[World]:
    with ExitStack() as house:
        yield World(house, folder, **how)


@pytest.fixture(scope="module")
def world(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("tls")) as made:
        yield made


def store(client: Client, seed: int) -> None:
    stored = client.store(tokens(seed), kv(seed))
    assert (stored.blocks + stored.deduplicated, stored.miss) == (8, None)
    assert client.flush()


def load(client: Client, seed: int) -> None:
    out = torch.zeros_like(kv(seed))
    assert client.load(tokens(seed), out) == 128
    assert torch.equal(out, kv(seed))


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_what_is_stored_is_loaded_to_the_last_bit(world: World, transport: str) -> None:
    with world.connect(transports=(transport,)) as client:
        store(client, 1)
        load(client, 1)
        assert {shard["server_name"] for shard in client.status()["shards"]} == {"kv.example"}
        assert {path["name"] for path in client.status()["transports"].values()} == {transport}


def test_a_tenant_sees_nothing_of_another(world: World) -> None:
    with world.connect() as mine, world.connect("yours") as yours:
        store(mine, 2)
        assert yours.lookup(tokens(2)).blocks == 0


def test_shards_try_one_another_and_a_drained_one_hands_its_pages_over(
    shared_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as world, world.connect() as client:
        token = tmp_path / "ops"
        token.write_text("ops", encoding="utf-8")
        for seed in range(1, 9):
            store(client, seed)
        reaches = ["--address", world.cluster.address, "--ca", str(world.authority.ca), "--token-from", str(token)]
        os.environ["KVCLUSTER_SERVER_NAME"] = "kv.example"
        try:
            assert main(["doctor", *reaches]) == 0
            said = capsys.readouterr().out
            assert "all 2 shard(s) can be reached: 2 by tcp" in said
            assert main(["drain", "shard-0", *reaches]) == 0
        finally:
            del os.environ["KVCLUSTER_SERVER_NAME"]
        eventually(lambda: [shard["state"] for shard in client.status()["shards"]] == ["up"])
        for seed in range(1, 9):
            load(client, seed)


# ------------------------------------------------------------------------------------------------ who gets in


def test_who_does_not_know_the_authority_or_the_name_connects_to_nothing(world: World, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger", "stranger")
    for config, why in (
        (ClientConfig(ca_file=str(stranger.ca), server_name="kv.example"), "certificate of kv.example is refused"),
        (world.config(server_name="other.example"), "certificate of other.example is refused: .*mismatch"),
        (ClientConfig(ca_file=str(world.authority.ca)), r"certificate of 127\.0\.0\.1 is refused: .*mismatch"),
    ):
        with pytest.raises(CredentialError, match=why):
            kvcluster.connect(world.cluster.address, SPEC, token="mine", config=config)
    with pytest.raises(ProtocolError, match=r"speaks TLS only: name the file .*--ca"):
        kvcluster.connect(world.cluster.address, SPEC, token="mine")
    for token in (None, "stolen"):
        with pytest.raises(CredentialError):
            world.connect(token)


def test_metrics_and_probes_are_within_tls(world: World) -> None:
    context = ssl.create_default_context(cafile=str(world.authority.ca))
    with (
        socket.create_connection(("127.0.0.1", world.metrics_port)) as connected,
        context.wrap_socket(connected, server_hostname="kv.example") as wrapped,
    ):
        wrapped.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        said = b"".join(iter(lambda: wrapped.recv(65_536), b"")).decode()
    expires = next(line for line in said.splitlines() if line.startswith("kvcluster_certificate_expires_seconds "))
    assert 59 * 86_400 < float(expires.split()[1]) - time.time() < 61 * 86_400
    assert 'kvcluster_file_stale{file="certificates"} 0.0' in said
    with pytest.raises((URLError, OSError)):
        urlopen(f"http://127.0.0.1:{world.metrics_port}/healthz", timeout=10)


def test_events_are_for_operators_and_readers_of_events(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    reader, tenant = world.issue("reader", "events"), world.issue("tenant", "tenant/mine")
    heard = []
    with EventSubscriber(world.events, replay=world.replay, config=world.config(reader)) as subscriber:
        with world.connect() as client:
            store(client, 30)
        while not any(isinstance(event.event, BlocksStored) for event in heard):
            event = subscriber.next(30.0)
            assert event is not None
            heard.append(event)
    for config in (world.config(tenant), world.config()):
        with EventSubscriber(world.events, config=config) as subscriber, world.connect() as client:
            store(client, 31 if config.cert_file else 32)
            assert subscriber.next(1.0) is None
    with EventSubscriber(world.events) as subscriber:
        assert subscriber.next(1.0) is None, "in the clear"
    local = f"tcp://127.0.0.1:{free_port()}"
    files = reader.files
    forward = ["events", "--endpoint", world.events, "--forward", local, "--for", "20"]
    os.environ["KVCLUSTER_SERVER_NAME"] = "kv.example"
    try:
        with ThreadPoolExecutor(1) as aside:
            ended = aside.submit(main, [*forward, "--ca", files.ca, "--cert", files.cert, "--key", files.key])
            with EventSubscriber(local) as subscriber, world.connect() as client:
                seed, event = 40, None
                while event is None and seed < 60 and not ended.done():
                    store(client, seed := seed + 1)
                    event = subscriber.next(1.0)
            assert event is not None
            assert ended.result(60) == 0
    finally:
        del os.environ["KVCLUSTER_SERVER_NAME"]


def test_many_short_messages_of_a_reader_of_events_end_nothing_and_a_revoked_one_reads_no_more(world: World) -> None:
    reader = world.issue("talker", "events")
    host, _, port = world.events.removeprefix("tcp://").rpartition(":")
    context = ssl.create_default_context(cafile=str(world.authority.ca))
    context.load_cert_chain(reader.files.cert, reader.files.key)
    for _ in range(3):
        with (
            socket.create_connection((host, int(port)), timeout=30) as connected,
            context.wrap_socket(connected, server_hostname="kv.example") as talker,
        ):
            talker.sendall(zmtp.GREETING + zmtp.encode_ready(b"SUB"))
            with suppress(OSError):
                talker.sendall(b"\x00\x01\x00" * 5_461)
                talker.sendall(b"\x00\x01\x00" * 5_461)
                talker.recv(65_536)
    with EventSubscriber(world.events, config=world.config(reader)) as subscriber, world.connect() as client:
        heard, seed = None, 80
        while heard is None:
            store(client, seed := seed + 1)
            heard = subscriber.next(1.0)
        lines = world.token_file.read_text(encoding="utf-8")
        world.token_file.write_text(f"{lines}revoked sha256:{reader.fingerprint}\n", encoding="utf-8")
        try:

            def is_deaf() -> bool:
                nonlocal seed
                store(client, seed := seed + 1)
                return subscriber.next(1.0) is None

            eventually(is_deaf)
        finally:
            world.token_file.write_text(lines, encoding="utf-8")


def test_a_client_certificate_names_the_tenant(shared_ray: None, tmp_path: Path) -> None:
    with running(tmp_path, client_certificates=True) as world:
        certificate = world.issue("me", "tenant/mine")
        for transport in ("tcp", "grpc"):
            with world.connect(None, certificate, transports=(transport,)) as client:
                store(client, 1)
                load(client, 1)
        with world.connect("mine", certificate) as by_token:
            load(by_token, 1)
        with pytest.raises((CredentialError, Unreachable)):
            world.connect("mine")
        with pytest.raises(CredentialError, match="names 0 tenants"):
            world.connect(None, world.issue("nobody"))
        with world.connect(None, certificate) as client:
            load(client, 1)
            lines = world.token_file.read_text(encoding="utf-8")
            world.token_file.write_text(f"{lines}revoked sha256:{certificate.fingerprint}\n", encoding="utf-8")
            since = time.monotonic()
            while served(client):
                assert time.monotonic() - since < REVOKED_S


def served(client: Client) -> bool:
    with suppress(CredentialError):
        return client.lookup(tokens(1)).blocks > 0
    return False


# ------------------------------------------------------------------------------------------------ changes under load


class Load:
    """Clients that store and load all the time, and what went wrong for them."""

    def __init__(self, world: World, transports: tuple[str, ...]) -> None:
        self.failed: list[object] = []
        self.calls = 0
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(world, name)) for name in transports]
        for thread in self._threads:
            thread.start()

    def _work(self, world: World, transport: str) -> None:
        seed = 1_000 + 1_000 * len(transport)
        try:
            with world.connect(transports=(transport,)) as client:
                while not self._ends.is_set():
                    seed += 1
                    store(client, seed)
                    load(client, seed)
                    self.calls += 1
                    if seed % 5 == 0:  # as a worker does that starts now
                        with world.connect(transports=(transport,)) as new:
                            load(new, seed)
        except BaseException as error:
            self.failed.append(error)

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def under_load(world: World) -> Iterator[Load]:
    load = Load(world, ("tcp", "grpc"))
    try:
        yield load
    finally:
        load.end()


def passes(load: Load, calls: int = 6) -> None:
    """Waits until so many more calls have been made."""
    until = load.calls + calls
    eventually(lambda: load.calls >= until or load.failed)


def test_keys_are_replaced_and_a_token_revoked_and_no_honest_call_fails(world: World, under_load: Load) -> None:
    passes(under_load)
    ca = world.authority.ca
    first = ca.read_bytes()
    for _ in range(3):
        world.show(world.issue("node", "coordinator", "shard", names=("kv.example", "shards.example")))
        passes(under_load)
    # Another authority: both are trusted, then it signs, then it is trusted alone.
    second = Authority(Path(world.node.files.ca).parent.parent / "second", "second")
    both = ca.with_suffix(".both")
    both.write_bytes(first + second.ca.read_bytes())
    both.rename(ca)
    # Files are read together, so who shows the next certificate trusts both.
    world.show(world.issue("node", "coordinator", "shard", names=("kv.example", "shards.example")))
    passes(under_load)
    issued = second.issue("node", "coordinator", "shard", names=("kv.example", "shards.example"), cluster=world.name)
    for new, old in ((issued.files.key, world.node.files.key), (issued.files.cert, world.node.files.cert)):
        Path(new).rename(old)
    world.show(issued)
    passes(under_load)
    with world.connect("yours") as yours:
        yours.lookup(tokens(1))
        world.admit("mine", "ops")
        since = time.monotonic()
        while not refuses(yours):
            assert time.monotonic() - since < REVOKED_S
    passes(under_load)
    under_load.end()
    assert not under_load.failed and under_load.calls > 30
    world.admit("mine", "yours", "ops")
    eventually(lambda: admits(world, "yours"))


def admits(world: World, token: str) -> bool:
    with suppress(CredentialError):
        world.connect(token).close()
        return True
    return False


def refuses(client: Client) -> bool:
    try:
        client.lookup(tokens(1))
    except CredentialError:
        return True
    return False


def test_a_coordinator_that_restarts_goes_on(world: World) -> None:
    with world.connect() as client:
        store(client, 70)
        epoch = client.status()["epoch"]
        os.kill(world.cluster.pids()[0], signal.SIGKILL)

        def serves() -> bool:
            with suppress(KVClusterError):
                status = client.status(deadline_ms=1_000)
                states = [shard["state"] for shard in status["shards"]]
                return status["epoch"] > epoch and states == ["up", "up"] and status["state"] == "serving"
            return False

        eventually(serves)
        load(client, 70)


# ------------------------------------------------------------------------------------------------ who takes a port


class Squatter:
    """Takes a port, and keeps all metadata that callers send it."""

    def __init__(self, port: int, credentials: grpc.ServerCredentials | None) -> None:
        self.heard: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers([_Keeps(self.heard)])
        at = f"127.0.0.1:{port}"
        if credentials is None:
            assert self._server.add_insecure_port(at) == port
        else:
            assert self._server.add_secure_port(at, credentials) == port
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()


class ShySquatter:
    """A squatter that ends every second connection, the first included, before it has said anything."""

    def __init__(self, port: int, credentials: grpc.ServerCredentials) -> None:
        self._squatter = Squatter(behind := free_port(), credentials)
        self._behind, self.heard = behind, self._squatter.heard
        self._listening = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                self._listening.accept()[0].close()
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._behind))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError), other:
            while data := one.recv(65_536):
                other.sendall(data)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._squatter.close()


class _Keeps(grpc.GenericRpcHandler):
    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self._heard += [str(value) for key, value in details.invocation_metadata if key == "authorization"]


def squatted(squatter: Callable[[int], Squatter | ShySquatter], use: Callable[[str], object]) -> list[str]:
    """What a squatter hears when a client uses its port: it takes that of a coordinator that has ended."""
    port = free_port()
    with closing(squatter(port)) as listening:
        for _ in range(3):
            with suppress(KVClusterError):
                use(f"127.0.0.1:{port}")
        return listening.heard


def test_a_squatter_at_the_coordinators_port_gets_a_token_in_the_clear_and_none_within_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    theirs = Authority(tmp_path / "squatter", "squatter").issue("s", "coordinator")
    quick = {"connect_ms": 2_000, "deadline_ms": 1_000}

    def in_the_clear(address: str) -> None:
        kvcluster.connect(address, SPEC, token="mine", config=ClientConfig(**quick)).close()

    def within_tls(address: str) -> None:
        kvcluster.connect(address, SPEC, token="mine", config=ClientConfig(ca_file=str(authority.ca), **quick)).close()

    pair = tuple(Path(path).read_bytes() for path in (theirs.files.key, theirs.files.cert))
    own = grpc.ssl_server_credentials([pair])
    assert set(squatted(lambda port: Squatter(port, None), in_the_clear)) == {"Bearer mine"}, "as it was before"
    assert squatted(lambda port: Squatter(port, None), within_tls) == []
    assert squatted(lambda port: Squatter(port, own), within_tls) == []
    # Nor does one with a certificate of the cluster's own authority, for another name.
    neighbour = authority.issue("neighbour", "shard", "coordinator", names=("neighbour.example",))
    pair = tuple(Path(path).read_bytes() for path in (neighbour.files.key, neighbour.files.cert))
    assert squatted(lambda port: Squatter(port, grpc.ssl_server_credentials([pair])), within_tls) == []
    # Nor does one of that name in another role, whether it shows that at once or lets the client wait for it.
    tenant = authority.issue("tenant", "tenant/other")
    pair = tuple(Path(path).read_bytes() for path in (tenant.files.key, tenant.files.cert))
    assert squatted(lambda port: Squatter(port, grpc.ssl_server_credentials([pair])), within_tls) == []
    assert squatted(lambda port: ShySquatter(port, grpc.ssl_server_credentials([pair])), within_tls) == []


def test_a_certificate_that_is_not_for_the_cluster_starts_none(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for issued, why in (
        (
            authority.issue("a", "coordinator", "shard", cluster="other"),
            "lacks the URI kvcluster://tls-tested/coordinator",
        ),
        (authority.issue("b", "shard", cluster=CLUSTER), "is not for the coordinator of the cluster 'tls-tested'"),
    ):
        ca, cert, key = issued.files
        security = {"encryption": "tls", "ca_file": ca, "cert_file": cert, "key_file": key}
        with pytest.raises(ConfigError, match=why):
            kvcluster.local(config={"name": CLUSTER, "security": security})
