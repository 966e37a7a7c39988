"""Authentication: bearer tokens and the tenants that they stand for.

A token file has one line for each credential, `sha256:<hex digest of the token>  <tenant>`; blank lines and lines that
begin with # are skipped. Only digests are kept, on disk and in memory. A line may end in the word `operator`: the
bearer of that token may also make calls that affect every tenant, such as draining a shard, but still sees the blocks
of its own tenant only. An operator's line may have `-` in place of a tenant: its bearer runs the commands of COMMANDS
and nothing else, and is not counted among the tenants. A line that ends in `read-only` is of a token whose bearer looks
up and loads, and stores nothing. A line `grant  <tenant>  reads  <owner>` lets all of a tenant, or of every tenant (*),
read the KV of another, besides its own. A line `revoked  sha256:<fingerprint>` has the client certificate with that
fingerprint refused, whatever it names.

Where clients show certificates, one whose URI names a tenant or an operator of this cluster needs no token
(transport/certificates.py). Shards show what the coordinator has issued to them (shard_credentials.py), which stands
for no tenant.

The file is read again when it changes (watched_files.py), so that tokens are added and revoked while the cluster runs.
It is looked at when a caller is to be authenticated. A process that restarts while the file is unusable admits no
client, and reports why.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvcluster.config import TLS, Config
from kvcluster.config.ports import is_loopback
from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, TENANT_NAME, Caller, Epoch, Tenant
from kvcluster.errors import ConfigError, CredentialError
from kvcluster.runtime.audit_log import audited
from kvcluster.transport.certificates import OPERATOR, SCHEME, SHARD, CertificateNames
from kvcluster.watched_files import WatchedFiles, read_guarded

NO_TENANT = Tenant("-")
"""Of an operator's token that stands for no tenant. No tenant has this name."""

COMMANDS = frozenset({"Ping", "GetStatus", "GetEngines", "GetNamespaces", "GetPins", "Drain", "SetPolicy", "Probe"})
"""The coordinator's methods that a token of NO_TENANT may call."""

_REVOKED = re.compile(r"revoked\s+sha256:([0-9a-f]{64})")
_GRANT = re.compile(rf"grant\s+({TENANT_NAME.pattern}|\*)\s+reads\s+({TENANT_NAME.pattern})")
_LINE = re.compile(rf"sha256:([0-9a-f]{{64}})\s+(?:({TENANT_NAME.pattern})(?:\s+(operator|read-only))?|-\s+(operator))")
_EVERYONE = "*"
_READ_ONLY = "read-only"


class Tokens(NamedTuple):
    """The content of a token file: digest -> tenant, and the digests that are operators' and that are read-only.
    `revoked`: fingerprints of client certificates. `grants`: the tenants whose KV a tenant, or everyone, may read."""

    tenants: dict[str, Tenant]
    operators: frozenset[str]
    revoked: frozenset[str] = frozenset()
    read_only: frozenset[str] = frozenset()
    grants: Mapping[str, frozenset[Tenant]] = {}

    @property
    def tenant_count(self) -> int:
        return len({*self.tenants.values()} - {NO_TENANT})

    def reads_of(self, tenant: Tenant) -> frozenset[Tenant]:
        """Returns the tenants whose KV this one may read besides its own."""
        granted = [self.grants[name] for name in (tenant, _EVERYONE) if name in self.grants]
        return frozenset().union(*granted) - {tenant} if tenant != NO_TENANT else frozenset()

    def caller(self, hashed: str) -> Caller | None:
        """Returns the bearer of the token with this digest; None if the file has none."""
        tenant = self.tenants.get(hashed)
        if tenant is None:
            return None
        return Caller(
            tenant,
            operator=hashed in self.operators,
            read_only=hashed in self.read_only,
            reads=self.reads_of(tenant),
        )


