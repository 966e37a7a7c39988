"""What a process shows to servers when it connects, and by what it verifies them before."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcluster.config import NETWORK, NO_ENCRYPTION, TLS, ClientConfig
from kvcluster.core.messages import ShardAddress
from kvcluster.errors import ConfigError
from kvcluster.transport.addresses import check_address, host_of, is_on_loopback

if TYPE_CHECKING:
    from kvcluster.transport.certificates import Certificates

CA_FILE, CERT_FILE, KEY_FILE = "KVCLUSTER_CA_FILE", "KVCLUSTER_CERT_FILE", "KVCLUSTER_KEY_FILE"
CONNECTION = ("encryption", "ca_file", "cert_file", "key_file", "server_name")
"""The settings of a client that say how it connects (ClientConfig), as engines pass them on."""

ENCRYPTION, SERVER_NAME = "KVCLUSTER_ENCRYPTION", "KVCLUSTER_SERVER_NAME"
"""The variables of the environment that hold what a client's settings do not say."""


@dataclass(frozen=True)
class Credentials:
    """`token`: None for none. `certificates`: with them connections are encrypted, and the token is sent when the
    server's certificate has been verified; None for connections in the clear. `server_name`: the name that this must
    have, "" for the host of the address."""

    token: str | None = None
    certificates: Certificates | None = None
    server_name: str = ""

    def name_at(self, address: str) -> str:
        """Returns the name or address that the certificate of the server at this address must have."""
        return self.server_name or host_of(address)

    def for_shard(self, shard: ShardAddress) -> Credentials:
        """Returns those for connections to one shard."""
        return self.named(shard.server_name)

    def named(self, server_name: str) -> Credentials:
        """Returns those for connections to a server with this name in its certificate, "" for its address."""
        return replace(self, server_name=server_name) if self.certificates is not None else self


ANONYMOUS = Credentials()
"""Of a client of a cluster without tokens, in the clear."""


def client_credentials(address: str, token: str | None, config: ClientConfig) -> Credentials:
    """Returns what a client shows to the coordinator at `address` ("host:port"), by its settings and, for those that
    say nothing, by the environment. Raises ConfigError for a malformed address, if a file cannot be used, or if the
    settings leave open whether to encrypt a connection to another machine."""
    check_address(address)
    encryption = _encryption(config)
    if encryption == TLS:
        return replace(tls_credentials(config), token=token)
    if encryption not in (NETWORK, NO_ENCRYPTION) and not is_on_loopback(address):
        raise ConfigError(
            f"{address} is another machine, and nothing says how the connection is encrypted: name the authorities' "
            f"file as ca_file (or in {CA_FILE}), or say by encryption = network (or in {ENCRYPTION}) that the network "
            "encrypts, or by none that nothing does"
        )
    return Credentials(token)


def tls_credentials(config: ClientConfig) -> Credentials:
    """Returns the credentials of a client, without a token; in the clear if its settings and the environment name no
    TLS. Raises ConfigError if a file is missing or cannot be used."""
    if _encryption(config) != TLS:
        return ANONYMOUS
    ca_file = config.ca_file or os.environ.get(CA_FILE, "")
    cert_file = config.cert_file or os.environ.get(CERT_FILE, "")
    key_file = config.key_file or os.environ.get(KEY_FILE, "")
    if not ca_file:
        raise ConfigError(
            "encryption is tls, and nothing says by which authorities servers are verified: name their file as "
            f"ca_file, or in {CA_FILE} (`kvcluster certs init` makes one)"
        )
    if bool(cert_file) != bool(key_file):
        raise ConfigError("cert_file and key_file belong together: a certificate and its key")
    from kvcluster.transport.certificates import CertificateFiles, Certificates

    certificates = Certificates(CertificateFiles(ca_file, cert_file, key_file))
    return Credentials(None, certificates, config.server_name or os.environ.get(SERVER_NAME, ""))


def _encryption(config: ClientConfig) -> str:
    """Returns what the settings name, or else the environment."""
    if config.encryption or config.ca_file:
        return config.encryption or TLS
    return os.environ.get(ENCRYPTION, "") or (TLS if os.environ.get(CA_FILE, "") else "")
