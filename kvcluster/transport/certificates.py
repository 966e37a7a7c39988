"""The certificates of a process: its own, and the authorities by which it verifies those of others.

They are PEM files that are read again when they change (watched_files.py), so that certificates are renewed and
authorities replaced while everything runs: handshakes that follow use the new ones, and connections that are open go
on. Files that cannot be used change nothing, as those of a pair that is being replaced: the last good ones hold.

Each version is tried before it is used, by a handshake of the process with itself in memory. So a certificate that has
expired, that none of the authorities has signed, or that does not belong to its key is found when it is read.

DNS names and addresses of a certificate name the server. Its URIs say in which roles its bearer acts in a cluster:

    kvcluster://CLUSTER/coordinator  /shard  /operator  /events  /tenant/NAME
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import select
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import grpc

from kvcluster.config import TLS, Config
from kvcluster.core import limits
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ConfigError, CredentialError, KVClusterError, ProtocolError
from kvcluster.transport.addresses import split_address
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.watched_files import WatchedFiles, read_bounded

SCHEME = "kvcluster://"
COORDINATOR, SHARD, OPERATOR, EVENTS = "coordinator", "shard", "operator", "events"
TENANT = "tenant/"

DAY_S = 86_400
WARNED_S = 14 * DAY_S
"""How long before the end of a certificate its operator is told."""

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2; those of 1.3 are all as good."""

_OTHER_PURPOSE = 26
"""OpenSSL's X509_V_ERR_INVALID_PURPOSE: a server shows a certificate that is for clients alone."""

_ROUNDS = 4
"""More than a handshake of TLS 1.2 takes."""


class CertificateNames(NamedTuple):
    """What a certificate says of its bearer. `dns` and `addresses` name a server, `uris` its roles. `expires_s`: Unix
    time. `fingerprint`: SHA-256 of the certificate in DER, hex."""

    dns: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    expires_s: float = 0.0
    fingerprint: str = ""

    def has_role(self, cluster: str, role: str) -> bool:
        return f"{SCHEME}{cluster}/{role}" in self.uris

    def tenants(self, cluster: str) -> list[str]:
        """Returns the tenants of a cluster as which its bearer may act."""
        prefix = f"{SCHEME}{cluster}/{TENANT}"
        return [uri[len(prefix) :] for uri in self.uris if uri.startswith(prefix)]

    def name_for(self, host: str) -> str:
        """Returns the name by which those who connect to `host` verify this server: "" if the certificate has the host
        itself, and its first name otherwise."""
        if host in self.dns or host.strip("[]") in self.addresses:
            return ""
        return next((name for name in self.dns if not name.startswith("*")), "")


class CertificateFiles(NamedTuple):
    """The paths of PEM files: authorities, and a certificate with its key, "" for none."""

    ca: str
    cert: str = ""
    key: str = ""


