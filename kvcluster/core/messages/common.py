"""What several conversations share: needs, sources, plans, shard addresses, the two answers to any question, and the
envelope in which a question reaches a core.

The envelope (Request) has the call, the caller's tenant, the namespace, and the question. A client knows its question
and, if that is about one namespace, the namespace. The driver adds the call, and the server the tenant. So a question
(the payload) has none of the three, and a client need not fill in a value without a meaning. A core finds the namespace
of any question in the same place (docs/adr/0041).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kvcluster.core.groups import Part
from kvcluster.core.ids import Caller, CallId, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.miss import Loss
from kvcluster.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class Need:
    """What a load needs of each group: a part, or None for a group that it does not need; and the loss that it accepts.

    `avoid` names shards that have just failed this reader: other replicas serve instead, if there are any.
    """

    parts: tuple[Part | None, ...]
    accept: Loss = Loss.EXACT
    avoid: tuple[ShardId, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """The address of one incarnation of a shard. `host`: where it runs (core/placement.py). `server_name`: what its
    certificate is verified for, "" for the host of the address."""

    shard: ShardId
    epoch: Epoch
    address: str
    host: str = ""
    server_name: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """One page that serves a need or a piece of it: which part of which group, on which shard."""

    group: int
    part: Part
    shard: ShardAddress
    tier: Tier
    loss: Loss


Plan = tuple[tuple[Source, ...] | None, ...]
"""For each group the sources that together cover the needed part, or None if it is not available."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive blocks that are loaded by the same plan."""

    count: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Done:
    """Success or failure, if there is nothing else to answer."""

    ok: bool = True


class RefusedKind(Enum):
    """`UNKNOWN_NAMESPACE`: attach again. `STALE`: that epoch is over. `LIMIT`: ask for less. `BAD`: error of the
    caller."""

    UNKNOWN_NAMESPACE = "unknown_namespace"
    STALE = "stale"
    LIMIT = "limit"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Refused:
    """The question cannot be answered as asked; `kind` determines what a client does next (see RefusedKind)."""

    kind: RefusedKind
    detail: str


Q = TypeVar("Q")
Q_co = TypeVar("Q_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Request(Generic[Q_co]):
    """A question as it reaches a core.

    `call` is chosen by the driver, and the core's Answer repeats it. `tenant` is the one that the caller's credential
    names; `operator`, `read_only` and `reads` are what this permits (ids.Caller). `namespace` is None if the question
    is not about one namespace.
    """

    call: CallId
    tenant: Tenant
    namespace: NamespaceId | None
    question: Q_co
    operator: bool = False
    read_only: bool = False
    reads: frozenset[Tenant] = frozenset()


def request_of(caller: Caller, call: CallId, namespace: NamespaceId | None, question: Q) -> Request[Q]:
    """Returns the request of that caller."""
    return Request(call, caller.tenant, namespace, question, caller.operator, caller.read_only, caller.reads)
