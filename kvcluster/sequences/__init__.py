"""Sequences: KV that grows token by token in pages that forks share, and attention over it (docs/sequences.md)."""

from kvcluster.sequences.attend_planner import (
    AttendPlanner,
    FetchWhatFits,
    ShipAbsent,
    SpanChoice,
    SpanFacts,
    StepFacts,
)
from kvcluster.sequences.batch import SequenceBatch
from kvcluster.sequences.sequence import Sequence
from kvcluster.sequences.window_policy import WindowPolicy

__all__ = [
    "AttendPlanner",
    "FetchWhatFits",
    "Sequence",
    "SequenceBatch",
    "ShipAbsent",
    "SpanChoice",
    "SpanFacts",
    "StepFacts",
    "WindowPolicy",
]
