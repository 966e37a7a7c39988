"""Certificates for tests, by the library `cryptography`, and by none of the product's code."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvcluster.transport.certificates import CertificateFiles, Certificates

DAY = datetime.timedelta(days=1)
CLUSTER = "kvcluster"


@dataclass(frozen=True)
class Issued:
    """The files of one certificate, and its fingerprint."""

    files: CertificateFiles
    fingerprint: str

    def certificates(self) -> Certificates:
        return Certificates(self.files)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.timezone.utc)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 30 * DAY)
            .not_valid_after(now + 90 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.crt"
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def client(self) -> Certificates:
        """What a client knows that has no certificate of its own."""
        return Certificates(CertificateFiles(str(self.ca)))

    def issue(
        self,
        to: str,
        *roles: str,
        names: tuple[str, ...] = ("127.0.0.1",),
        cluster: str = CLUSTER,
        days: float = 60,
        ago: float = 1,
        serves: bool = True,
    ) -> Issued:
        """Issues a certificate with these roles ("shard", "tenant/me") and DNS names or addresses, which was valid for
        the first time `ago` days ago, for `days` days from now. A second one for the same `to` replaces the first.
        `serves`: it is for servers, too."""
        key = ec.generate_private_key(ec.SECP256R1())
        uris = [x509.UniformResourceIdentifier(f"kvcluster://{cluster}/{role}") for role in roles]
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - ago * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.SubjectAlternativeName([*map(_general_name, names), *uris]), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [*([ExtendedKeyUsageOID.SERVER_AUTH] if serves else []), ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                False,
            )
            .sign(self._key, hashes.SHA256())
        )
        paths = self._folder / f"{to}.crt", self._folder / f"{to}.key"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        new = self._folder / f"{to}.new"
        for path, data in zip(paths, (certificate.public_bytes(serialization.Encoding.PEM), private), strict=True):
            new.write_bytes(data)
            new.chmod(0o600)
            new.rename(path)
        fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
        return Issued(CertificateFiles(str(self.ca), *map(str, paths)), fingerprint)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
