"""Authentication: bearer tokens and the tenants that they stand for.

A token file has one line for each credential, `sha256:<hex digest of the token>  <tenant>`; blank lines and lines that
begin with # are skipped. Only digests are kept, on disk and in memory. A line may end in the word `operator`: the
bearer of that token may also make calls that affect every tenant, such as draining a shard, but still sees the blocks
of its own tenant only. The file is read again when it changes (token_file.py). The actors of a cluster authenticate to
one another with a secret of their own, which stands for no tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping

from kvcluster.config import ServerConfig
from kvcluster.core.ids import CLUSTER, Caller, Tenant
from kvcluster.errors import ConfigError, CredentialError
from kvcluster.runtime.token_file import TENANT, TokenFile, Tokens

DEFAULT_TENANT = Tenant("default")


class Authenticator:
    """Maps a token to its caller. Without tokens every caller is the tenant `default`, and an operator: access is then
    restricted by other means (see `authenticator`)."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant] | None,
        internal_secret: str,
        operators: frozenset[str] = frozenset(),
        *,
        file: TokenFile | None = None,
    ) -> None:
        """`tenants`: by the digest of their tokens, of which `operators` are some; or the same in a `file`."""
        self._fixed = Tokens(dict(tenants), operators) if tenants is not None else None
        self._file = file
        self._internal = digest(internal_secret)

    @property
    def tenants(self) -> int:
        """How many tenants have credentials, the cluster's own shards left out. At least 1."""
        return max(1, self._count())

    @property
    def one_tenant(self) -> bool:
        """Whether all callers, except the cluster's own shards, belong to one tenant. False while that is not known."""
        return self._count() == 1

    def caller(self, token: str | None) -> Caller:
        """Returns the caller of this token. Raises CredentialError if the token is missing, unknown or revoked."""
        hashed = digest(token) if token else ""
        if token and hmac.compare_digest(hashed, self._internal):
            return Caller(CLUSTER, internal=True)
        tokens = self._tokens()
        if tokens is None:
            return Caller(DEFAULT_TENANT, operator=True)
        if not token:
            raise CredentialError(
                "this cluster requires a token: pass token=... (commands take KVCLUSTER_TOKEN or --token-from FILE)"
            )
        tenant = tokens.tenants.get(hashed)
        if tenant is None:
            raise CredentialError("the cluster does not know this token; ask its operator for another")
        return Caller(tenant, operator=hashed in tokens.operators)

    def _count(self) -> int:
        """Returns the number of tenants; 0 while it is not known."""
        try:
            tokens = self._tokens()
        except CredentialError:
            return 0
        return tokens.tenant_count if tokens is not None else 1

    def _tokens(self) -> Tokens | None:
        return self._file.tokens() if self._file is not None else self._fixed


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
    if not TENANT.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is not a valid tenant name: use up to 64 letters, digits, '.', '_' and '-', "
            "the first a letter or digit"
        )
    return f"sha256:{digest(token)}  {tenant}" + ("  operator" if operator else "")


def authenticator(config: ServerConfig, internal_secret: str, *, restarted: bool = False) -> Authenticator:
    """Returns the Authenticator that the configuration asks for. Raises ConfigError if the server would accept callers
    from other machines without tokens, or if the token file cannot be used; not if it has `restarted`, since then the
    rest of the cluster needs it, and no client is admitted until the file can be used."""
    if config.token_file:
        file = TokenFile(config.token_file, one_tenant="shm" in config.transports, must_exist=not restarted)
        return Authenticator(None, internal_secret, file=file)
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
