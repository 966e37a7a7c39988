"""What a chaos run did and what was seen: a table for people, JSON for machines, and the verdict."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOALS_S = {
    "shard killed, stored again": 5.0,
    "replicated shard killed, first hit": 5.0,
    "node killed, stored again": 8.0,
    "coordinator killed, first hit": 5.0,
    "head lost, first hit": 20.0,
}
"""From the kill to the victim's blocks served again."""


@dataclass(slots=True)
class Report:
    """`wrong` is everything that must not be on any machine: wrong bytes, what was raised, what was leaked. `late` are
    calls that passed their deadline, which must not be either, but belongs to the machine too."""

    form: str
    seed: int
    seconds: float = 0.0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    def took(self, what: str, seconds: float) -> None:
        """Returns how long it took until the cluster had recovered."""
        self.took_s.setdefault(what, []).append(seconds)

    def read(self, journals: Iterable[Path]) -> None:
        """Adds what workers have written down. The last line of one that was killed may be torn."""
        for journal in journals:
            for line in journal.read_text(encoding="utf-8").splitlines():
                try:
                    said = json.loads(line)
                except ValueError:
                    continue
                self.outcomes.update(said.get("counts", {}))
                for kind, told in (("wrong", self.wrong), ("late", self.late)):
                    if kind in said:
                        told.append(f"{journal.stem}: {said[kind]}")

    def missed_goals(self) -> list[str]:
        """Goals that some recovery took longer than."""
        return [
            f"{what}: {max(self.took_s[what]):.1f} s, where {goal:.0f} s is the goal"
            for what, goal in GOALS_S.items()
            if max(self.took_s.get(what, [0.0])) > goal
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "faults": dict(self.faults),
            "outcomes": dict(self.outcomes),
            "took_s": {what: [round(s, 3) for s in seconds] for what, seconds in self.took_s.items()},
            "wrong": self.wrong,
            "late": self.late,
            "missed_goals": self.missed_goals(),
        }

    def table(self) -> str:
        """For people."""
        lines = [f"chaos: {self.form}, seed {self.seed}, {self.seconds:.0f} s"]
        lines += ["", "faults"] + [f"  {number:>9}  {kind}" for kind, number in self.faults.items()]
        lines += ["", "outcomes"] + [f"  {number:>9,}  {what}" for what, number in sorted(self.outcomes.items())]
        lines += ["", "until all was well (times, median, longest)"]
        for what, seconds in sorted(self.took_s.items()):
            middle = sorted(seconds)[len(seconds) // 2]
            lines.append(f"  {len(seconds):>3} {middle:>6.2f} s {max(seconds):>6.2f} s  {what}")
        lines += ["", f"must not be: {len(self.wrong)}"] + [f"  {what}" for what in self.wrong]
        lines += [f"late calls: {len(self.late)}"] + [f"  {what}" for what in self.late]
        lines += [f"goal missed: {what}" for what in self.missed_goals()]
        return "\n".join(lines)