class TokenFile:
    """The tokens of one file.

    `one_tenant`: the file may name one tenant only, if it did at first. Where workers map memory that holds the pages
    of all tenants, a second tenant needs a restart without that mapping.
    """

    def __init__(
        self,
        path: str,
        *,
        one_tenant: bool = False,
        must_exist: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError if the file cannot be used now. `must_exist` is False for a process that restarts and has
        to serve the rest of the cluster in any case: then nothing is raised."""
        self._one_tenant = one_tenant
        self._file = WatchedFiles(
            (path,),
            lambda before: self._read(path, before),
            stays="The tokens that it had stay valid",
            again=lambda tokens: _taken(path, tokens),
            must_exist=must_exist,
            clock=clock,
        )

    def tokens(self) -> Tokens:
        """Returns the tokens that are valid now. Raises CredentialError if no version of the file could be used."""
        tokens = self._file.value()
        if tokens is None:
            raise CredentialError(f"this server admits no client until its token file can be used: {self._file.why}")
        return tokens

    def trouble(self) -> str:
        """Returns why the newest version of the file is not in use, as it could not be used; "" if it is."""
        return self._file.trouble()

    def _read(self, path: str, before: Tokens | None) -> Tokens:
        tokens = read_token_file(path)
        if before is None:
            self._one_tenant = self._one_tenant and tokens.tenant_count == 1
        elif self._one_tenant and tokens.tenant_count > 1:
            raise ConfigError(
                f"the token file {path} now names several tenants, and this cluster shares memory with the "
                "workers of one: restart it, or leave shm out of server.transports"
            )
        return tokens


def _taken(path: str, tokens: Tokens) -> str:
    """Records that a new version of the file holds. Returns a line for the log."""
    audited("token_file_read", path=path, tokens=len(tokens.tenants), tenants=tokens.tenant_count)
    return f"the token file {path} was read again: {len(tokens.tenants)} tokens"


def read_token_file(path: str) -> Tokens:
    """Returns the content of a token file. Raises ConfigError if it cannot be read, is not valid, or could have been
    written by another user than root and the user of this process."""
    return parse_tokens(read_guarded(path, "token file", limits.TOKEN_FILE_BYTES, "admit anyone"))


def parse_tokens(text: str) -> Tokens:
    """Parses the text of a token file. Raises ConfigError that names the faulty line."""
    tenants: dict[str, Tenant] = {}
    operators, revoked, read_only = set(), set(), set()
    grants: dict[str, frozenset[Tenant]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if certificate := _REVOKED.fullmatch(line):
            revoked.add(certificate[1])
            continue
        if grant := _GRANT.fullmatch(line):
            grants[grant[1]] = grants.get(grant[1], frozenset()) | {Tenant(grant[2])}
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"token file, line {number}: expected 'sha256:<64 hex digits>  <tenant>', optionally with '  operator' "
                "or '  read-only' (`kvcluster token --tenant NAME` makes one), or 'grant  <tenant>  reads  <tenant>'"
            )
        if match[2] == _READ_ONLY:
            raise ConfigError(f"token file, line {number}: the tenant is missing before {_READ_ONLY!r}")
        if match[1] in tenants:
            raise ConfigError(f"token file, line {number}: this token already has a line")
        tenants[match[1]] = Tenant(match[2]) if match[2] else NO_TENANT
        if match[3] == _READ_ONLY:
            read_only.add(match[1])
        elif match[3] or match[4]:
            operators.add(match[1])
    if not tenants and not revoked and not grants:
        raise ConfigError("the token file contains no token, so no client could connect; `kvcluster token` makes one")
    return Tokens(tenants, frozenset(operators), frozenset(revoked), frozenset(read_only), grants)


DEFAULT_TENANT = Tenant("default")

ONLY_TO_ISSUE = (
    "a shard proves by this that it may have a credential of its own (IssueCredential), and does all else with that"
)

NOT_A_TENANT = (
    "this token is an operator's and stands for no tenant: it runs commands such as status and drain, and neither "
    "stores nor loads; use a token of the tenant (`kvcluster token --tenant NAME`)"
)


EpochOf = Callable[[str], "Epoch | None"]
"""The token of a shard -> its incarnation; None for other tokens."""


_UNISSUED = Epoch(0)
"""Of a shard that the coordinator issues no credential to."""


def _no_shard(token: str) -> Epoch | None:
    """Knows no shard."""
    return None


def _worker(caller: Caller) -> Caller:
    if caller.tenant == NO_TENANT:
        raise CredentialError(NOT_A_TENANT)
    if caller.internal and caller.epoch is None:
        raise CredentialError(ONLY_TO_ISSUE)
    return caller


class Authenticator:
    """Maps a token to its caller. Without tokens every caller is the tenant `default`, and an operator: access is then
    restricted by other means (see `authenticator`)."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant] | None,
        secret: str,
        operators: frozenset[str] = frozenset(),
        *,
        file: TokenFile | None = None,
        epoch_of: EpochOf = _no_shard,
        secret_suffices: Callable[[], bool] = bool,
        cluster: str = "kvcluster",
        certified: bool = False,
    ) -> None:
        """`tenants`: by the digest of their tokens, of which `operators` are some; or the same in a `file`. `secret`:
        what shards show to get a credential, "" where they show certificates. `epoch_of`, `secret_suffices`: see
        shard_credentials.py. `cluster`: the name in the URIs of certificates. `certified`: clients show certificates;
        without tokens those alone say who calls."""
        self._fixed = Tokens(dict(tenants), operators) if tenants is not None else None
        self._file = file
        self._secret = digest(secret) if secret else ""
        self._epoch_of, self._secret_suffices = epoch_of, secret_suffices
        self._cluster, self._certified = cluster, certified

    @property
    def tenants(self) -> int:
        """How many tenants have credentials, the cluster's own shards left out. At least 1."""
        return max(1, self._count())

    @property
    def one_tenant(self) -> bool:
        """Whether all callers, except the cluster's own shards, belong to one tenant. False while that is not known."""
        return self._count() == 1 and not self._certified

    def trouble(self) -> str:
        """As TokenFile; "" without a file."""
        return self._file.trouble() if self._file is not None else ""

    def caller(self, token: str | None) -> Caller:
        """Returns the caller of this token. Raises CredentialError if the token is missing, unknown or revoked."""
        hashed = digest(token) if token else ""
        if token and (epoch := self._epoch_of(token)) is not None:
            return Caller(CLUSTER, internal=True, epoch=epoch)
        if self._secret and hmac.compare_digest(hashed, self._secret):
            return Caller(CLUSTER, internal=True, epoch=_UNISSUED if self._secret_suffices() else None)
        tokens = self._tokens()
        if tokens is None and self._certified:
            raise CredentialError("this cluster knows no tokens: its clients show certificates, which say who they are")
        if tokens is None:
            return Caller(DEFAULT_TENANT, operator=True)
        if not token:
            raise CredentialError(
                "this cluster requires a token: pass token=... (commands take KVCLUSTER_TOKEN or --token-from FILE)"
            )
        caller = tokens.caller(hashed)
        if caller is None:
            raise CredentialError("the cluster does not know this token; ask its operator for another")
        return caller

    def by_certificate(self, shown: CertificateNames) -> Caller:
        """Returns the caller who shows this verified certificate and no token. Raises CredentialError if it was
        revoked, or its URIs name no role or several tenants of this cluster."""
        self.check_certificate(shown)
        if shown.has_role(self._cluster, SHARD):
            return Caller(CLUSTER, internal=True)
        tenants = [name for name in shown.tenants(self._cluster) if TENANT_NAME.fullmatch(name)]
        operator = shown.has_role(self._cluster, OPERATOR)
        if len(tenants) > 1 or not (tenants or operator):
            raise CredentialError(
                f"this client's certificate names {len(tenants)} tenants of the cluster {self._cluster!r}: without a "
                f"token it needs one URI {SCHEME}{self._cluster}/tenant/NAME, or {SCHEME}{self._cluster}/operator"
            )
        tenant, tokens = Tenant(tenants[0]) if tenants else NO_TENANT, self._tokens()
        reads: frozenset[Tenant] = tokens.reads_of(tenant) if tokens is not None else frozenset()
        return Caller(tenant, operator=operator, reads=reads)

    def check_certificate(self, shown: CertificateNames) -> None:
        """Raises CredentialError if this verified certificate was revoked, or as `is_revoked`."""
        if self.is_revoked(shown):
            raise CredentialError("this client's certificate was revoked; ask the operator of the cluster for another")

    def is_revoked(self, shown: CertificateNames) -> bool:
        """Whether the token file has this certificate refused. Raises CredentialError if no version of the file could
        be used."""
        tokens = self._tokens()
        return tokens is not None and shown.fingerprint in tokens.revoked

    def worker(self, token: str | None) -> Caller:
        """Returns the caller of this token, who moves pages. Raises CredentialError as `caller`, and for a token that
        stands for no tenant."""
        return _worker(self.caller(token))

    def worker_within_tls(self, token: str | None, shown: CertificateNames) -> Caller:
        """As `worker`, of a caller who has shown this verified certificate. Without a token the certificate says who
        calls. That of a shard must not be revoked whatever token it shows: no line of the token file revokes those that
        the coordinator issues."""
        caller = self.caller(token) if token else self.by_certificate(shown)
        if caller.internal:
            self.check_certificate(shown)
        return _worker(caller)

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


