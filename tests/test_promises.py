"""Claims about tools/promises.py: a promise that loses its test is named, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import promises

ROOT = Path(__file__).parents[1]

TREE = {
    "tests/test_leases.py": "def test_an_expired_lease_is_ended(): ...\n"
    "class TestBook:\n    def test_it_counts(self): ...\n",
    "tests/test_wire.py": "from kvcluster.testing.suite import Claims as Shared\nclass TestWire(Shared): ...\n",
    "tests/helpers.py": "def helper(): ...\n",
    "kvcluster/testing/suite/__init__.py": "from kvcluster.testing.suite.moving import MovingClaims\n"
    "class Claims(MovingClaims): ...\n",
    "kvcluster/testing/suite/moving.py": "class MovingClaims:\n    def test_bytes_arrive(self): ...\n",
    "tests/sim/bugs/shards.py": "@planted(LeaseBook, 'running')\ndef late_commit(): ...\ndef not_planted(): ...\n",
    "tests/fuzz/wire_parsers.py": "yield_ = Parser('ticket', read)\n",
    "tests/chaos/faults.py": "class Kind(Enum):\n    FLIP = 'bits flipped'\n",
    "tests/vllm/e2e/__main__.py": "CHECKS = {'identity': identity.check}\n",
    "tests/attacks/attackers.py": "ATTACKS = {'streams': Attack('calls', streams)}\n",
    "tests/core/transcripts/both/stall.txt": "",
}


def said(root: Path, *rows: str, header: str = "| promise | mechanism | test | runs in |") -> list[str]:
    """The complaints about a document with these rows; the first stands in line 3."""
    for path, text in {**TREE, promises.DOCUMENTS[0]: "\n".join([header, "|---|---|---|---|", *rows])}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return list(promises.complaints(root))


@pytest.mark.parametrize(
    ("test", "runs"),
    [
        ("`tests/test_leases.py`", "CI"),
        ("`tests/test_leases.py -k expired`", "CI"),
        ('`tests/test_leases.py -k "(EXPIRED and not book) or counts"`', "CI"),
        ("`tests/test_leases.py -k TestBook`", "CI"),
        ("`tests/test_wire.py -k bytes_arrive`", "CI"),
        ("`tests/core/transcripts/both/stall.txt`", "CI"),
        ("planted bug `late-commit`", "CI, nightly"),
        ("parser `ticket`", "CI, nightly"),
        ("chaos `bits flipped`", "nightly"),
        ("e2e `identity`", "nightly"),
        ("attack `streams`", "nightly"),
        ("`tests/test_leases.py`, chaos `bits flipped`", "CI, nightly"),
    ],
)
def test_a_promise_whose_tests_are_there_is_not_complained_about(tmp_path: Path, test: str, runs: str) -> None:
    assert said(tmp_path, f"| leases end | by time | {test} | {runs} |") == []


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("| p | m | `tests/test_gone.py` | CI |", "tests/test_gone.py does not exist"),
        ("| p | m | `tests/helpers.py` | CI |", "tests/helpers.py has no test"),
        ("| p | m | `tests/test_leases.py -k expried` | CI |", "-k 'expried' selects no test of tests/test_leases.py"),
        ('| p | m | `tests/test_leases.py -k "expired or gone"` | CI |', "-k 'gone' selects no test"),
        ('| p | m | `tests/test_leases.py -k "expired and counts"` | CI |', "-k 'expired and counts' selects no test"),
        ('| p | m | `tests/test_leases.py -k "expired counts"` | CI |', "cannot be read"),
        ('| p | m | `tests/test_leases.py -k "(expired"` | CI |', "cannot be read"),
        ("| p | m | `test_leases.py` | CI |", "`test_leases.py` is no reference"),
        ("| p | m | `tests/core/transcripts/both/gone.txt` | CI |", "gone.txt does not exist"),
        ("| p | m | planted bug `late` | CI, nightly |", "has no planted bug 'late'"),
        ("| p | m | planted bug `not-planted` | CI, nightly |", "has no planted bug 'not-planted'"),
        ("| p | m | parser `tickets` | CI, nightly |", "has no parser 'tickets'"),
        ("| p | m | chaos `bits` | nightly |", "has no chaos 'bits'"),
        ("| p | m | e2e `llama` | nightly |", "has no e2e 'llama'"),
        ("| p | m | the simulator | CI |", "names no test"),
        ("| p | m | | CI |", "names no test"),
        ("| p | m | `tests/test_leases.py` | |", "`runs in` says ''; its tests run in 'CI'"),
        ("| p | m | `tests/test_leases.py` | nightly |", "`runs in` says 'nightly'; its tests run in 'CI'"),
        ("| p | m | `tests/test_leases.py` |", "a promise has 4 cells, and this row has 3"),
    ],
)
def test_a_promise_without_its_test_is_named_with_its_line(tmp_path: Path, row: str, complaint: str) -> None:
    sound = "| p | m | `tests/test_leases.py` | CI |"
    (found,) = said(tmp_path, sound, row)
    assert found.startswith("docs/reliability.md:4: ")
    assert complaint in found


def test_a_removed_test_is_complained_about(tmp_path: Path) -> None:
    row = "| p | m | `tests/test_wire.py -k bytes_arrive` | CI |"
    assert said(tmp_path, row) == []
    (tmp_path / "kvcluster/testing/suite/moving.py").write_text("class MovingClaims: ...\n", encoding="utf-8")
    assert [found for found in promises.complaints(tmp_path) if "tests/test_wire.py has no test" in found]


def test_a_table_of_promises_without_the_column_is_complained_about(tmp_path: Path) -> None:
    (found,) = said(tmp_path, "| p | m | `tests/test_gone.py` |", header="| promise | mechanism | test |")
    assert found.startswith("docs/reliability.md:1: the columns of promises are ")


def test_other_tables_and_trees_without_the_document_are_left_alone(tmp_path: Path) -> None:
    assert said(tmp_path, "| a | b | c | d |", header="| fault | how | what | when |") == []
    (tmp_path / promises.DOCUMENTS[0]).unlink()
    assert list(promises.complaints(tmp_path)) == []


def test_the_promises_of_this_repository_are_read() -> None:
    # `make check` holds them to their tests (tools/tidy.py).
    rows = (ROOT / promises.DOCUMENTS[0]).read_text(encoding="utf-8").splitlines()
    assert len([row for row in rows if "ADR" in row]) > 10
