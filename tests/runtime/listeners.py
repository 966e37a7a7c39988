"""Every listener of a cluster within one process, made as the actors make them.

The coordinator and the shard behind them are real. The tenant `me` is attached to both, and has a page in the shard.
The token file is looked at by a clock of the test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcluster.actors import coordinator as coordinator_actor
from kvcluster.actors import shard as shard_actor
from kvcluster.config import load
from kvcluster.core.ids import Epoch, ShardId
from kvcluster.core.messages import Attach, ShardAddress
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.auth import Authenticator, TokenFile, authenticator, token_line
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.metric_samples import CallMetrics
from kvcluster.runtime.metrics_server import serve_metrics
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_credentials import CredentialIssuer, ShardCredentials
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.runtime.transport_servers import serve_paths
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.grpc_pages import page_handlers
from kvcluster.transport.listener import ListenTls
from kvcluster.transport.rpc import RpcHandler
from kvcluster.wire.methods import COORDINATOR, SHARD
from tests.authority import Issued
from tests.runtime.events import ANYWHERE, effect
from tests.runtime.hosts import BOUND_S, EPOCH, ME, SPEC, Coordinator, shard, soon, store

HOST = "127.0.0.1"
SECRET = "of the cluster"
HELD, WRITTEN = 1, 2
"""The numbers of a page that the shard holds, and of one that is written by those who may."""


class Listeners:
    """A coordinator with its ports, and a shard with its; `addresses` has those of coordinator and shards by what is
    served there, "host:port" each. `issued`: None to listen in the clear."""

    def __init__(
        self, house: ExitStack, folder: Path, issued: Issued | None = None, *, client_certificates: bool = False
    ) -> None:
        self.now = 0.0
        """The time of the clock by which the token file is looked at."""
        self.addresses: dict[str, str] = {}
        self.token_file = folder / "tokens"
        self.admit({"of nobody": "nobody"})
        self._house = house
        self._certificates = issued.certificates() if issued is not None else None
        self._config = load(overrides=self._settings(issued, client_certificates=client_certificates))
        self._secret = SECRET if issued is None else ""
        self._serve_coordinator()
        self._serve_shard()

    def admit(
        self,
        tenants: Mapping[str, str],
        operators: Sequence[str] = (),
        revoked: Sequence[str] = (),
        read_only: Sequence[str] = (),
    ) -> None:
        """Has the token file admit these tokens of tenants, and refuse the certificates with these fingerprints. The
        tenant `reader` may read the KV of `me`."""
        rights = {token: {"operator": token in operators, "read_only": token in read_only} for token in tenants}
        lines = [token_line(token, tenant, **rights[token]) for token, tenant in tenants.items()]
        lines += ["grant reader reads me", *(f"revoked sha256:{fingerprint}" for fingerprint in revoked)]
        new = self.token_file.with_suffix(".new")
        new.write_text("\n".join(lines), encoding="utf-8")
        new.chmod(0o600)
        new.rename(self.token_file)

    def shard_tokens(self, epoch: Epoch, proves: Credentials) -> tuple[str | None, str | None]:
        """What another shard, which proves itself by these credentials, shows to the coordinator and to the shard."""
        other = ShardCredentials(epoch, proves)
        own = other.to_report(self.addresses["reports"], "", soon()).token
        return own, other.to_shard(ShardAddress(ShardId("shard-0"), EPOCH, self.addresses["grpc"])).token

    def publish(self) -> None:
        """Publishes an event."""
        assert self._coordinator.publisher is not None
        self._coordinator.publisher.publish(effect(HELD))

    # ------------------------------------------------------------------------------------------- its parts

    def _settings(self, issued: Issued | None, *, client_certificates: bool) -> dict[str, Any]:
        """The overrides of a configuration in which everything listens that can."""
        security: dict[str, Any] = {}
        if issued is not None:
            ca, cert, key = issued.files
            security = {"encryption": "tls", "ca_file": ca, "cert_file": cert, "key_file": key}
        return {
            "server": {"token_file": str(self.token_file), "transports": ["tcp", "grpc"], "shard_ports": "0"},
            "security": {**security, "client_certificates": client_certificates},
            "events": {"endpoint": ANYWHERE, "replay": ANYWHERE},
            "metrics": {"port": 9400},
        }

    def _authenticator(self, **how: Any) -> Authenticator:
        """As the actors', by the clock of the test."""
        auth = authenticator(self._config, self._secret, **how)
        auth._file = TokenFile(str(self.token_file), clock=lambda: self.now)
        return auth

    def _serve_coordinator(self) -> None:
        issuer, certificates, config = CredentialIssuer(), self._certificates, self._config
        auth = self._authenticator(epoch_of=issuer.epoch_of)
        self._coordinator = coordinator = CoordinatorHost(
            *(Epoch(1), config), on_end=lambda leave: None, certificates=certificates, is_revoked=auth.is_revoked
        )
        self._house.callback(coordinator.close)
        coordinator.start()
        coordinator.ask(build_request(Attach(SPEC), ME), BOUND_S)
        for_workers, for_shards = coordinator_actor.handlers_of(coordinator.ask, issuer)
        mutual = config.security.client_certificates
        self._serve_grpc("workers", for_workers, auth, client_certificates=mutual)
        self._serve_grpc("reports", for_shards, auth, client_certificates=True)
        self._serve_metrics("metrics", coordinator)
        assert coordinator.publisher is not None
        self.addresses["events"] = coordinator.publisher.endpoint.removeprefix("tcp://")
        self.addresses["replay"] = coordinator.publisher.replay_endpoint.removeprefix("tcp://")

    def _serve_shard(self) -> None:
        own = shard_actor.credentials_of(EPOCH, self._secret, self._certificates)
        own.to_report(self.addresses["reports"], "", soon())
        auth = self._authenticator(epoch_of=own.epoch_of, secret_suffices=lambda: own.secret_suffices)
        reported = Coordinator()
        host = self._house.enter_context(shard(reported))
        reported.wait_for(3)  # from the answer to the second on, it is a member and takes pages
        store(host, [HELD])
        handlers = unary_handlers(SHARD, host.ask, shared=shard_actor._ALSO_FOR_SHARDS) | page_handlers(host)
        mutual = self._config.security.client_certificates
        self._serve_grpc("grpc", handlers, auth, client_certificates=mutual)
        tls = None
        if self._certificates is not None:
            tls = ListenTls(self._certificates, mutual, auth.worker_within_tls)
        paths = serve_paths(host, auth, self._config.server, HOST, tls)
        self._house.callback(paths.close)
        self.addresses |= {offer.transport: offer.address for offer in paths.offers.offers}
        self._serve_metrics("metrics of shards", host)

    def _serve_grpc(
        self, name: str, handlers: dict[str, RpcHandler], auth: Authenticator, *, client_certificates: bool
    ) -> None:
        server = GrpcServer(
            *(handlers, auth, HOST, 0, 4), certificates=self._certificates, client_certificates=client_certificates
        )
        server.start()
        self._house.callback(server.close, grace_s=0)
        self.addresses[name] = server.address

    def _serve_metrics(self, name: str, host: CoordinatorHost | ShardHost) -> None:
        calls = CallMetrics({**COORDINATOR, **SHARD})
        server = serve_metrics(self._config.metrics, range(1), host, calls, self._certificates)
        assert server is not None
        self._house.callback(server.close)
        self.addresses[name] = f"{HOST}:{server.port}"
