"""An event as a subscriber gets it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core.messages.reports import AllBlocksCleared, KVEvent


@dataclass(frozen=True, slots=True)
class Event:
    """One received KV event. `namespace` (its first digits, in hexadecimal) and `model` are "" if the topic is not one
    of ours. `why` is set for an AllBlocksCleared that no publisher sent: it stands for missed batches, and all earlier
    events of that topic are void."""

    topic: str
    namespace: str
    model: str
    event: KVEvent
    why: str = ""

    def __repr__(self) -> str:
        blocks = "" if isinstance(self.event, AllBlocksCleared) else f" of {len(self.event.hashes):,} blocks"
        return f"<Event {type(self.event).__name__}{blocks}, {self.topic}{f': {self.why}' if self.why else ''}>"
