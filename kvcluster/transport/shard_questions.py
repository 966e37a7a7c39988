"""The questions that all transports ask a shard in the same way: to attach, for its offers, to flush, and so on. A
transport supplies `_ask`; loads, stores and Attends are its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from kvcluster.core.ids import Epoch, NamespaceId
from kvcluster.core.messages import (
    AttachedShard,
    AttachShard,
    Done,
    Flush,
    GetOffers,
    Offers,
    PageKey,
    Refused,
    RegisterSpans,
    Reply,
    ShardQuestion,
    Suspect,
)
from kvcluster.core.spec import KVSpec
from kvcluster.transport.base import Deadline, RefusedByShard

R = TypeVar("R", bound=Reply)


class ShardQuestions(ABC):
    """The control questions of a Transport, over `_ask` of the class that inherits them."""

    @abstractmethod
    def _ask(self, question: ShardQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        """Returns the shard's answer. Raises Unavailable if none comes by the deadline."""

    def attach(self, spec: KVSpec, deadline: Deadline) -> AttachedShard:
        return _expected(AttachedShard, self._ask(AttachShard(spec), deadline))

    def offers(self, deadline: Deadline) -> Offers:
        """Which data paths the shard serves beside this one. Raises Unavailable, or RefusedByShard."""
        return _expected(Offers, self._ask(GetOffers(), deadline))

    def flush(self, deadline: Deadline) -> bool:
        wait_ns = int(deadline.remaining_s() * 0.9e9)  # leaves time for the shard's answer if it waits in vain
        return self._ask(Flush(wait_ns), deadline) == Done(True)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        _expected(Done, self._ask(Suspect(epoch, tuple(keys)), deadline, namespace))

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        """As RegistersSpans."""
        _expected(Done, self._ask(message, deadline, namespace))


def _expected(kind: type[R], answer: Reply) -> R:
    """Returns an answer of this type. Raises RefusedByShard."""
    if isinstance(answer, Refused):
        raise RefusedByShard(answer)
    assert isinstance(answer, kind)
    return answer