class LoadedCertificates:
    """One version of the files, ready for handshakes. Raises ConfigError if they cannot be used.

    `number` counts the versions of a process. `client`, `server` and `mutual` are the contexts of handshakes: of the
    side that connects, of a server, and of a server that asks for a certificate. `own`: the names of the process's own
    certificate. All but `client` are None without one. `serves`: the process is a server."""

    def __init__(self, files: CertificateFiles, number: int, *, serves: bool = False) -> None:
        self.number = number
        self.ca, _ = _read(files.ca, "the authorities' file")
        self.cert = _read(files.cert, "the certificate")[0] if files.cert else None
        self.key = _read_key(files.key) if files.key else None
        self.client = self._context(ssl.PROTOCOL_TLS_CLIENT, files)
        self.server = self.mutual = self.own = None
        if files.cert:
            self.server, self.mutual = (self._context(ssl.PROTOCOL_TLS_SERVER, files) for _ in range(2))
            self.mutual.verify_mode = ssl.CERT_REQUIRED
            without_names = self._context(ssl.PROTOCOL_TLS_CLIENT, files)
            without_names.check_hostname = False
            self.own, for_servers = _try(self.server, self.mutual, without_names, files)
            if serves and not for_servers:
                raise ConfigError(
                    f"{files.cert} is for clients alone: a server's has the purpose of server authentication"
                )

    def _context(self, protocol: int, files: CertificateFiles) -> ssl.SSLContext:
        """Returns a context that knows the authorities, and the own certificate if there is one. Raises ConfigError."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.hostname_checks_common_name = False
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # each would make an idle connection of a client readable
        try:
            with _in_memory(self.ca) as ca:
                context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{files.ca} holds no certificates in PEM: {_reason(error)}") from None
        if self.cert is not None and self.key is not None:
            try:
                with _in_memory(self.cert) as cert, _in_memory(self.key) as key:
                    context.load_cert_chain(cert, key, password="")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{files.cert} and {files.key} are no certificate and its key, in PEM without a pass phrase: "
                    f"{_reason(error)}"
                ) from None
        return context


class Certificates:
    """The certificates in some files; thread-safe. Raises ConfigError if the files cannot be used now."""

    def __init__(
        self, files: CertificateFiles, *, serves: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`serves`: the process is a server."""
        self.files = files
        self._watched = WatchedFiles(
            tuple(filter(None, files)),
            lambda before: LoadedCertificates(files, 1 if before is None else before.number + 1, serves=serves),
            stays="The certificates that were read before stay in use",
            again=lambda loaded: f"the certificates were read again: {files.cert or files.ca}",
            clock=clock,
        )

    def now(self) -> LoadedCertificates:
        """Returns the certificates that are valid now."""
        loaded = self._watched.value()
        assert loaded is not None, "there are some, or the constructor has raised"
        return loaded

    def trouble(self) -> str:
        """Returns why the newest version of the files is not in use, as it could not be used; "" if it is."""
        return self._watched.trouble()

    def warning(self, now_s: float) -> str:
        """Returns what an operator should do: if the newest files are not in use, or the certificate ends within
        WARNED_S of this Unix time; "" if nothing is to be done."""
        if trouble := self.trouble():
            return trouble
        own = self.now().own
        left_s = own.expires_s - now_s if own is not None else WARNED_S
        if own is None or left_s >= WARNED_S:
            return ""
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(own.expires_s))
        ends = f"ends in {left_s / DAY_S:.0f} days, at {when}" if left_s > 0 else f"has ended, at {when}"
        return f"the certificate {self.files.cert} {ends}: replace the files, which are then read again"

    def channel(self, server: bytes) -> grpc.ChannelCredentials:
        """Returns what gRPC needs to connect to the server that has this certificate, in PEM, and to no other; with
        this process's certificate if it has one."""
        loaded = self.now()
        return grpc.ssl_channel_credentials(server, loaded.key, loaded.cert)

    def server(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """Returns what gRPC needs to listen. It asks for the newest certificate at each handshake."""
        used = -1

        def newest() -> Any:
            nonlocal used
            loaded = self.now()
            if loaded.number == used:
                return None
            used = loaded.number
            return _for_grpc(loaded)

        return grpc.dynamic_ssl_server_credentials(
            _for_grpc(self.now()), newest, require_client_authentication=client_certificates
        )


def own_name(certificates: Certificates | None, host: str) -> str:
    """Returns the name by which those who connect to this process at `host` verify it, "" for the host itself."""
    own = certificates.now().own if certificates is not None else None
    return own.name_for(host) if own is not None else ""


def own_certificates(config: Config, role: str) -> Certificates | None:
    """Returns the certificates of the coordinator or of a shard of a cluster; None if that serves in the clear. Raises
    ConfigError if the files cannot be used, or the certificate is not for that role of this cluster."""
    security = config.security
    if security.encryption != TLS:
        return None
    files = CertificateFiles(security.ca_file, security.cert_file, security.key_file)
    certificates = Certificates(files, serves=True)
    own = certificates.now().own
    if own is None or not own.has_role(config.name, role):
        raise ConfigError(
            f"security.cert_file {files.cert} is not for the {role} of the cluster {config.name!r}: it lacks the URI "
            f"{SCHEME}{config.name}/{role}"
        )
    return certificates


def _for_grpc(loaded: LoadedCertificates) -> Any:
    assert loaded.key is not None and loaded.cert is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], root_certificates=loaded.ca)


def names_of(certificate: dict[str, Any], der: bytes) -> CertificateNames:
    """Returns the names of a verified certificate, from what `ssl.SSLSocket.getpeercert` returns of it."""
    names: dict[str, list[str]] = {}
    for kind, name in certificate.get("subjectAltName", ()):
        names.setdefault(kind, []).append(name)
    expires_s = ssl.cert_time_to_seconds(certificate["notAfter"]) if "notAfter" in certificate else 0.0
    addresses = []
    for address in names.get("IP Address", ()):
        with suppress(ValueError):
            addresses.append(str(ipaddress.ip_address(address.strip())))
    return CertificateNames(
        tuple(names.get("DNS", ())),
        tuple(addresses),
        tuple(names.get("URI", ())),
        float(expires_s),
        hashlib.sha256(der).hexdigest(),
    )


