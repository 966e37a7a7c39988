"""Which handler steps a message, and with which namespace."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from kvcluster.core.dispatcher import READ_ONLY, Dispatcher
from kvcluster.core.ids import CallId, NamespaceId, Tenant
from kvcluster.core.messages import (
    Answer,
    Done,
    Effect,
    GetStatus,
    Purge,
    Refused,
    RefusedKind,
    Request,
    Siblings,
    Tick,
    UnpinBlocks,
    Warn,
)
from tests.core.samples import OURS, THEIRS

CALL, NAMESPACE = CallId(3), NamespaceId(b"n" * 32)
UNKNOWN = Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach first")


def find(namespace: NamespaceId, tenant: Tenant, reads: Collection[Tenant]) -> str | None:
    return "a namespace" if namespace == NAMESPACE and OURS in (tenant, *reads) else None


def within(request: Request[Any], space: str, now: int) -> list[Effect]:
    return [Warn(f"{type(request.question).__name__} in {space} at {now}", "told")]


def answered(request: Request[Any], now: int) -> list[Effect]:
    return [Answer(request.call, Done())]


def told(message: Any, now: int) -> list[Effect]:
    return [Warn(type(message).__name__, "told")]


DISPATCHER = Dispatcher(
    find,
    UNKNOWN,
    in_namespace={Siblings: within, UnpinBlocks: within},
    of_no_namespace={GetStatus: answered, Purge: answered},
    from_driver={Tick: told},
    reading=(Siblings, GetStatus),
)
GRANTED = frozenset({OURS})


def test_a_question_about_a_namespace_is_stepped_within_it() -> None:
    assert DISPATCHER.step(Request(CALL, OURS, NAMESPACE, Siblings()), 5) == [
        Warn("Siblings in a namespace at 5", "told")
    ]


@pytest.mark.parametrize(("tenant", "namespace"), [(THEIRS, NAMESPACE), (OURS, NamespaceId(b"o" * 32))])
def test_one_about_a_namespace_that_its_tenant_does_not_have_reaches_no_handler(
    tenant: Tenant, namespace: NamespaceId
) -> None:
    assert DISPATCHER.step(Request(CALL, tenant, namespace, Siblings()), 5) == [Answer(CALL, UNKNOWN)]


def test_a_question_that_reads_is_stepped_within_the_namespace_of_a_tenant_who_is_granted() -> None:
    assert DISPATCHER.step(Request(CALL, THEIRS, NAMESPACE, Siblings(), reads=GRANTED), 5) == [
        Warn("Siblings in a namespace at 5", "told")
    ]


def test_one_that_changes_something_is_not() -> None:
    request = Request(CALL, THEIRS, NAMESPACE, UnpinBlocks(()), reads=GRANTED)
    assert DISPATCHER.step(request, 5) == [Answer(CALL, UNKNOWN)]


@pytest.mark.parametrize(("namespace", "question"), [(NAMESPACE, UnpinBlocks(())), (None, Purge())])
def test_a_read_only_credential_changes_nothing(namespace: NamespaceId | None, question: object) -> None:
    assert DISPATCHER.step(Request(CALL, OURS, namespace, question, read_only=True), 5) == [Answer(CALL, READ_ONLY)]
    assert DISPATCHER.step(Request(CALL, OURS, namespace, question), 5) != [Answer(CALL, READ_ONLY)]


def test_it_reads() -> None:
    assert DISPATCHER.step(Request(CALL, OURS, None, GetStatus(), read_only=True), 5) == [Answer(CALL, Done())]


def test_one_without_a_namespace_that_has_to_have_one_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="Siblings is asked about a namespace"):
        DISPATCHER.step(Request(CALL, OURS, None, Siblings()), 5)


def test_any_other_question_is_stepped_for_every_tenant() -> None:
    assert DISPATCHER.step(Request(CALL, THEIRS, None, GetStatus()), 5) == [Answer(CALL, Done())]


def test_what_the_driver_tells_has_no_envelope() -> None:
    assert DISPATCHER.step(Tick(), 5) == [Warn("Tick", "told")]
    with pytest.raises(KeyError):
        DISPATCHER.step(GetStatus(), 5)
