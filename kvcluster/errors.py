"""Every exception that kvcluster raises on purpose.

    KVClusterError
    ├── CallerError            the call itself is wrong; mend the code that made it
    │   ├── SpecError          a KVSpec, group, plane or part that cannot be
    │   └── LimitError         more than one call may carry (see core/limits.py)
    ├── ConfigError            a configuration, token file or address that cannot be used
    ├── CredentialError        the token is missing or not known to the server
    ├── Unreachable            nothing answered at that address, or not in time
    │   └── Trouble            the same within an exchange, as a miss (transport/base.py)
    └── ProtocolError          the other side speaks something else, or an unknown version

Trouble inside the cluster (a dead shard, a full tier, a passed deadline) is no error of a client's calls:
it is a miss with a reason, because an engine can always recompute. It is raised only where no miss could
be returned (`hashes`, `attach`), or where "done" would be a lie (`status`, `clear`, `purge`). Each message
says what was wrong and what to do next.
"""

from __future__ import annotations


class KVClusterError(Exception):
    """Root of all errors below."""


class CallerError(KVClusterError, ValueError):
    """An argument of this call is wrong; nothing was moved."""


class SpecError(CallerError):
    """A KVSpec, group, plane or part that describes no possible cache."""


class LimitError(CallerError):
    """The call carries more than one call may; split it."""


class ConfigError(KVClusterError):
    """A setting, token file or address that cannot be used."""


class CredentialError(KVClusterError):
    """The token is missing, or not one that the server knows."""


class Unreachable(KVClusterError):
    """Nothing answered at the address within the deadline."""


class ProtocolError(KVClusterError):
    """The other side does not speak kvcluster, or speaks another version of it."""
