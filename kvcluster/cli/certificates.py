"""Certificates of a cluster's own CA, from arguments and a clock: no file, no terminal.

A cluster's CA is one self-signed certificate that may sign certificates of processes and no further CA. Its subject
has the name of the cluster, so that nothing besides its two files says for which cluster it signs.

What a process may do is in the URIs of its certificate, one for each role: `kvcluster://CLUSTER/coordinator`,
`.../shard`, `.../operator`, `.../events` or `.../tenant/NAME`. Where it is found is in its DNS names and IP addresses.
The invariant: a certificate is renewed for the roles and names that it has, and only beside its own key, because
certificates are public and a copy of one must earn its bearer nothing.

Nothing else imports `cryptography`, and servers need it for nothing (docs/adr/0102).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvcluster.config import load
from kvcluster.errors import ConfigError
from kvcluster.runtime.auth import check_tenant_name
from kvcluster.transport.certificates import COORDINATOR, SCHEME, SHARD, TENANT

_SERVERS = (COORDINATOR, SHARD)

_BACKDATED = timedelta(minutes=5)
"""How far the clock of a verifier may be behind the one of the CA's machine."""

_MOST_DAYS = 36_500
"""A century. X.509 ends with the year 9999, at which adding days would overflow."""

_MOST_NAMES = 100
"""Of one certificate, which each handshake sends: 100 of the longest names are 25 KiB, and OpenSSL takes 100 KiB."""

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"(?:\*\.{_LABEL}\.)?{_LABEL}(?:\.{_LABEL})*")
_MOST_DNS_CHARS = 253

