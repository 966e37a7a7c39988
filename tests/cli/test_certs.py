"""`kvcluster certs`: what its certificates prove in handshakes of Python's own ssl, its files, and what it refuses."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcluster.cli import certificates, certs
from kvcluster.cli.certificates import CertPair, CertSubject, checked_name, issue, new_authority, read_authority
from kvcluster.cli.main import main
from kvcluster.errors import ConfigError
from kvcluster.transport.certificates import CertificateFiles, Certificates
from tests.docs.snippets import COMMANDS

ROOT = Path(__file__).parents[2]
NOW = datetime.now(timezone.utc).replace(microsecond=0)
DAY = timedelta(days=1)
OPENSSL = shutil.which("openssl")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def certs_run(line: str) -> int:
    return main(["certs", *line.split()])


@pytest.fixture
def issued(here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A CA in `ca`, and in `node` the files of a host with a coordinator and a shard."""
    assert certs_run("init ca --cluster prod") == 0
    assert certs_run("issue ca --role coordinator --role shard --name localhost --name 127.0.0.1 --to node") == 0
    capsys.readouterr()
    return here / "node"


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what the command says, which fails."""
    capsys.readouterr()
    assert certs_run(line) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("kvcluster: ") and said.err.count("\n") == 1
    return said.err


def context(side: int, folder: Path, ca: Path | None = None) -> ssl.SSLContext:
    """Both sides show the certificate of a folder and verify that of the other, as strictly as Python 3.13 does."""
    made = ssl.SSLContext(side)
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    made.load_verify_locations(ca or folder / "ca.crt")
    return made


def handshake(server: Path, client: Path, name: str, ca: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the certificate that the client saw, and the one that the server saw. `ca`: that the client trusts, if
    another than its own. Raises ssl.SSLError for the side that refuses."""
    seen: list[Any] = []
    ends = socket.socketpair()

    def serve() -> None:
        accepting = context(ssl.PROTOCOL_TLS_SERVER, server)
        with suppress(OSError), accepting.wrap_socket(ends[0], server_side=True) as served:  # an SSLError is one
            seen.append(served.getpeercert())
            served.sendall(b"!")
        with suppress(OSError):
            ends[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        trusting = context(ssl.PROTOCOL_TLS_CLIENT, client, ca)
        with trusting.wrap_socket(ends[1], server_hostname=name) as connected:
            assert connected.recv(1) == b"!", "the server has refused"  # in TLS 1.3 it speaks last
            return dict(connected.getpeercert() or {}), seen[0]
    finally:
        ends[1].close()
        thread.join()


def pair_in(folder: Path, pair: CertPair, ca: CertPair) -> Path:
    folder.mkdir()
    for name, data in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", ca.certificate)):
        (folder / name).write_bytes(data)
    return folder


def made(folder: Path, subject: CertSubject, *, days: int = 90, now: datetime = NOW) -> Path:
    """A folder with a certificate that a CA of its own issued at that time."""
    ca = new_authority("prod", days=days + 1, now=now)
    return pair_in(folder, issue(read_authority(ca.certificate, ca.key), subject, days=days, now=now), ca)


# -------------------------------------------------------------------------------------------- handshakes


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_both_sides_verify_one_another_and_read_roles_and_names(issued: Path, name: str) -> None:
    assert certs_run("issue ca --role tenant --tenant team-a --role operator --to worker") == 0
    server, client = handshake(issued, Path("worker"), name)
    assert server["subjectAltName"] == (
        ("DNS", "localhost"),
        ("IP Address", "127.0.0.1"),
        ("URI", "kvcluster://prod/coordinator"),
        ("URI", "kvcluster://prod/shard"),
    )
    assert client["subjectAltName"] == (("URI", "kvcluster://prod/tenant/team-a"), ("URI", "kvcluster://prod/operator"))
    assert server["issuer"] == client["issuer"]


def test_grpc_verifies_both_sides_too_and_tells_the_roles_of_its_caller(issued: Path) -> None:
    seen: list[Mapping[str, Sequence[bytes]]] = []

    def served(request: bytes, call: grpc.ServicerContext) -> bytes:
        seen.append(call.auth_context())
        return request

    assert certs_run("issue ca --role tenant --tenant team-a --to worker") == 0
    ca, key, certificate, worker_key, worker = (
        Path(name).read_bytes()
        for name in ("ca/ca.crt", "node/tls.key", "node/tls.crt", "worker/tls.key", "worker/tls.crt")
    )
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(served)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Call": handler}),))
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca, worker_key, worker)) as channel:
            assert channel.unary_unary("/test/Call")(b"?", timeout=30) == b"?"
    finally:
        server.stop(None).wait()
    assert seen[0]["peer_uri"] == [b"kvcluster://prod/tenant/team-a"]


