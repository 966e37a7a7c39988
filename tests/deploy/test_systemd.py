"""The units of deploy/systemd: what they run, and that a drain ends before systemd's patience does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcluster.config.sections import CoordinatorConfig

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
COMMANDS = {"head": ["up", "--foreground", "--config"], "node": ["join", "${HEAD}", "--config"]}


def settings(name: str) -> dict[str, str]:
    lines = (UNITS / f"kvcluster-{name}.service").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_unit_runs_a_command_of_the_program_and_outlasts_a_drain(name: str) -> None:
    unit = settings(name)
    program, *arguments, path = unit["ExecStart"].split()
    assert (program, arguments) == ("/opt/kvcluster/bin/kvcluster", COMMANDS[name])
    assert path == "/etc/kvcluster/cluster.toml"
    command = [sys.executable, "-m", "kvcluster.cli.main", arguments[0], "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(option in told.stdout for option in arguments if option.startswith("--"))
    assert int(unit["TimeoutStopSec"]) * 1000 > CoordinatorConfig().drain_ms
    assert (unit["User"], unit["NoNewPrivileges"], unit["ProtectSystem"]) == ("kvcluster", "yes", "strict")
