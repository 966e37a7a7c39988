"""Every exception that kvcluster raises on purpose.

    KVClusterError
    ├── CallerError            the call itself is wrong; correct the calling code
    │   ├── SpecError          an invalid KVSpec, group, plane or part
    │   └── LimitError         the call exceeds a limit (see core/limits.py)
    │       └── ResidentSetFull   no page of a worker's memory is left for a sequence
    ├── ConfigError            a configuration, token file or address that cannot be used
    ├── CredentialError        the token is missing or not known to the server
    ├── Unreachable            no answer from that address in time
    │   └── Unavailable        the same within an exchange, as a miss (transport/base.py)
    ├── LostTokens             tokens of a sequence are in no memory any more; compute them again
    └── ProtocolError          the other side does not speak kvcluster
        └── VersionError       it speaks only versions of the protocol that this side does not

A failure inside the cluster (a dead shard, a full tier, a passed deadline) is not an error of a client's call: it is a
miss with a reason, because an engine can always recompute. It is raised only if the call cannot return a miss
(`hashes`, `attach`), or if returning normally would claim success (`status`, `clear`, `purge`). Each message says what
was wrong and what to do next.
"""

from __future__ import annotations


class KVClusterError(Exception):
    """Root of all errors that kvcluster raises on purpose.

        try:
            client.store(token_ids, "no memory")
        except kvcluster.KVClusterError as error:
            print(error)                                     # says whose mistake it is, and what to do

    The others are in `kvcluster.errors`.
    """


class CallerError(KVClusterError, ValueError):
    """An argument of this call is wrong; nothing was moved."""


class SpecError(CallerError):
    """A KVSpec, group, plane or part is invalid."""


class LimitError(CallerError):
    """The call exceeds a limit of one call; split it."""


class ResidentSetFull(LimitError):
    """The resident set has no page for another block of a sequence, and no block of it is stored yet whose page could
    be used. Close sequences, or open the client with a larger `resident_bytes`."""


class ConfigError(KVClusterError):
    """A setting, token file or address that cannot be used."""


class CredentialError(KVClusterError):
    """The token is missing, or the server does not know it."""


class Unreachable(KVClusterError):
    """No answer came from the address within the deadline."""


class ProtocolError(KVClusterError):
    """The other side does not speak kvcluster, or sent something that its protocol does not allow."""


class VersionError(ProtocolError):
    """No version of the protocol is spoken by both sides; the message names both, and which of them to upgrade."""


class LostTokens(KVClusterError):
    """The token of a sequence at `position` cannot be had: the cluster has lost the block that holds it. The sequence's
    `missing()` names all such ranges of tokens: compute their KV again in a fork that is truncated to the start of the
    first, or truncate the sequence to `position` and go on from there."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position

    def __reduce__(self) -> tuple[type[LostTokens], tuple[int, str]]:
        return type(self), (self.position, str(self))