def check_tenant_name(tenant: str) -> None:
    """Raises ConfigError unless a tenant may have this name."""
    if not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is not a valid tenant name: use up to 64 letters, digits, '.', '_' and '-', "
            "the first a letter or digit"
        )


def token_line(token: str, tenant: str, *, operator: bool = False, read_only: bool = False) -> str:
    """Returns the line of a token file that admits this token; that of an `operator` may be NO_TENANT's. Raises
    ConfigError if `tenant` is not a valid tenant name, or an operator's token is to be read-only."""
    if operator and read_only:
        raise ConfigError("an operator's token cannot be read-only: make two")
    # The tenant is checked separately: the tenant name `a operator` would make a valid line, and grant operator rights
    # that were never intended.
    if not (operator and tenant == NO_TENANT):
        check_tenant_name(tenant)
    return f"sha256:{digest(token)}  {tenant}" + ("  operator" if operator else "  read-only" if read_only else "")


def authenticator(
    config: Config,
    secret: str,
    *,
    epoch_of: EpochOf = _no_shard,
    secret_suffices: Callable[[], bool] = bool,
    restarted: bool = False,
) -> Authenticator:
    """Returns the Authenticator that the configuration asks for. Raises ConfigError if the server would accept callers
    from other machines without tokens or certificates, or if the token file cannot be used; not if it has `restarted`,
    since then the rest of the cluster needs it, and no client is admitted until the file can be used."""
    server, tls = config.server, config.security.encryption == TLS
    file = None
    if server.token_file:
        file = TokenFile(server.token_file, one_tenant="shm" in server.transports, must_exist=not restarted)
    elif not is_loopback(server.host) and not server.insecure and not config.security.client_certificates:
        raise ConfigError(
            f"refusing to listen on {server.host} without a token file: any client could read the cache. "
            "Give server.token_file (--token-file), or pass --insecure if the network itself restricts access"
        )
    return Authenticator(
        *(None, "" if tls else secret),
        file=file,
        epoch_of=epoch_of,
        secret_suffices=secret_suffices,
        cluster=config.name,
        certified=config.security.client_certificates,
    )
