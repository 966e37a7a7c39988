"""Who asks: bearer tokens and the tenants that they stand for.

A token file has a line for each credential, `sha256:<hex digest of the token>  <tenant>`; blank lines and lines that
begin with # are skipped. Only digests are kept, on disk and in memory. A line may end in the word `operator`: its
bearer may also do what touches every tenant, such as to drain a shard, and still sees no block but its own tenant's.
The actors of a cluster speak to one another with a secret of their own, which stands for no tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.config import ServerConfig
from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Tenant
from kvcluster.errors import ConfigError, CredentialError

DEFAULT_TENANT = Tenant("default")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"sha256:([0-9a-f]{{64}})\s+({_TENANT.pattern})(\s+operator)?")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever stands behind a credential. `internal`: a shard of this cluster, which speaks for all tenants.
    `operator`: may ask for what touches all tenants."""

    tenant: Tenant
    internal: bool = False
    operator: bool = False


class Tokens(NamedTuple):
    """What a token file says: digest -> tenant, and which of the digests are operators'."""

    tenants: dict[str, Tenant]
    operators: frozenset[str]


class Authenticator:
    """Token -> caller. With no token file, everybody is the tenant `default`, and its operator: strangers are kept
    out by other means (see `authenticator`)."""

    def __init__(
        self, tenants: Mapping[str, Tenant] | None, internal_secret: str, operators: frozenset[str] = frozenset()
    ) -> None:
        self._tenants = tenants
        self._operators = operators
        self._internal = digest(internal_secret)

    @property
    def one_tenant(self) -> bool:
        """Are all callers of one tenant, but for the cluster's own?"""
        return self._tenants is None or len(set(self._tenants.values())) == 1

    def caller(self, token: str | None) -> Caller:
        """Raises CredentialError where the token is missing or unknown."""
        hashed = digest(token) if token else ""
        if token and hmac.compare_digest(hashed, self._internal):
            return Caller(CLUSTER, internal=True)
        if self._tenants is None:
            return Caller(DEFAULT_TENANT, operator=True)
        if not token:
            raise CredentialError(
                "this cluster wants a token: pass token=... (the command line takes --token or KVCLUSTER_TOKEN)"
            )
        tenant = self._tenants.get(hashed)
        if tenant is None:
            raise CredentialError("this token is not one that the cluster knows; ask its operator for another")
        return Caller(tenant, operator=hashed in self._operators)


def digest(token: str) -> str:
    """What a token file holds of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A random token of 256 bits. It does not begin with a dash, which a command line would take for an option."""
    while (token := secrets.token_urlsafe(32)).startswith("-"):
        """One of sixty-four does."""
    return token


def token_line(token: str, tenant: str, *, operator: bool = False) -> str:
    """The line of a token file that admits this token. Raises ConfigError where no file can hold such a tenant."""
    # Checked by itself: `a operator` would make a good line, and an operator that nobody meant.
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is no tenant's name: up to 64 letters, digits, '.', '_' and '-', the first a letter or digit"
        )
    return f"sha256:{digest(token)}  {tenant}" + ("  operator" if operator else "")


def parse_tokens(text: str) -> Tokens:
    """The tokens of a file. Raises ConfigError naming the line."""
    tenants: dict[str, Tenant] = {}
    operators = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"token file, line {number}: expected 'sha256:<64 hex digits>  <tenant>', perhaps with '  operator'; "
                "`kvcluster token --tenant NAME` makes one"
            )
        if match[1] in tenants:
            raise ConfigError(f"token file, line {number}: this token has a line already")
        tenants[match[1]] = Tenant(match[2])
        if match[3]:
            operators.add(match[1])
    if not tenants:
        raise ConfigError("the token file names no token, so nobody could connect; `kvcluster token` makes one")
    return Tokens(tenants, frozenset(operators))


def authenticator(config: ServerConfig, internal_secret: str) -> Authenticator:
    """From the configuration. Raises ConfigError where it would let strangers in."""
    if config.token_file:
        path = config.token_file
        try:
            with open(path, "rb") as file:
                data = file.read(limits.TOKEN_FILE_BYTES + 1)
            text = data.decode("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the token file {path}: {error}") from None
        if len(data) > limits.TOKEN_FILE_BYTES:
            raise ConfigError(f"token file {path} is larger than {limits.TOKEN_FILE_BYTES} bytes")
        tokens = parse_tokens(text)
        return Authenticator(tokens.tenants, internal_secret, tokens.operators)
    if not is_loopback(config.host) and not config.insecure:
        raise ConfigError(
            f"refusing to listen on {config.host} without a token file: anybody could read the cache. "
            "Give server.token_file (--token-file), or say --insecure if the network itself keeps strangers out"
        )
    return Authenticator(None, internal_secret)


def is_loopback(host: str) -> bool:
    """Is this an address that only processes of this machine can reach?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
