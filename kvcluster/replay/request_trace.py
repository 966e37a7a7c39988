"""Request traces in the form that Mooncake publishes: one JSON object a line, in order of time.

`timestamp` is in milliseconds; `hash_ids` names the blocks of the prompt, a chain from its first block on: an id always
follows the same ids. Other fields of a line are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvcluster.errors import ConfigError


class TraceRequest(NamedTuple):
    """The arrival time of a prompt in milliseconds, and the ids of its blocks."""

    at_ms: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time. They name `asked` blocks in total, of which `distinct` are different."""

    requests: tuple[TraceRequest, ...]
    distinct: int
    asked: int


def read(path: str | Path, *, most: int | None = None) -> Trace:
    """Reads the first `most` requests of a trace, or all. Raises ConfigError, naming the line, for an invalid one."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse(islice(file, most), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no trace: it is not UTF-8 text") from None


def parse(lines: Iterable[str], name: str) -> Trace:
    """Parses the lines of a trace as `read` does; `name` is their name in error messages."""
    requests: list[TraceRequest] = []
    before: dict[int, int | None] = {}  # what each block follows
    for number, line in enumerate(lines, 1):
        try:
            request = _request(line)
            if requests and request.at_ms < requests[-1].at_ms:
                raise ValueError(f"timestamp {request.at_ms} is before {requests[-1].at_ms}, that of the line above")
            for last, block in zip((None, *request.ids), request.ids, strict=False):
                if (known := before.setdefault(block, last)) != last:
                    raise ValueError(f"block {block} follows {last}, and elsewhere {known}: not a chain")
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        requests.append(request)
    if not requests:
        raise ConfigError(f"{name} holds no requests")
    return Trace(tuple(requests), len(before), sum(len(request.ids) for request in requests))


def _request(line: str) -> TraceRequest:
    try:
        value = json.loads(line)
        at_ms, ids = value["timestamp"], tuple(value["hash_ids"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("not a JSON object with timestamp and hash_ids") from None
    if not ids or not all(type(number) is int and 0 <= number < 2**63 for number in (at_ms, *ids)):
        raise ValueError("timestamp is an integer of milliseconds, and hash_ids a list of integers, from 0 on")
    return TraceRequest(at_ms, ids)
