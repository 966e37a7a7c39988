"""The envelope in which a question reaches a core: the call, the caller's tenant, the namespace, and the question.

A client knows its question and, if that is about one namespace, the namespace. The driver adds the call, and the server
the tenant. So a question (the payload) has none of the three, and a client need not fill in a value without a meaning.
A core finds the namespace of any question in the same place (docs/adr/0041).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcluster.core.ids import CallId, NamespaceId, Tenant

Q_co = TypeVar("Q_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Request(Generic[Q_co]):
    """A question as it reaches a core.

    `call` is chosen by the driver, and the core's Answer repeats it. `tenant` is the one that the caller's credential
    names, and `operator` whether it may see the whole cluster. `namespace` is None if the question is not about one
    namespace.
    """

    call: CallId
    tenant: Tenant
    namespace: NamespaceId | None
    question: Q_co
    operator: bool = False
