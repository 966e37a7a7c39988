"""docs/models.md, the architectures that the doctor knows and the table of kinds hold the saved examination of vLLM's
registry, and claim no more than it found. `make models` makes it; a sample is examined again by tests/vllm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvcluster.core import architectures
from kvcluster.core.model_kinds import TRAITS
from kvcluster.core.model_outcome import EXAMINED, REFUSED, UNKNOWN, model_outcome
from tests.vllm.e2e.__main__ import ALONE, CHECKS
from tests.vllm.models_table import page

RESULT = page.saved()
ROWS: dict[str, dict[str, Any]] = RESULT["rows"]
EXAMINED_ROWS = {name: row for name, row in ROWS.items() if "error" not in row}
CHECKPOINTS: dict[str, dict[str, Any]] = RESULT["checkpoints"]
UNNAMED = "not refused by name, and no engine of it starts: "
"""What stands before the error of an engine that kvcluster does not refuse by name (examine.py)."""


def test_the_page_says_what_was_found() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page_text(RESULT), "make models MODELS_ARGS=--pages"


def test_the_doctor_knows_what_was_found() -> None:
    known = page.known_of(RESULT)
    assert RESULT["vllm"] == architectures.RELEASE
    assert [(kinds, names.split()) for kinds, names in EXAMINED.served] == [
        (kinds, names.split()) for kinds, names in known.served
    ]
    assert [(kinds, why, names.split()) for kinds, why, names in EXAMINED.refused] == [
        (kinds, why, names.split()) for kinds, why, names in known.refused
    ]
    assert EXAMINED.unread.split() == known.unread.split()
    assert EXAMINED.not_examined.split() == known.not_examined.split()


def test_every_row_is_of_kinds_that_the_table_has() -> None:
    rows = {**EXAMINED_ROWS, **{name: row for name, row in CHECKPOINTS.items() if "error" not in row}}
    assert {
        name: row["traits"] for name, row in rows.items() if not row["traits"] or set(row["traits"]) - set(TRAITS)
    } == {}


def test_every_check_that_proves_a_kind_is_one_that_is_run() -> None:
    assert {trait.proved_by for trait in TRAITS.values() if trait.proved_by} <= {*CHECKS, *ALONE}


def test_every_architecture_and_checkpoint_stands_on_the_page() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert [name for name in (*ROWS, *RESULT["later"], *CHECKPOINTS) if f"\n| {name} |" not in text] == []
    assert set(CHECKPOINTS) == set(page.checkpoint_names())


def test_the_shares_are_of_all_architectures() -> None:
    counts = [int(line.split()[0]) for line in page.shares(RESULT)]
    assert sum(counts) == len(ROWS) + len(RESULT["later"])


def refusal_patterns() -> list[re.Pattern[str]]:
    """The sentences of the connector's refusals, with anything in place of what is filled in."""
    folder = page.ROOT / "kvcluster" / "engines" / "vllm"
    sources = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in ("refusals", "state_format", "kv_plan")]
    functions = [
        node
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and "refusals" in node.name
    ]
    yielded = [
        node.value for each in functions for node in ast.walk(each) if isinstance(node, ast.Yield) and node.value
    ]
    return [re.compile("".join(_parts(value)), re.DOTALL) for value in yielded]


def _parts(value: ast.expr) -> Iterator[str]:
    for part in value.values if isinstance(value, ast.JoinedStr) else [value]:
        yield re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+"


def test_every_refusal_is_one_of_the_connectors_own() -> None:
    patterns = refusal_patterns()
    assert len(patterns) > 10
    rows = {**EXAMINED_ROWS, **{name: row for name, row in CHECKPOINTS.items() if "error" not in row}}
    reasons = {reason for row in rows.values() for reason in row["refused"] if not reason.startswith(UNNAMED)}
    assert reasons
    assert [reason for reason in reasons if not any(pattern.fullmatch(reason) for pattern in patterns)] == []


def config_of(name: str) -> dict[str, Any]:
    return page.checkpoint(name) if name in CHECKPOINTS else dict(EXAMINED_ROWS[name]["config"])


@pytest.mark.parametrize("name", [*CHECKPOINTS, *EXAMINED_ROWS])
def test_the_doctor_calls_nothing_served_that_is_not_and_is_right_where_it_is_sure(name: str) -> None:
    row = CHECKPOINTS.get(name) or EXAMINED_ROWS[name]
    if "config" not in row and name not in CHECKPOINTS:  # refused by its settings, before a configuration was kept
        return
    found = model_outcome(config_of(name))
    if row["refused"]:
        assert found.outcome == REFUSED
        assert found.why == page.reason(row)
    else:
        assert found.outcome in (page.outcome(row), UNKNOWN)
    if found.is_served:
        assert (list(found.kinds), found.token_bytes) == (row["traits"], row["token_bytes"])


def test_the_doctor_is_sure_of_most_of_what_is_served() -> None:
    served = [name for name, row in EXAMINED_ROWS.items() if not row["refused"]]
    sure = [name for name in served if model_outcome(config_of(name)).is_served]
    assert len(sure) >= len(served) // 2
    assert {"LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"} <= set(sure)


@pytest.mark.parametrize("name", [*RESULT["later"], *(name for name in ROWS if name not in EXAMINED_ROWS)])
def test_what_was_not_examined_is_unknown(name: str) -> None:
    assert model_outcome({**page.checkpoint("Llama-3.1-8B"), "architectures": [name]}).outcome == UNKNOWN
