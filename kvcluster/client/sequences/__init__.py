"""Sequences: KV that grows token by token in pages that forks share, and attention over it (docs/sequences.md)."""

from kvcluster.client.sequences.attend_planner import (
    AttendPlanner,
    FetchWhatFits,
    ShipAbsent,
    SpanChoice,
    SpanFacts,
    StepFacts,
)
from kvcluster.client.sequences.batch import SequenceBatch
from kvcluster.client.sequences.policy import WindowPolicy
from kvcluster.client.sequences.sequence import Sequence

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