def test_the_commands_of_the_page_make_hosts_that_verify_one_another(here: Path) -> None:
    commands = [command for _, command in COMMANDS if command.startswith("kvcluster certs ")]
    others = ("kvcluster-ca", "kv-ca")  # of several hosts, and of Kubernetes
    page = [shlex.split(words, comments=True)[1:] for words in commands if not any(ca in words for ca in others)]
    assert [words[1] for words in page] == ["init", "issue", "issue", "issue", "show", "renew"]
    assert [main(words) for words in page] == [0] * len(page)
    handshake(Path("head"), Path("team-a"), "10.0.0.5")
    handshake(Path("node-1"), Path("head"), "node-1.example")


def test_a_wildcard_stands_for_one_label(here: Path) -> None:
    folder = made(here / "made", CertSubject(("shard",), ("*.shards.example",)))
    handshake(folder, folder, "a.shards.example")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(folder, folder, "a.b.shards.example")


def test_another_name_is_refused(issued: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(issued, issued, "other.example")


def test_another_ca_of_the_same_name_is_refused(issued: Path) -> None:
    assert certs_run("init other --cluster prod") == 0
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(issued, issued, "localhost", Path("other/ca.crt"))


def test_a_tenant_cannot_serve(here: Path) -> None:
    folder = made(here / "made", CertSubject(("tenant/team-a",), ("localhost",)))
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        handshake(folder, folder, "localhost")


@pytest.mark.parametrize("role", ["tenant --tenant team-a", "operator", "events"])
def test_a_client_reads_the_certificate_of_each_role(issued: Path, role: str) -> None:
    assert certs_run(f"issue ca --role {role} --to mine") == 0
    own = Certificates(CertificateFiles("mine/ca.crt", "mine/tls.crt", "mine/tls.key")).now().own
    assert own is not None and own.uris == (f"kvcluster://prod/{role.replace(' --tenant ', '/')}",)


@pytest.mark.parametrize(("ago", "why"), [(3 * DAY, "expired"), (-DAY, "not yet valid")])
def test_a_certificate_is_refused_outside_of_its_time(here: Path, ago: timedelta, why: str) -> None:
    folder = made(here / "made", CertSubject(("shard",), ("localhost",)), days=2, now=NOW - ago)
    with pytest.raises(ssl.SSLCertVerificationError, match=why):
        handshake(folder, folder, "localhost")


def test_a_verifier_whose_clock_is_minutes_behind_accepts_a_new_certificate(here: Path) -> None:
    folder = made(here / "made", CertSubject(("shard",), ("localhost",)), now=NOW + timedelta(minutes=4))
    handshake(folder, folder, "localhost")


def test_openssl_finds_what_ssl_finds(issued: Path) -> None:
    """Where there is no `openssl`, ssl alone says it, by the same library."""
    handshake(issued, issued, "localhost")
    if OPENSSL is None:
        return
    for purpose in ("sslserver", "sslclient"):
        command = [OPENSSL, "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "ca/ca.crt", "node/tls.crt"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "node/tls.crt: OK\n"), done.stderr
    read = subprocess.run(
        [OPENSSL, "x509", "-in", "ca/ca.crt", "-noout", "-text"], capture_output=True, text=True, check=True
    )
    text = " ".join(read.stdout.split())
    assert "Basic Constraints: critical CA:TRUE, pathlen:0" in text
    assert "Key Usage: critical Certificate Sign, CRL Sign" in text


# ------------------------------------------------------------------------------------------------- files


def test_private_keys_are_their_owners_alone(issued: Path) -> None:
    modes = {path: stat.S_IMODE(Path(path).stat().st_mode) for path in ("ca", "ca/ca.key", "node", "node/tls.key")}
    assert modes == {"ca": 0o700, "ca/ca.key": 0o600, "node": 0o700, "node/tls.key": 0o600}
    assert sorted(os.listdir("ca")) == ["ca.crt", "ca.key"]
    assert sorted(os.listdir("node")) == ["ca.crt", "tls.crt", "tls.key"]
    assert Path("node/tls.key").read_text().startswith("-----BEGIN PRIVATE KEY-----\n")


def test_renewing_keeps_names_roles_and_modes_and_makes_a_new_key(issued: Path) -> None:
    before = {name: (issued / name).read_bytes() for name in os.listdir(issued)}
    names = handshake(issued, issued, "localhost")[0]["subjectAltName"]
    os.chmod(issued / "tls.key", 0o640)
    assert certs_run("renew node --ca ca --days 30") == 0
    after = {name: (issued / name).read_bytes() for name in os.listdir(issued)}
    assert [name for name in sorted(before) if before[name] == after.get(name)] == ["ca.crt"]
    assert stat.S_IMODE((issued / "tls.key").stat().st_mode) == 0o640  # a server of that group reads it
    renewed = handshake(issued, issued, "localhost")[0]
    assert renewed["subjectAltName"] == names
    assert ssl.cert_time_to_seconds(renewed["notAfter"]) - NOW.timestamp() < 31 * 86_400


def test_a_renewed_key_belongs_to_the_owner_of_the_one_before(issued: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when root renews what a server reads as another user; root alone can, so it is only asked for."""
    real, given = certs._found, []

    def found(opened: int, name: str) -> os.stat_result | None:
        about = real(opened, name)
        return about and os.stat_result((*about[:4], 12_345, 12_346, *about[6:]))

    monkeypatch.setattr(certs, "_found", found)
    monkeypatch.setattr(certs.os, "fchown", lambda *asked: given.append(asked[1:]))
    assert certs_run("renew node --ca ca") == 0
    assert given == [(12_345, 12_346)] * 2


def test_a_reader_at_any_moment_of_a_renewal_sees_whole_files_and_the_key_first(
    issued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look() -> None:
        certificate, key = (issued / "tls.crt").read_bytes(), (issued / "tls.key").read_bytes()
        seen.append((certificate, key, certificates.is_pair(certificate, key)))

    def observed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            look()
            done = real(*given, **more)
            look()
            return done

        return call

    for name in ("unlink", "fchmod", "fsync", "rename"):
        monkeypatch.setattr(certs.os, name, observed(getattr(os, name)))
    assert certs_run("renew node --ca ca") == 0
    monkeypatch.undo()
    states = list(dict.fromkeys(seen))
    assert [pair for *_, pair in states] == [True, False, True]
    old, between, new = states
    assert between == (old[0], new[1], False)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_renewal_goes_on_after_one_that_was_cut_off(
    issued: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = os.rename, []

    def rename(*given: Any, **more: Any) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(given)
        real(*given, **more)

    with monkeypatch.context() as cut:
        cut.setattr(certs.os, "rename", rename)
        assert certs_run("renew node --ca ca") == 130
    assert certs_run("renew node --ca ca") == 0
    handshake(issued, issued, "localhost")
    assert sorted(os.listdir(issued)) == ["ca.crt", "tls.crt", "tls.key"]


def test_a_ca_that_cannot_be_written_leaves_no_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(certs.os, "fsync", full)
    assert "cannot write to ca: No space left on device" in refused("init ca", capsys)
    assert os.listdir(here) == []


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("init ca", "ca is there already, and its CA may be in use"),
        ("init none/ca", "cannot write to none/ca: No such file or directory"),
        ("init other --cluster Prod_1", "name must be up to 40 of a-z, 0-9 and '-'"),
        ("init other --days 40000", "40000 days are not between 1 and 36500"),
        ("issue node --role shard --name a --to b", "node is no folder with ca.crt and ca.key: `kvcluster certs init`"),
        ("issue ca --role shard --to b", "a certificate of a shard needs --name"),
        ("issue ca --role tenant --to b", "--role tenant and --tenant NAME belong together"),
        ("issue ca --role operator --tenant a --to b", "--role tenant and --tenant NAME belong together"),
        ("issue ca --role tenant --tenant a/b --to b", "'a/b' is not a valid tenant name"),
        ("issue ca --role shard --name a:7070 --to b", "'a:7070' is neither a DNS name nor an IP address"),
        ("issue ca --role shard --name 0.0.0.0 --to b", "'0.0.0.0' is no address by which others reach a process"),
        ("issue ca --role shard --name fe80::1%eth0 --to b", "is no address by which others reach a process"),
        ("issue ca --role shard --name a --to node", "node/tls.crt is there already"),
        ("issue ca --role shard --name a --to ca", "ca is the folder of a CA"),
        ("issue ca --role operator --to b --days 3650", "before the certificate would: give --days 3649 or less"),
        ("issue ca --role operator --to ca/ca.crt/b", "cannot write to ca/ca.crt/b: Not a directory"),
        ("renew none --ca ca", "cannot renew none: No such file or directory"),
        ("renew ca --ca ca", "cannot read ca/tls.key: No such file or directory"),
        ("show none", "cannot read none: No such file or directory"),
        ("show node/tls.key", "the file is no certificate in PEM"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    issued: Path, line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in issued.parent.rglob("*") if path.is_file()}
    assert sentence in refused(line, capsys)
    assert {path: path.read_bytes() for path in issued.parent.rglob("*") if path.is_file()} == before
    assert not Path("b").exists() or not os.listdir("b")


def test_a_certificate_has_a_bounded_number_of_names() -> None:
    names = [f"node-{number}" for number in range(101)]
    assert len(certificates.subject_of(["shard"], None, names[1:]).names) == 100
    with pytest.raises(ConfigError, match="101 names are more than the 100 of one certificate"):
        certificates.subject_of(["shard"], None, names)


def test_a_key_or_folder_that_others_may_use_is_refused(issued: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chmod("ca/ca.key", 0o640)
    assert "can use ca/ca.key: `chmod go-rwx ca/ca.key`" in refused("renew node --ca ca", capsys)
    os.chmod("ca/ca.key", 0o600)
    os.chmod("ca", 0o707)
    assert "can write to ca: `chmod o-w ca`" in refused("renew node --ca ca", capsys)
    os.chmod("ca", 0o700)
    os.chmod("node/tls.key", 0o604)
    assert "can use node/tls.key: `chmod o-rwx node/tls.key`" in refused("renew node --ca ca", capsys)


def test_a_ca_whose_files_do_not_belong_together_is_refused(issued: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs_run("init other") == 0
    shutil.copy("other/ca.key", "ca/ca.key")
    assert "ca.key is not the key of ca.crt" in refused("renew node --ca ca", capsys)
    Path("ca/ca.key").write_text("no key\n")
    assert "ca.key is no private key in PEM" in refused("renew node --ca ca", capsys)
    shutil.copy("node/tls.crt", "ca/ca.crt")
    shutil.copy("node/tls.key", "ca/ca.key")
    assert "ca.crt is no certificate of a CA" in refused("renew node --ca ca", capsys)
    Path("ca/ca.crt").write_text("")
    assert "ca/ca.crt is no file of 1 to" in refused("renew node --ca ca", capsys)


def test_roles_are_renewed_beside_their_own_key_and_by_their_own_ca_alone(
    issued: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the owner of a folder that another user's cron renews would get any role whose certificate it has seen."""
    assert certs_run("issue ca --role operator --to ops") == 0
    assert certs_run("issue ca --role shard --name a --to shard") == 0
    shutil.copy("ops/tls.crt", "shard/tls.crt")
    assert "tls.key is not the key of tls.crt in shard" in refused("renew shard --ca ca", capsys)
    for link in (os.symlink, os.link):
        shutil.rmtree("shard")
        os.mkdir("shard")
        for name in ("tls.crt", "tls.key"):
            link(Path("ops", name).absolute(), Path("shard", name))
        said = refused("renew shard --ca ca", capsys)
        assert "tls.key is a link or no file" in said or "shard/tls.key has other names" in said
    assert certs_run("init other --cluster prod") == 0
    assert "another CA signed tls.crt" in refused("renew node --ca other", capsys)
    shutil.copy("ca/ca.crt", "node/tls.crt")
    shutil.copy("ca/ca.key", "node/tls.key")
    assert "tls.crt has no role in cluster prod" in refused("renew node --ca ca", capsys)


def test_a_ca_of_another_cluster_in_the_folder_is_not_replaced(
    issued: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    shutil.copy("ca/ca.crt", "mine/ca.crt")
    assert certs_run("issue ca --role operator --to mine") == 0
    Path("theirs").mkdir()
    Path("theirs/ca.crt").write_text("another\n")
    assert "theirs/ca.crt is another CA" in refused("issue ca --role operator --to theirs", capsys)


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (timedelta(days=9, hours=12), "the CA ends .* make another with `kvcluster certs init`"),
        (timedelta(days=8), "the CA ends .*: give --days 2 or less, or make another CA"),
        (timedelta(days=11), "the CA ended .*: make another with"),
        (-timedelta(days=1), "the CA begins .*: check this machine's clock"),
    ],
)
def test_a_ca_signs_nothing_beyond_its_own_time(after: timedelta, sentence: str) -> None:
    ca = new_authority("prod", days=10, now=NOW)
    authority = read_authority(ca.certificate, ca.key)
    with pytest.raises(ConfigError, match=sentence):
        issue(authority, CertSubject(("operator",), ()), days=3, now=NOW + after)
    last = issue(authority, CertSubject(("operator",), ()), days=2, now=NOW + 8 * DAY)
    assert last.until == ca.until


# -------------------------------------------------------------------------------------------------- show


def shown(path: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert certs_run(f"show {path} --json") == status
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_show_tells_what_the_certificate_says(issued: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = shown("node", capsys)
    assert facts == shown("node/tls.crt", capsys)
    assert facts["roles"] == ["kvcluster://prod/coordinator", "kvcluster://prod/shard"]
    assert facts["names"] == ["localhost", "127.0.0.1"]
    assert (facts["issuer"], facts["days_left"]) == ("CN=kvcluster CA,O=prod", 89)
    der = ssl.PEM_cert_to_DER_cert((issued / "tls.crt").read_text())
    assert facts["sha256"] == hashlib.sha256(der).hexdigest()
    assert (facts["verified"], facts["why"], facts["ca"]) == (True, None, False)
    ca = shown("ca", capsys)
    assert (ca["verified"], ca["ca"], ca["roles"]) == (True, True, [])
    assert certs_run("show node") == 0
    said = capsys.readouterr().out
    assert "names        localhost, 127.0.0.1\n" in said and said.endswith("ca.crt       verifies it\n")


def test_show_says_what_is_wrong_and_fails(issued: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs_run("init other") == 0
    shutil.copy("other/ca.crt", "node/ca.crt")
    facts = shown("node", capsys, 1)
    assert (facts["verified"], facts["why"]) == (False, "another CA signed it")
    (issued / "ca.crt").write_bytes(Path("other/ca.crt").read_bytes() + Path("ca/ca.crt").read_bytes())
    assert shown("node", capsys)["verified"] is True  # a bundle, as while all processes change to another CA
    (issued / "ca.crt").unlink()
    assert shown("node", capsys)["verified"] is None


@pytest.mark.parametrize(("pathlen", "why"), [(None, None), (1, None), (0, "another CA signed it")])
def test_show_goes_through_the_issuers_that_follow_as_handshakes_do(
    here: Path, pathlen: int | None, why: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in files of cert-manager with the CA of an organisation."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, name)]) for name in ("root", "next", "leaf")]
    chain = []
    for at, issuer in ((0, 0), (1, 0), (2, 1)):
        length = pathlen if not at else None
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[issuer].public_key())
        builder = (
            certificates._builder(names[at], names[issuer], keys[at], NOW - DAY, NOW + DAY)
            .add_extension(x509.BasicConstraints(ca=at < 2, path_length=length), critical=True)
            .add_extension(certificates._key_usage(ca=at < 2), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(keys[at].public_key()), critical=False)
            .add_extension(above, critical=False)
        )
        chain.append(certificates._pair(builder.sign(keys[issuer], hashes.SHA256()), keys[at]))
    root, between, leaf = chain
    folder = pair_in(here / "made", leaf._replace(certificate=leaf.certificate + between.certificate), root)
    assert shown("made", capsys, 1 if why else 0)["why"] == why
    with pytest.raises(ssl.SSLCertVerificationError, match="path length") if why else nullcontext():
        handshake(folder, folder, "localhost")
    shutil.copy(folder / "ca.crt", "ca.crt")
    (here / "leaf.crt").write_bytes(leaf.certificate)
    assert shown("leaf.crt", capsys, 1)["why"] == "another CA signed it"


def test_a_ca_that_names_no_cluster_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "prod")])
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    builder = certificates._builder(name, name, key, NOW - DAY, NOW + DAY).add_extension(constraints, critical=True)
    made = certificates._pair(builder.sign(key, hashes.SHA256()), key)
    with pytest.raises(ConfigError, match=r"ca\.crt does not name its cluster"):
        read_authority(made.certificate, made.key)


def test_show_says_that_a_certificate_has_ended(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(here / "old", CertSubject(("shard",), ("a",)), days=2, now=NOW - 3 * DAY)
    facts = shown("old", capsys, 1)
    assert (facts["valid_now"], facts["why"]) == (False, "it is not valid at this time")
    assert certs_run("show old") == 1
    assert "UTC: it has ended\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- names


LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
DNS = st.builds(
    lambda star, labels: star + ".".join(labels) + ".test",
    st.sampled_from(["", "*.a."]),
    st.lists(LABELS, min_size=1, max_size=4),
)
NAMES = st.one_of(DNS, st.ip_addresses().filter(lambda each: not each.is_unspecified).map(str))
CA = new_authority("prod", days=100, now=NOW)
AUTHORITY = read_authority(CA.certificate, CA.key)


@given(names=st.lists(NAMES, min_size=1, max_size=5, unique=True))
def test_every_name_is_in_the_certificate_as_it_was_given(names: list[str]) -> None:
    subject = certificates.subject_of(["shard"], None, names)
    pair = issue(AUTHORITY, subject, days=1, now=NOW)
    assert certificates.issued_subject(AUTHORITY, pair.certificate) == subject
    assert certificates.certificate_facts(pair.certificate, CA.certificate, NOW)["verified"] is True


@given(text=st.text(max_size=300))
def test_any_text_is_a_name_or_is_refused(text: str) -> None:
    try:
        name = checked_name(text)
    except ConfigError:
        return
    with suppress(ValueError):
        assert ip_address(name) == ip_address(text)
        return
    assert name == text.lower() and name.isascii() and len(name) <= 253
    assert all(0 < len(label) < 64 and label.strip("-") == label for label in name.split("."))


OTHER_TEXTS = [
    "http://a",
    "a b",
    "a\n",
    "[::1]",
    "\u212aube.example",
    "b\u00fccher.example",
    ".".join(["a" * 60] * 5),
    "::",
]


@pytest.mark.parametrize(
    "text",
    [
        *"*.-",
        "",
        "a..b",
        "a.",
        "-a",
        "a-",
        "a_b",
        "*.a",
        "a.*.b.c",
        "a*.b.c",
        "10.0.0.256",
        "10",
        "x" * 64,
        *OTHER_TEXTS,
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        checked_name(text)


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_certificate_are_a_sentence(data: bytes) -> None:
    begin, end = b"-----BEGIN CERTIFICATE-----\n", b"\n-----END CERTIFICATE-----\n"
    for text in (data, begin + base64.b64encode(data) + end):
        with pytest.raises(ConfigError, match=r"tls\.crt is no certificate in PEM"):
            certificates.read_certificates(text, "tls.crt")


LEAF = issue(AUTHORITY, CertSubject(("shard", "tenant/a"), ("a.example", "10.0.0.5")), days=1, now=NOW)
DER = ssl.PEM_cert_to_DER_cert(LEAF.certificate.decode())


@pytest.mark.filterwarnings("ignore")  # the library warns of serial numbers and versions that RFC 5280 forbids
@settings(max_examples=500)
@given(changes=st.dictionaries(st.integers(0, len(DER) - 1), st.integers(0, 255), min_size=1, max_size=3))
def test_a_changed_certificate_is_shown_or_refused_and_never_renewed(changes: dict[int, int]) -> None:
    damaged = bytes(changes.get(at, byte) for at, byte in enumerate(DER))
    pem = ssl.DER_cert_to_PEM_cert(damaged).encode()
    with suppress(ConfigError):
        facts = certificates.certificate_facts(pem, CA.certificate, NOW)
        assert facts["verified"] is (damaged == DER)
    if damaged != DER:
        with pytest.raises(ConfigError):
            certificates.issued_subject(AUTHORITY, pem)


# ------------------------------------------------------------------------------------------- the package


def test_without_the_library_the_command_says_what_to_install(here: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None; from kvcluster.cli.main import main; "
        "sys.exit(main(['certs', *sys.argv[1:]]))"
    )
    for line in ("init ca", "issue ca --role operator --to a", "renew a --ca ca", "show a"):
        done = subprocess.run(
            [sys.executable, "-c", code, *line.split()], capture_output=True, text=True, check=False, env=_environment()
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "kvcluster: this needs cryptography, which is not installed: pip install 'kvcluster[certs]'\n"
        )
    assert os.listdir(here) == []


def test_other_commands_do_not_import_the_library() -> None:
    code = "import sys; from kvcluster.cli.main import main; main(['certs']); print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout.endswith("False\n")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
