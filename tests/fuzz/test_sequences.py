"""Scripts of every verb of sequences against plain tensors, and nothing is found. The fuzzer itself is tried with
planted faults. CI has 20,000 operations of another seed beside these tests: `make fuzz-quick`."""

from __future__ import annotations

from collections import Counter

import pytest

from kvcluster.sequences.sequence import Sequence
from tests.fuzz.sequences.episode import Finding
from tests.fuzz.sequences.fuzzer import Fuzz
from tests.fuzz.sequences.operations import OPERATIONS

VERBS = [
    "advance",
    "append",
    "attend",
    "block_table",
    "client.load",
    "client.lookup",
    "client.prewarm_resident",
    "client.resident",
    "client.sequence",
    "close",
    "explain_attention",
    "flush",
    "fork",
    "load",
    "mark_written",
    "missing",
    "policy",
    "read",
    "reserve",
    "reset",
    "resident_pages",
    "statistics",
    "truncate",
    "update",
    "write",
    "batch.advance",
    "batch.append",
    "batch.attend",
    "batch.flush",
    "batch.fork",
    "batch.load",
    "batch.read",
    "batch.reserve",
    "batch.reset",
    "batch.truncate",
    "batch.update",
    "batch.write",
]

EVENTS = """ResidentSetFull LimitError refused evicted encoded dropped lent loaded fetched shipped local collected
published+block cached+prefix coded+read lossy+from+here threads scant restarted""".replace("\n", " ").split()


@pytest.mark.slow
def test_sequences_hold_what_plain_tensors_hold() -> None:
    """Every verb is called, every operation made, and everything happens that the fuzzer is there for."""
    tally = Fuzz(0).run(5_000)
    assert [verb for verb in VERBS if not tally.verbs[verb]] == []
    assert [event for event in EVENTS if not tally.events[event.replace("+", " ")]] == []
    assert [name for name in OPERATIONS if not tally.events[f"operation {name}"]] == []


def test_the_same_seed_makes_the_same_scripts() -> None:
    assert Fuzz(5).script(3, 80) == Fuzz(5).script(3, 80) != Fuzz(6).script(3, 80)


def test_a_fault_is_found_and_its_script_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    truncate = Sequence.truncate

    def keeps_one_more(sequence: Sequence, tokens: int, **how: float) -> None:
        calls["truncate"] += 1
        truncate(sequence, min(tokens + 1, sequence.length), **how)

    monkeypatch.setattr(Sequence, "truncate", keeps_one_more)
    monkeypatch.setattr("tests.fuzz.sequences.fuzzer.SHRINKING_S", 5.0)
    with pytest.raises(Finding, match=r"shortened to \d+ operations"):
        Fuzz(0).run(500)
    assert calls["truncate"]
