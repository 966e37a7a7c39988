"""`kvcluster doctor` as a person meets it: what it finds, what it advises, and what it ends with."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvcluster.cli import doctor
from kvcluster.cli.coordinator_args import read_status
from kvcluster.cli.doctor import examine
from kvcluster.cli.doctor_view import add_diagnosis
from kvcluster.cli.main import main
from kvcluster.cli.text_page import TextPage
from kvcluster.config import ServerConfig
from kvcluster.core.ids import Caller, CallId, ShardId, Tenant
from kvcluster.core.messages import (
    CoordinatorQuestion,
    ListeningPort,
    Offer,
    Offers,
    Probe,
    ProcessFacts,
    Reply,
    Request,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CredentialError
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.runtime import peer_probe
from kvcluster.runtime.auth import Authenticator, digest
from kvcluster.runtime.peer_probe import PeerProbe
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.transport_servers import serve_paths
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.process_location import ProcessLocation
from kvcluster.transport.rpc import ClockDifference, Connection
from kvcluster.transport.tcp_pages import TcpServer, open_path, serve
from kvcluster.wire.methods import COORDINATOR, SHARD
from kvcluster.wire.versions import VERSIONS_KEY, Versions, encode_versions
from tests.ports import refused
from tests.transport.frail import Frail
from tests.transport.peers import SECRET, of_a_shard

FACTS = ProcessFacts(2**22, 2**30, (ListeningPort("grpc", 7100, "7100-7163"),))
HERE = "memory"
"""Where the shards of a MemoryCluster say that they are."""

DEFAULT = Credentials("default")


class Served:
    """A cluster of this process whose coordinator and shards can be reached as those of a real one."""

    def __init__(self, cluster: MemoryCluster, *, knows_probes: bool = True) -> None:
        self.cluster = cluster
        tenants = {digest("default"): Tenant("default"), digest("operator"): Tenant("ops")}
        self.auth = Authenticator(tenants, "", frozenset({digest("operator")}), epoch_of=of_a_shard)
        self._closing: list[Callable[[], object]] = []
        methods = {name: method for name, method in COORDINATOR.items() if knows_probes or name != "Probe"}
        self.coordinator = self._serve(unary_handlers(methods, self._ask, operators=frozenset({"Probe"})))
        self.address = self.coordinator.address
        self.shards: dict[str, GrpcServer] = {}
        self.tcp: dict[str, TcpServer] = {}
        shows = Credentials(SECRET).for_shard
        for name, host in cluster.shards.items():
            handlers = unary_handlers(SHARD, host.ask, shared=frozenset({"GetOffers"}))
            handlers |= page_handlers(host)
            self.shards[name] = self._serve(handlers)
            self._offer(name, host)
            probe = PeerProbe(
                lambda: FACTS, lambda: ClockDifference(5_000_000, 1_000_000), shows, ProcessLocation(HERE)
            )
            host._probe = probe.carry_out
        known = {server.address for server in self.shards.values()}
        cluster.wait_until(lambda: {shard["address"] for shard in self.status()} == known)

    def status(self) -> list[dict[str, Any]]:
        members = self.cluster.coordinator_core().state.members.all()
        return [{"address": member.info.address} for member in members]

    def _offer(self, name: str, host: ShardHost) -> None:
        """What this shard would tell of itself, were it a process of its own."""
        paths = serve_paths(host, self.auth, ServerConfig(), "127.0.0.1", servers={"tcp": serve})
        self._closing.append(paths.close)
        (tcp,) = paths.servers
        assert isinstance(tcp, TcpServer)
        self.tcp[name] = tcp

        def tell() -> None:
            host.core.offers = paths.offers
            host.core._address = self.shards[name].address

        host.inspect(tell)

    def _serve(self, handlers: Any) -> GrpcServer:
        server = GrpcServer(handlers, self.auth, "127.0.0.1", 0, threads=4)
        server.start()
        self._closing.append(lambda: server.close(grace_s=0))
        return server

    def _ask(self, build: Callable[[CallId], Request[CoordinatorQuestion]], wait_s: float, tenant: Tenant) -> Reply:
        return self.cluster.running_coordinator().ask(build, wait_s, tenant)

    def close(self) -> None:
        for close in self._closing:
            close()


@contextmanager
def serving(**config: object) -> Iterator[Served]:
    with MemoryCluster(shards=2, ram_bytes="4MiB", config=config) as cluster:
        served = Served(cluster)
        try:
            yield served
        finally:
            served.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("KVCLUSTER_TOKEN", "default")
    with serving() as served:
        yield served


def paths_of(shard: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {path["transport"]: path for path in shard["transports"]}


# --------------------------------------------------------------------------------------------- all is well


def test_of_a_cluster_that_is_well_it_says_by_which_transports_each_shard_is_reached(served: Served) -> None:
    found = examine(served.address, DEFAULT, openers={"tcp": open_path})
    assert found["healthy"]
    assert found["verdict"] == "all 2 shard(s) can be reached: 2 by tcp"
    coordinator = found["coordinator"]
    assert (coordinator["protocol_version"], coordinator["credential"]) == (PROTOCOL_VERSION, "accepted")
    for shard in found["shards"]:
        paths = paths_of(shard)
        assert list(paths) == ["shm", "tcp", "grpc"], "in the order of choice"
        assert (shard["chosen"], shard["reachable"]) == ("tcp", True)
        for name in ("tcp", "grpc"):
            assert paths[name]["works"] and paths[name]["connect_ms"] > 0 and paths[name]["trip_ms"] > 0
        assert paths["shm"]["why"] == "this client cannot use it on this platform"
    assert json.loads(json.dumps(found)) == found


def test_it_leaves_nothing_behind(served: Served) -> None:
    assert examine(served.address, DEFAULT, openers={"tcp": open_path})["healthy"]
    with closing(Connection(served.address, Credentials("default"))) as connection:
        assert read_status(GrpcPort(connection), 10_000)["namespaces"] == 0
    served.cluster.wait_until_idle()
    served.cluster.check()


def test_the_command_ends_with_0_and_prints_a_page(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", served.address]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{served.address}  answers, protocol version {PROTOCOL_VERSION}, credential accepted, serv")
    assert "all 2 shard(s) can be reached" in said.splitlines()[-1]
    assert {line.split()[0] for line in said.splitlines() if line.startswith("shard-")} == {"shard-0", "shard-1"}


def test_for_machines_it_prints_json_and_nothing_else(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--address", served.address]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True


# ----------------------------------------------------------------------------------------- of the whole cluster


def test_for_an_operator_the_shards_try_one_another(served: Served) -> None:
    found = examine(served.address, Credentials("operator"), openers={"tcp": open_path})["cluster"]
    assert (found["why"], found["problems"]) == (None, [])
    tried = {(pair["source"], pair["target"], pair["transport"]): pair["trip_ms"] for pair in found["pairs"]}
    sources = [("shard-0", "shard-1"), ("shard-1", "shard-0"), ("this host", "shard-0"), ("this host", "shard-1")]
    assert set(tried) == {(*pair, transport) for pair in sources for transport in ("grpc", "tcp")}
    assert all(tried.values())
    coordinator, *shards = found["processes"]
    assert coordinator["address"] == served.address
    assert [(row["clock_ms"], row["clock_error_ms"], row["pool_bytes"]) for row in shards] == [(5.0, 1.0, 2**22)] * 2
    assert shards[0]["ports"] == [{"use": "grpc", "port": 7100, "allowed": "7100-7163"}]
    assert json.loads(json.dumps(found)) == found


def test_a_shard_that_others_do_not_reach_is_named_with_what_to_do(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_probe, "PATIENCE_MS", 300)
    monkeypatch.setattr(doctor, "PATIENCE_MS", 3_000)
    served.shards["shard-1"].close(grace_s=0)
    found = examine(served.address, Credentials("operator"), openers={"tcp": open_path})
    said = [problem["what"] for problem in found["cluster"]["problems"]]
    assert any(line.startswith("shard-0 (127.0.0.1:") and "does not reach shard-1 (" in line for line in said)
    assert not any(line.startswith("shard-1 (") for line in said)  # it reaches others
    assert main(["doctor", "--address", served.address]) == 1


def test_a_tenant_is_told_that_it_takes_an_operator(served: Served) -> None:
    found = examine(served.address, DEFAULT, openers={"tcp": open_path})
    assert found["healthy"]
    assert "give an operator's token" in found["cluster"]["why"]
    refused = pytest.raises(CredentialError, match="having the shards try one another is for operators")
    with closing(Connection(served.address, Credentials("default"))) as connection, refused:
        connection.ask(COORDINATOR["Probe"], Probe(), Deadline.after_ms(10_000))


def test_a_coordinator_of_an_older_release_is_said_not_to_know() -> None:
    with MemoryCluster(shards=2, ram_bytes="4MiB") as cluster:
        served = Served(cluster, knows_probes=False)
        try:
            found = examine(served.address, Credentials("operator"), openers={"tcp": open_path})
        finally:
            served.close()
    assert found["healthy"]
    assert "does not know how to have the shards try one another" in found["cluster"]["why"]


# ------------------------------------------------------------------------------------------- what is refused


def offering(served: Served, *offers: Offer, refused: tuple[tuple[str, str], ...] = ()) -> None:
    """Every shard says that it offers these."""
    for host in served.cluster.shards.values():

        def tell(host: ShardHost = host) -> None:
            host.core.offers = Offers(host.core.epoch, offers, refused)

        host.inspect(tell)


def test_what_a_shard_does_not_offer_is_told_in_its_own_words(served: Served) -> None:
    offering(served, refused=(("shm", "the token file names several tenants"),))
    found = examine(
        served.address,
        Credentials("default"),
        openers={"shm": open_path, "tcp": open_path},
        location=ProcessLocation(HERE),
    )
    assert found["verdict"] == "all 2 shard(s) can be reached: 2 by grpc"
    paths = paths_of(found["shards"][0])
    assert paths["shm"]["why"] == "the token file names several tenants"
    assert "all tokens are of one tenant" in paths["shm"]["advice"]
    assert paths["tcp"]["why"] == "not offered by the shard"


def test_shared_memory_is_for_the_same_host(served: Served) -> None:
    offering(served, Offer("shm", "@name"))
    found = examine(
        served.address, Credentials("default"), openers={"shm": open_path}, location=ProcessLocation("elsewhere")
    )
    assert paths_of(found["shards"][0])["shm"]["why"] == "another host: the shard is on memory, and this is elsewhere"


def test_a_transport_that_fails_is_told_with_what_to_do(served: Served) -> None:
    (host, *_) = served.cluster.shards.values()
    shm = Frail("shm", MemoryTransport(host, Caller(Tenant("default"))))
    shm.opening = CredentialError("this shard runs as another user")
    tcp = served.tcp["shard-0"]
    tcp.close()
    with refused(int(tcp.address.rpartition(":")[2])):
        offering(served, Offer("shm", "@shm"), Offer("tcp", tcp.address))
        found = examine(
            served.address,
            Credentials("default"),
            openers={"shm": shm.open, "tcp": open_path},
            location=ProcessLocation(HERE),
        )
    assert found["healthy"], "gRPC takes their place"
    paths = paths_of(found["shards"][0])
    assert paths["shm"]["why"] == "this shard runs as another user"
    assert "as the user of the shard" in paths["shm"]["advice"]
    assert "Connection refused" in paths["tcp"]["why"]
    assert "firewalls" in paths["tcp"]["advice"]
    assert shm.closed == shm.opened


def test_a_shard_that_hangs_when_asked_for_its_offers_is_still_reached(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> Offers:
        raise Unavailable(Miss(MissReason.DEADLINE, "too late"))

    monkeypatch.setattr("kvcluster.transport.grpc_pages.GrpcPages.offers", silent)
    found = examine(served.address, DEFAULT, openers={"tcp": open_path})
    assert found["healthy"]
    assert paths_of(found["shards"][0])["tcp"]["why"] == "the shard does not tell its transports: too late"


# ----------------------------------------------------------------------------------------- what is not there


def test_a_shard_that_cannot_be_reached_is_named_and_the_status_is_1(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PATIENCE_MS", 500)
    served.shards["shard-1"].close(grace_s=0)
    assert main(["doctor", "--address", served.address]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "of 2 shard(s), shard-1 cannot be reached: blocks there are misses"
    )
    found = examine(served.address, DEFAULT, openers={"tcp": open_path})
    shard = next(shard for shard in found["shards"] if shard["shard"] == "shard-1")
    paths = paths_of(shard)
    assert (shard["reachable"], shard["chosen"], paths["grpc"]["works"]) == (False, None, False)
    assert paths["tcp"]["why"] == "control messages use gRPC, which does not work"


def test_a_lost_shard_is_not_tried() -> None:
    with serving(membership_ttl_ms=1_500) as served:
        served.cluster.stop_shard(ShardId("shard-0"))
        members = served.cluster.coordinator_core().state.members
        served.cluster.wait_until(lambda: "shard-0" in members.lost)
        found = examine(served.address, DEFAULT, openers={"tcp": open_path})
        shard = next(shard for shard in found["shards"] if shard["shard"] == "shard-0")
        assert (shard["state"], shard["transports"]) == ("lost", [])
        assert shard["why"] == "the coordinator no longer gets reports from it"
        assert not found["healthy"]


def test_without_shards_nothing_is_well(served: Served) -> None:
    for shard in list(served.cluster.shards):
        served.cluster.stop_shard(shard)
    served.cluster.stop_coordinator()
    served.cluster.start_coordinator()
    found = examine(served.address, DEFAULT)
    assert (found["healthy"], found["verdict"]) == (
        False,
        "the coordinator knows no shard: nothing can be stored",
    )


@pytest.mark.parametrize(("token", "why"), [("stranger", "does not know this token"), (None, "requires a token")])
def test_a_credential_that_is_not_accepted_is_told_with_where_to_get_one(
    served: Served, token: str | None, why: str
) -> None:
    found = examine(served.address, Credentials(token))
    assert (found["coordinator"]["reachable"], found["coordinator"]["credential"]) == (True, "refused")
    assert why in found["coordinator"]["why"] and why in found["verdict"]
    assert "kvcluster token" in found["coordinator"]["advice"]
    page = TextPage(None, colour=False)
    add_diagnosis(page, found)
    assert "what to do: give --token-from, or KVCLUSTER_TOKEN" in str(page)


def test_another_version_of_the_protocol_is_told_with_what_to_install(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = Versions(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2, "9.0.0")
    monkeypatch.setattr("kvcluster.runtime.server.OURS", newer)
    monkeypatch.setattr("kvcluster.runtime.server.METADATA", ((VERSIONS_KEY, encode_versions(newer)),))
    found = examine(served.address, DEFAULT)
    assert found["coordinator"]["protocol_version"] is None
    assert "kvcluster 9.0.0, which speaks versions" in found["coordinator"]["why"]
    assert "upgrade the caller" in found["coordinator"]["why"]
    assert "upgrade the older side" in found["coordinator"]["advice"]


def test_where_nothing_listens_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PATIENCE_MS", 100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert main(["doctor", "--address", address]) == 1
    first, why, what, verdict = capsys.readouterr().out.splitlines()
    assert first == f"{address}  does not answer"
    assert verdict == f"this machine cannot use the cluster: {why}"
    assert what.startswith("what to do: `kvcluster up` starts a cluster here")


@pytest.mark.parametrize(
    ("address", "why"),
    [("nonsense", "is not host:port"), ("10.0.0.5:7070", "nothing says how the connection is encrypted")],
)
def test_what_it_would_not_connect_to_is_an_error(address: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", address]) != 0
    assert why in capsys.readouterr().err


def test_where_something_else_listens_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    server = GrpcServer({}, Authenticator(None, "secret"), "127.0.0.1", 0, threads=2)
    server.start()
    try:
        found = examine(server.address, ANONYMOUS)
    finally:
        server.close(grace_s=0)
    assert "is no kvcluster server" in found["coordinator"]["why"]
    assert "nothing else listens at that port" in found["coordinator"]["advice"]


def test_a_coordinator_that_answers_nothing_of_its_state_is_told_to_hang(served: Served) -> None:
    served.cluster.stop_coordinator()
    found = examine(served.address, DEFAULT)
    assert (found["coordinator"]["reachable"], found["healthy"]) == (True, False)
    assert "hangs or has just died" in found["coordinator"]["advice"]
    served.cluster.start_coordinator()