def names_in_pem(uris: list[bytes], pem: bytes) -> CertificateNames:
    """Returns the URIs and the fingerprint of a certificate that gRPC has verified."""
    der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    return CertificateNames(uris=tuple(uri.decode() for uri in uris), fingerprint=hashlib.sha256(der).hexdigest())


# ------------------------------------------------------------------------------------------------- handshakes


def connect_tls(
    connected: socket.socket, name: str, certificates: Certificates, deadline: Deadline, *, role: str = SHARD
) -> ssl.SSLSocket:
    """Returns a TLS socket over a connected one, once the certificate of the other side has been verified: that it is
    of one of the authorities, has this name or address, and is for that role in some cluster. Closes the socket and
    raises Unavailable if it does not answer, CredentialError if its certificate is another's, ProtocolError if it
    speaks no TLS."""
    try:
        wrapped = certificates.now().client.wrap_socket(connected, server_hostname=name, do_handshake_on_connect=False)
    except OSError as error:
        connected.close()
        raise Unavailable(Miss(MissReason.SHARD_LOST, f"{name}: {_reason(error)}")) from None
    try:
        handshake(wrapped, name, deadline)
        shown = certificate_of(wrapped) or CertificateNames()
        if not any(_role_of(uri) == role for uri in shown.uris):
            raise CredentialError(f"the certificate of {name} is not a {role}'s: it lacks the URI {SCHEME}NAME/{role}")
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _role_of(uri: str) -> str:
    """Returns the role that a URI gives in some cluster; "" if it gives none."""
    return uri.removeprefix(SCHEME).partition("/")[2] if uri.startswith(SCHEME) else ""


def check_server(connected: socket.socket, name: str, certificates: Certificates, deadline: Deadline) -> None:
    """Verifies a coordinator at the other end, and closes the socket. Raises as `connect_tls`."""
    connect_tls(connected, name, certificates, deadline, role=COORDINATOR).close()


def verified_certificate(
    address: str, name: str, certificates: Certificates, deadline: Deadline, *, role: str
) -> bytes:
    """Returns the certificate, in PEM, that the server at `address` ("host:port") shows. Raises as `connect_tls`, and
    Unavailable if no server listens there."""
    try:
        connected = socket.create_connection(split_address(address), timeout=deadline.remaining_s())
    except OSError as error:
        raise Unavailable(Miss(MissReason.SHARD_LOST, _reason(error).lower())) from None
    with closing(connect_tls(connected, name, certificates, deadline, role=role)) as wrapped:
        shown = wrapped.getpeercert(binary_form=True)
        assert shown is not None, "it was verified"
        return ssl.DER_cert_to_PEM_cert(shown).encode("ascii")


class ServerTls(NamedTuple):
    """What a handshake with a server has shown. `version`, `cipher`: as OpenSSL calls them."""

    version: str
    cipher: str
    names: CertificateNames


def examine_server(
    connected: socket.socket, name: str, certificates: Certificates, deadline: Deadline, *, role: str
) -> ServerTls:
    """Returns what a server shows, and closes the socket. Raises as `connect_tls`."""
    with closing(connect_tls(connected, name, certificates, deadline, role=role)) as wrapped:
        cipher = wrapped.cipher()
        shown = certificate_of(wrapped) or CertificateNames()
        return ServerTls(str(wrapped.version()), cipher[0] if cipher else "", shown)


