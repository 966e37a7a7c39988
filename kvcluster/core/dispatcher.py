"""Which handler of a core steps a message, and within which namespace.

A core has three tables of handlers: of questions that are asked about a namespace, of all other questions, and of what
the driver itself tells. The namespace of a question is looked up here and nowhere else, under the tenant of the
request. A handler of the first table gets the namespace that was found, so it cannot forget to hold a question to those
that the caller may see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from kvcluster.core.ids import NamespaceId, Tenant
from kvcluster.core.messages import Answer, Effect, Refused, Request

SpaceT = TypeVar("SpaceT")


class Dispatcher(Generic[SpaceT]):
    """The handlers of one core, by the type of the question or message.

    `find` returns the namespace of that id where that tenant may see it. Where it returns None, a question about a
    namespace is answered `unknown`.
    """

    def __init__(
        self,
        find: Callable[[NamespaceId, Tenant], SpaceT | None],
        unknown: Refused,
        *,
        in_namespace: Mapping[type, Callable[[Request[Any], SpaceT, int], list[Effect]]],
        of_no_namespace: Mapping[type, Callable[[Request[Any], int], list[Effect]]],
        from_driver: Mapping[type, Callable[[Any, int], list[Effect]]],
    ) -> None:
        self._find = find
        self._unknown = unknown
        self._in_namespace = in_namespace
        self._of_no_namespace = of_no_namespace
        self._from_driver = from_driver

    def step(self, message: object, now: int) -> list[Effect]:
        """The effects of the one handler of this message."""
        if not isinstance(message, Request):
            return self._from_driver[type(message)](message, now)
        kind = type(message.question)
        handle = self._in_namespace.get(kind)
        if handle is None:
            return self._of_no_namespace[kind](message, now)
        assert message.namespace is not None, f"{kind.__name__} is asked about a namespace"
        space = self._find(message.namespace, message.tenant)
        if space is None:
            return [Answer(message.call, self._unknown)]
        return handle(message, space, now)
