"""What happened, in order: kept as tuples, and formatted only when it is read.

A line is (instant, process, action, arguments). The text holds nothing that differs between two runs of one seed: no
address of an object, no order of a set.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from kvcluster.core.ids import Attempt
from kvcluster.core.messages import Need, PageEvent, PageKey, RemovedEvent, ShardAddress, ShardInfo
from kvcluster.core.miss import Miss

TAIL = 200

Entry = tuple[int, str, str, tuple[Any, ...]]


class Journal:
    """The last TAIL lines, or all of them if `whole`."""

    def __init__(self, *, whole: bool = False) -> None:
        self._entries: deque[Entry] = deque(maxlen=None if whole else TAIL)
        self.add = self._entries.append

    def __len__(self) -> int:
        return len(self._entries)

    def lines(self, last: int | None = None) -> Iterator[str]:
        """Yields the lines as text, the oldest first."""
        skip = 0 if last is None else max(0, len(self._entries) - last)
        for number, entry in enumerate(self._entries):
            if number >= skip:
                yield line(entry)

    def digest(self) -> str:
        """Returns a digest that is equal if two runs did the same."""
        digest = hashlib.sha256()
        for text in self.lines():
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()


def line(entry: Entry) -> str:
    """Formats one line of a journal."""
    at, who, what, arguments = entry
    return f"{at / 1e6:10.3f}  {who:<8} {what:<8} {'  '.join(map(words, arguments))}".rstrip()


def words(value: Any) -> str:
    """Formats any value of the core, short enough to read."""
    for kinds, form in _FORMS:
        if isinstance(value, kinds):
            return form(value)
    if is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "canonical"):  # a spec: its namespace is printed elsewhere
            return "spec"
        return f"{type(value).__name__}({_joined(getattr(value, field.name) for field in fields(value))})"
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({_joined(value)})"
    return type(value).__name__


_FORMS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (ShardInfo, lambda info: f"{info.shard}:{info.epoch % 10**12} free {info.free_bytes} leases {info.leases}"),
    (ShardAddress, lambda shard: f"{shard.address}:{shard.epoch % 10**12}"),
    (PageKey, lambda key: f"{key.hash.hex()[:6]}/{key.group}:{key.part.head_start}-{key.part.head_stop}"),
    (Attempt, lambda attempt: f"#{int.from_bytes(attempt.holder[-2:], 'big')}.{attempt.counter}"),
    (Need, lambda need: f"need{' without ' + ' '.join(need.avoid) if need.avoid else ''}"),
    (PageEvent, lambda event: f"+{words(event.key)}"),
    (RemovedEvent, lambda event: f"-{words(event.key)}{' corrupt' if event.corrupt else ''}"),
    (Miss, lambda miss: miss.reason.value),
    (bytes, lambda name: name.hex()[:6] if name else "-"),
    (Enum, lambda member: str(member.name).lower()),
    ((int, str, type(None)), str),
    (list, lambda values: "; ".join(map(words, values)) or "nothing"),
)
"""How values of these types are formatted: the first that fits counts."""


def _joined(values: Iterable[Any]) -> str:
    return " ".join(map(words, values))
