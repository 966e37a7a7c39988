from __future__ import annotations

import dataclasses
import pickle

import pytest

from kvcluster.core import hashing
from kvcluster.core.ids import HASH_BYTES, Tenant
from tests.core.build import attempt, spec


def test_tries_of_one_client_are_ordered_by_their_counter() -> None:
    tries = [attempt(10), attempt(9), attempt(0, of=1), attempt(1)]
    assert sorted(tries) == [attempt(1), attempt(9), attempt(10), attempt(0, of=1)]


def test_an_attempt_is_a_value_also_in_another_process() -> None:
    once = attempt(7, of=3)
    again = pickle.loads(pickle.dumps(once))
    assert again == once and hash(again) == hash(once)
    assert {once: "answer"}[again] == "answer"
    assert once != attempt(7, of=4) and once != attempt(8, of=3)


def test_an_attempt_cannot_be_changed_into_another() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(attempt(1), "counter", 2)  # noqa: B010 - an assignment would not pass the type checker


def test_an_attempt_is_written_short_enough_for_a_log_line() -> None:
    assert str(attempt(12, of=0xAB << 120)) == "ab000000#12"


def test_hashes_and_namespaces_have_the_length_that_the_wire_expects() -> None:
    namespace = spec().namespace(Tenant("default"))
    assert len(namespace) == len(hashing.root(namespace)) == HASH_BYTES
