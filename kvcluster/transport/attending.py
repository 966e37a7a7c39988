"""The worker's interface to remote attention: what a transport to a shard can do beside moving pages.

Spans are registered over gRPC, as all control is. The query and its results go over tcp, shm or within the process;
gRPC itself carries none, because each of its messages is copied twice on either side.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import AttendAnswer, AttendRequest, RegisterSpans
from kvcluster.transport.base import Deadline

ATTEND_PATHS = ("tcp", "shm")
"""The transports between processes that carry queries."""


class NotAttending(Exception):
    """The transport in use carries no queries. The text says which it is, and why no other is in use."""


class SpanResults(NamedTuple):
    """A shard's answer, and, if it is Attended, the bytes of the results."""

    answer: AttendAnswer
    data: memoryview


@runtime_checkable
class RegistersSpans(Protocol):
    """A control path over which spans are registered."""

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        """Registers and ends spans. Raises Unavailable, or RefusedByShard."""


@runtime_checkable
class Attends(Protocol):
    """A data path over which a shard is asked to attend."""

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        """Has the shard attend to registered spans; `query` has exactly the bytes that the request describes. Raises
        Unavailable, RefusedByShard or ProtocolError; NotAttending from a transport whose path in use is another."""
