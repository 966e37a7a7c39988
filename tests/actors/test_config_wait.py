"""A node that joins waits until the head runs the configuration that it was given."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

from kvcluster.actors.joining import wait_for_config
from kvcluster.config import as_values, load

OLD = load(overrides={"shard": {"ram_bytes": "1GiB"}})
NEW = load(overrides={"shard": {"ram_bytes": "2GiB"}, "groups": {"a": {"per_node": True}}})


class Head:
    """Answers in turn; an error is raised."""

    def __init__(self, *answers: object) -> None:
        self.answers: Iterator[object] = iter(answers)
        self.said: list[str] = []

    def published(self) -> str | None:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else json.dumps(answer)


class Stop(threading.Event):
    """An event whose waits take no time."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_it_goes_on_as_soon_as_the_head_has_the_same() -> None:
    head = Head(RuntimeError("no head"), None, as_values(OLD), as_values(NEW))
    assert wait_for_config(NEW, head.published, 60.0, head.said.append, Stop())
    assert len(head.said) == 1 and "waiting until the head runs this configuration" in head.said[0]


def test_the_same_at_once_is_not_worth_a_word() -> None:
    head = Head(as_values(NEW))
    assert wait_for_config(NEW, head.published, 60.0, head.said.append, Stop())
    assert head.said == []


def test_a_head_that_keeps_another_is_joined_when_the_time_is_up() -> None:
    head = Head(*[as_values(OLD)] * 10**6)
    assert not wait_for_config(NEW, head.published, 0.05, head.said.append, Stop())
    assert "joining all the same" in head.said[-1]


def test_a_signal_ends_it() -> None:
    stop = Stop()
    stop.set()
    assert not wait_for_config(NEW, Head().published, 60.0, str, stop)
