"""Prints the table of what was checked after the tests of the chart."""

from __future__ import annotations

import pytest

from tests.chart import table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in table.lines():
        terminalreporter.write_line(line)
