"""Logs of a process as JSON, one object a line, bounded in rate; and the log of its decisions.

    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "process": "shard-0", "logger": "kvcluster.decisions", ...}

A decision is an event with fields, logged in one line at the boundary of a process: an exchange that ended, a refused
call, an order, a purge, a drain, a lost shard. The core does not log: its input and output are logged here. Decisions
have a logger of their own, which shows them where INFO is shown.

With `log.format = "json"` each record is a JSON object. A decision has its event and fields in the object; any other
record has its `message`. The lines per second are limited for each event, and for all other records of one logger,
whatever causes them: the next line has the number that was `left_out`. A text is cut at TEXT_CHARS. So no tenant and no
stranger fills a disk.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import IO, Any

from kvcluster.config import LogConfig
from kvcluster.core.messages import (
    BlocksPinned,
    Drain,
    EvictOrder,
    LoadGrant,
    MoveOrder,
    Order,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    PullOrder,
    Purge,
    Purged,
    Refused,
    Reply,
    ReportAck,
    Request,
    SetPolicy,
    SetWeights,
    StoreGrant,
    UnpinBlocks,
)
from kvcluster.transport.exchange_summary import ExchangeSummary

TEXT_CHARS = 512
"""The most characters of one text in a line: an error may quote what a stranger has sent."""

_TRACE_CHARS = 4 * TEXT_CHARS
_OURS = "kvcluster"


def set_up_log(config: LogConfig, process: str, stream: IO[str] | None = None) -> None:
    """Has this process log as configured. With "json": all that kvcluster logs from INFO on, and warnings of others, to
    `stream`, by default its standard error. With "text" nothing is changed."""
    if config.format != "json":
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process))
    handler.addFilter(LineBudget(config.lines_per_second))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_OURS).setLevel(logging.INFO)


class LineBudget(logging.Filter):
    """Lets so many lines of each event, and of each logger besides, through in a second. The first line after others
    were left out has their number as `left_out`."""

    def __init__(self, lines_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = lines_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], tuple[int, int, int]] = {}  # a second, lines in it, and lines left out

    def filter(self, record: logging.LogRecord) -> bool:
        source = record.name, getattr(record, "event", "")
        now = int(self._clock())
        with self._lock:
            second, lines, left_out = self._lines.get(source, (now, 0, 0))
            if second != now:
                lines = 0
            passes = lines < self._most
            self._lines[source] = (now, lines + 1, 0) if passes else (now, lines, left_out + 1)
        if passes and left_out:
            record.left_out = left_out
        return passes


class JsonFormatter(logging.Formatter):
    """One JSON object a record, in one line. `process` names the process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
        }
        event = getattr(record, "event", None)
        content = {"message": record.getMessage()} if event is None else {"event": event, **record.__dict__["fields"]}
        line |= {name: _cut(value) for name, value in content.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_TRACE_CHARS:]
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        return json.dumps(line, default=str)


def _cut(value: Any) -> Any:
    return value[:TEXT_CHARS] if isinstance(value, str) else value


_decisions = logging.getLogger("kvcluster.decisions")


def decided(event: str, /, **fields: Any) -> None:
    """Logs one decision. Does nothing where decisions are not shown."""
    _log(logging.INFO, event, fields)


def warned(event: str, /, **fields: Any) -> None:
    """Logs what an operator should know as a warning, which is shown by default."""
    _log(logging.WARNING, event, fields)


def _log(level: int, event: str, fields: Mapping[str, Any]) -> None:
    if _decisions.isEnabledFor(level):
        text = ", ".join(f"{name}={value}" for name, value in fields.items())
        _decisions.log(level, "%s: %s", event, text, extra={"event": event, "fields": dict(fields)})


def exchange_fields(summary: ExchangeSummary) -> dict[str, Any]:
    """Returns the fields of the event `exchange_ended`."""
    fields: dict[str, Any] = {
        "operation": summary.operation.value,
        "path": summary.path,
        "tenant": summary.tenant or None,  # None: another shard
        "attempt": str(summary.attempt),
        "result": summary.result.value,
        "ms": round(summary.seconds * 1e3, 3),
        "pages": summary.pages,
        "bytes": sum(summary.nbytes.values()),
    }
    if summary.missed:
        fields["missed"] = dict(summary.missed)
    if summary.error:
        fields["error"] = summary.error
    return fields


