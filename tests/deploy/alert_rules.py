"""The alert rules of deploy/prometheus, their cases for promtool, and what an expression selects."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")

RELEASE = "kvcluster_release"
"""The label that says of which cluster a series is."""

ILL, WELL = "blue/cache", "green/cache"
"""The two releases of the cases."""

METRIC = r"\b(?:up|kvcluster_(?!release\b)\w+|kvcluster:\w+)"
"""The name of a series: Prometheus' own of a target, one of ours, or one of the connector in vLLM."""


class Selector(NamedTuple):
    """A selector of an expression: the name of its series, and the operator and value of each label."""

    name: str
    labels: Mapping[str, tuple[str, str]]

    @property
    def equal(self) -> dict[str, str]:
        """The labels that must have one value."""
        return {label: value for label, (operator, value) in self.labels.items() if operator == "="}


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def selectors(expression: str) -> list[Selector]:
    """Returns the selectors of series in an expression, or of one series."""
    return [
        Selector(name, {label: (how, value) for label, how, value in re.findall(r'(\w+)\s*([=!]~?)"([^"]*)"', labels)})
        for name, labels in re.findall(rf"({METRIC})(?:\{{([^}}]*)\}})?", expression)
    ]


def cases() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    return loaded


def connector_counters() -> set[str]:
    """Returns the names of the counters that the connector shows in vLLM; its module needs vLLM."""
    tree = ast.parse((ROOT / "kvcluster/engines/vllm/stats.py").read_text(encoding="utf-8"))
    (described,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "DESCRIBED"
    ]
    return {f"kvcluster:{name}_total" for name in ast.literal_eval(described)}


def promtool(program: str, files: Iterable[Path], tests: Iterable[Mapping[str, Any]], folder: Path) -> str:
    """Runs these tests against these files of rules. Returns what promtool reports; "" if all pass."""
    wanted = {"rule_files": [str(path) for path in files], "evaluation_interval": "1m", "tests": list(tests)}
    path = folder / "tests.yaml"
    path.write_text(yaml.safe_dump(wanted), encoding="utf-8")
    command = [program, "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr if done.returncode else ""
