"""Authentication: bearer tokens and the tenants that they stand for.

A token file has one line for each credential, `sha256:<hex digest of the token>  <tenant>`; blank lines and lines that
begin with # are skipped. Only digests are kept, on disk and in memory. A line may end in the word `operator`: the
bearer of that token may also make calls that affect every tenant, such as draining a shard, but still sees the blocks
of its own tenant only. The actors of a cluster authenticate to one another with a secret of their own, which stands for
no tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from kvcluster.config import ServerConfig
from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Caller, Tenant
from kvcluster.errors import ConfigError, CredentialError

DEFAULT_TENANT = Tenant("default")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"sha256:([0-9a-f]{{64}})\s+({_TENANT.pattern})(\s+operator)?")


class Tokens(NamedTuple):
    """The content of a token file: digest -> tenant, and the digests that are operators'."""

    tenants: dict[str, Tenant]
    operators: frozenset[str]


class Authenticator:
    """Maps a token to its caller. Without a token file every caller is the tenant `default`, and an operator: access is
    then restricted by other means (see `authenticator`)."""

    def __init__(
        self, tenants: Mapping[str, Tenant] | None, internal_secret: str, operators: frozenset[str] = frozenset()
    ) -> None:
        self._tenants = tenants
        self._operators = operators
        self._internal = digest(internal_secret)

    @property
    def tenants(self) -> int:
        """How many tenants have credentials, the cluster's own shards left out. At least 1."""
        return max(1, len(set(self._tenants.values()))) if self._tenants is not None else 1

    @property
    def one_tenant(self) -> bool:
        """Whether all callers, except the cluster's own shards, belong to one tenant."""
        return self.tenants == 1

    def caller(self, token: str | None) -> Caller:
        """Returns the caller of this token. Raises CredentialError if the token is missing or unknown."""
        hashed = digest(token) if token else ""
        if token and hmac.compare_digest(hashed, self._internal):
            return Caller(CLUSTER, internal=True)
        if self._tenants is None:
            return Caller(DEFAULT_TENANT, operator=True)
        if not token:
            raise CredentialError(
                "this cluster requires a token: pass token=... (the command line takes --token or KVCLUSTER_TOKEN)"
            )
        tenant = self._tenants.get(hashed)
        if tenant is None:
            raise CredentialError("the cluster does not know this token; ask its operator for another")
        return Caller(tenant, operator=hashed in self._operators)


def digest(token: str) -> str:
    """Returns the form in which a token file stores a token: the hex SHA-256 digest."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """Returns a random token of 256 bits. It never begins with a dash, which a command line would take for an
    option."""
    while (token := secrets.token_urlsafe(32)).startswith("-"):
        """One token in sixty-four begins with a dash."""
    return token


def token_line(token: str, tenant: str, *, operator: bool = False) -> str:
    """Returns the line of a token file that admits this token. Raises ConfigError if `tenant` is not a valid tenant
    name."""
    # The tenant is checked separately: the tenant name `a operator` would make a valid line, and grant operator rights
    # that were never intended.
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is not a valid tenant name: use up to 64 letters, digits, '.', '_' and '-', "
            "the first a letter or digit"
        )
    return f"sha256:{digest(token)}  {tenant}" + ("  operator" if operator else "")


def parse_tokens(text: str) -> Tokens:
    """Parses the text of a token file. Raises ConfigError that names the faulty line."""
    tenants: dict[str, Tenant] = {}
    operators = set()
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"token file, line {number}: expected 'sha256:<64 hex digits>  <tenant>', "
                "optionally with '  operator'; `kvcluster token --tenant NAME` makes one"
            )
        if match[1] in tenants:
            raise ConfigError(f"token file, line {number}: this token already has a line")
        tenants[match[1]] = Tenant(match[2])
        if match[3]:
            operators.add(match[1])
    if not tenants:
        raise ConfigError("the token file contains no token, so no client could connect; `kvcluster token` makes one")
    return Tokens(tenants, frozenset(operators))


def authenticator(config: ServerConfig, internal_secret: str) -> Authenticator:
    """Returns the Authenticator that the configuration asks for. Raises ConfigError if the token file cannot be used,
    or if the server would accept callers from other machines without tokens."""
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
            f"refusing to listen on {config.host} without a token file: any client could read the cache. "
            "Give server.token_file (--token-file), or pass --insecure if the network itself restricts access"
        )
    return Authenticator(None, internal_secret)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
