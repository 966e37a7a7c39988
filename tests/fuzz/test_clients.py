"""Clients keep to their oracle, and the fuzzer that says so finds what is planted.

CI has 20,000 operations of another seed beside these tests: `make fuzz-quick`; `make fuzz-clients` has more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvcluster.copies.batch import CopyStatus
from kvcluster.core import hashing
from kvcluster.transfers import bound_memory, load_executor, long_chains, transfer
from kvcluster.transfers.part_memory import Ask
from tests.fuzz.client.fuzzer import Finding, Tally, run, run_episode

SEED, OPERATIONS = 0, 5_000
"""So many operations of this seed meet all that the fuzzer is there for."""

WITHIN = 2_000
"""Operations within which a planted fault is found."""


def test_clients_find_what_was_stored_and_no_other_byte() -> None:
    tally = run(OPERATIONS, SEED)
    assert tally.operations == OPERATIONS
    met = tally.events
    for event in (
        "blocks loaded",
        "blocks stored",
        "blocks deduplicated",
        "destinations used twice",
        "layers awaited",
        "loads of a shorter prefix",
        "misfits refused",
        "placeholders",
        "threads",
        "tickets redeemed elsewhere",
    ):
        assert met[event], f"never met: {event}"


def test_the_same_seed_makes_the_same_calls() -> None:
    def verbs() -> Counter[str]:
        tally = Tally()
        run_episode(1, 3, 60, tally)
        return tally.verbs

    assert verbs() == verbs()


def placeholders_of_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is bound for the end of its long_chains, whatever is cached."""

    def bound(*given: Any, any_end: bool = False, **named: Any) -> bound_memory.BoundMemory:
        return bound_memory.bind(*given, **named)

    monkeypatch.setattr("kvcluster.client.client.bind", bound)


def nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_memory, "first_shared", lambda footprints: None)


def sources_are_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.Transfer, "source_free", lambda self: True)


def what_does_not_match_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = load_executor.LoadSink._count_records

    def count(self: Any, batch: Any, start: int, stop: int) -> bool:
        for at in range(start, stop):
            if batch.status[at] == CopyStatus.MISMATCH:
                batch.status[at] = CopyStatus.DONE
        return counted(self, batch, start, stop)

    monkeypatch.setattr(load_executor.LoadSink, "_count_records", count)


def salts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chains.hashing, "root", lambda namespace, salt, root=hashing.root: root(namespace, b""))


def windows_are_a_block_short(monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = Ask.untouched.fget
    assert untouched is not None
    monkeypatch.setattr(Ask, "untouched", property(lambda self: min(self.blocks, untouched(self) + 1)))


@pytest.mark.parametrize(
    "plant",
    [
        placeholders_of_the_whole_prompt,
        nothing_is_compared,
        sources_are_free_at_once,
        what_does_not_match_is_done,
        salts_are_forgotten,
        windows_are_a_block_short,
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Finding) as finding:
        run(WITHIN, seed=0)
    assert "--seed 0 --episode" in str(finding.value)
