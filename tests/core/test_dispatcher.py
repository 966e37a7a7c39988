"""Which handler steps a message, and with which namespace."""

from __future__ import annotations

from typing import Any

import pytest

from kvcluster.core.dispatcher import Dispatcher
from kvcluster.core.ids import CallId, NamespaceId, Tenant
from kvcluster.core.messages import (
    Answer,
    Done,
    Effect,
    GetStatus,
    Refused,
    RefusedKind,
    Request,
    Siblings,
    Tick,
    Warn,
)
from tests.core.samples import OURS, THEIRS

CALL, NAMESPACE = CallId(3), NamespaceId(b"n" * 32)
UNKNOWN = Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach first")


def find(namespace: NamespaceId, tenant: Tenant) -> str | None:
    return "a namespace" if (namespace, tenant) == (NAMESPACE, OURS) else None


def within(request: Request[Any], space: str, now: int) -> list[Effect]:
    return [Warn(f"{type(request.question).__name__} in {space} at {now}", "told")]


def answered(request: Request[Any], now: int) -> list[Effect]:
    return [Answer(request.call, Done())]


def told(message: Any, now: int) -> list[Effect]:
    return [Warn(type(message).__name__, "told")]


DISPATCHER = Dispatcher(
    find, UNKNOWN, in_namespace={Siblings: within}, of_no_namespace={GetStatus: answered}, from_driver={Tick: told}
)


def test_a_question_about_a_namespace_is_stepped_within_it() -> None:
    assert DISPATCHER.step(Request(CALL, OURS, NAMESPACE, Siblings()), 5) == [
        Warn("Siblings in a namespace at 5", "told")
    ]


@pytest.mark.parametrize(("tenant", "namespace"), [(THEIRS, NAMESPACE), (OURS, NamespaceId(b"o" * 32))])
def test_one_about_a_namespace_that_its_tenant_does_not_have_reaches_no_handler(
    tenant: Tenant, namespace: NamespaceId
) -> None:
    assert DISPATCHER.step(Request(CALL, tenant, namespace, Siblings()), 5) == [Answer(CALL, UNKNOWN)]


def test_one_without_a_namespace_that_has_to_have_one_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="Siblings is asked about a namespace"):
        DISPATCHER.step(Request(CALL, OURS, None, Siblings()), 5)


def test_any_other_question_is_stepped_for_every_tenant() -> None:
    assert DISPATCHER.step(Request(CALL, THEIRS, None, GetStatus()), 5) == [Answer(CALL, Done())]


def test_what_the_driver_tells_has_no_envelope() -> None:
    assert DISPATCHER.step(Tick(), 5) == [Warn("Tick", "told")]
    with pytest.raises(KeyError):
        DISPATCHER.step(GetStatus(), 5)
