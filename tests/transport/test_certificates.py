"""Certificates of a process: read and tried, read again, and verified by those who connect."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvcluster.errors import ConfigError, CredentialError, KVClusterError, ProtocolError
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.certificates import (
    CertificateFiles,
    CertificateNames,
    Certificates,
    check_server,
    connect_tls,
)
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.wire.socket_frames import FrameKind
from tests.authority import Authority, Issued

BOUND_S = 20.0


def soon() -> Deadline:
    return Deadline.after_ms(BOUND_S * 1e3)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Handshakes:
    """A server that carries out the handshake with each who connects, and keeps what came of it."""

    def __init__(self, certificates: Certificates, *, mutual: bool) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self._certificates, self._mutual = certificates, mutual
        self.outcomes: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self._listening.accept()
                with closing(FramedSocket(connected, "a client", None)) as link:
                    try:
                        self.outcomes.append(link.accept_tls(self._certificates, soon(), mutual=self._mutual))
                        link.receive(FrameKind.HELLO, deadline=soon())
                    except KVClusterError as error:
                        self.outcomes.append(error)

    def connected(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=BOUND_S)

    def close(self) -> None:
        with suppress(OSError):  # closed already
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(BOUND_S)
        self._listening.close()


@pytest.fixture
def served(authority: Authority) -> Iterator[Callable[[Issued], Handshakes]]:
    started: list[Handshakes] = []

    def serve(issued: Issued, *, mutual: bool = False) -> Handshakes:
        started.append(Handshakes(issued.certificates(), mutual=mutual))
        return started[-1]

    yield serve
    for one in started:
        one.close()


def test_a_certificate_tells_its_names_roles_and_end(authority: Authority) -> None:
    issued = authority.issue("s", "shard", "tenant/me", names=("a.example", "*.b.example", "10.0.0.5", "fd00::5"))
    own = issued.certificates().now().own
    assert own is not None
    assert own.dns == ("a.example", "*.b.example") and own.addresses == ("10.0.0.5", "fd00::5")
    assert own.has_role("kvcluster", "shard") and not own.has_role("other", "shard")
    assert own.tenants("kvcluster") == ["me"] and own.tenants("other") == []
    assert own.fingerprint == issued.fingerprint
    assert own.name_for("10.0.0.5") == own.name_for("[fd00::5]") == own.name_for("a.example") == ""
    assert own.name_for("10.0.0.6") == "a.example"
    assert CertificateNames(dns=("*.b.example",)).name_for("10.0.0.6") == "", "no name is told that cannot be asked for"


def test_files_that_cannot_be_used_are_refused_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("good", "shard"), Authority(tmp_path / "other", "other").issue("other", "shard")
    expired = authority.issue("expired", "shard", days=-0.5)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    large = tmp_path / "large"
    large.write_bytes(b"#" * (2**20 + 1))
    ca, cert, key = good.files
    for files, why in (
        (CertificateFiles("/nowhere", cert, key), "cannot read the authorities' file /nowhere: No such file"),
        (CertificateFiles(str(garbage), cert, key), "holds no certificates in PEM"),
        (CertificateFiles(ca, "/nowhere", key), "cannot read the certificate /nowhere"),
        (CertificateFiles(ca, cert, other.files.key), "are no certificate and its key"),
        (CertificateFiles(ca, other.files.cert, other.files.key), "is refused by the authorities of .*issuer"),
        (CertificateFiles(ca, expired.files.cert, expired.files.key), "is refused .*expired"),
        (CertificateFiles(ca, str(large), key), "is larger than"),
    ):
        with pytest.raises(ConfigError, match=why):
            Certificates(files)
    Path(key).chmod(0o644)
    with pytest.raises(ConfigError, match=r"every user of this machine can read .*chmod o-rw"):
        Certificates(good.files)


def test_a_certificate_for_clients_alone_is_shown_by_clients_and_serves_none(
    authority: Authority, served: Callable[..., Handshakes]
) -> None:
    mine = authority.issue("me", "tenant/me", names=(), serves=False)
    own = mine.certificates().now().own
    assert own is not None and own.tenants("kvcluster") == ["me"]
    server = served(authority.issue("s", "shard"), mutual=True)
    connect_tls(server.connected(), "127.0.0.1", mine.certificates(), soon()).close()
    server.close()
    assert [one.fingerprint for one in server.outcomes if isinstance(one, CertificateNames)] == [mine.fingerprint]
    with pytest.raises(ConfigError, match="is for clients alone"):
        Certificates(mine.files, serves=True)
    with pytest.raises(ConfigError, match=r"is refused .*expired"):
        authority.issue("old", "tenant/me", names=(), serves=False, days=-0.5).certificates()


def test_what_is_no_file_costs_no_descriptor_and_holds_no_thread(authority: Authority, tmp_path: Path) -> None:
    clock, issued = Clock(), authority.issue("s", "shard")
    certificates = Certificates(issued.files, clock=clock)
    before, cert = certificates.now(), Path(issued.files.cert)
    kept, descriptors = cert.read_bytes(), len(os.listdir("/proc/self/fd"))
    for make in (Path.mkdir, os.mkfifo):
        cert.unlink() if cert.is_file() else cert.rmdir()
        make(cert)
        for _ in range(20):
            clock.now += 1
            assert certificates.now() is before and "it is no file" in certificates.trouble()
        assert len(os.listdir("/proc/self/fd")) == descriptors
    cert.unlink()
    cert.write_bytes(kept)
    clock.now += 1
    assert certificates.now() is not before and not certificates.trouble()


def test_files_are_read_again_when_they_change_and_a_pair_that_does_not_fit_changes_nothing(
    authority: Authority, tmp_path: Path
) -> None:
    clock = Clock()
    first = authority.issue("s", "shard")
    certificates = Certificates(first.files, clock=clock)
    before = certificates.now()
    second = authority.issue("s", "shard", names=("new.example",))
    assert certificates.now() is before, "it looks once a second"
    clock.now += 1
    after = certificates.now()
    assert after.number == before.number + 1 and after.own is not None and after.own.fingerprint == second.fingerprint
    key = Path(first.files.key)
    kept = key.read_bytes()
    Path(authority.issue("t", "shard").files.key).rename(key)
    clock.now += 1
    assert certificates.now() is after and "no certificate and its key" in certificates.trouble()
    key.write_bytes(kept)
    clock.now += 1
    assert certificates.now().number == after.number + 1 and not certificates.trouble()


def test_a_server_is_accepted_by_its_authority_and_name(
    authority: Authority, served: Callable[..., Handshakes], tmp_path: Path
) -> None:
    server = served(authority.issue("s", "shard", names=("kv.example", "127.0.0.1")))
    for name in ("kv.example", "127.0.0.1"):
        connect_tls(server.connected(), name, authority.client(), soon()).close()
    for name in ("other.example", "127.0.0.2"):
        with pytest.raises(CredentialError, match=rf"certificate of {name} is refused: .*mismatch"):
            connect_tls(server.connected(), name, authority.client(), soon())
    stranger = Authority(tmp_path / "stranger", "stranger").client()
    with pytest.raises(CredentialError, match=r"certificate of kv\.example is refused: .*(issuer|self-signed)"):
        connect_tls(server.connected(), "kv.example", stranger, soon())


def test_a_server_is_accepted_by_its_role(authority: Authority, served: Callable[..., Handshakes]) -> None:
    client = authority.client()
    coordinator, tenant = served(authority.issue("c", "coordinator")), served(authority.issue("t", "tenant/me"))
    for server in (coordinator, tenant):
        with pytest.raises(CredentialError, match="is not a shard's"):
            connect_tls(server.connected(), "127.0.0.1", client, soon())
    check_server(coordinator.connected(), "127.0.0.1", client, soon())
    called = served(authority.issue("called", "tenant/shard", "tenant/coordinator"))
    with pytest.raises(CredentialError, match="is not a shard's"):
        connect_tls(called.connected(), "127.0.0.1", client, soon())
    with pytest.raises(CredentialError, match="is not a coordinator's"):
        check_server(tenant.connected(), "127.0.0.1", client, soon())


def test_a_client_shows_its_certificate_where_it_is_asked_for_one(
    authority: Authority, served: Callable[..., Handshakes], tmp_path: Path
) -> None:
    server = served(authority.issue("s", "shard"), mutual=True)
    mine = authority.issue("me", "tenant/me", names=())
    connect_tls(server.connected(), "127.0.0.1", mine.certificates(), soon()).close()
    without = connect_tls(server.connected(), "127.0.0.1", authority.client(), soon())
    with closing(FramedSocket(without, "the server")) as link, pytest.raises((Unavailable, ProtocolError)):
        link.receive(FrameKind.WELCOME, deadline=soon())  # in TLS 1.3 the refusal comes after the client's part
    server.close()
    shown = [outcome for outcome in server.outcomes if isinstance(outcome, CertificateNames)]
    assert [one.fingerprint for one in shown] == [mine.fingerprint]
    assert any(isinstance(outcome, ProtocolError) for outcome in server.outcomes)


def test_a_server_that_ends_the_connection_in_the_handshake_may_be_tried_again(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def end() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(4_096)

        thread = threading.Thread(target=end)
        thread.start()
        near = socket.create_connection(listening.getsockname())
        with pytest.raises(Unavailable, match="closed the connection during the TLS handshake"):
            connect_tls(near, "127.0.0.1", authority.client(), soon())
        thread.join()


def test_what_speaks_no_tls_is_told_apart(authority: Authority) -> None:
    client = authority.client()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.sendall(b"SSH-2.0-something\r\n")
                connected.recv(4_096)

        thread = threading.Thread(target=answer)
        thread.start()
        near = socket.create_connection(listening.getsockname())
        with pytest.raises(ProtocolError, match=r"127\.0\.0\.1 makes no TLS connection"):
            connect_tls(near, "127.0.0.1", client, soon())
        thread.join(BOUND_S)
        near = socket.create_connection(listening.getsockname())
        with pytest.raises(Unavailable, match="no TLS handshake in time"):
            connect_tls(near, "127.0.0.1", client, Deadline.after_ms(100))


def test_a_client_that_speaks_no_tls_is_refused(authority: Authority, served: Callable[..., Handshakes]) -> None:
    server = served(authority.issue("s", "shard"))
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with server.connected() as near:
            near.sendall(first)
            with suppress(ConnectionResetError):
                while near.recv(4_096):
                    """An alert of TLS at most."""
    server.close()
    assert len(server.outcomes) == 3 and all(isinstance(one, ProtocolError) for one in server.outcomes)
