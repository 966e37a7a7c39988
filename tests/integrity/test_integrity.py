"""A few dozen draws of each search; `make integrity` makes 10,000 of each. A search that cannot fail proves nothing, so
planted bugs must be found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvcluster.copies.batch import CopyBatch, CopyStatus
from kvcluster.core.codecs import Codec
from kvcluster.memory import checksum
from kvcluster.transfers import python_verified_copies
from kvcluster.transfers.python_verified_copies import PythonCopies
from tests.integrity import __main__ as program
from tests.integrity import flips, scribbler
from tests.integrity.executors import PYTHON
from tests.integrity.flips import CELLS, Cell, flip_bits
from tests.integrity.scribbler import KINDS, scribble


def test_a_flipped_bit_is_reported_in_its_block_and_no_other() -> None:
    tally = flip_bits(48, seed=0)
    assert not tally.wrong
    assert sum(tally.found.values()) == 48 == len(tally.found), "each in a cell of its own"


def test_cells_are_every_combination_of_what_is_named() -> None:
    assert len(CELLS) == len(set(CELLS)) == len(flips.EXECUTORS) * len(flips.SPECS) * len(flips.SERVERS) * 3


@pytest.mark.parametrize("layout", ["dense", "nhd"])
def test_a_load_that_accepts_a_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(flips, "CELLS", [Cell(PYTHON, layout, "memory", Codec.RAW)])
    copied = PythonCopies._load

    def unverified(self: PythonCopies, batch: CopyBatch, at: int, data: memoryview) -> CopyStatus:
        records = batch.records
        first, count = records.layers[at], records.counts[at]
        records.set_sums(at, checksum.layer_sums(batch.identities[at], first, count, data))
        return copied(self, batch, at, data)

    monkeypatch.setattr(PythonCopies, "_load", unverified)
    tally = flip_bits(5, seed=0)
    assert len(tally.wrong) == 5
    assert not tally.found


def test_a_load_that_writes_beside_its_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are right, and only the comparison of values shows it."""
    monkeypatch.setattr(flips, "CELLS", [Cell(PYTHON, "nhd", "memory", Codec.RAW)])
    put = PythonCopies.put

    def swapped(self: PythonCopies, place: Any, layer: int, stop: int, view: memoryview, coder: Any) -> None:
        put(self, place, layer, stop, memoryview(bytes(view)[::-1]), coder)

    monkeypatch.setattr(PythonCopies, "put", swapped)
    assert len(flip_bits(3, seed=0).wrong) == 4, "three flips, and the load before them"


def test_what_changes_while_it_is_copied_is_accepted_right_or_refused() -> None:
    tally = scribble(2 * len(KINDS), seed=0)
    assert sum(tally.tries.values()) == 2 * len(KINDS) == 2 * len(tally.tries)
    assert not tally.wrong.total()
    assert tally.accepted.total() + tally.raced.total() >= 4 * len(tally.tries), "every record is counted"


def test_sums_of_a_source_that_is_read_a_second_time_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that verifies the source, and then copies it again, accepts bytes that it has not summed."""
    monkeypatch.setattr(scribbler, "KINDS", [kind for kind in KINDS if kind[1:] == ("dense", PYTHON)])

    def twice(identity: int, first: int, layers: int, into: memoryview, data: memoryview) -> tuple[int, ...]:
        sums = checksum.layer_sums(identity, first, layers, memoryview(bytes(data)))
        torn = bytearray(data)
        torn[0] ^= 1  # what the scribbler may do in between
        into[:] = torn
        return sums

    monkeypatch.setattr(python_verified_copies.checksum, "copy_sums", twice)
    assert scribble(20, seed=0).wrong.total()


def test_the_program_fails_where_a_load_was_wrong_or_nothing_raced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, wrong = flips.Tally(), flips.Tally(wrong=["a cell"])
    kind = KINDS[0]
    raced = scribbler.Tally(Counter({kind: 2}), Counter({kind: 7}), Counter({kind: 1}))
    idle, torn = (
        scribbler.Tally(Counter({kind: 2})),
        scribbler.Tally(raced.tries, raced.accepted, raced.raced, raced.tries),
    )
    monkeypatch.setattr("sys.argv", ["integrity", "--flips", "0", "--tries", "2"])
    for flipped, scribbled, code in ((good, raced, 0), (wrong, raced, 1), (good, idle, 1), (good, torn, 1)):
        monkeypatch.setattr(program, "flip_bits", lambda flips, seed, tally=flipped: tally)
        monkeypatch.setattr(program, "scribble", lambda tries, seed, tally=scribbled: tally)
        assert program.main() == code
    assert f"no copy met the scribbler: load dense {kind.executor}" in capsys.readouterr().out
