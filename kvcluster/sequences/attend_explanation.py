"""Where the spans of a step were attended to, and why: what `explain_attention` returns."""

from __future__ import annotations

from typing import NamedTuple

from kvcluster.sequences.attend_planner import SpanChoice


class SpanPlace(NamedTuple):
    """Where positions `start` to `stop` of some rows of a step were attended to: `choice`, and the shard that has
    them."""

    start: int
    stop: int
    rows: tuple[int, ...]
    shard: str
    choice: SpanChoice


class AttendExplanation(NamedTuple):
    """Where the spans of the last step that had a planner were attended to, in order; what lies between them is
    attended to in this process. `why` is what the planner's `explain` returns for that step; empty if the planner
    has none."""

    places: tuple[SpanPlace, ...]
    why: str

    def __str__(self) -> str:
        lines = [
            f"tokens {place.start}-{place.stop} of row {', '.join(map(str, place.rows))}: {place.choice.value} "
            f"({place.shard})"
            for place in self.places
        ]
        return "\n".join([*lines, self.why] if self.why else lines)
