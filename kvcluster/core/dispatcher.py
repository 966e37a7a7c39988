"""Selects the handler of a core for a message, and the namespace that the message is about.

A core has three tables of handlers: for questions about a namespace, for all other questions, and for messages from the
driver itself. The namespace of a question is looked up here and nowhere else, under the tenant of the request, and for
a question that only reads also under the tenants whose KV the caller may read (docs/adr/0103). A handler of the first
table is given the namespace that was found, so it cannot forget to restrict a question to those that the caller may
see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from kvcluster.core.ids import NamespaceId, Tenant
from kvcluster.core.messages import Answer, Effect, Refused, RefusedKind, Request

SpaceT = TypeVar("SpaceT")

READ_ONLY = Refused(
    RefusedKind.BAD,
    "this token is read-only: its bearer looks up and loads, and changes nothing (its line in the token file ends in "
    "`read-only`)",
)


class Dispatcher(Generic[SpaceT]):
    """The handlers of one core, by the type of the question or message.

    `find` returns the namespace of that id if it is the tenant's, or may be read as one of those other tenants. If it
    returns None, a question about the namespace is answered `unknown`. `reading`: the questions of those whose
    credential is read-only, and about namespaces of other tenants; all others are refused.
    """

    def __init__(
        self,
        find: Callable[[NamespaceId, Tenant, Collection[Tenant]], SpaceT | None],
        unknown: Refused,
        *,
        in_namespace: Mapping[type, Callable[[Request[Any], SpaceT, int], list[Effect]]],
        of_no_namespace: Mapping[type, Callable[[Request[Any], int], list[Effect]]],
        from_driver: Mapping[type, Callable[[Any, int], list[Effect]]],
        reading: Collection[type],
    ) -> None:
        self._find = find
        self._unknown = unknown
        self._in_namespace = in_namespace
        self._of_no_namespace = of_no_namespace
        self._from_driver = from_driver
        self._reading = frozenset(reading)

    def step(self, message: object, now: int) -> list[Effect]:
        """Calls the handler of this message and returns its effects."""
        if not isinstance(message, Request):
            return self._from_driver[type(message)](message, now)
        kind = type(message.question)
        if message.read_only and kind not in self._reading:
            return [Answer(message.call, READ_ONLY)]
        handle = self._in_namespace.get(kind)
        if handle is None:
            return self._of_no_namespace[kind](message, now)
        assert message.namespace is not None, f"{kind.__name__} is asked about a namespace"
        granted = message.reads if kind in self._reading else ()
        space = self._find(message.namespace, message.tenant, granted)
        if space is None:
            return [Answer(message.call, self._unknown)]
        return handle(message, space, now)
