"""A process that logs JSON: each line is one object, and no one fills a disk with them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvcluster.config import LogConfig
from kvcluster.runtime import json_log
from kvcluster.runtime.json_log import TEXT_CHARS, LineBudget, decided, set_up_log, warned

log = logging.getLogger("kvcluster.some.module")


class Written:
    """What was logged."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def written() -> Iterator[Written]:
    """Sets this process up, and puts its own logging back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("kvcluster")
    before = root.handlers[:], root.level, ours.level
    written = Written()
    set_up_log(LogConfig("json", lines_per_second=1_000), "shard-0", written.stream)
    yield written
    root.handlers[:], root.level, ours.level = before
    logging.getLogger("kvcluster").setLevel(before[2])  # which drops what loggers remember of levels
    root.setLevel(before[1])


def test_a_decision_is_an_object_with_its_fields(written: Written) -> None:
    decided("exchange_ended", path="tcp", pages=3, missed={"evicted": 1})
    warned("shard_lost", why="shard-1 is silent")
    first, second = written.lines()
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "INFO",
        "process": "shard-0",
        "logger": "kvcluster.decisions",
        "event": "exchange_ended",
        "path": "tcp",
        "pages": 3,
        "missed": {"evicted": 1},
    }
    assert (second["level"], second["why"]) == ("WARNING", "shard-1 is silent")


def test_other_records_have_their_message_and_where_they_failed(written: Written) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.warning("it %s", "broke", exc_info=True)
    log.debug("not of interest")
    logging.getLogger("other").info("nor this")
    [line] = written.lines()
    assert line["message"] == "it broke" and line["logger"] == "kvcluster.some.module"
    assert line["exception"].endswith("ValueError: two\nlines")


def test_a_long_text_is_cut_and_a_line_stays_one_line(written: Written) -> None:
    decided("call_refused", why="x\n" * 10_000)
    log.info("y" * 10_000)
    assert [len(line.get("why") or line["message"]) for line in written.lines()] == [TEXT_CHARS] * 2


def test_each_event_has_so_many_lines_a_second_and_the_next_says_how_many_were_left_out() -> None:
    now = 7.0
    budget = LineBudget(2, clock=lambda: now)

    def passes(event: str) -> tuple[bool, int]:
        record = logging.LogRecord("kvcluster.decisions", logging.INFO, "", 0, "", (), None)
        record.event = event
        return budget.filter(record), getattr(record, "left_out", 0)

    assert [passes("exchange_ended") for _ in range(5)] == [(True, 0), (True, 0), *[(False, 0)] * 3]
    assert passes("purge") == (True, 0), "no event takes another's lines"
    now = 8.0
    assert [passes("exchange_ended") for _ in range(2)] == [(True, 3), (True, 0)]


def test_text_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_log.logging, "StreamHandler", None)  # it would be called
    set_up_log(LogConfig(), "shard-0")
