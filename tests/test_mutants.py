"""The tool that runs mutants of the core (tools/mutants.py), on a package of one module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import Mutant, Place, Stage, Verdict

ROOT = Path(__file__).parents[1]
TINY = "kvcluster/core/tiny.py"
CODE = "def larger(a, b):\n    return a if a > b else b\n"
TEST = "from kvcluster.core.tiny import larger\n\n\ndef test_the_larger() -> None:\n    assert larger(2, 1) == 2\n"
PLACES: list[Place] = [(TINY, line, "swap_op", number) for line in range(1, 20) for number in range(1, 4)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    packages = dict.fromkeys(("kvcluster/__init__.py", "kvcluster/core/__init__.py"), "")
    for path, text in {**packages, TINY: CODE, "tests/core/test_tiny.py": TEST, "pyproject.toml": ""}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def mutant(old: str, new: str) -> Mutant:
    text = CODE.replace(old, new)
    return Mutant(f"tiny:2:{new}", TINY, 2, "swap_op", mutants.change_of(CODE, text), text)


def judged(tree: Path, *of: Mutant) -> list[Verdict]:
    told: list[Verdict] = []
    verdicts = mutants.judged(of, tree, jobs=1, way=lambda path: mutants.stages(tree, path, seeds=0), tell=told.append)
    assert told == verdicts
    return verdicts


def test_a_sample_depends_on_the_seed_alone() -> None:
    assert mutants.drawn(PLACES, 1) == mutants.drawn(PLACES[::-1], 1)
    assert mutants.drawn(PLACES, 1) != mutants.drawn(PLACES, 2)
    assert sorted(mutants.drawn(PLACES, 1)) == PLACES


def test_each_place_has_an_id_of_its_own() -> None:
    assert mutants.id_of(("kvcluster/core/messages/reports.py", 80, "swap_op", 2)) == "messages/reports:80:swap_op:2"
    assert len({mutants.id_of(place) for place in PLACES}) == len(PLACES)


def test_a_mutant_that_a_test_notices_is_killed_and_another_survives(tree: Path) -> None:
    def everything() -> dict[Path, str]:
        return {path: path.read_text(encoding="utf-8") for path in tree.rglob("*") if path.is_file()}

    before = everything()
    killed, survivor = judged(tree, mutant("a > b", "a < b"), mutant("a > b", "a >= b"))
    assert everything() == before, "the working tree stays as it is"
    assert killed.killed_by == "tests: test_the_larger"
    assert killed.change == "return a if a > b else b => return a if a < b else b"
    assert survivor.killed_by is None
    assert mutants.percent([killed, survivor]) == 50
    assert "survived" in mutants.table([killed, survivor])[2], "survivors come first"


def test_nothing_is_judged_where_the_unmutated_code_fails(tree: Path) -> None:
    (tree / "tests/core/test_tiny.py").write_text(TEST.replace("== 2", "== 3"), encoding="utf-8")
    with pytest.raises(RuntimeError, match="the unmutated code fails: tests: test_the_larger"):
        judged(tree, mutant("a > b", "a < b"))


def test_a_mutant_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    endless = Stage("tests", (sys.executable, "-c", "while True: pass"), "", limit_s=0.1)
    assert mutants.run(endless, tmp_path) == "timeout of the tests"


def test_a_failure_without_a_name_is_told_by_its_exit_status(tmp_path: Path) -> None:
    failing = Stage("simulator", (sys.executable, "-c", "raise SystemExit(3)"), r"^(seed \d+)")
    assert mutants.run(failing, tmp_path) == "simulator: exit status 3"


def test_every_room_is_a_module_of_the_core_and_names_tests_that_are_there() -> None:
    for room, names in mutants.ROOMS.items():
        assert any((ROOT / mutants.CORE).rglob(f"{room}.py")), room
        assert all((ROOT / f"tests/core/{name}.py").exists() for name in names), names
    assert all(any((ROOT / mutants.CORE).rglob(f"{name}.py")) for name in mutants.EXCLUDED)


def test_a_module_without_tests_of_its_own_has_those_of_the_whole_core() -> None:
    tests, simulator = mutants.stages(ROOT, "kvcluster/core/messages/reports.py", seeds=7)
    assert tests.command[-1] == "tests/core"
    assert simulator.command[-2:] == ("--seeds", "7")