def speaks_tls(connected: socket.socket, deadline: Deadline) -> bool:
    """Whether the other end answers as a server of TLS, whoever it is; closes the socket. It is sent nothing but the
    first message of a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(context.wrap_socket(connected, do_handshake_on_connect=False)) as wrapped:
        try:
            handshake(wrapped, "the server", deadline)
        except KVClusterError:
            return False
        return True


def accepting(connected: socket.socket, certificates: Certificates, *, mutual: bool) -> ssl.SSLSocket:
    """Returns a TLS socket over one that was accepted, before its handshake, in which the other side must show a
    certificate if it is `mutual`. Raises OSError if the socket has been closed."""
    context = server_context(certificates, mutual=mutual)
    return context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)


def server_context(certificates: Certificates, *, mutual: bool) -> ssl.SSLContext:
    """Returns the context of a server's handshakes by the certificates that are valid now. `mutual`: the other side
    must show one."""
    loaded = certificates.now()
    context = loaded.mutual if mutual else loaded.server
    assert context is not None, "a server has a certificate"
    return context


def certificate_of(connected: ssl.SSLSocket | ssl.SSLObject) -> CertificateNames | None:
    """Returns the names of the certificate that the other side has shown; None if it has shown none."""
    der = connected.getpeercert(binary_form=True)
    return names_of(connected.getpeercert() or {}, der) if der else None


def handshake(connected: ssl.SSLSocket, peer: str, deadline: Deadline) -> None:
    """Carries out the handshake, and leaves the socket non-blocking. Raises Unavailable if the other side does not
    answer or has closed the connection, CredentialError if its certificate is not accepted, or ProtocolError if it
    speaks no TLS."""
    connected.setblocking(False)
    poll = select.poll()
    poll.register(connected, 0)
    while True:
        try:
            connected.do_handshake()
            return
        except ssl.SSLWantReadError:
            poll.modify(connected, select.POLLIN)
        except ssl.SSLWantWriteError:
            poll.modify(connected, select.POLLOUT)
        except ssl.SSLCertVerificationError as error:
            raise CredentialError(f"the certificate of {peer} is refused: {_verify_reason(error)}") from None
        except ssl.SSLEOFError:  # as a server does that has all its connections, or one that is ending
            raise Unavailable(
                Miss(MissReason.SHARD_LOST, f"{peer} closed the connection during the TLS handshake")
            ) from None
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or "").upper():
                raise CredentialError(f"{peer} refuses this process's certificate: {_reason(error)}") from None
            raise ProtocolError(f"{peer} makes no TLS connection: {_reason(error)}") from None
        except OSError as error:
            raise Unavailable(Miss(MissReason.SHARD_LOST, f"{peer}: {_reason(error)}")) from None
        if not poll.poll(int(deadline.remaining_s() * 1e3) + 1):
            raise Unavailable(Miss(MissReason.DEADLINE, f"{peer}: no TLS handshake in time"))
        deadline.check(peer)


def _try(
    server: ssl.SSLContext, mutual: ssl.SSLContext, client: ssl.SSLContext, files: CertificateFiles
) -> tuple[CertificateNames, bool]:
    """Returns the names of the own certificate, and whether it is for servers, after a handshake in memory. One that is
    for clients alone is shown to a server that asks for it. Raises ConfigError if it fails. Names are left to those who
    connect: here the chain, the dates, the purpose and the key are compared."""
    try:
        try:
            return certificate_of(_shaken(server, client)[0]) or CertificateNames(), True
        except ssl.SSLCertVerificationError as error:
            if error.verify_code != _OTHER_PURPOSE:
                raise
            client.verify_mode = ssl.CERT_NONE
            return certificate_of(_shaken(mutual, client)[1]) or CertificateNames(), False
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{files.cert} is refused by the authorities of {files.ca}: {_verify_reason(error)}"
        ) from None
    except ssl.SSLError as error:
        raise ConfigError(f"{files.cert} serves no TLS handshake: {_reason(error)}") from None


def _shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Returns both sides of a handshake in memory, the client's first. Raises SSLError if it fails."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_ROUNDS):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides


def _reason(error: OSError | ValueError) -> str:
    """Returns an error of OpenSSL or of the system in words."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _verify_reason(error: ssl.SSLCertVerificationError) -> str:
    return str(error.verify_message).rstrip(".")


def _read(path: str, what: str) -> tuple[bytes, os.stat_result]:
    """Returns the content of a file of certificates, and what it is. Raises ConfigError if it cannot be read, is no
    file or is too large."""
    try:
        data, found = read_bounded(path, limits.CERTIFICATE_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {what} {path}: {_reason(error)}") from None
    if len(data) > limits.CERTIFICATE_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {limits.CERTIFICATE_FILE_BYTES} bytes")
    return data, found


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Within the block, the path of a file in memory with that content: OpenSSL reads what was read here, whatever the
    path of the user has become meanwhile."""
    opened = os.memfd_create("kvcluster-certificate", os.MFD_CLOEXEC)
    try:
        os.write(opened, data)
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


def _read_key(path: str) -> bytes:
    """As `_read`, of a key, which other users may not read."""
    data, found = _read(path, "the key")
    if found.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"every user of this machine can read or write the key {path}: `chmod o-rw {path}`")
    return data
