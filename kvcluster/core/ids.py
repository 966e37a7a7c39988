"""Types of the identifiers in the core, so that a type checker distinguishes them.

Hashes, namespaces and holders are raw bytes: they are compared and looked up, never computed with.
Time is integer nanoseconds on the clock of the process that reads it; it never crosses machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from kvcluster.release import PROTOCOL_VERSION

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the chained digest of a block (see hashing.py)."""

NamespaceId = NewType("NamespaceId", bytes)
"""32 bytes: the digest of a KVSpec and the tenant that owns it (see spec.py)."""

Tenant = NewType("Tenant", str)
"""Derived by the server from the caller's credential, never read from the caller's message."""

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What operators may call a tenant, in files of tokens and quotas and in certificates."""

CLUSTER = Tenant("")
"""The tenant of requests from a shard of this cluster, which acts for every tenant. No client credential maps to it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller that a credential identifies. `internal`: a shard of this cluster, which acts for all tenants;
    `epoch`: its incarnation, None for one that has no credential of its own yet and may ask for one.
    `operator`: may make calls that affect all tenants. `read_only`: stores and removes nothing. `reads`: the tenants
    whose KV it may read besides its own tenant's. `version`: of the protocol, as agreed on with this caller."""

    tenant: Tenant
    internal: bool = False
    operator: bool = False
    version: int = PROTOCOL_VERSION
    epoch: Epoch | None = None
    read_only: bool = False
    reads: frozenset[Tenant] = frozenset()


ShardId = NewType("ShardId", str)
"""A shard's name. It stays the same across restarts; the epoch counts those."""

Epoch = NewType("Epoch", int)
"""An actor's incarnation: later incarnations are larger."""

Holder = NewType("Holder", bytes)
"""16 random bytes: one incarnation of a client."""

SequenceId = NewType("SequenceId", bytes)
"""16 random bytes, chosen by the worker that opens the sequence."""

SpanId = NewType("SpanId", int)
"""A registered span of a holder, which chooses the number and never uses it again."""

CallId = NewType("CallId", int)
"""Identifies a request within one process, so that an effect can answer it."""

HASH_BYTES = 32
SUM_BYTES = 8
"""The size of a checksum; each layer of a page has one."""

HOLDER_BYTES = 16
SEQUENCE_BYTES = 16


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt of one client. A completion names its attempt; a late completion is counted and dropped."""

    holder: Holder
    counter: int

    def __str__(self) -> str:
        return f"{self.holder.hex()[:8]}#{self.counter}"
