"""Which transports a shard serves beside gRPC, and what it says of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvcluster.config import ServerConfig
from kvcluster.config.ports import shard_ports
from kvcluster.core.ids import CLUSTER, Caller, ShardId, Tenant
from kvcluster.core.messages import GetOffers, Offer, ShardAddress
from kvcluster.errors import ConfigError, CredentialError
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.auth import NO_TENANT, Authenticator, digest
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.transport_servers import serve_paths
from kvcluster.transport.auto import OPENERS
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.listener import CallerOf, ListenAt
from kvcluster.transport.path_selector import try_path
from kvcluster.transports import BY_NAME
from tests.runtime.hosts import BOUND_S, EPOCH, Coordinator, attempt, configured, no_source, shard, soon
from tests.transport.peers import SECRET, of_a_shard

EVERY_CLIENT = Authenticator(None, "secret")


class Recorded:
    """A server that serves nothing. `wrong` is what it raises when it is started."""

    def __init__(self, name: str, wrong: Exception | None = None) -> None:
        self.address = f"at {name}"
        self.details = b""
        self.running = False
        self.wrong = wrong
        self.caller_of: CallerOf = lambda token: Caller(CLUSTER)
        self.listens_at: ListenAt | None = None

    def serve(self, host: ShardHost, caller_of: CallerOf, at: ListenAt) -> Recorded:
        self.caller_of, self.listens_at = caller_of, at
        return self

    def start(self) -> None:
        if self.wrong is not None:
            raise self.wrong
        self.running = True

    def close(self) -> None:
        self.running = False


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with shard(Coordinator()) as host:
        yield host


def test_what_the_configuration_names_is_served_until_it_is_closed(host: ShardHost) -> None:
    shm, tcp = Recorded("shm"), Recorded("tcp")
    config = ServerConfig(socket_dir="/run/sockets")
    paths = serve_paths(host, EVERY_CLIENT, config, "here", servers={"shm": shm.serve, "tcp": tcp.serve})
    assert paths.offers.epoch == EPOCH
    assert paths.offers.offers == (Offer("shm", "at shm"), Offer("tcp", "at tcp"))
    assert paths.offers.refused == ()
    at = ListenAt("here", shard_ports(config), "/run/sockets")
    assert (shm.running, tcp.running, shm.listens_at, tcp.listens_at) == (True, True, at, at)
    paths.close()
    assert (shm.running, tcp.running) == (False, False)


def test_what_a_server_has_to_tell_besides_its_address_goes_with_its_offer(host: ShardHost) -> None:
    tcp = Recorded("tcp")
    tcp.details = b"what only its other half understands"
    paths = serve_paths(
        host, EVERY_CLIENT, ServerConfig(transports=("grpc", "tcp")), "here", servers={"tcp": tcp.serve}
    )
    assert paths.offers.offers == (Offer("tcp", "at tcp", BY_NAME["tcp"].version, tcp.details),)


def test_what_the_configuration_leaves_out_is_not_served_and_that_is_told(host: ShardHost) -> None:
    shm, tcp = Recorded("shm"), Recorded("tcp")
    config = ServerConfig(transports=("grpc", "tcp"))
    paths = serve_paths(host, EVERY_CLIENT, config, "here", servers={"shm": shm.serve, "tcp": tcp.serve})
    assert paths.offers.offers == (Offer("tcp", "at tcp"),)
    assert paths.offers.refused == (("shm", "the shard's configuration leaves it out"),)
    assert not shm.running


@pytest.mark.parametrize("error", [OSError("no room in /dev/shm"), ConfigError("no room in /dev/shm")])
def test_what_cannot_be_started_is_told_and_the_rest_is_served(host: ShardHost, error: Exception) -> None:
    shm, tcp = Recorded("shm", error), Recorded("tcp")
    paths = serve_paths(host, EVERY_CLIENT, ServerConfig(), "here", servers={"shm": shm.serve, "tcp": tcp.serve})
    assert paths.offers.refused == (("shm", "the shard cannot serve it: no room in /dev/shm"),)
    assert tcp.running


def test_what_there_is_no_server_for_is_told(host: ShardHost) -> None:
    paths = serve_paths(host, EVERY_CLIENT, ServerConfig(), "here", servers={})
    assert paths.offers.offers == ()
    assert paths.offers.refused == tuple((name, "the shard cannot serve it on its platform") for name in ("shm", "tcp"))


@pytest.mark.parametrize(
    ("tenants", "offered"), [(("a",), True), (("a", "a"), True), (("a", "b"), False), (("a", NO_TENANT), True)]
)
def test_memory_is_shared_only_where_all_tokens_are_of_one_tenant(
    host: ShardHost, tenants: tuple[str, ...], offered: bool
) -> None:
    shm, tcp = Recorded("shm"), Recorded("tcp")
    auth = Authenticator({digest(f"token {at}"): Tenant(name) for at, name in enumerate(tenants)}, "secret")
    paths = serve_paths(host, auth, ServerConfig(), "here", servers={"shm": shm.serve, "tcp": tcp.serve})
    assert shm.running is offered and tcp.running
    assert [offer.transport for offer in paths.offers.offers] == (["shm", "tcp"] if offered else ["tcp"])
    if not offered:
        (refused,) = paths.offers.refused
        assert refused[0] == "shm" and "read one another's pages" in refused[1]


def test_a_path_knows_its_callers_as_grpc_does(host: ShardHost) -> None:
    tcp = Recorded("tcp")
    tenants = {digest("good"): Tenant("me"), digest("operator"): NO_TENANT}
    auth = Authenticator(tenants, "secret", frozenset({digest("operator")}), epoch_of=of_a_shard)
    serve_paths(host, auth, ServerConfig(), "here", servers={"tcp": tcp.serve})
    assert (tcp.caller_of("good").tenant, tcp.caller_of(SECRET).tenant) == (Tenant("me"), CLUSTER)
    for token in ("bad", "", None, "operator", "secret"):
        with pytest.raises(CredentialError):
            tcp.caller_of(token)


def test_a_shard_tells_what_it_was_started_with_and_real_servers_answer_there() -> None:
    host = ShardHost(
        ShardAddress(ShardId("shard-0"), EPOCH, "shard-0", "host"),
        configured(),
        tell=Coordinator().tell,
        open_source=no_source,
        on_end=lambda leave: None,
    )
    with closing(host), closing(serve_paths(host, EVERY_CLIENT, ServerConfig(), "127.0.0.1")) as paths:
        host.start(paths.offers)
        assert host.ask(build_request(GetOffers(), Tenant("t")), BOUND_S) == paths.offers
        assert [offer.transport for offer in paths.offers.offers] == ["shm", "tcp"]
        for offer in paths.offers.offers:
            with closing(OPENERS[offer.transport](offer, ANONYMOUS)) as path:
                try_path(path, EPOCH, attempt(), soon())