_DAMAGED = (
    *(ValueError, TypeError, KeyError),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What releases 42 to 50 of the library raise where bytes of real certificates were changed at random."""

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


class CertPair(NamedTuple):
    """A certificate and its private key (PKCS #8), both PEM, and the end of the certificate."""

    certificate: bytes
    key: bytes
    until: datetime


class CertSubject(NamedTuple):
    """What a certificate is for. `roles`: as in the URI, such as `shard` or `tenant/team-a`. `names`: DNS names and IP
    addresses."""

    roles: tuple[str, ...]
    names: tuple[str, ...]


class CertAuthority(NamedTuple):
    """The CA of one cluster."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    cluster: str


def new_authority(cluster: str, *, days: int, now: datetime) -> CertPair:
    """Returns the certificate and key of a new CA. Raises ConfigError for a name that no cluster has."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(_cluster(cluster), "kvcluster CA")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(subject, subject, key, now - _BACKDATED, _end(now, days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    return _pair(builder.sign(key, hashes.SHA256()), key)


def read_authority(certificate: bytes, key: bytes) -> CertAuthority:
    """Returns the CA whose certificate and key these are. Raises ConfigError if they are not those of a CA that
    `new_authority` made."""
    found = read_certificates(certificate, "ca.crt")[0]
    private = _read_key(key, "ca.key")
    constraints = _extension(found, x509.BasicConstraints)
    if constraints is None or not constraints.ca:
        raise ConfigError("ca.crt is no certificate of a CA: `kvcluster certs init` makes one")
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not _is_key_of(private, found):
        raise ConfigError("ca.key is not the key of ca.crt: restore the two files of one `kvcluster certs init`")
    clusters = found.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if len(clusters) != 1:
        raise ConfigError("ca.crt does not name its cluster: use a CA that `kvcluster certs init` made")
    return CertAuthority(found, private, _cluster(str(clusters[0].value)))


def subject_of(roles: Sequence[str], tenant: str | None, names: Sequence[str]) -> CertSubject:
    """Returns what a certificate of these roles is for: coordinator, shard, operator, events, tenant. Raises
    ConfigError if that cannot be: a tenant is missing or has no valid name, or a name is neither a DNS name nor an IP
    address, or is missing for a server."""
    if ("tenant" in roles) != (tenant is not None):
        raise ConfigError("--role tenant and --tenant NAME belong together: give both or neither")
    if tenant is not None:
        check_tenant_name(tenant)
    servers = [role for role in roles if role in _SERVERS]
    if servers and not names:
        raise ConfigError(
            f"a certificate of a {servers[0]} needs --name, the DNS name or IP address by which others reach it"
        )
    if len(names) > _MOST_NAMES:
        raise ConfigError(f"{len(names)} names are more than the {_MOST_NAMES} of one certificate: issue several")
    paths = [f"{TENANT}{tenant}" if role == "tenant" else role for role in roles]
    return CertSubject(tuple(dict.fromkeys(paths)), tuple(dict.fromkeys(map(checked_name, names))))


def checked_name(text: str) -> str:
    """Returns the DNS name or IP address as certificates have it. Raises ConfigError if it is neither."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        name = text.lower()
        # A last label of digits alone makes a mistyped IPv4 address: no top-level domain has one (RFC 3696).
        number = name.rpartition(".")[2].isdigit()
        if text.isascii() and len(name) <= _MOST_DNS_CHARS and _DNS_NAME.fullmatch(name) and not number:
            return name
        raise ConfigError(
            f"{text!r} is neither a DNS name nor an IP address: write it as node-1.example, *.shards.example, 10.0.0.5 "
            "or fd00::5, without a port and without brackets"
        ) from None
    if address.is_unspecified or "%" in text:
        raise ConfigError(f"{text!r} is no address by which others reach a process: give the one that they connect to")
    return str(address)


def issue(authority: CertAuthority, subject: CertSubject, *, days: int, now: datetime) -> CertPair:
    """Returns a new certificate and key. Raises ConfigError if the CA ends before the certificate would."""
    end = _end(now, days)
    _check_outlasts(authority.certificate, end, now)
    key = ec.generate_private_key(ec.SECP256R1())
    common = " ".join(dict.fromkeys(role.partition("/")[0] for role in subject.roles))
    begin = max(now - _BACKDATED, authority.certificate.not_valid_before_utc)
    issuer_key = _extension(
        authority.certificate, x509.SubjectKeyIdentifier
    ) or x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())
    builder = (
        _builder(_name(authority.cluster, common), authority.certificate.subject, key, begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_purposes(subject)), critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternatives(authority.cluster, subject)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
    )
    return _pair(builder.sign(authority.key, hashes.SHA256()), key)


def is_pair(certificate: bytes, key: bytes) -> bool:
    """Whether this is the key of the certificate. Raises ConfigError if one of them cannot be read."""
    return _is_key_of(_read_key(key, "tls.key"), read_certificates(certificate, "tls.crt")[0])


def issued_subject(authority: CertAuthority, certificate: bytes) -> CertSubject:
    """Returns what a certificate of this CA is for. Raises ConfigError if another CA signed it, or if it has no
    role."""
    found = read_certificates(certificate, "tls.crt")[0]
    if not _signed_by(found, authority.certificate):
        raise ConfigError(
            "another CA signed tls.crt, and this one would give its roles anew without having given them: renew it "
            "with its own CA, or `kvcluster certs issue` into another folder"
        )
    prefix = f"{SCHEME}{authority.cluster}/"
    roles = [uri.removeprefix(prefix) for uri in _uris(found) if uri.startswith(prefix)]
    if not roles:
        raise ConfigError(f"tls.crt has no role in cluster {authority.cluster}: `kvcluster certs issue` gives one")
    return CertSubject(tuple(roles), tuple(_names(found)))


def certificate_facts(certificate: bytes, ca: bytes | None, now: datetime) -> dict[str, Any]:
    """Returns what `show` tells of the first certificate of a file, whose issuers may follow it. `ca`: the content of
    ca.crt. `verified`: whether one of its certificates verifies it now, and None without `ca`; `why` it does not."""
    chain = read_certificates(certificate, "the file")
    found = chain[0]
    constraints = _extension(found, x509.BasicConstraints)
    why = _why_not_verified(chain, read_certificates(ca, "ca.crt"), now) if ca is not None else ""
    return {
        "subject": found.subject.rfc4514_string(),
        "issuer": found.issuer.rfc4514_string(),
        "ca": constraints is not None and constraints.ca,
        "roles": _uris(found),
        "names": _names(found),
        "valid_from": found.not_valid_before_utc.isoformat(),
        "valid_until": found.not_valid_after_utc.isoformat(),
        "days_left": (found.not_valid_after_utc - now) // timedelta(days=1),
        "valid_now": found.not_valid_before_utc <= now <= found.not_valid_after_utc,
        "sha256": found.fingerprint(hashes.SHA256()).hex(),
        "verified": None if ca is None else not why,
        "why": why or None,
    }


def read_certificates(data: bytes, name: str) -> list[x509.Certificate]:
    """Returns the certificates of PEM text, at least one. Raises ConfigError that says which file it is."""
    try:
        found = x509.load_pem_x509_certificates(data)
        for each in found:
            _ = each.extensions, each.subject, each.issuer  # these are parsed when they are first asked for
    except _DAMAGED:
        raise ConfigError(
            f"{name} is no certificate in PEM, or a damaged one: its first line should be '-----BEGIN CERTIFICATE-----'"
        ) from None
    return found


def _cluster(name: str) -> str:
    """Returns the name if a cluster may have it. Raises ConfigError."""
    return load(overrides={"name": name}).name


def _end(now: datetime, days: int) -> datetime:
    if not 1 <= days <= _MOST_DAYS:
        raise ConfigError(f"{days} days are not between 1 and {_MOST_DAYS}: give another --days")
    return now + timedelta(days=days)


def _check_outlasts(ca: x509.Certificate, end: datetime, now: datetime) -> None:
    if now < ca.not_valid_before_utc:
        raise ConfigError(f"the CA begins {ca.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: check this machine's clock")
    left = (ca.not_valid_after_utc - now) // timedelta(days=1)
    ends = f"the CA {'ended' if now > ca.not_valid_after_utc else 'ends'} {ca.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if left < 1:
        raise ConfigError(f"{ends}: make another with `kvcluster certs init`, and let all processes trust both")
    if end > ca.not_valid_after_utc:
        raise ConfigError(
            f"{ends}, before the certificate would: give --days {left} or less, or make another CA with "
            "`kvcluster certs init`, and let all processes trust both"
        )


def _name(cluster: str, common: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster), x509.NameAttribute(NameOID.COMMON_NAME, common)]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin.astimezone(timezone.utc))
        .not_valid_after(end.astimezone(timezone.utc))
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _purposes(subject: CertSubject) -> list[x509.ObjectIdentifier]:
    serves = any(role in _SERVERS for role in subject.roles)
    return [*([ExtendedKeyUsageOID.SERVER_AUTH] if serves else []), ExtendedKeyUsageOID.CLIENT_AUTH]


def _alternatives(cluster: str, subject: CertSubject) -> Iterator[x509.GeneralName]:
    for name in subject.names:
        try:
            yield x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            yield x509.DNSName(name)
    for role in subject.roles:
        yield x509.UniformResourceIdentifier(f"{SCHEME}{cluster}/{role}")


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> CertPair:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return CertPair(certificate.public_bytes(pem), private, certificate.not_valid_after_utc)


def _read_key(data: bytes, name: str) -> Any:
    try:
        return serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # a TypeError: it is encrypted
        raise ConfigError(f"{name} is no private key in PEM without a passphrase") from None


def _is_key_of(key: Any, certificate: x509.Certificate) -> bool:
    try:
        return _key_bytes(key.public_key()) == _key_bytes(certificate.public_key())
    except (ValueError, UnsupportedAlgorithm):  # the certificate's, of a kind or curve that is not known
        return False


def _key_bytes(key: CertificatePublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _uris(certificate: x509.Certificate) -> list[str]:
    found = _extension(certificate, x509.SubjectAlternativeName)
    return found.get_values_for_type(x509.UniformResourceIdentifier) if found is not None else []


def _names(certificate: x509.Certificate) -> list[str]:
    found = _extension(certificate, x509.SubjectAlternativeName) or ()
    return [str(each.value) for each in found if isinstance(each, (x509.DNSName, x509.IPAddress))]


def _why_not_verified(chain: Sequence[x509.Certificate], trusted: Iterable[x509.Certificate], now: datetime) -> str:
    """Returns why none of the `trusted` verifies the first of the `chain` through those that follow it; "" if one
    does."""
    trusted = list(trusted)
    for at, each in enumerate(chain):
        if not each.not_valid_before_utc <= now <= each.not_valid_after_utc:
            which = "it is" if not at else "a certificate between it and the CA is"
            return f"{which} not valid at this time"
        issuers = [ca for ca in trusted if ca == each or _signed_by(each, ca, at)]
        if any(ca.not_valid_before_utc <= now <= ca.not_valid_after_utc for ca in issuers):
            return ""
        if issuers:
            return "the CA itself is not valid at this time"
        if not any(_signed_by(each, above, at) for above in chain[at + 1 : at + 2]):
            break
    return "another CA signed it"


def _signed_by(certificate: x509.Certificate, ca: x509.Certificate, below: int = 0) -> bool:
    """Whether that CA signed the certificate, and may where so many CAs stand `below` it."""
    constraints = _extension(ca, x509.BasicConstraints)
    if constraints is None or not constraints.ca:
        return False
    if constraints.path_length is not None and constraints.path_length < below:
        return False
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):  # another name, or kind of key
        return False
    return True