def answered(request: Request[Any], reply: Reply) -> tuple[str, dict[str, Any]] | None:
    """Returns the event and the fields of the coordinator's answer to a question; None if it decides nothing that is
    worth a line, such as a renewal."""
    who = {"tenant": request.tenant}
    match request.question, reply:
        case question, Refused(kind, detail):
            return "question_refused", who | {"question": type(question).__name__, "kind": kind.value, "why": detail}
        case PrepareLoad() as question, LoadGrant() as grant:
            why = {"missed": str(grant.miss)} if grant.miss is not None else {}
            named = who | {"attempt": str(question.attempt), "hold": question.hold}
            return "lookup", named | {"blocks": len(question.hashes), "found": grant.blocks} | why
        case PrepareStore() as question, StoreGrant(runs):
            counts: dict[str, Any] = {}
            for run in runs:
                counts[run.decision.value] = counts.get(run.decision.value, 0) + run.count
            misses = [str(run.miss) for run in runs if run.miss is not None]
            why = {"missed": misses[0]} if misses else {}
            return "store_prepared", who | {"attempt": str(question.attempt)} | counts | why
        case Purge(model, weights, adapter), Purged(blocks):
            return "purge", who | {"model": model, "weights": weights, "adapter": adapter, "blocks": blocks}
        case Drain(shard), reply:
            return "drain_ordered", who | {"shard": shard, "known": getattr(reply, "ok", False)}
        case SetPolicy(settings), _:
            return "policy_set", who | dict(settings)
        case SetWeights() as question, _:
            return "weights_set", who | {"model": question.model, "weights": question.weights}
        case PinBlocks() as question, BlocksPinned(blocks):
            return "pin", who | {"blocks": blocks, "of": len(question.hashes), "replicas": question.replicas}
        case UnpinBlocks(), BlocksPinned(blocks):
            return "unpin", who | {"blocks": blocks}
    return None


def shown() -> bool:
    """Whether decisions are logged anywhere."""
    return _decisions.isEnabledFor(logging.INFO)


class AckReader:
    """What is new in the coordinator's answers to a shard's reports. They repeat each order and tombstone until the
    shard is known to have it."""

    def __init__(self) -> None:
        self._coordinator = 0
        self._order = 0
        self._tombstone = 0
        self._drains = False

    def news(self, ack: ReportAck) -> list[tuple[str, dict[str, Any]]]:
        """Returns the events, with their fields, that were in no earlier answer."""
        if ack.epoch != self._coordinator:
            self._coordinator, self._order = ack.epoch, 0
        found: list[tuple[str, dict[str, Any]]] = []
        if ack.drain and not self._drains:
            found.append(("drain_begun", {"coordinator": ack.epoch}))
        self._drains = ack.drain
        for stone in ack.tombstones:
            if stone.number > self._tombstone:
                self._tombstone = stone.number
                names = {"model": stone.model, "weights": stone.weights, "adapter": stone.adapter}
                found.append(("purge_received", {"tenant": stone.tenant, "number": stone.number, **names}))
        for order in ack.orders:
            if order.number > self._order:
                self._order = order.number
                found.append(("order", {"number": order.number, **_order_fields(order)}))
        if ack.leave is not None:
            found.append(("leave_ordered", {"why": ack.leave.value}))
        return found


def _order_fields(order: Order) -> dict[str, Any]:
    match order:
        case EvictOrder(_, blocks, tier):
            return {"kind": "evict", "blocks": len(blocks), "tier": tier.name.lower()}
        case MoveOrder(_, moves):
            return {"kind": "move", "blocks": len(moves), "to": sorted({move.to.name.lower() for move in moves})}
        case PullOrder():
            return {"kind": "pull", "pages": len(order.pages), "from": order.source.shard}
